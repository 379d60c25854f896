"""Token embedding: a gather whose backward adds the rows of a repeated token in ascending order, without atomics."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from shared.kernels.cuda.segments import segment_sum, segments_of


class Embedding(torch.autograd.Function):
    """(ids [T], weight [V, D]) -> [T, D]."""

    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(ids)
        ctx.num_rows = weight.shape[0]
        return torch.nn.functional.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:  # type: ignore[override]
        (ids,) = ctx.saved_tensors
        return None, segment_sum(grad.contiguous(), segments_of(ids, ctx.num_rows), grad.dtype)
