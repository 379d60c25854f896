"""Training attention: forward over packed sequences whose own rows are the store, and its deterministic backward.

The forward is the serial walk of `attention_math`; keys and values come through the tensor memory accelerator. The
backward recomputes probabilities from the saved log-sum-exp (Dao et al. 2022, algorithm 4); it owes nobody any bits, only
determinism: no atomics, every sum in one program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from shared.kernels.cuda.attention_math import BLOCK, CHUNK, LOG2E, Tiles, block_step, cut_tiles, merge, score_block


@triton.jit
def packed_kernel(
    q, keys, values, o, lse, q_start, tile_seq, tile_first, factor, scale, softcap, stride_q, stride_o,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BQ: tl.constexpr, BM: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    kvh = tl.program_id(1)
    seq = tl.load(tile_seq + tile)
    first = tl.load(tile_first + tile)
    start = tl.load(q_start + seq)
    q_len = tl.load(q_start + seq + 1) - start
    last = tl.minimum(first + BQ, q_len) - 1
    rm = tl.arange(0, BM)
    rd = tl.arange(0, DP)
    rn = tl.arange(0, BLOCK)
    index = first + rm // G
    row_ok = (rm < BQ * G) & (index < q_len)
    head = kvh * G + rm % G
    at = (start + index).to(tl.int64) * stride_q + head * D
    qt = tl.load(q + at[:, None] + rd[None, :], mask=row_ok[:, None] & (rd < D)[None, :], other=0.0)
    ones = tl.full((BLOCK, 16), 1.0, qt.dtype)
    if WINDOW > 0:
        lowest = tl.maximum(first - WINDOW + 1, 0) // BLOCK * BLOCK
        unmasked = lowest
    else:
        lowest = 0
        unmasked = (first + 1) // BLOCK * BLOCK
    tm = tl.full((BM,), -float("inf"), tl.float32)
    t = tl.zeros((BM,), tl.float32)
    ta = tl.zeros((BM, DP), tl.float32)
    for c in range(lowest // CHUNK, last // CHUNK + 1):
        m = tl.full((BM,), -float("inf"), tl.float32)
        l = tl.zeros((BM, 16), tl.float32)
        a = tl.zeros((BM, DP), tl.float32)
        begin = tl.maximum(c * CHUNK, lowest)
        end = tl.minimum(c * CHUNK + CHUNK, last + 1)
        full = tl.maximum(tl.minimum(end, unmasked), begin)
        for n in range(begin, full, BLOCK):
            kt = keys.load([start + n, kvh, 0]).reshape(BLOCK, DP).T
            vt = values.load([start + n, kvh, 0]).reshape(BLOCK, DP)
            m, l, a = block_step(qt, kt, vt, ones, m, l, a, True, factor, scale, softcap, SOFTCAP, False)
        for n in range(full, end, BLOCK):
            kt = keys.load([start + n, kvh, 0]).reshape(BLOCK, DP).T
            vt = values.load([start + n, kvh, 0]).reshape(BLOCK, DP)
            # rows behind the tile belong to others and may hold anything: zero times NaN would not be zero
            vt = tl.where((n + rn <= last)[:, None], vt, 0.0)
            keep = (n + rn)[None, :] <= index[:, None]
            if WINDOW > 0:
                keep = keep & ((n + rn)[None, :] > index[:, None] - WINDOW)
            m, l, a = block_step(qt, kt, vt, ones, m, l, a, keep, factor, scale, softcap, SOFTCAP, True)
        tm, t, ta = merge(tm, t, ta, m, tl.max(l, 1), a)
    to = (start + index).to(tl.int64) * stride_o + head * D
    out = (ta / t[:, None]).to(o.dtype.element_ty)
    tl.store(o + to[:, None] + rd[None, :], out, mask=row_ok[:, None] & (rd < D)[None, :])
    tl.store(lse + (start + index).to(tl.int64) * H + head, tm + tl.log2(t), mask=row_ok)


@triton.jit
def delta_kernel(o, do, delta, rows, D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr):
    """delta = sum over D of o * do, one value a (query, head)."""
    rr = tl.program_id(0) * BR + tl.arange(0, BR)
    rd = tl.arange(0, DP)
    keep = (rr < rows)[:, None] & (rd < D)[None, :]
    at = rr.to(tl.int64)[:, None] * D + rd[None, :]
    x = tl.load(o + at, mask=keep, other=0.0).to(tl.float32) * tl.load(do + at, mask=keep, other=0.0).to(tl.float32)
    tl.store(delta + rr, tl.sum(x, 1), mask=rr < rows)


@triton.jit
def probabilities(s, lse, keep, factor, scale, softcap, SOFTCAP: tl.constexpr, MASK: tl.constexpr):
    """p [BM, BN] from raw products, and d(score)/d(raw product) / scale, 1 without a cap."""
    capped = score_block(s, scale, softcap, SOFTCAP)
    p = tl.exp2(capped * factor - lse[:, None])
    if MASK:
        p = tl.where(keep, p, 0.0)
    if SOFTCAP:
        slope = 1.0 - (capped / softcap) * (capped / softcap)
    else:
        slope = 1.0
    return p, slope


@triton.jit
def dq_kernel(
    q, keys, values, do, dq, lse, delta, q_start, tile_seq, tile_first, factor, scale, softcap,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BQ: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    kvh = tl.program_id(1)
    seq = tl.load(tile_seq + tile)
    first = tl.load(tile_first + tile)
    start = tl.load(q_start + seq)
    q_len = tl.load(q_start + seq + 1) - start
    last = tl.minimum(first + BQ, q_len) - 1
    rm = tl.arange(0, BM)
    rd = tl.arange(0, DP)
    rn = tl.arange(0, BN)
    index = first + rm // G
    row_ok = (rm < BQ * G) & (index < q_len)
    row = (start + index).to(tl.int64) * H + kvh * G + rm % G
    keep_d = row_ok[:, None] & (rd < D)[None, :]
    at = row[:, None] * D + rd[None, :]
    qt = tl.load(q + at, mask=keep_d, other=0.0)
    dot = tl.load(do + at, mask=keep_d, other=0.0)
    lse_m = tl.load(lse + row, mask=row_ok, other=0.0)
    delta_m = tl.load(delta + row, mask=row_ok, other=0.0)
    acc = tl.zeros((BM, DP), tl.float32)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(first - WINDOW + 1, 0) // BN * BN
        full = lowest
    else:
        full = (first + 1) // BN * BN
    for n in range(lowest, full, BN):
        kt = keys.load([start + n, kvh, 0]).reshape(BN, DP)
        vt = values.load([start + n, kvh, 0]).reshape(BN, DP)
        p, slope = probabilities(tl.dot(qt, kt.T), lse_m, True, factor, scale, softcap, SOFTCAP, False)
        ds = p * (tl.dot(dot, vt.T) - delta_m[:, None]) * slope
        acc = tl.dot(ds.to(kt.dtype), kt, acc)
    for n in range(full, last + 1, BN):
        inside = n + rn <= last
        kt = tl.where(inside[:, None], keys.load([start + n, kvh, 0]).reshape(BN, DP), 0.0)
        vt = tl.where(inside[:, None], values.load([start + n, kvh, 0]).reshape(BN, DP), 0.0)
        keep = (n + rn)[None, :] <= index[:, None]
        if WINDOW > 0:
            keep = keep & ((n + rn)[None, :] > index[:, None] - WINDOW)
        p, slope = probabilities(tl.dot(qt, kt.T), lse_m, keep, factor, scale, softcap, SOFTCAP, True)
        ds = p * (tl.dot(dot, vt.T) - delta_m[:, None]) * slope
        acc = tl.dot(ds.to(kt.dtype), kt, acc)
    tl.store(dq + at, (acc * scale).to(dq.dtype.element_ty), mask=keep_d)


@triton.jit
def dkv_kernel(
    q, k, v, do, dk, dv, lse, delta, q_start, tile_seq, tile_first, factor, scale, softcap,
    H: tl.constexpr, HK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BQ: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One block of keys against every query that sees it; scores are kept transposed, [BN, BM]."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kvh = tl.program_id(1)
    seq = tl.load(tile_seq + tile)
    first = tl.load(tile_first + tile)
    start = tl.load(q_start + seq)
    length = tl.load(q_start + seq + 1) - start
    rm = tl.arange(0, BM)
    rd = tl.arange(0, DP)
    key = first + tl.arange(0, BN)
    key_ok = key < length
    at = ((start + key).to(tl.int64) * HK + kvh)[:, None] * D + rd[None, :]
    keep_d = key_ok[:, None] & (rd < D)[None, :]
    kt = tl.load(k + at, mask=keep_d, other=0.0)
    vt = tl.load(v + at, mask=keep_d, other=0.0)
    dk_acc = tl.zeros((BN, DP), tl.float32)
    dv_acc = tl.zeros((BN, DP), tl.float32)
    end = length
    if WINDOW > 0:
        end = tl.minimum(length, first + BN + WINDOW - 1)
    for f in range(first // BQ * BQ, end, BQ):
        index = f + rm // G
        row_ok = (rm < BQ * G) & (index < length)
        row = (start + index).to(tl.int64) * H + kvh * G + rm % G
        keep_q = row_ok[:, None] & (rd < D)[None, :]
        qt = tl.load(q + row[:, None] * D + rd[None, :], mask=keep_q, other=0.0)
        dot = tl.load(do + row[:, None] * D + rd[None, :], mask=keep_q, other=0.0)
        lse_m = tl.load(lse + row, mask=row_ok, other=0.0)
        delta_m = tl.load(delta + row, mask=row_ok, other=0.0)
        s = score_block(tl.dot(kt, qt.T), scale, softcap, SOFTCAP)
        p = tl.exp2(s * factor - lse_m[None, :])
        keep = (key[:, None] <= index[None, :]) & row_ok[None, :]
        if WINDOW > 0:
            keep = keep & (key[:, None] > index[None, :] - WINDOW)
        p = tl.where(keep, p, 0.0)
        dv_acc = tl.dot(p.to(dot.dtype), dot, dv_acc)
        ds = p * (tl.dot(vt, dot.T) - delta_m[None, :])
        if SOFTCAP:
            ds = ds * (1.0 - (s / softcap) * (s / softcap))
        dk_acc = tl.dot(ds.to(qt.dtype), qt, dk_acc)
    tl.store(dk + at, (dk_acc * scale).to(dk.dtype.element_ty), mask=keep_d)
    tl.store(dv + at, dv_acc.to(dv.dtype.element_ty), mask=keep_d)


@dataclass(frozen=True)
class Packed:
    """Cuts of one packed batch, made once and shared by all layers."""

    q_start: torch.Tensor
    """[S + 1] int32."""
    forward: Tiles
    dq: Tiles
    dkv: Tiles
    """`first` counts keys; a tile is a block of BN keys."""


FORWARD_ROWS = 128
DQ_ROWS, DQ_KEYS = 128, 64
DKV_ROWS, DKV_KEYS = 64, 128


def pack(lens: list[int], group: int, device: torch.device) -> Packed:
    """Args: lens, tokens of each sequence in packing order; group, query heads per KV head."""
    starts = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32).to(device)
    return Packed(
        starts, cut_tiles(lens, group, FORWARD_ROWS, device), cut_tiles(lens, group, DQ_ROWS, device),
        cut_tiles(lens, 1, DKV_KEYS, device),
    )  # fmt: skip


def _descriptors(k: torch.Tensor, v: torch.Tensor, block: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    wide = triton.next_power_of_2(k.shape[2])
    return tuple(TensorDescriptor(x, list(x.shape), list(x.stride()), [block, 1, wide]) for x in (k, v))  # type: ignore[return-value]


class PackedAttention(torch.autograd.Function):
    """q [T, H, D], k, v [T, Hkv, D], contiguous -> [T, H, D]."""

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
    ) -> torch.Tensor:
        tokens, heads, dim = q.shape
        group = heads // k.shape[1]
        out = torch.empty_like(q)
        lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
        keys, values = _descriptors(k, v, BLOCK)
        tiles = packed.forward
        packed_kernel[(tiles.seq.shape[0], k.shape[1])](
            q, keys, values, out, lse, packed.q_start, tiles.seq, tiles.first, LOG2E if softcap else scale * LOG2E, scale,
            softcap, q.stride(0), out.stride(0), H=heads, G=group, D=dim, DP=triton.next_power_of_2(dim), BQ=tiles.queries,
            BM=tiles.rows,
            BLOCK=BLOCK, CHUNK=CHUNK, WINDOW=window, SOFTCAP=softcap > 0, num_warps=8, num_stages=3 if dim <= 128 else 2,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.packed, ctx.scale, ctx.window, ctx.softcap = packed, scale, window, softcap
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = packed_backward(
            q, k, v, out, lse, grad.contiguous(), ctx.packed, ctx.scale, ctx.window, ctx.softcap
        )
        return dq, dk, dv, None, None, None, None


def packed_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, grad: torch.Tensor,
    packed: Packed, scale: float, window: int, softcap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of `PackedAttention`; all tensors contiguous."""
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    wide = triton.next_power_of_2(dim)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    delta = torch.empty_like(lse)
    delta_kernel[(triton.cdiv(tokens * heads, 32),)](
        out, grad, delta, tokens * heads, D=dim, DP=wide, BR=32, num_warps=4
    )
    factor = LOG2E if softcap else scale * LOG2E
    shape = {"H": heads, "G": heads // kv_heads, "D": dim, "DP": wide, "WINDOW": window, "SOFTCAP": softcap > 0}
    stages = 2 if wide <= 128 else 1
    keys, values = _descriptors(k, v, DQ_KEYS)
    dq_kernel[(packed.dq.seq.shape[0], kv_heads)](
        q, keys, values, grad, dq, lse, delta, packed.q_start, packed.dq.seq, packed.dq.first, factor, scale, softcap,
        BQ=packed.dq.queries, BM=packed.dq.rows, BN=DQ_KEYS, num_warps=8, num_stages=stages, **shape,
    )  # fmt: skip
    dkv_kernel[(packed.dkv.seq.shape[0], kv_heads)](
        q, k, v, grad, dk, dv, lse, delta, packed.q_start, packed.dkv.seq, packed.dkv.first, factor, scale, softcap,
        HK=kv_heads, BQ=DKV_ROWS // shape["G"], BM=DKV_ROWS, BN=DKV_KEYS, num_warps=8, num_stages=stages, **shape,
    )  # fmt: skip
    return dq, dk, dv
