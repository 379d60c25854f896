"""Attention over a row store: decode, chunked prefill and packed training are one function of (row, its own prefix).

The definition, which fixes the bits: keys are walked in blocks of 64 inside chunks of 1024, both anchored at absolute
positions; each chunk is one online softmax; chunks merge in ascending order. Decode runs the chunks in parallel and
merges them in `merge_kernel`; prefill and training walk them serially in one program. Row sums go through the matrix
unit (a column of ones), because `tl.sum` reduces in an order that depends on the warp layout. A block or chunk without
a visible key is an exact identity. Query heads of one KV head are packed into the rows of a tile.

Legend: T query rows, S sequences, H query heads, Hkv KV heads, G = H / Hkv, D head dim, R store rows.
"""

from __future__ import annotations

from dataclasses import dataclass

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
def block_step(qt, kt, vt, ones, m, l, a, keep, factor, scale, softcap, SOFTCAP: tl.constexpr, MASK: tl.constexpr):
    """One block of keys. m is the running maximum in units of `factor`; the multiply-add is explicit so that no
    compiler choice can contract it differently in another tile."""
    s = score_block(tl.dot(qt, kt), scale, softcap, SOFTCAP)
    if MASK:
        s = tl.where(keep, s, -float("inf"))
    top = tl.maximum(m, tl.max(s, 1) * factor)
    if MASK:
        safe = tl.where(top == -float("inf"), 0.0, top)
    else:
        safe = top
    decay = tl.exp2(m - safe)
    p = tl.exp2(tl.fma(s, tl.full(s.shape, 1.0, tl.float32) * factor, -safe[:, None])).to(vt.dtype)
    l = tl.dot(p, ones, l * decay[:, None])
    a = tl.dot(p, vt, a * decay[:, None])
    return top, l, a


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


def cut_tiles(q_lens: list[int], group: int, rows: int, device: torch.device) -> Tiles:
    """Tiles of `rows` matrix rows that cover every query of every sequence once, the longest walks first."""
    queries = rows // group
    tiles = [(first, s) for s, n in enumerate(q_lens) for first in range(0, n, queries)]
    tiles.sort(key=lambda tile: (-tile[0], tile[1]))
    pairs = torch.tensor(tiles, dtype=torch.int32).reshape(-1, 2).to(device)
    return Tiles(pairs[:, 1].contiguous(), pairs[:, 0].contiguous(), queries, rows)
