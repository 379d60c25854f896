"""The operations of one numerics mode on one device, and what they were found to be.

`exact` keeps the row contract: an output row is a function of its own input row (in attention, of its own prefix) and of
the weights, and of nothing else. `fast` is what others run: the library's kernels as they come.
"""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.kernels import fast
from shared.kernels.activation import silu_mul
from shared.kernels.attention import attention
from shared.kernels.attention_layout import AttentionLayout
from shared.kernels.embedding import embedding
from shared.kernels.linear import Linear, has_onednn_float32, onednn_linear, padded_linear
from shared.kernels.logprob import LogprobOutput, lm_logprob
from shared.kernels.machine import cpu_model
from shared.kernels.norm import rms_norm
from shared.kernels.rope import rope
from shared.kernels.sampling import SampleOutput, SamplingParams, sample

Mode = Literal["exact", "fast"]


class InexactKernelError(RuntimeError):
    """A kernel's output row depends on more than its input row; exact mode must not start."""


class Ops:
    """The functions of one mode; build it with `build_ops`.

    Every method that takes activations accepts float32 and bfloat16, and its weights in the same dtype.
    """

    keeps_table = False
    """Whether products come from a table of certified ones, as on CUDA, instead of one function."""

    has_paged_kernels = False
    """Whether attention and the row operations are kernels that read page tables and slots on the device."""

    def __init__(self, mode: Mode, device: torch.device) -> None:
        self.mode = mode
        self.device = device
        self._linear: Linear = F.linear if mode == "fast" else linear_candidates()[0]

    def activate(self) -> None:
        """Make the process compute in this mode again, where it has computed in the other one since; on CUDA both share the
        library's settings. What is built last is active."""

    def use_linear(self, linear: Linear) -> None:
        """Replace the matrix product; the self-check does so when the first choice is not exact here."""
        self._linear = linear

    def linear(self, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """[T, N] = x Wᵀ + b (`linear.py`)."""
        return self._linear(x_TK, weight_NK, bias_N)

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """[..., D] -> [..., D] (`norm.py`)."""
        return self._pick(rms_norm, fast.rms_norm)(x_TD, weight_D, eps)

    def rope(self, x_THD: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> Tensor:
        """[T, H, D] rotated by table rows [T, D / 2] (`rope.py`)."""
        return rope(x_THD, cos_Td, sin_Td)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up (`activation.py`)."""
        return self._pick(silu_mul, fast.silu_mul)(gate, up)

    def embedding(self, token_ids_T: Tensor, weight_VD: Tensor) -> Tensor:
        """[T] -> [T, D] (`embedding.py`)."""
        return embedding(token_ids_T, weight_VD)

    def write_kv(
        self, k_TKD: Tensor, v_TKD: Tensor, store: tuple[Tensor, Tensor], layout: AttentionLayout
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values [T, Hkv, D] to `layout.query_rows` of the stores, and return the stores."""
        slots = layout.slots(k_TKD.device)
        return store[0].index_copy_(0, slots, k_TKD), store[1].index_copy_(0, slots, v_TKD)

    def attention(
        self,
        q_THD: Tensor,
        k_RKD: Tensor,
        v_RKD: Tensor,
        layout: AttentionLayout,
        scale: float,
        *,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """[T, H, D] queries over row stores [R, Hkv, D] (`attention.py`)."""
        attend = self._pick(attention, fast.attention)
        return attend(q_THD, k_RKD, v_RKD, layout, scale, sliding_window=sliding_window, softcap=softcap)

    def lm_logprob(
        self,
        hidden_RD: Tensor,
        weight_VD: Tensor,
        targets_R: Tensor,
        temperature_R: Tensor,
        *,
        weight32_VD: Tensor | None = None,
    ) -> LogprobOutput:
        """Log-probability, argmax and entropy of each row's target (`logprob.py`)."""
        if self.mode == "fast":
            return fast.lm_logprob(hidden_RD, weight_VD, targets_R, temperature_R)
        return lm_logprob(hidden_RD, weight_VD, targets_R, temperature_R, weight32_VD=weight32_VD, linear=self._linear)

    def sample(
        self, hidden_RD: Tensor, weight_VD: Tensor, params: SamplingParams, *, weight32_VD: Tensor | None = None
    ) -> SampleOutput:
        """One token per row (`sampling.py`)."""
        if self.mode == "fast":
            return sample(hidden_RD, weight_VD, params, weight32_VD=weight_VD, linear=fast.head_linear)
        return sample(hidden_RD, weight_VD, params, weight32_VD=weight32_VD, linear=self._linear)

    def describe(self) -> dict[str, str]:
        """The implementation that each operation runs, read back from this object."""
        names: dict[str, Callable] = {
            "linear": self._linear,
            "rms_norm": self._pick(rms_norm, fast.rms_norm),
            "rope": rope,
            "silu_mul": self._pick(silu_mul, fast.silu_mul),
            "embedding": embedding,
            "attention": self._pick(attention, fast.attention),
            "lm_logprob": self._pick(lm_logprob, fast.lm_logprob),
            "sample": sample,
        }
        return {op: _name(function) for op, function in names.items()}

    def widen_head(self, weight_VD: Tensor) -> Tensor | None:
        """What `lm_logprob` and `sample` take as `weight32_VD`, for a caller that keeps it across calls; None: nothing."""
        return weight_VD.float() if self.mode == "exact" else None

    def certify_linear(self, dtype: torch.dtype, shapes_KN: Sequence[tuple[int, int]]) -> None:
        """Settle on products for a model's (K, N) where a table of certified ones is kept, which the CPU does not do."""

    def settle_attention(self, dtype: torch.dtype, heads: tuple[int, int, int]) -> None:
        """Settle on kernels for (H, Hkv, D) heads where there is a choice, which the CPU does not have."""

    def machine(self) -> str:
        """The name of what computes."""
        return cpu_model() if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)

    def identity(self, dtype: torch.dtype) -> str:
        """What the bits are a property of, besides torch, the mode and the dtype."""
        implementations = " ".join(f"{op}={name}" for op, name in self.describe().items())
        return (
            f"device={self.machine()!r} isa={torch.backends.cpu.get_cpu_capability()} "
            f"threads={torch.get_num_threads()} {implementations}"
        )

    def _pick(self, exact: Callable, other: Callable) -> Callable:
        return exact if self.mode == "exact" else other


def linear_candidates() -> list[Linear]:
    """The exact matrix products, fastest first."""
    return [onednn_linear, padded_linear] if has_onednn_float32() else [padded_linear]


def build_ops(mode: Mode, device: str | torch.device = "cpu") -> Ops:
    """The operations of a mode on a device.

    Raises:
        ValueError: an unknown mode, or a device that has no exact kernels.
    """
    device = torch.device(device)
    if mode not in ("exact", "fast"):
        raise ValueError(f"the numerics mode must be 'exact' or 'fast', got {mode!r}; set one of the two")
    if device.type == "cuda" and (mode == "exact" or _has_triton()):
        return _cuda_ops(mode, device)
    if mode == "exact" and device.type != "cpu":
        raise ValueError(f"exact mode has no kernels for device {str(device)!r}; use device 'cpu' or mode 'fast'")
    return Ops(mode, device)


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _cuda_ops(mode: Mode, device: torch.device) -> Ops:
    if not _has_triton():
        raise ValueError(
            "exact mode on CUDA needs triton, which is not installed; pip install 'triton>=3.6' or use 'cpu'"
        )
    if not torch.cuda.is_available():
        raise ValueError(
            f"{mode} mode on {str(device)!r} needs a CUDA device, torch {torch.__version__} sees none; use 'cpu'"
        )
    from shared.kernels.cuda.fast import FastCudaOps
    from shared.kernels.cuda.ops import CudaOps

    return CudaOps(device) if mode == "exact" else FastCudaOps(device)


def _name(function: Callable) -> str:
    module = getattr(function, "__module__", None) or "torch"
    return f"{module.removeprefix('shared.kernels.')}.{getattr(function, '__name__', repr(function))}"
