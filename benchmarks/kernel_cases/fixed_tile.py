"""The published way to products that do not depend on the number of rows: one tile for every shape, by programs that stay.

Tile, grouping, warps and stages are those of thinking-machines-lab/batch_invariant_ops, the code is ours. A baseline, and nothing
else.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

TILE = {"BT": 128, "BN": 128, "BK": 64, "GROUP": 8, "num_warps": 8, "num_stages": 3}


@triton.jit
def fixed_tile_kernel(  # type: ignore[no-untyped-def]
    x, w, y, T, N, K, stride_x, stride_w, stride_y,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Shapes: x [T, K], w [N, K], y [T, N]; a program takes every PROGRAMS-th tile."""
    num_t = tl.cdiv(T, BT)
    num_n = tl.cdiv(N, BN)
    per_group = GROUP * num_n
    rk = tl.arange(0, BK)
    for tile in tl.range(tl.program_id(0), num_t * num_n, PROGRAMS, flatten=True):
        first = tile // per_group * GROUP
        size = min(num_t - first, GROUP)
        rt = (first + tile % per_group % size) * BT + tl.arange(0, BT)
        rn = tile % per_group // size * BN + tl.arange(0, BN)
        row_t = tl.where(rt < T, rt, 0).to(tl.int64)
        row_n = tl.where(rn < N, rn, 0).to(tl.int64)
        acc = tl.zeros((BT, BN), tl.float32)
        for k in range(0, K, BK):
            inside = k + rk < K
            a = tl.load(x + row_t[:, None] * stride_x + (k + rk)[None, :], mask=inside[None, :], other=0.0)
            b = tl.load(w + row_n[None, :] * stride_w + (k + rk)[:, None], mask=inside[:, None], other=0.0)
            acc = tl.dot(a, b, acc)
        keep = (rt < T)[:, None] & (rn < N)[None, :]
        tl.store(y + rt.to(tl.int64)[:, None] * stride_y + rn[None, :], acc.to(y.dtype.element_ty), mask=keep)


def fixed_tile(x: torch.Tensor, w: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """Args: x [T, K], w [N, K] of one dtype with unit inner stride, out [T, N]."""
    tokens, n = x.shape[0], w.shape[0]
    tiles = triton.cdiv(tokens, TILE["BT"]) * triton.cdiv(n, TILE["BN"])
    programs = min(num_programs(x.device), tiles)
    fixed_tile_kernel[(programs,)](
        x, w, out, tokens, n, x.shape[1], x.stride(0), w.stride(0), out.stride(0), PROGRAMS=programs, **TILE
    )
    return out


@cache
def num_programs(device: torch.device) -> int:
    """One a multiprocessor; a few where there are none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
