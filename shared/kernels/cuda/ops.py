"""Exact operations on CUDA; the API is that of `shared.kernels.ops.Ops`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shared.kernels.attention_layout import AttentionLayout
from shared.kernels.certify import Table, use_cublaslt_without_split_k
from shared.kernels.cuda import attention_choice, identity
from shared.kernels.cuda.attention import anchored, attention
from shared.kernels.cuda.attention_math import CHUNK
from shared.kernels.cuda.embedding import Embedding
from shared.kernels.cuda.head import LmLogprob
from shared.kernels.cuda.linear import Linear
from shared.kernels.cuda.rowwise import Rope, SiluMul, kv_write, rms_norm
from shared.kernels.cuda.sampling import sample
from shared.kernels.logprob import LogprobOutput
from shared.kernels.ops import InexactKernelError, Ops
from shared.kernels.sampling import SampleOutput, SamplingParams

if TYPE_CHECKING:
    from shared.kernels.cuda.fast import LibraryProducts

DTYPES = (torch.bfloat16, torch.float16)


class CudaOps(Ops):
    """Certified products and Triton kernels; activations and weights in bfloat16 or float16."""

    keeps_table = True
    has_paged_kernels = True
    serial_chunk = CHUNK
    """Keys of a chunk where one program walks a whole context."""

    def __init__(self, device: torch.device, table: Table | LibraryProducts | None = None) -> None:
        """Args: table, the certified products; None opens this device's."""
        super().__init__("exact", device)
        # Trainer and replicas must have equal workspaces. PyTorch gives cuBLAS one for each stream, which is all that products
        # need to repeat; this variable, which older releases asked for, changes their size and is read anew in every product: a
        # small model's training step took 1.4 times as long.
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        self.table = Table() if table is None else table

    def activate(self) -> None:
        """Put the library's settings, which the whole process shares, back to this mode's."""
        use_cublaslt_without_split_k()

    def certify_linear(self, dtype: torch.dtype, shapes_KN: Sequence[tuple[int, int]]) -> None:
        """Certify the products of a model on this device, or find them in the cache.

        Raises:
            InexactKernelError: a dtype without exact kernels, or a shape without an exact product.
        """
        if dtype not in DTYPES:
            raise InexactKernelError(
                f"exact mode on CUDA computes in bfloat16 or float16, got {dtype}; set dtype to one of them or use device 'cpu'"
            )
        self.table.prepare([(n, k) for k, n in shapes_KN], dtype)

    def settle_attention(self, dtype: torch.dtype, heads: tuple[int, int, int]) -> None:
        """Choose the kernel of packed forwards, bits compared (`attention_choice.py`)."""
        attention_choice.settle(self.device, dtype, heads)

    def linear(self, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """[..., K] -> [..., N] (`linear.py`)."""
        x = x_TK.reshape(-1, x_TK.shape[-1]).contiguous()
        y = Linear.apply(x, weight_NK.contiguous(), bias_N, self.table.linear)
        return y.view(*x_TK.shape[:-1], weight_NK.shape[0])

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """[..., D] -> [..., D] (`rowwise.py`)."""
        return rms_norm(x_TD, None, weight_D, eps)[0]

    def rope(self, x_THD: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> Tensor:
        """[T, H, D] rotated by table rows [T, D / 2] (`rowwise.py`)."""
        return Rope.apply(x_THD, cos_Td.contiguous(), sin_Td.contiguous())

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up (`rowwise.py`)."""
        return SiluMul.apply(gate, up)

    def embedding(self, token_ids_T: Tensor, weight_VD: Tensor) -> Tensor:
        """[T] -> [T, D] (`embedding.py`)."""
        return Embedding.apply(token_ids_T, weight_VD)

    def write_kv(
        self, k_TKD: Tensor, v_TKD: Tensor, store: tuple[Tensor, Tensor], layout: AttentionLayout
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values to `layout.query_rows` of the stores, and return the stores (`rowwise.py`)."""
        kv_write(k_TKD.contiguous(), v_TKD.contiguous(), *store, layout.slots(k_TKD.device))
        return store

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
        return attention(
            q_THD, k_RKD, v_RKD, layout, scale, sliding_window=sliding_window, softcap=softcap,
            choose_chunk=self.choose_chunk,
        )  # fmt: skip

    def choose_chunk(self, num_programs: int, longest: int) -> int:
        """Keys of a chunk of attention, which are part of the exact mode's bits."""
        return anchored(num_programs, longest)

    def lm_logprob(
        self,
        hidden_RD: Tensor,
        weight_VD: Tensor,
        targets_R: Tensor,
        temperature_R: Tensor,
        *,
        weight32_VD: Tensor | None = None,
    ) -> LogprobOutput:
        """Log-probability, argmax and entropy of each row's target (`head.py`); `weight32_VD` is not needed here."""
        temperature = temperature_R.float().contiguous()
        hidden, weight = hidden_RD.contiguous(), weight_VD.contiguous()
        return LogprobOutput(*LmLogprob.apply(hidden, weight, targets_R.contiguous(), temperature, self._logits))

    def sample(
        self, hidden_RD: Tensor, weight_VD: Tensor, params: SamplingParams, *, weight32_VD: Tensor | None = None
    ) -> SampleOutput:
        """One token per row (`sampling.py`); `weight32_VD` is not needed here."""
        return sample(hidden_RD.contiguous(), weight_VD.contiguous(), params.to(hidden_RD.device), self._logits)

    def _logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return self.table.linear(hidden, weight, out_dtype=torch.float32)

    def widen_head(self, weight_VD: Tensor) -> None:
        """None: the product accumulates in float32 by itself."""
        return

    def describe(self) -> dict[str, str]:
        """The implementation that each operation runs; for products the certified members in use."""
        members = sorted({m for found in self.table.describe().values() for m in found.split(", ")})
        return {
            "linear": f"certify.Table({', '.join(members)})",
            "rms_norm": "cuda.rowwise.rms_norm",
            "rope": "cuda.rowwise.Rope",
            "silu_mul": "cuda.rowwise.SiluMul",
            "embedding": "cuda.embedding.Embedding",
            "attention": "cuda.attention.attention",
            "packed_attention": attention_choice.describe(),
            "lm_logprob": "cuda.head.LmLogprob",
            "sample": "cuda.sampling.sample",
        }

    def identity(self, dtype: torch.dtype) -> str:
        """What the bits are a property of. The members in use are not in it: a table holds members of one class only."""
        return f"{identity.describe_device()} class={identity.class_digest(self.device, dtype)}"
