"""A weighted sum of the words of many tensors, in one launch: hundreds of small ones would keep the host busy for a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared.kernels.machine import to_device

PROGRAMS = 64
"""That share a tensor."""


@triton.jit
def checksum_kernel(addresses, counts, sums, W: tl.constexpr, BLOCK: tl.constexpr):
    """sums[t] += sum over i of (words[i] * ((i * W) | 1) modulo 2^32), as signed numbers; integers have no order of addition.

    Args:
        addresses, counts: [tensors] int64: of int32 words.
        sums: [tensors] int64.
    """
    t = tl.program_id(0)
    words = tl.load(addresses + t).to(tl.pointer_type(tl.int32))
    count = tl.load(counts + t)
    first = tl.program_id(1).to(tl.int64) * BLOCK
    total = tl.zeros((BLOCK,), tl.int64)
    for begin in range(first, count, tl.num_programs(1).to(tl.int64) * BLOCK):
        i = begin + tl.arange(0, BLOCK)
        word = tl.load(words + i, mask=i < count, other=0)
        total += (word * ((i.to(tl.int32) * W) | 1)).to(tl.int64)
    if first < count:
        tl.atomic_add(sums + t, tl.sum(total))


def weighted_sums(tensors: Sequence[Tensor], weight: int) -> Tensor:
    """[tensors] int64, in the current stream.

    Args:
        tensors: int32, contiguous, [n], all on one device.
        weight: as int32.
    """
    device = tensors[0].device
    table = torch.tensor([[t.data_ptr() for t in tensors], [t.numel() for t in tensors]], dtype=torch.int64)
    addresses, counts = to_device(table, device)
    sums = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    checksum_kernel[(len(tensors), PROGRAMS)](addresses, counts, sums, W=weight, BLOCK=4096, num_warps=8)
    return sums
