"""Matrix product with weights, each output row a function of its own input row alone.

A BLAS picks its kernel by the number of rows, and the kernels round differently. The exact kernels here always show it a
multiple of ROW_MULTIPLE rows, in one call: on every CPU library measured that keeps all rows in one class.

Shapes: T rows, K inputs, N outputs.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

ROW_MULTIPLE = 16

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(x [T, K], weight [N, K], bias [N] or None) -> [T, N]."""


def pad_rows(x_TK: Tensor) -> Tensor:
    """Append zero rows until the row count is a positive multiple of ROW_MULTIPLE."""
    num_missing = -x_TK.shape[0] % ROW_MULTIPLE or (ROW_MULTIPLE if x_TK.shape[0] == 0 else 0)
    return F.pad(x_TK, (0, 0, 0, num_missing)) if num_missing else x_TK


def padded_linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """`F.linear` on padded rows: oneDNN in bfloat16, MKL in float32.

    Args:
        x_TK: [T, K]; weight_NK: [N, K] of the same dtype; bias_N: [N] or None.

    Returns:
        [T, N] in the dtype of x.
    """
    num_rows = x_TK.shape[0]
    y = F.linear(pad_rows(x_TK), weight_NK, bias_N)
    return y if y.shape[0] == num_rows else y[:num_rows]


def has_onednn_float32() -> bool:
    """Whether this build of torch has the float32 oneDNN product, about twice as fast as MKL on AMD."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _onednn(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x_TK, weight_NK, bias_N, "none", [], "")


class _OneDnnLinear(torch.autograd.Function):
    """oneDNN's product carries no autograd formula in torch, so it is written here."""

    @staticmethod
    def forward(ctx, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x_TK, weight_NK)
        return _onednn(x_TK, weight_NK, bias_N)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TN: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # type: ignore[no-untyped-def]
        x_TK, weight_NK = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_TN = grad_TN.contiguous()
        return (
            _onednn(grad_TN, weight_NK.t().contiguous(), None) if needs_x else None,
            _onednn(grad_TN.t().contiguous(), x_TK.t().contiguous(), None) if needs_weight else None,
            grad_TN.sum(0) if needs_bias else None,
        )


def onednn_linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """oneDNN on padded rows; float32 only (in bfloat16 `padded_linear` is oneDNN already).

    Args:
        x_TK: [T, K]; weight_NK: [N, K]; bias_N: [N] or None.

    Returns:
        [T, N] float32.
    """
    if x_TK.dtype != torch.float32:
        return padded_linear(x_TK, weight_NK, bias_N)
    num_rows = x_TK.shape[0]
    y = _OneDnnLinear.apply(pad_rows(x_TK).contiguous(), weight_NK.contiguous(), bias_N)
    return y if y.shape[0] == num_rows else y[:num_rows]
