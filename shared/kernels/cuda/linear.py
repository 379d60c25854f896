"""A projection: the certified product forward; backward by the library, which may split the tokens of a weight's gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import once_differentiable

Product = Callable[..., torch.Tensor]
"""`certify.Table.linear`: (x [T, K], weight [N, K], bias [N] or None, out_dtype=None) -> [T, N]."""


def weight_gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """[N, K] = grad [T, N].T @ x [T, K].

    The same inputs give the same bits, and no other product has to have them: over thousands of tokens a small weight has too few
    tiles for the device, so the library may split the sum.
    """
    with library_products(is_cuda=grad.is_cuda):
        return torch.mm(grad.t(), x)


@contextmanager
def library_products(*, is_cuda: bool) -> Iterator[None]:
    """cuBLAS as it chooses by itself, split-K allowed: cuBLASLt's choice took twice as long for the smallest weights."""
    if not is_cuda:
        yield
        return
    cuda, matmul = torch.backends.cuda, torch.backends.cuda.matmul
    library = cuda.preferred_blas_library()
    bf16 = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction_split_k
    fp16 = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction_split_k
    cuda.preferred_blas_library("cublas")
    matmul.allow_bf16_reduced_precision_reduction = bf16[0], True
    matmul.allow_fp16_reduced_precision_reduction = fp16[0], True
    try:
        yield
    finally:
        cuda.preferred_blas_library(library)
        matmul.allow_bf16_reduced_precision_reduction = bf16
        matmul.allow_fp16_reduced_precision_reduction = fp16


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
            weight_gradient(grad, x) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
            None,
        )
