"""Attention over a paged store: decode with its chunks in parallel, and chunked prefill. See `attention_math`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
import triton
import triton.language as tl

from shared.kernels.cuda.attention_math import BLOCK, CHUNK, LOG2E, Tiles, block_step, merge, no_keys, sift_values


@triton.jit
def chunk_pages(table, begin, limit, PAGE: tl.constexpr, CHUNK: tl.constexpr):
    """Page ids of the chunk at position `begin`, as many as it may have: PAGE and CHUNK are powers of two."""
    COUNT: tl.constexpr = CHUNK // PAGE if PAGE < CHUNK else 1
    at = begin // PAGE + tl.arange(0, COUNT)
    return tl.load(table + at, mask=at * PAGE < limit, other=0)


@triton.jit
def block_rows(table, chunk, ids, n, rn, limit, PAGE: tl.constexpr, AT_ONCE: tl.constexpr):
    """Where the positions n + rn of one sequence lie: a first store row and offsets [BLOCK] from it.

    AT_ONCE: by the page `ids` of the chunk at position `chunk`; otherwise by the table.
    """
    t = n + rn
    row = 0
    offset = rn
    if AT_ONCE and rn.shape[0] <= PAGE:
        is_here = tl.arange(0, ids.shape[0]) == (n - chunk) // PAGE
        row = tl.sum(tl.where(is_here, ids, 0), 0).to(tl.int64) * PAGE + n % PAGE
    else:
        if AT_ONCE:
            # the pipeliner looks up the block behind the last one too, whose page the chunk does not have
            page = tl.gather(ids, ((t - chunk) // PAGE) & (ids.shape[0] - 1), 0)
        else:
            # one page id per position, even where a block lies in one page: the pipeliner prefetches a tensor of page ids
            # along with the keys, but would wait for a scalar one
            page = tl.load(table + t // PAGE, mask=t < limit, other=0)
        offset = page.to(tl.int64) * PAGE + t % PAGE
    return row, offset


@triton.jit(do_not_specialize=["max_pages", "max_chunks"])
def cached_kernel(
    q, k, v, o, part_m, part_l, part_a, pages, q_start, context, tile_seq, tile_first,
    factor, scale, softcap, stride_q, stride_o, max_pages, max_chunks, STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BQ: tl.constexpr, BM: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr, WALKS: tl.constexpr, ONES: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    # a query alone in its tile sees whatever is loaded, unless a window starts within a block
    SIFT: tl.constexpr = BQ > 1 or WINDOW > 0
    HKV: tl.constexpr = H // G
    pid = tl.program_id(0)
    if BQ == 1:
        # the KV heads of a position are neighbours in memory: they are read at about the same time
        tile = pid // HKV
        kvh = pid % HKV
    else:
        # the tiles of a sequence read the same keys
        tile = pid % (tl.num_programs(0) // HKV)
        kvh = pid // (tl.num_programs(0) // HKV)
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
    if WALKS:
        c_lo = lowest // CHUNK
        num_chunks = p_hi // CHUNK + 1 - c_lo
    else:
        # no loop: it would take registers, and with them programs that hide each other's latency
        c_lo = tl.program_id(1)
        num_chunks = 1

    tm = tl.full((BM,), -float("inf"), tl.float32)
    t = tl.zeros((BM,), tl.float32)
    ta = tl.zeros((BM, DP), tl.float32)
    for i in range(num_chunks):
        c = c_lo + i
        m, l, a = no_keys(BM, ONES, DP)
        begin = tl.maximum(c * CHUNK, lowest)
        end = tl.minimum(c * CHUNK + CHUNK, p_hi + 1)
        ids = None
        if AT_ONCE:
            ids = chunk_pages(table, c * CHUNK, ctx, PAGE, CHUNK)
        if WINDOW > 0 or AT_ONCE:
            full = begin
        else:
            full = tl.maximum(tl.minimum(end, (p_lo + 1) // BLOCK * BLOCK), begin)
        for n in range(begin, full, BLOCK):
            row, offset = block_rows(table, c * CHUNK, ids, n, rn, ctx, PAGE, AT_ONCE)
            kp = kb + row * STRIDE_K + (offset[None, :] * STRIDE_K + rd[:, None])
            vp = vb + row * STRIDE_V + (offset[:, None] * STRIDE_V + rd[None, :])
            if D == DP:
                kt = tl.load(kp)
                vt = tl.load(vp)
            else:
                kt = tl.load(kp, mask=(rd < D)[:, None], other=0.0)
                vt = tl.load(vp, mask=(rd < D)[None, :], other=0.0)
            m, l, a = block_step(qt, kt, vt, ones, m, l, a, None, None, factor, scale, softcap, SOFTCAP, False, False)
        for n in range(full, end, BLOCK):
            row, offset = block_rows(table, c * CHUNK, ids, n, rn, ctx, PAGE, AT_ONCE)
            kp = kb + row * STRIDE_K + (offset[None, :] * STRIDE_K + rd[:, None])
            vp = vb + row * STRIDE_V + (offset[:, None] * STRIDE_V + rd[None, :])
            seen = n + rn <= p_hi
            kt = tl.load(kp, mask=seen[None, :] & (rd < D)[:, None], other=0.0)
            vt = tl.load(vp, mask=seen[:, None] & (rd < D)[None, :], other=0.0)
            blame = None
            if SIFT:
                vt, blame = sift_values(vt, seen)
            if BQ == 1:
                keep = seen[None, :]
            else:
                keep = (n + rn)[None, :] <= pos[:, None]
            at_edge = True
            if WINDOW > 0:
                keep = keep & ((n + rn)[None, :] > pos[:, None] - WINDOW)
            elif AT_ONCE:
                at_edge = n + BLOCK > p_lo + 1
            m, l, a = block_step(
                qt, kt, vt, ones, m, l, a, keep, blame, factor, scale, softcap, SOFTCAP, True, SIFT, at_edge
            )
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
            slot = ((tile * HKV + kvh).to(tl.int64) * max_chunks + c_lo) * (BQ * G) + rm
            tl.store(part_m + slot, tm, mask=row_ok)
            tl.store(part_l + slot, t, mask=row_ok)
            tl.store(part_a + slot[:, None] * DP + rd[None, :], ta, mask=row_ok[:, None])
    else:
        if not WALKS:
            t = tl.where(p_hi < CHUNK, t, float("nan"))
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


@dataclass(frozen=True, slots=True)
class CachedShape:
    """How `cached_kernel` is compiled: a question of speed, never of bits."""

    num_warps: int
    num_stages: int
    at_once: bool = False
    """For one query a tile: the page ids of a chunk are loaded before its keys, and one loop walks its blocks, all masked.
    Otherwise ids are loaded block by block, and only blocks at the mask's edge are masked: less to wait for at the start of a
    chunk, where few programs hide it."""


MANY = CachedShape(num_warps=4, num_stages=2, at_once=True)
FEW = CachedShape(num_warps=2, num_stages=3)
MANY_PROGRAMS = 256
"""Tiles x KV heads from which `MANY` reads faster than `FEW`."""


def choose_shape(
    tiles: Tiles, num_kv_heads: int, head_dim: int, *, walks: bool = False, chunk: int = CHUNK
) -> CachedShape:
    """The shape of a launch, by what a captured graph fixes too: never by contexts."""
    is_many = tiles.queries == 1 and tiles.seq.shape[0] * num_kv_heads >= MANY_PROGRAMS
    # a longer chunk, which only the fast mode has, may have more page ids than a program can hold
    if is_many and not walks and chunk <= CHUNK:
        return MANY if tiles.rows <= 64 else replace(MANY, num_warps=8)
    num_warps = FEW.num_warps if tiles.rows <= 32 else 4 if tiles.rows == 64 else 8
    return replace(FEW, num_warps=num_warps, num_stages=FEW.num_stages if head_dim <= 128 else 2)


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
    walks: bool = False,
    window: int = 0,
    softcap: float = 0.0,
    shape: CachedShape | None = None,
    ones: int = 16,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """Args:
    q: [T, H, D]; k, v: [R, Hkv, D] row stores; out: [T, H, D].
    partials: scratch; given, the chunks run in parallel.
    walks: one program walks all chunks. With neither, a query that sees more than the first chunk gets NaN.
    window: positions a query sees, itself included; 0 for all.
    softcap: 0, or the cap of cap * tanh(score / cap).
    shape, ones: questions of speed, never of bits; shape None chooses by the launch.
    chunk: keys of a chunk, a power of two from BLOCK on. Part of the bits: anything but CHUNK is for the fast mode alone.
    """
    heads, dim = q.shape[1], q.shape[2]
    group = heads // k.shape[1]
    wide = triton.next_power_of_2(dim)
    scratch = partials if partials is not None else Partials(q, q, q, 1)
    shape = shape or choose_shape(tiles, k.shape[1], dim, walks=walks, chunk=chunk)
    cached_kernel[(tiles.seq.shape[0] * k.shape[1], scratch.chunks)](
        q, k, v, out, scratch.m, scratch.l, scratch.a, rows.pages, rows.q_start, rows.context, tiles.seq, tiles.first,
        LOG2E if softcap else scale * LOG2E, scale, softcap, q.stride(0), out.stride(0), rows.pages.stride(0), scratch.chunks,
        STRIDE_K=k.stride(0), STRIDE_V=v.stride(0), H=heads, G=group, D=dim, DP=wide, BQ=tiles.queries, BM=tiles.rows,
        BLOCK=BLOCK, CHUNK=chunk, PAGE=rows.page_size, WINDOW=window, SOFTCAP=softcap > 0, SPLIT=partials is not None,
        WALKS=walks, ONES=ones, AT_ONCE=shape.at_once, num_warps=shape.num_warps, num_stages=shape.num_stages,
    )  # fmt: skip
    if partials is not None:
        merge_kernel[(tiles.seq.shape[0], k.shape[1], tiles.queries * group)](
            out, partials.m, partials.l, partials.a, rows.q_start, rows.context, tiles.seq, tiles.first, out.stride(0),
            partials.chunks, G=group, D=dim, DP=wide, BQ=tiles.queries, CHUNK=chunk, WINDOW=window,
            WIDE=min(8, triton.next_power_of_2(partials.chunks)), num_warps=2,
        )  # fmt: skip
    return out
