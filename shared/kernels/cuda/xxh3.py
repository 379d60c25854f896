"""xxh3-128 of tensors where they lie, as far as it takes the whole of them: what is left of each is a few hundred bytes.

A block of 1024 bytes adds to eight 64-bit accumulators, whatever they hold, and is followed by a scramble of them. So the sums
of all blocks are computed at once (`sum_kernel`), and one warp per tensor walks along its sums (`walk_kernel`).

Sources: XXH3_hashLong_128b of xxHash 0.8 (github.com/Cyan4973/xxHash, doc/xxhash_spec.md) with seed 0 and the default secret.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from shared.kernels.machine import to_device

BLOCK_BYTES = 1024
"""16 stripes of 8 words; after them the accumulators are scrambled."""
PART_BLOCKS = 32
"""Of one program of `sum_kernel`."""
MOST_SUMS = 2**22
"""Blocks whose sums are kept at one time: 64 bytes each."""


@triton.jit
def sum_kernel(words, starts, counts, outs, secret, sums, BLOCKS: tl.constexpr):
    """sums[out + b] = what block b of the part adds to the accumulators, modulo 2^64.

    Args:
        words: [..] int64, the memory.
        starts, counts, outs: [parts] int64: first word, number of blocks, first row of `sums`.
        secret: [24] int64.
        sums: [.., 8] int64.
    """
    part = tl.program_id(0)
    start = tl.load(starts + part)
    count = tl.load(counts + part)
    out = tl.load(outs + part)
    block = tl.arange(0, BLOCKS)[:, None, None]
    stripe = tl.arange(0, 16)[None, :, None]
    lane = tl.arange(0, 8)[None, None, :]
    row = words + start + block * 128 + stripe * 8
    data = tl.load(row + lane, mask=block < count, other=0).to(tl.uint64, bitcast=True)
    key = data ^ tl.load(secret + stripe + lane).to(tl.uint64, bitcast=True)
    # To an accumulator goes the word beside its own: sums are exchanged, sixteen times fewer than words.
    even, odd = tl.split(tl.sum(data, axis=1).reshape(BLOCKS, 4, 2))
    total = tl.sum((key & 0xFFFFFFFF) * (key >> 32), axis=1) + tl.join(odd, even).reshape(BLOCKS, 8)
    b = tl.arange(0, BLOCKS)[:, None]
    at = sums + (out + b) * 8 + tl.arange(0, 8)[None, :]
    tl.store(at, total.to(tl.int64, bitcast=True), mask=b < count)


@triton.jit
def walk_kernel(sums, firsts, counts, initial, secret, states, UNROLL: tl.constexpr):
    """states[t] = the accumulators behind the blocks of tensor t.

    Args:
        firsts, counts: [tensors] int64: first row of `sums`, number of blocks.
        initial: [8] int64.
        secret: [24] int64.
        states: [tensors, 8] int64.
    """
    t = tl.program_id(0)
    lane = tl.arange(0, 8)
    row = sums + tl.load(firsts + t) * 8 + lane
    count = tl.load(counts + t)
    key = tl.load(secret + 16 + lane).to(tl.uint64, bitcast=True)
    acc = tl.load(initial + lane).to(tl.uint64, bitcast=True)
    whole = count // UNROLL * UNROLL
    # Unrolled, so that many loads are under way: each takes longer than all that is done with it.
    for first in range(0, whole, UNROLL):
        for i in tl.static_range(UNROLL):
            acc += tl.load(row + (first + i) * 8).to(tl.uint64, bitcast=True)
            acc = (acc ^ (acc >> 47) ^ key) * 0x9E3779B1
    for i in range(whole, count):
        acc += tl.load(row + i * 8).to(tl.uint64, bitcast=True)
        acc = (acc ^ (acc >> 47) ^ key) * 0x9E3779B1
    tl.store(states + t * 8 + lane, acc.to(tl.int64, bitcast=True))


def walk(flat: Tensor, offsets: np.ndarray, counts: np.ndarray, initial: np.ndarray, secret: np.ndarray) -> Tensor:
    """[n, 8] int64 on the device, in the current stream: the accumulators behind `counts` blocks from `offsets` on.

    Args:
        flat: uint8, contiguous, at an address that 8 divides.
        offsets: [n] int64, bytes; 8 divides them.
        counts: [n] int64.
        initial: [8] uint64.
        secret: [24] uint64.
    """
    words = flat[: flat.numel() // 8 * 8].view(torch.int64)
    constants = _there(np.concatenate((initial, secret)).view(np.int64), flat.device)
    states = torch.empty((len(offsets), 8), dtype=torch.int64, device=flat.device)
    begin = 0
    while begin < len(offsets):
        # As many as fit, at least one.
        fitting = int(np.searchsorted(np.cumsum(counts[begin:]), MOST_SUMS, side="right"))
        here = slice(begin, begin + max(1, fitting))
        _walk(words, offsets[here] // 8, counts[here], constants[:8], constants[8:], states[here])
        begin = here.stop
    return states


def _walk(
    words: Tensor, starts_N: np.ndarray, counts_N: np.ndarray, initial: Tensor, secret: Tensor, states_N8: Tensor
) -> None:
    firsts_N = np.cumsum(counts_N) - counts_N
    parts_N = -(-counts_N // PART_BLOCKS)
    num_parts = int(parts_N.sum())
    of_P = np.repeat(np.arange(len(counts_N)), parts_N)
    # Of each part, blocks of its tensor before it.
    before_P = (np.arange(num_parts) - np.repeat(np.cumsum(parts_N) - parts_N, parts_N)) * PART_BLOCKS
    table_3P = np.stack((starts_N[of_P] + before_P * 128, np.minimum(counts_N[of_P] - before_P, PART_BLOCKS),
                         firsts_N[of_P] + before_P))  # fmt: skip
    starts, counts, outs = _there(table_3P, words.device)
    sums = torch.empty((max(1, int(counts_N.sum())), 8), dtype=torch.int64, device=words.device)
    if num_parts:
        sum_kernel[(num_parts,)](words, starts, counts, outs, secret, sums, BLOCKS=PART_BLOCKS, num_warps=8)
    firsts, counts = _there(np.stack((firsts_N, counts_N)), words.device)
    walk_kernel[(len(counts_N),)](sums, firsts, counts, initial, secret, states_N8, UNROLL=32, num_warps=1)


def _there(values: np.ndarray, device: torch.device) -> Tensor:
    return to_device(torch.from_numpy(np.ascontiguousarray(values)), device)
