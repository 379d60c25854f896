"""Training attention: forward over packed sequences whose own rows are the store, with autograd.

The forward is the serial walk of `attention_math`; keys and values come through the tensor memory accelerator, which wants
the rows of a sequence in one piece. Where sequences share rows (a prompt packed once), keys and values are gathered into
one piece per sequence first; the backward adds the gradients of a shared row in a fixed order.

Legend as in `attention_math`; E context rows of all sequences (T where nothing is shared).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor

from shared.kernels.cuda.attention_backward import DKV_KEYS, DQ_ROWS, packed_backward
from shared.kernels.cuda.attention_math import (
    BLOCK,
    CHUNK,
    LOG2E,
    Tiles,
    block_step,
    cut_tiles,
    merge,
    no_keys,
    query_tile,
    sift_values,
    to_device,
)
from shared.kernels.cuda.attention_schedule import Schedule
from shared.kernels.cuda.segments import Segments, segment_sum, segments_of

FORWARD_ROWS = 128


@triton.jit
def seen_block(qt, keys, values, row, kvh, ones, m, l, a, factor, scale, softcap, SHAPE: tl.constexpr):
    """A block of keys, from row `row` on, that every query of the tile sees."""
    kt = keys.load([row, kvh, 0]).reshape(SHAPE[0], SHAPE[1]).T
    vt = values.load([row, kvh, 0]).reshape(SHAPE[0], SHAPE[1])
    return block_step(qt, kt, vt, ones, m, l, a, None, None, factor, scale, softcap, SHAPE[3], False, False)


@triton.jit
def edge_block(qt, keys, values, row, kvh, ones, m, l, a, n, pos, last, factor, scale, softcap, SHAPE: tl.constexpr):
    """The block at position `n`, which some queries see and some don't."""
    kt = keys.load([row, kvh, 0]).reshape(SHAPE[0], SHAPE[1]).T
    vt = values.load([row, kvh, 0]).reshape(SHAPE[0], SHAPE[1])
    key = n + tl.arange(0, SHAPE[0])
    # rows behind the tile belong to others and may hold anything
    vt, blame = sift_values(vt, key <= last)
    keep = key[None, :] <= pos[:, None]
    if SHAPE[2] > 0:
        keep = keep & (key[None, :] > pos[:, None] - SHAPE[2])
    return block_step(qt, kt, vt, ones, m, l, a, keep, blame, factor, scale, softcap, SHAPE[3], True, True)


@triton.jit
def packed_kernel(
    q, keys, values, o, lse, q_start, k_start, tile_seq, tile_first, factor, scale, softcap, stride_q, stride_o,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BQ: tl.constexpr, BM: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ONES: tl.constexpr,
    FLAT: tl.constexpr,
):  # fmt: skip
    SHAPE: tl.constexpr = (BLOCK, DP, WINDOW, SOFTCAP)
    kvh = tl.program_id(1)
    rm = tl.arange(0, BM)
    rd = tl.arange(0, DP)
    row_0, query, pos, row_ok, p_lo, last = query_tile(q_start, k_start, tile_seq, tile_first, rm, G, BQ)
    head = kvh * G + rm % G
    at = query.to(tl.int64) * stride_q + head * D
    qt = tl.load(q + at[:, None] + rd[None, :], mask=row_ok[:, None] & (rd < D)[None, :], other=0.0)
    ones = tl.full((BLOCK, ONES), 1.0, qt.dtype)
    if WINDOW > 0:
        lowest = tl.maximum(p_lo - WINDOW + 1, 0) // BLOCK * BLOCK
        edge = lowest
    else:
        lowest = 0
        edge = (p_lo + 1) // BLOCK * BLOCK
    m, l, a = no_keys(BM, ONES, DP)
    tm, t, ta = m, tl.zeros((BM,), tl.float32), a
    if FLAT:
        # one pipeline across chunks; a chunk is merged where the next one begins
        for n in range(lowest, edge, BLOCK):
            if n % CHUNK == 0:
                tm, t, ta = merge(tm, t, ta, m, tl.max(l, 1), a)
                m, l, a = no_keys(BM, ONES, DP)
            m, l, a = seen_block(qt, keys, values, row_0 + n, kvh, ones, m, l, a, factor, scale, softcap, SHAPE)
        for n in range(edge, last + 1, BLOCK):
            if n % CHUNK == 0:
                tm, t, ta = merge(tm, t, ta, m, tl.max(l, 1), a)
                m, l, a = no_keys(BM, ONES, DP)
            m, l, a = edge_block(
                qt, keys, values, row_0 + n, kvh, ones, m, l, a, n, pos, last, factor, scale, softcap, SHAPE
            )
        tm, t, ta = merge(tm, t, ta, m, tl.max(l, 1), a)
    else:
        for c in range(lowest // CHUNK, last // CHUNK + 1):
            m, l, a = no_keys(BM, ONES, DP)
            begin = tl.maximum(c * CHUNK, lowest)
            end = tl.minimum(c * CHUNK + CHUNK, last + 1)
            full = tl.maximum(tl.minimum(end, edge), begin)
            for n in range(begin, full, BLOCK):
                m, l, a = seen_block(qt, keys, values, row_0 + n, kvh, ones, m, l, a, factor, scale, softcap, SHAPE)
            for n in range(full, end, BLOCK):
                m, l, a = edge_block(
                    qt, keys, values, row_0 + n, kvh, ones, m, l, a, n, pos, last, factor, scale, softcap, SHAPE
                )
            tm, t, ta = merge(tm, t, ta, m, tl.max(l, 1), a)
    to = query.to(tl.int64) * stride_o + head * D
    out = (ta / t[:, None]).to(o.dtype.element_ty)
    tl.store(o + to[:, None] + rd[None, :], out, mask=row_ok[:, None] & (rd < D)[None, :])
    tl.store(lse + query.to(tl.int64) * H + head, tm + tl.log2(t), mask=row_ok)


@dataclass(frozen=True, slots=True)
class ForwardShape:
    """How the forward is compiled: a question of speed, never of bits."""

    ones: int = 16
    """Columns of ones that the row sums go through: 16, or 8, which the matrix unit takes from registers."""
    is_flat: bool = False
    """One loop over the blocks of all chunks, instead of one per chunk, which drains the pipeline at each end."""
    num_stages: int = 3


FORWARD = ForwardShape()


@dataclass(frozen=True, slots=True)
class Packed:
    """Cuts of one packed batch, made once and shared by all layers."""

    q_start: torch.Tensor
    """[S + 1] int32: first query row of each sequence."""
    k_start: torch.Tensor
    """[S + 1] int32: first key row of each sequence; the queries are its last positions."""
    forward: Tiles
    dq: Tiles
    dkv: Tiles
    """`first` counts keys; a tile is a block of DKV_KEYS keys."""
    rows: torch.Tensor | None = None
    """[E] int32: store row of each key row; None where they are the store's rows in order."""
    shared: Segments | None = None
    """The key rows of each store row."""


def pack(
    q_lens: list[int],
    group: int,
    device: torch.device,
    *,
    context_lens: list[int] | None = None,
    rows: np.ndarray | None = None,
    num_store_rows: int = 0,
) -> Packed:
    """Args:
    q_lens: queries of each sequence in packing order.
    group: query heads per KV head.
    context_lens: keys of each sequence, its queries included; None: the queries are all.
    rows: [E] store row of each position of each context; None: the store holds them in this order.
    num_store_rows: of the store, if `rows` are given.
    """
    contexts = q_lens if context_lens is None else context_lens
    starts = [to_device(np.concatenate([[0], np.cumsum(lens)]), device) for lens in (q_lens, contexts)]
    return Packed(
        starts[0],
        starts[1],
        cut_tiles(q_lens, group, FORWARD_ROWS, device),
        cut_tiles(q_lens, group, DQ_ROWS, device),
        cut_tiles(contexts, 1, DKV_KEYS, device),
        None if rows is None else to_device(rows, device),
        None if rows is None else segments_of(torch.from_numpy(np.asarray(rows)), num_store_rows).to(device),
    )


def packed_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: Packed, *, scale: float, window: int, softcap: float,
    shape: ForwardShape = FORWARD,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Output [T, H, D] and log-sum-exp in base 2 [T, H] float32; arguments as for `PackedAttention`."""
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    wide = triton.next_power_of_2(dim)
    out = torch.empty_like(q)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    keys, values = (
        TensorDescriptor(x, list(x.shape), list(x.stride()), [BLOCK, 1, wide]) for x in _in_one_piece(k, v, packed)
    )
    tiles = packed.forward
    packed_kernel[(tiles.seq.shape[0], kv_heads)](
        q, keys, values, out, lse, packed.q_start, packed.k_start, tiles.seq, tiles.first,
        LOG2E if softcap else scale * LOG2E, scale, softcap, q.stride(0), out.stride(0), H=heads, G=heads // kv_heads, D=dim,
        DP=wide, BQ=tiles.queries, BM=tiles.rows, BLOCK=BLOCK, CHUNK=CHUNK, WINDOW=window, SOFTCAP=softcap > 0,
        ONES=shape.ones, FLAT=shape.is_flat, num_warps=8, num_stages=shape.num_stages if wide <= 128 else 2,
    )  # fmt: skip
    return out, lse


class PackedAttention(torch.autograd.Function):
    """q [T, H, D], k, v [R, Hkv, D], contiguous -> [T, H, D]; R is T unless `packed` names the rows.

    With a `schedule` the forward is that of `attention_hopper`: the same bits, also those that the backward reads.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        packed: Packed,
        scale: float,
        window: int,
        softcap: float,
        schedule: Schedule | None = None,
    ) -> torch.Tensor:
        if schedule is None:
            out, lse = packed_forward(q, k, v, packed, scale=scale, window=window, softcap=softcap)
        else:
            # Gluon is not in every triton.
            from shared.kernels.cuda.attention_hopper import hopper_forward

            out, lse = hopper_forward(q, *_in_one_piece(k, v, packed), schedule, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.packed, ctx.scale, ctx.window, ctx.softcap = packed, scale, window, softcap
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        packed: Packed = ctx.packed
        keys, values = _in_one_piece(k, v, packed)
        # float32 where the gradients of one row are still to be added up
        wide = k.dtype if packed.shared is None else torch.float32
        dq, dk, dv = packed_backward(
            q, keys, values, out, lse, grad.contiguous(), packed, scale=ctx.scale, window=ctx.window, softcap=ctx.softcap,
            dtype=wide,
        )  # fmt: skip
        if packed.shared is not None:
            dk, dv = (segment_sum(x.flatten(1), packed.shared, k.dtype).view_as(k) for x in (dk, dv))
        return dq, dk, dv, None, None, None, None, None


def _in_one_piece(k: torch.Tensor, v: torch.Tensor, packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
    """[E, Hkv, D] keys and values, each sequence's context in consecutive rows."""
    if packed.rows is None:
        return k, v
    return k.index_select(0, packed.rows), v.index_select(0, packed.rows)
