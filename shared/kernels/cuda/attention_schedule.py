"""How the tiles of a packed batch are dealt to programs that stay: work of `attention_hopper`.

Legend as in `attention_math`.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shared.kernels.cuda.attention_math import BLOCK, cut_tiles, to_device

HEAD_DIM = 128
ROWS = 64
"""Rows of a warpgroup, half of a tile's; the query heads of one KV head divide it."""
RECORD = 8
"""Integers of a tile's record."""
TILE_COST = 1.5
"""What a tile costs besides its blocks of keys, in such blocks."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Made once per packed batch and shared by all layers."""

    table: torch.Tensor
    """[n, RECORD] int32, the tiles of one program after those of another. A record: first key row of the tile's sequence; row and
    position of the tile's first query; position of its last; queries from there to the sequence's end; KV head; two unused."""
    starts: torch.Tensor
    """[programs + 1] int32: where each program's tiles begin."""


def deal(
    q_lens: Sequence[int] | np.ndarray,
    context_lens: Sequence[int] | np.ndarray,
    heads: int,
    kv_heads: int,
    device: torch.device,
    *,
    num_programs: int,
) -> Schedule:
    """Each tile, the longest walks of a KV head first, goes to the program that has the least to do.

    One KV head after another: programs that run at once share its keys and values in the cache.

    Args:
        q_lens: queries of each sequence, at least one in all.
        context_lens: keys of each, its queries included, which are its last positions.
        num_programs: that the device runs at once.
    """
    q_lens, context_lens = np.asarray(q_lens, np.int64), np.asarray(context_lens, np.int64)
    tiles = cut_tiles(q_lens, heads // kv_heads, 2 * ROWS, torch.device("cpu"))
    seq, first = tiles.seq.numpy(), tiles.first.numpy()
    before = (context_lens - q_lens)[seq]
    last = before + np.minimum(first + tiles.queries, q_lens[seq]) - 1
    q_start, k_start = (np.cumsum(lens) - lens for lens in (q_lens, context_lens))
    table = np.zeros((len(seq), RECORD), np.int32)
    table[:, :5] = np.stack([k_start[seq], q_start[seq] + first, before + first, last, q_lens[seq] - first], 1)
    table = np.tile(table[np.argsort(-last, kind="stable")], (kv_heads, 1))
    table[:, 5] = np.arange(kv_heads).repeat(len(seq))
    busy = [(0.0, program) for program in range(min(num_programs, len(table)))]
    owner = np.empty(len(table), np.int64)
    for i, blocks in enumerate((table[:, 3] // BLOCK + 1).tolist()):
        load, owner[i] = busy[0]
        heapq.heapreplace(busy, (load + blocks + TILE_COST, int(owner[i])))
    counts = np.bincount(owner, minlength=len(busy))
    return Schedule(
        to_device(table[np.argsort(owner, kind="stable")], device),
        to_device(np.concatenate([[0], counts.cumsum()]), device),
    )


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Of the device; 1 where the kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
