"""Attention over a row store: decode, chunked prefill and packed training are one function of (row, its own prefix).

The definition, which fixes the bits: keys are walked in blocks of 64 inside chunks of 1024, both anchored at absolute
positions; each chunk is one online softmax; chunks merge in ascending order. Decode runs the chunks in parallel and
merges them in `merge_kernel`; prefill and training walk them serially in one program. Row sums go through the matrix
unit (a column of ones), because `tl.sum` reduces in an order that depends on the warp layout. A block or chunk without
a visible key is an exact identity. Query heads of one KV head are packed into the rows of a tile.

Legend: T query rows, S sequences, H query heads, Hkv KV heads, G = H / Hkv, D head dim, R store rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

BLOCK = 64
CHUNK = 1024
LOG2E = 1.4426950408889634


@triton.jit
def score_block(s, scale, softcap, SOFTCAP: tl.constexpr):
    """Raw products -> what the softmax exponentiates, before the factor log2(e) that `exponent` applies."""
    if SOFTCAP:
        z = s * (scale / softcap)
        # tanh from exp2, so that every tile shape compiles the same operations
        e = tl.exp2(tl.minimum(tl.maximum(z, -15.0), 15.0) * 2.8853900817779268)
        s = softcap * ((e - 1.0) / (e + 1.0))
    return s


@triton.jit
def sift_values(vt, inside):
    """Values of a block at the mask's edge: rows that are not `inside` or not finite become zero, because zero times NaN is
    NaN. The second result [BLOCK], added to the scores, makes NaN of the queries that do see such a row."""
    finite = tl.min((tl.abs(vt.to(tl.float32)) < float("inf")).to(tl.int32), 1) > 0
    vt = tl.where((inside & finite)[:, None], vt, 0.0)
    return vt, tl.where(inside & (finite == 0), float("nan"), 0.0)


@triton.jit
def block_step(
    qt, kt, vt, ones, m, l, a, keep, blame, factor, scale, softcap,
    SOFTCAP: tl.constexpr, MASK: tl.constexpr, BLAME: tl.constexpr, at_edge=True,
):  # fmt: skip
    """One block of keys. m is the running maximum in units of `factor`; the multiply-add is explicit so that no
    compiler choice can contract it differently in another tile. At the mask's edge `keep` [BM, BLOCK] says who sees what
    and `blame` is that of `sift_values`. A masked block that every query sees whole has the bits of an unmasked one if the
    scalar `at_edge` is false: they differ where every score is -inf."""
    s = score_block(tl.dot(qt, kt), scale, softcap, SOFTCAP)
    if BLAME:
        s = s + blame[None, :]
    if MASK:
        s = tl.where(keep, s, -float("inf"))
    top = tl.maximum(m, tl.max(s, 1) * factor)
    if MASK:
        safe = tl.where((top == -float("inf")) & at_edge, 0.0, top)
    else:
        safe = top
    decay = tl.exp2(m - safe)
    p = tl.exp2(tl.fma(s, tl.full(s.shape, 1.0, tl.float32) * factor, -safe[:, None])).to(vt.dtype)
    l = tl.dot(p, ones, l * decay[:, None])
    a = tl.dot(p, vt, a * decay[:, None])
    return top, l, a


@triton.jit
def query_tile(q_start, k_start, tile_seq, tile_first, rm, G: tl.constexpr, BQ: tl.constexpr):
    """Where this program's tile of a packed sequence lies.

    Returns: the sequence's first row in the store; for each row `rm` of the tile its query's row, the query's position, and
    whether there is such a query; the positions of the tile's first and last query.
    """
    tile = tl.program_id(0)
    seq = tl.load(tile_seq + tile)
    first = tl.load(tile_first + tile)
    start = tl.load(q_start + seq)
    q_len = tl.load(q_start + seq + 1) - start
    row_0 = tl.load(k_start + seq)
    before = tl.load(k_start + seq + 1) - row_0 - q_len
    index = first + rm // G
    row_ok = (rm < BQ * G) & (index < q_len)
    return row_0, start + index, before + index, row_ok, before + first, before + tl.minimum(first + BQ, q_len) - 1


@triton.jit
def no_keys(BM: tl.constexpr, ONES: tl.constexpr, DP: tl.constexpr):
    """(m, l, a) of a chunk before its first key; merging it is an exact identity."""
    m = tl.full((BM,), -float("inf"), tl.float32)
    return m, tl.zeros((BM, ONES), tl.float32), tl.zeros((BM, DP), tl.float32)


@triton.jit
def merge(tm, t, ta, m, l, a):
    """The one formula that joins a chunk (m, l, a) to what came before it (tm, t, ta)."""
    top = tl.maximum(tm, m)
    safe = tl.where(top == -float("inf"), 0.0, top)
    old = tl.exp2(tm - safe)
    new = tl.exp2(m - safe)
    t = tl.fma(t, old, l * new)
    ta = tl.fma(ta, tl.zeros_like(ta) + old[:, None], a * new[:, None])
    return top, t, ta


@dataclass(frozen=True, slots=True)
class Tiles:
    """Query tiles: which sequence, and its first query."""

    seq: torch.Tensor
    """[n] int32."""
    first: torch.Tensor
    """[n] int32."""
    queries: int
    """Queries per tile, BQ."""
    rows: int
    """Rows per tile, BM >= BQ x G."""


def cut_tiles(
    q_lens: Sequence[int] | np.ndarray,
    group: int,
    rows: int,
    device: torch.device,
    *,
    of: np.ndarray | None = None,
    queries: int | None = None,
) -> Tiles:
    """Tiles of `rows` matrix rows that cover every query of every sequence once, the longest walks first.

    Args:
        q_lens: queries of each sequence.
        group: query heads per KV head, at most `rows`.
        of: the sequences to cover; None for all.
        queries: per tile; None for as many as fit. 1 where no sequence has more: every row in use costs a decode scratch
            and a program that merges it.
    """
    lens = np.asarray(q_lens, np.int64)
    seqs = np.arange(len(lens)) if of is None else np.asarray(of, np.int64)
    queries = rows // group if queries is None else queries
    counts = -(-lens[seqs] // queries)
    seq = seqs.repeat(counts)
    first = (np.arange(len(seq)) - (counts.cumsum() - counts).repeat(counts)) * queries
    order = np.lexsort((seq, -first))
    return Tiles(to_device(seq[order], device), to_device(first[order], device), queries, rows)


def to_device(values: Sequence[int] | np.ndarray, device: torch.device) -> torch.Tensor:
    """int32, contiguous, on the device."""
    return torch.from_numpy(np.ascontiguousarray(values, np.int32)).to(device)
