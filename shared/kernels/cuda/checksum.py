"""A weighted sum of the words of many tensors, in one launch: hundreds of small ones would keep the host busy for a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from shared.kernels.machine import to_device

BLOCK, BLOCKS = 4096, 4
"""Words that a program reads at once, and how often: tensors of all sizes keep the device evenly busy."""


@triton.jit
def checksum_kernel(parts, sums, W: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """sums[t] += sum over the part's i of (words[i] * ((i * W) | 1) modulo 2^32), as signed numbers; integers have no order of
    addition.

    Args:
        parts: [programs, 4] int64: a tensor's t, address and number of int32 words, and the first of them here.
        sums: [tensors] int64.
    """
    part = parts + tl.program_id(0) * 4
    words = tl.load(part + 1).to(tl.pointer_type(tl.int32))
    count = tl.load(part + 2)
    first = tl.load(part + 3)
    total = tl.zeros((BLOCK,), tl.int64)
    for block in tl.static_range(BLOCKS):
        i = first + block * BLOCK + tl.arange(0, BLOCK)
        word = tl.load(words + i, mask=i < count, other=0)
        total += (word * ((i.to(tl.int32) * W) | 1)).to(tl.int64)
    tl.atomic_add(sums + tl.load(part), tl.sum(total))


def weighted_sums(tensors: Sequence[Tensor], weight: int) -> Tensor:
    """[tensors] int64, in the current stream.

    Args:
        tensors: int32, contiguous, [n], all on one device; n > 0.
        weight: as int32.
    """
    device = tensors[0].device
    addresses_N, counts_N = np.array([(t.data_ptr(), t.numel()) for t in tensors], np.int64).T
    parts_N = -(-counts_N // (BLOCK * BLOCKS))
    of_P = np.repeat(np.arange(len(tensors)), parts_N)
    firsts_P = (np.arange(len(of_P)) - np.repeat(np.cumsum(parts_N) - parts_N, parts_N)) * (BLOCK * BLOCKS)
    parts_P4 = np.stack((of_P, addresses_N[of_P], counts_N[of_P], firsts_P), axis=1)
    sums = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    parts = to_device(torch.from_numpy(parts_P4), device)
    checksum_kernel[(len(of_P),)](parts, sums, W=weight, BLOCK=BLOCK, BLOCKS=BLOCKS, num_warps=8)
    return sums
