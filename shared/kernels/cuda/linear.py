"""A projection: the certified product forward; backward by the library, split-K forbidden."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

Product = Callable[..., torch.Tensor]
"""`certify.Table.linear`: (x [T, K], weight [N, K], bias [N] or None, out_dtype=None) -> [T, N]."""


class Linear(torch.autograd.Function):
    """(x [T, K], weight [N, K], bias [N] or None, product) -> [T, N]."""

    @staticmethod
    def forward(ctx: Any, x, weight, bias, product: Product) -> torch.Tensor:  # type: ignore[no-untyped-def, override]
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        return (
            torch.mm(grad, weight) if needs_x else None,
            torch.mm(grad.t(), x) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
            None,
        )
