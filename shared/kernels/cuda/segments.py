"""Sums of rows by key in a fixed order, without atomics: what a gather's backward needs to be deterministic.

Legend: E rows to add, R sums, W columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Segments(NamedTuple):
    """Which rows make up each sum, in ascending order."""

    order: torch.Tensor
    """[E] int32: rows sorted by key, equal keys in their own order."""
    first: torch.Tensor
    """[R + 1] int32: the place in `order` where each key's rows begin."""

    def to(self, device: torch.device) -> Segments:
        return Segments(self.order.to(device), self.first.to(device))


def segments_of(keys: torch.Tensor, num_sums: int) -> Segments:
    """Args: keys, [E] integers in [0, R), on any device; num_sums, R. Nothing is read back from the device."""
    ordered, order = torch.sort(keys, stable=True)
    sums = torch.arange(num_sums + 1, dtype=ordered.dtype, device=keys.device)
    return Segments(order.int(), torch.searchsorted(ordered, sums, out_int32=True))


@triton.jit
def segment_sum_kernel(x, order, first, y, W, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    rw = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for i in range(tl.load(first + r), tl.load(first + r + 1)):
        row = tl.load(order + i).to(tl.int64)
        acc += tl.load(x + row * W + rw, mask=rw < W, other=0.0).to(tl.float32)
    tl.store(y + r * W + rw, acc.to(y.dtype.element_ty), mask=rw < W)


def segment_sum(x: torch.Tensor, segments: Segments, dtype: torch.dtype) -> torch.Tensor:
    """y[r] = sum of the rows of segment r, added in float32 in their order; 0 where there are none.

    Args:
        x: [E, W] contiguous.
        dtype: of the result [R, W].
    """
    num_sums, width = segments.first.shape[0] - 1, x.shape[1]
    y = torch.empty(num_sums, width, dtype=dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(width))
    segment_sum_kernel[(num_sums, triton.cdiv(width, block))](x, segments.order, segments.first, y, width, BLOCK=block)
    return y
