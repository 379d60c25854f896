"""What other engines run on CUDA, without the row contract: the baseline of every speed comparison there, and its control.

    products     cuBLAS as PyTorch calls it, split-K and reduced precision allowed; the head's logits in the weights' dtype
    attention    the kernels of the exact mode, contexts cut to fill the device instead of at anchored positions
    the rest     the exact mode's fused kernels, which nothing faster replaces

Everything that could cost the exact mode speed is free here, and nothing else is slower: a ratio of the two is the price of
exactness.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from shared.kernels.cuda import identity
from shared.kernels.cuda.attention_math import BLOCK, CHUNK
from shared.kernels.cuda.attention_schedule import num_multiprocessors
from shared.kernels.cuda.ops import CudaOps

WAVES = 8
"""Programs per multiprocessor that hide each other's latency in decode."""
LONGEST_CHUNK = 1 << 20
SHORTEST_CHUNK = 4 * BLOCK


def use_library_defaults() -> None:
    """The process's library products as PyTorch ships them."""
    if not torch.cuda.is_available():
        return
    torch.backends.cuda.preferred_blas_library("default")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (True, True)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (True, True)


class LibraryProducts:
    """Stands where the exact mode has its table of certified products."""

    def __init__(self, *, rounds_logits: bool = True) -> None:
        """Args: rounds_logits, whether a wider `out_dtype` is given up for speed."""
        self._rounds_logits = rounds_logits

    def linear(
        self,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """[T, N] = x [T, K] @ w [N, K].T (+ bias [N]) in the dtype of x, or in `out_dtype` unless that is given up."""
        if out_dtype not in (None, x.dtype) and not self._rounds_logits:
            return torch.mm(x, w.t(), out_dtype=out_dtype)
        if bias is None:
            return torch.mm(x, w.t(), out=out)
        return torch.addmm(bias, x, w.t(), out=out)

    def prepare(self, shapes: list[tuple[int, int]], dtype: torch.dtype, out_dtype: torch.dtype | None = None) -> None:
        """Nothing to certify."""

    def describe(self) -> dict[str, str]:
        """Shape -> members in use."""
        return {"*": "cublas"}


class FastCudaOps(CudaOps):
    """Same interface, nothing promised."""

    keeps_table = False
    serial_chunk = LONGEST_CHUNK

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, LibraryProducts())
        self.mode = "fast"
        self.activate()

    def activate(self) -> None:
        use_library_defaults()

    def certify_linear(self, dtype: torch.dtype, shapes_KN: object) -> None:
        """Nothing to certify."""

    def choose_chunk(self, num_programs: int, longest: int) -> int:
        """A power of two that cuts the longest context into as many pieces as the device has room for; the exact mode's, which
        many programs read fastest, where there is no room for more than one."""
        pieces = max(1, WAVES * num_multiprocessors(self.device) // max(num_programs, 1))
        if pieces == 1 or longest <= SHORTEST_CHUNK:
            return CHUNK
        return max(triton.next_power_of_2(triton.cdiv(longest, pieces)), SHORTEST_CHUNK)

    def describe(self) -> dict[str, str]:
        """The implementation that each operation runs."""
        return super().describe() | {
            "linear": "torch.mm (cublas defaults)",
            "attention": "cuda.attention.attention, cut by load",
        }

    def identity(self, dtype: torch.dtype) -> str:
        """What the numbers are a property of; that the bits are is not said."""
        return identity.describe_device()
