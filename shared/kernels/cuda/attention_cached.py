"""Attention over a paged store: decode with its chunks in parallel, and chunked prefill. See `attention_math`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from shared.kernels.cuda.attention_math import BLOCK, CHUNK, LOG2E, Tiles, block_step, merge, no_keys, sift_values


@triton.jit
def store_rows(pages, n, rn, limit, PAGE: tl.constexpr):
    """Store rows of the positions n + rn of one sequence."""
    # one page id per position, even where a block lies in one page: the pipeliner prefetches a tensor of page ids
    # along with the keys, but would wait for a scalar one
    t = n + rn
    page = tl.load(pages + t // PAGE, mask=t < limit, other=0).to(tl.int64)
    return page * PAGE + t % PAGE


@triton.jit(do_not_specialize=["max_pages", "max_chunks"])
def cached_kernel(
    q, k, v, o, part_m, part_l, part_a, pages, q_start, context, tile_seq, tile_first,
    factor, scale, softcap, stride_q, stride_k, stride_v, stride_o, max_pages, max_chunks,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BQ: tl.constexpr, BM: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr, ONES: tl.constexpr,
):  # fmt: skip
    # a query alone in its tile sees whatever is loaded, unless a window starts within a block
    SIFT: tl.constexpr = BQ > 1 or WINDOW > 0
    tile = tl.program_id(0)
    kvh = tl.program_id(1)
    seq = tl.load(tile_seq + tile)
    first = tl.load(tile_first + tile)
    start = tl.load(q_start + seq)
    q_len = tl.load(q_start + seq + 1) - start
    ctx = tl.load(context + seq)
    p_lo = ctx - q_len + first
    p_hi = ctx - q_len + tl.minimum(first + BQ, q_len) - 1
    table = pages + seq.to(tl.int64) * max_pages

    rm = tl.arange(0, BM)
    rd = tl.arange(0, DP)
    rn = tl.arange(0, BLOCK)
    index = first + rm // G
    row_ok = (rm < BQ * G) & (index < q_len)
    pos = ctx - q_len + index
    head = kvh * G + rm % G
    at = (start + index).to(tl.int64) * stride_q + head * D
    qt = tl.load(q + at[:, None] + rd[None, :], mask=row_ok[:, None] & (rd < D)[None, :], other=0.0)
    ones = tl.full((BLOCK, ONES), 1.0, v.dtype.element_ty)
    kb = k + kvh * D
    vb = v + kvh * D
    if WINDOW > 0:
        lowest = tl.maximum(p_lo - WINDOW + 1, 0) // BLOCK * BLOCK
    else:
        lowest = 0
    if SPLIT:
        c_lo = tl.program_id(2)
        c_hi = tl.minimum(c_lo, p_hi // CHUNK)
    else:
        c_lo = lowest // CHUNK
        c_hi = p_hi // CHUNK

    tm = tl.full((BM,), -float("inf"), tl.float32)
    t = tl.zeros((BM,), tl.float32)
    ta = tl.zeros((BM, DP), tl.float32)
    for c in range(c_lo, c_hi + 1):
        m, l, a = no_keys(BM, ONES, DP)
        begin = tl.maximum(c * CHUNK, lowest)
        end = tl.minimum(c * CHUNK + CHUNK, p_hi + 1)
        if WINDOW > 0:
            full = begin
        else:
            full = tl.maximum(tl.minimum(end, (p_lo + 1) // BLOCK * BLOCK), begin)
        for n in range(begin, full, BLOCK):
            rows = store_rows(table, n, rn, ctx, PAGE)
            if D == DP:
                kt = tl.load(kb + rows[None, :] * stride_k + rd[:, None])
                vt = tl.load(vb + rows[:, None] * stride_v + rd[None, :])
            else:
                kt = tl.load(kb + rows[None, :] * stride_k + rd[:, None], mask=(rd < D)[:, None], other=0.0)
                vt = tl.load(vb + rows[:, None] * stride_v + rd[None, :], mask=(rd < D)[None, :], other=0.0)
            m, l, a = block_step(qt, kt, vt, ones, m, l, a, None, None, factor, scale, softcap, SOFTCAP, False, False)
        for n in range(full, end, BLOCK):
            rows = store_rows(table, n, rn, ctx, PAGE)
            seen = n + rn <= p_hi
            kt = tl.load(kb + rows[None, :] * stride_k + rd[:, None], mask=seen[None, :] & (rd < D)[:, None], other=0.0)
            vt = tl.load(vb + rows[:, None] * stride_v + rd[None, :], mask=seen[:, None] & (rd < D)[None, :], other=0.0)
            blame = None
            if SIFT:
                vt, blame = sift_values(vt, seen)
            keep = (n + rn)[None, :] <= pos[:, None]
            if WINDOW > 0:
                keep = keep & ((n + rn)[None, :] > pos[:, None] - WINDOW)
            m, l, a = block_step(qt, kt, vt, ones, m, l, a, keep, blame, factor, scale, softcap, SOFTCAP, True, SIFT)
        # all columns of l are equal
        total = tl.max(l, 1)
        if SPLIT:
            tm = m
            t = total
            ta = a
        else:
            tm, t, ta = merge(tm, t, ta, m, total, a)
    if SPLIT:
        if c_lo <= p_hi // CHUNK:
            slot = ((tile * tl.num_programs(1) + kvh).to(tl.int64) * max_chunks + c_lo) * (BQ * G) + rm
            tl.store(part_m + slot, tm, mask=row_ok)
            tl.store(part_l + slot, t, mask=row_ok)
            tl.store(part_a + slot[:, None] * DP + rd[None, :], ta, mask=row_ok[:, None])
    else:
        to = (start + index).to(tl.int64) * stride_o + head * D
        tl.store(
            o + to[:, None] + rd[None, :],
            (ta / t[:, None]).to(o.dtype.element_ty),
            mask=row_ok[:, None] & (rd < D)[None, :],
        )


@triton.jit(do_not_specialize=["max_chunks"])
def merge_kernel(
    o, part_m, part_l, part_a, q_start, context, tile_seq, tile_first, stride_o, max_chunks,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BQ: tl.constexpr, CHUNK: tl.constexpr, WINDOW: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Joins the chunks of one row in ascending order; WIDE partials are loaded at a time to hide their latency."""
    tile = tl.program_id(0)
    kvh = tl.program_id(1)
    r = tl.program_id(2)
    seq = tl.load(tile_seq + tile)
    first = tl.load(tile_first + tile)
    start = tl.load(q_start + seq)
    q_len = tl.load(q_start + seq + 1) - start
    index = first + r // G
    if index < q_len:
        pos = tl.load(context + seq) - q_len + index
        rd = tl.arange(0, DP)
        one = tl.arange(0, 1)
        tm = tl.full((1,), -float("inf"), tl.float32)
        t = tl.zeros((1,), tl.float32)
        ta = tl.zeros((1, DP), tl.float32)
        c_lo = 0
        if WINDOW > 0:
            c_lo = tl.maximum(tl.load(context + seq) - q_len + first - WINDOW + 1, 0) // CHUNK
        base = (tile * tl.num_programs(1) + kvh).to(tl.int64) * max_chunks
        for c in range(c_lo, pos // CHUNK + 1, WIDE):
            # unrolled, so that the loads of WIDE chunks are in flight together
            for j in tl.static_range(WIDE):
                inside = one + (c + j) <= pos // CHUNK
                slot = (base + c + j) * (BQ * G) + r + one
                m = tl.load(part_m + slot, mask=inside, other=-float("inf"))
                l = tl.load(part_l + slot, mask=inside, other=0.0)
                a = tl.load(part_a + slot[:, None] * DP + rd[None, :], mask=inside[:, None], other=0.0)
                tm, t, ta = merge(tm, t, ta, m, l, a)
        to = (start + index).to(tl.int64) * stride_o + (kvh * G + r % G) * D
        out = ta / t[:, None]
        tl.store(o + to + rd[None, :], out.to(o.dtype.element_ty), mask=(rd < D)[None, :])


@dataclass(frozen=True, slots=True)
class CachedRows:
    """Where the keys of each sequence lie in the paged store."""

    context: torch.Tensor
    """[S] int32: keys of each sequence, its queries included."""
    q_start: torch.Tensor
    """[S + 1] int32: first query row of each sequence."""
    pages: torch.Tensor
    """[S, P] int32: page of each page-sized piece of the context."""
    page_size: int
    """Tokens of a page, a power of two. 1 maps every position by itself."""


@dataclass(frozen=True, slots=True)
class Partials:
    """fp32 scratch of a split decode, allocated once so that graphs can capture it."""

    m: torch.Tensor
    """[slots], slots = tiles x Hkv x chunks x rows in use of a tile."""
    l: torch.Tensor
    """[slots]."""
    a: torch.Tensor
    """[slots x D padded to a power of two]."""
    chunks: int
    """Of the longest context."""


def allocate_partials(
    tiles: Tiles, heads: int, num_kv_heads: int, head_dim: int, longest: int, *, chunk: int = CHUNK
) -> Partials:
    """Scratch for `tiles` over contexts of at most `longest` keys in chunks of `chunk`."""
    chunks = triton.cdiv(longest, chunk)
    size = tiles.seq.shape[0] * chunks * tiles.queries * heads
    new = partial(torch.empty, dtype=torch.float32, device=tiles.seq.device)
    return Partials(new(size), new(size), new(size * triton.next_power_of_2(head_dim)), chunks)


def attend_cached(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: CachedRows,
    tiles: Tiles,
    *,
    scale: float,
    out: torch.Tensor,
    partials: Partials | None = None,
    window: int = 0,
    softcap: float = 0.0,
    num_warps: int = 0,
    num_stages: int = 3,
    ones: int = 16,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """Args:
    q: [T, H, D]; k, v: [R, Hkv, D] row stores; out: [T, H, D].
    partials: scratch; given, the chunks run in parallel.
    window: positions a query sees, itself included; 0 for all.
    softcap: 0, or the cap of cap * tanh(score / cap).
    num_warps, num_stages, ones: questions of speed, never of bits; num_warps 0 chooses by the tile.
    chunk: keys of a chunk, a multiple of BLOCK. Part of the bits: anything but CHUNK is for the fast mode alone.
    """
    heads, dim = q.shape[1], q.shape[2]
    group = heads // k.shape[1]
    wide = triton.next_power_of_2(dim)
    scratch = partials if partials is not None else Partials(q, q, q, 1)
    warps = num_warps or (2 if tiles.rows <= 32 else 4 if tiles.rows == 64 else 8)
    cached_kernel[(tiles.seq.shape[0], k.shape[1], scratch.chunks)](
        q, k, v, out, scratch.m, scratch.l, scratch.a, rows.pages, rows.q_start, rows.context, tiles.seq, tiles.first,
        LOG2E if softcap else scale * LOG2E, scale, softcap, q.stride(0), k.stride(0), v.stride(0), out.stride(0),
        rows.pages.stride(0), scratch.chunks,
        H=heads, G=group, D=dim, DP=wide, BQ=tiles.queries, BM=tiles.rows, BLOCK=BLOCK, CHUNK=chunk, PAGE=rows.page_size,
        WINDOW=window, SOFTCAP=softcap > 0, SPLIT=partials is not None, ONES=ones, num_warps=warps,
        num_stages=num_stages if wide <= 128 else 2,
    )  # fmt: skip
    if partials is not None:
        merge_kernel[(tiles.seq.shape[0], k.shape[1], tiles.queries * group)](
            out, partials.m, partials.l, partials.a, rows.q_start, rows.context, tiles.seq, tiles.first, out.stride(0),
            partials.chunks, G=group, D=dim, DP=wide, BQ=tiles.queries, CHUNK=chunk, WINDOW=window,
            WIDE=min(8, triton.next_power_of_2(partials.chunks)), num_warps=2,
        )  # fmt: skip
    return out
