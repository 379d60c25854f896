"""Gradients of packed attention: probabilities recomputed from the saved log-sum-exp (Dao et al. 2022, algorithm 4).

They owe nobody any bits, only determinism: no atomics, every sum in one program. Legend as in `attention_packed`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from shared.kernels.cuda.attention_math import LOG2E, query_tile, score_block

if TYPE_CHECKING:
    from shared.kernels.cuda.attention_packed import Packed

DQ_ROWS, DQ_KEYS = 128, 64
DKV_ROWS, DKV_KEYS = 64, 128


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
    q, keys, values, do, dq, lse, delta, q_start, k_start, tile_seq, tile_first, factor, scale, softcap,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BQ: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    kvh = tl.program_id(1)
    rm = tl.arange(0, BM)
    rd = tl.arange(0, DP)
    rn = tl.arange(0, BN)
    row_0, query, pos, row_ok, p_lo, last = query_tile(q_start, k_start, tile_seq, tile_first, rm, G, BQ)
    row = query.to(tl.int64) * H + kvh * G + rm % G
    keep_d = row_ok[:, None] & (rd < D)[None, :]
    at = row[:, None] * D + rd[None, :]
    qt = tl.load(q + at, mask=keep_d, other=0.0)
    dot = tl.load(do + at, mask=keep_d, other=0.0)
    lse_m = tl.load(lse + row, mask=row_ok, other=0.0)
    delta_m = tl.load(delta + row, mask=row_ok, other=0.0)
    acc = tl.zeros((BM, DP), tl.float32)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(p_lo - WINDOW + 1, 0) // BN * BN
        full = lowest
    else:
        full = (p_lo + 1) // BN * BN
    for n in range(lowest, full, BN):
        kt = keys.load([row_0 + n, kvh, 0]).reshape(BN, DP)
        vt = values.load([row_0 + n, kvh, 0]).reshape(BN, DP)
        p, slope = probabilities(tl.dot(qt, kt.T), lse_m, True, factor, scale, softcap, SOFTCAP, False)
        ds = p * (tl.dot(dot, vt.T) - delta_m[:, None]) * slope
        acc = tl.dot(ds.to(kt.dtype), kt, acc)
    for n in range(full, last + 1, BN):
        inside = n + rn <= last
        kt = tl.where(inside[:, None], keys.load([row_0 + n, kvh, 0]).reshape(BN, DP), 0.0)
        vt = tl.where(inside[:, None], values.load([row_0 + n, kvh, 0]).reshape(BN, DP), 0.0)
        keep = (n + rn)[None, :] <= pos[:, None]
        if WINDOW > 0:
            keep = keep & ((n + rn)[None, :] > pos[:, None] - WINDOW)
        p, slope = probabilities(tl.dot(qt, kt.T), lse_m, keep, factor, scale, softcap, SOFTCAP, True)
        ds = p * (tl.dot(dot, vt.T) - delta_m[:, None]) * slope
        acc = tl.dot(ds.to(kt.dtype), kt, acc)
    tl.store(dq + at, (acc * scale).to(dq.dtype.element_ty), mask=keep_d)


@triton.jit
def dkv_kernel(
    q, k, v, do, dk, dv, lse, delta, q_start, k_start, tile_seq, tile_first, factor, scale, softcap,
    H: tl.constexpr, HK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BQ: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One block of keys against every query that sees it; scores are kept transposed, [BN, BM]."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kvh = tl.program_id(1)
    seq = tl.load(tile_seq + tile)
    first = tl.load(tile_first + tile)
    start = tl.load(q_start + seq)
    q_len = tl.load(q_start + seq + 1) - start
    row_0 = tl.load(k_start + seq)
    context = tl.load(k_start + seq + 1) - row_0
    before = context - q_len
    rm = tl.arange(0, BM)
    rd = tl.arange(0, DP)
    key = first + tl.arange(0, BN)
    key_ok = key < context
    at = ((row_0 + key).to(tl.int64) * HK + kvh)[:, None] * D + rd[None, :]
    keep_d = key_ok[:, None] & (rd < D)[None, :]
    kt = tl.load(k + at, mask=keep_d, other=0.0)
    vt = tl.load(v + at, mask=keep_d, other=0.0)
    dk_acc = tl.zeros((BN, DP), tl.float32)
    dv_acc = tl.zeros((BN, DP), tl.float32)
    end = q_len
    if WINDOW > 0:
        end = tl.minimum(q_len, first + BN + WINDOW - 1 - before)
    for f in range(tl.maximum(first - before, 0) // BQ * BQ, end, BQ):
        index = f + rm // G
        row_ok = (rm < BQ * G) & (index < q_len)
        pos = before + index
        row = (start + index).to(tl.int64) * H + kvh * G + rm % G
        keep_q = row_ok[:, None] & (rd < D)[None, :]
        qt = tl.load(q + row[:, None] * D + rd[None, :], mask=keep_q, other=0.0)
        dot = tl.load(do + row[:, None] * D + rd[None, :], mask=keep_q, other=0.0)
        lse_m = tl.load(lse + row, mask=row_ok, other=0.0)
        delta_m = tl.load(delta + row, mask=row_ok, other=0.0)
        s = score_block(tl.dot(kt, qt.T), scale, softcap, SOFTCAP)
        p = tl.exp2(s * factor - lse_m[None, :])
        keep = (key[:, None] <= pos[None, :]) & row_ok[None, :]
        if WINDOW > 0:
            keep = keep & (key[:, None] > pos[None, :] - WINDOW)
        p = tl.where(keep, p, 0.0)
        dv_acc = tl.dot(p.to(dot.dtype), dot, dv_acc)
        ds = p * (tl.dot(vt, dot.T) - delta_m[None, :])
        if SOFTCAP:
            ds = ds * (1.0 - (s / softcap) * (s / softcap))
        dk_acc = tl.dot(ds.to(qt.dtype), qt, dk_acc)
    tl.store(dk + at, (dk_acc * scale).to(dk.dtype.element_ty), mask=keep_d)
    tl.store(dv + at, dv_acc.to(dv.dtype.element_ty), mask=keep_d)


def packed_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, grad: torch.Tensor,
    packed: Packed, *, scale: float, window: int, softcap: float, dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of q [T, H, D], k and v [E, Hkv, D], each sequence's keys in one piece; all tensors contiguous.

    Args:
        dtype: of the gradients of k and v.
    """
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    wide = triton.next_power_of_2(dim)
    dq = torch.empty_like(q)
    dk, dv = (torch.empty_like(x, dtype=dtype) for x in (k, v))
    delta = torch.empty_like(lse)
    delta_kernel[(triton.cdiv(tokens * heads, 32),)](
        out, grad, delta, tokens * heads, D=dim, DP=wide, BR=32, num_warps=4
    )
    factor = LOG2E if softcap else scale * LOG2E
    shape = {"H": heads, "G": group, "D": dim, "DP": wide, "WINDOW": window, "SOFTCAP": softcap > 0}
    stages = 2 if wide <= 128 else 1
    keys, values = (TensorDescriptor(x, list(x.shape), list(x.stride()), [DQ_KEYS, 1, wide]) for x in (k, v))
    tiles = packed.dq
    dq_kernel[(tiles.seq.shape[0], kv_heads)](
        q, keys, values, grad, dq, lse, delta, packed.q_start, packed.k_start, tiles.seq, tiles.first, factor, scale, softcap,
        BQ=tiles.queries, BM=tiles.rows, BN=DQ_KEYS, num_warps=8, num_stages=stages, **shape,
    )  # fmt: skip
    rows = max(DKV_ROWS, triton.next_power_of_2(group))
    tiles = packed.dkv
    dkv_kernel[(tiles.seq.shape[0], kv_heads)](
        q, k, v, grad, dk, dv, lse, delta, packed.q_start, packed.k_start, tiles.seq, tiles.first, factor, scale, softcap,
        HK=kv_heads, BQ=rows // group, BM=rows, BN=DKV_KEYS, num_warps=8, num_stages=stages, **shape,
    )  # fmt: skip
    return dq, dk, dv
