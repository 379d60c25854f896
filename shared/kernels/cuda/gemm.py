"""y = x @ w.T (+ bias): every tile shape here walks K in ascending order in one fp32 accumulator.

That makes them one bit class (see docs/numerics.md): which member runs is a question of speed only, and
`shared.kernels.certify` checks it on the device before a member may be picked.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class Tile:
    """One compiled shape of `gemm_kernel`. `swap` puts the weights on the matrix unit's M side, so that few tokens fill
    its N side (8 at least) instead of wasting 64 rows."""

    block_t: int
    """Tokens per program."""
    block_n: int
    """Output columns (rows of the weight) per program."""
    block_k: int
    num_warps: int
    num_stages: int
    swap: bool

    @property
    def name(self) -> str:
        side = "weights" if self.swap else "tokens"
        return f"triton-{side}-{self.block_t}x{self.block_n}x{self.block_k}-w{self.num_warps}s{self.num_stages}"


REFERENCE = Tile(128, 128, 64, 8, 3, False)
"""The plain K-ascending walk that defines the class; also the tile of the published batch-invariant method."""

FEW_TOKENS = tuple(
    Tile(t, n, k, warps, stages, True)
    for t in (8, 16, 32)
    for n, k, warps, stages in (
        (16, 64, 1, 8),
        (16, 128, 1, 8),
        (16, 256, 1, 6),
        (16, 256, 2, 6),
        (16, 512, 2, 4),
        (16, 512, 4, 4),
        (32, 128, 2, 6),
        (32, 128, 4, 8),
        (32, 256, 2, 4),
        (32, 256, 4, 5),
        (32, 512, 4, 3),
        (64, 128, 4, 5),
        (64, 128, 4, 8),
        (64, 256, 4, 3),
        (64, 256, 4, 4),
        (128, 64, 4, 5),
        (128, 64, 4, 8),
        (128, 128, 8, 4),
    )
)
"""Few rows are read from memory as fast as the weights arrive, so what counts is bytes in flight: deep pipelines, and as many
programs as the device has multiprocessors."""
MANY_TOKENS = (
    Tile(64, 32, 128, 4, 5, True),
    Tile(64, 64, 128, 4, 4, True),
    Tile(64, 128, 64, 4, 4, True),
    Tile(128, 64, 64, 4, 4, True),
    Tile(64, 64, 64, 4, 5, False),
    Tile(64, 128, 64, 4, 4, False),
    Tile(128, 128, 64, 8, 4, False),
    Tile(128, 256, 64, 8, 3, False),
    Tile(256, 128, 64, 8, 3, True),
)


@triton.jit(do_not_specialize=["T"])
def gemm_kernel(
    x, w, bias, y, T, N, K, stride_x, stride_w, stride_y,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Shapes: x [T, K], w [N, K], bias [N], y [T, N]. The bias is added to the accumulator before the one rounding."""
    pid = tl.program_id(0)
    num_t = tl.cdiv(T, BT)
    num_n = tl.cdiv(N, BN)
    # token tiles of one group share weight tiles in L2
    per_group = GROUP * num_n
    first = (pid // per_group) * GROUP
    size = min(num_t - first, GROUP)
    pt = first + (pid % per_group) % size
    pn = (pid % per_group) // size
    rt = pt * BT + tl.arange(0, BT)
    rn = pn * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    row_t = tl.where(rt < T, rt, 0).to(tl.int64)
    row_n = tl.where(rn < N, rn, 0).to(tl.int64)
    if SWAP:
        acc = tl.zeros((BN, BT), tl.float32)
    else:
        acc = tl.zeros((BT, BN), tl.float32)
    for k in range(0, K, BK):
        cols = k + rk
        if SWAP:
            pa = w + row_n[:, None] * stride_w + cols[None, :]
            pb = x + row_t[None, :] * stride_x + cols[:, None]
        else:
            pa = x + row_t[:, None] * stride_x + cols[None, :]
            pb = w + row_n[None, :] * stride_w + cols[:, None]
        if EVEN_K:
            a = tl.load(pa)
            b = tl.load(pb)
        else:
            a = tl.load(pa, mask=cols[None, :] < K, other=0.0)
            b = tl.load(pb, mask=cols[:, None] < K, other=0.0)
        acc = tl.dot(a, b, acc)
    if SWAP:
        acc = tl.trans(acc)
    if HAS_BIAS:
        acc = acc + tl.load(bias + rn, mask=rn < N, other=0.0).to(tl.float32)[None, :]
    keep = (rt < T)[:, None] & (rn < N)[None, :]
    tl.store(y + rt.to(tl.int64)[:, None] * stride_y + rn[None, :], acc.to(y.dtype.element_ty), mask=keep)


def _options(tile: Tile, k: int, has_bias: bool) -> dict[str, int | bool]:
    return {
        "BT": tile.block_t, "BN": tile.block_n, "BK": tile.block_k, "SWAP": tile.swap, "EVEN_K": k % tile.block_k == 0,
        "HAS_BIAS": has_bias, "GROUP": 8, "num_warps": tile.num_warps, "num_stages": tile.num_stages,
    }  # fmt: skip


def gemm(x: torch.Tensor, w: torch.Tensor, tile: Tile, *, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """Args: x [T, K], w [N, K] of one dtype with unit inner stride, bias [N] or None, out [T, N] (any float dtype)."""
    tokens, k = x.shape
    n = w.shape[0]
    grid = (triton.cdiv(tokens, tile.block_t) * triton.cdiv(n, tile.block_n),)
    gemm_kernel[grid](
        x, w, bias if bias is not None else w, out, tokens, n, k, x.stride(0), w.stride(0), out.stride(0),
        **_options(tile, k, bias is not None),
    )  # fmt: skip
    return out


def compile_tiles(
    tiles: Iterable[Tile], x: torch.Tensor, w: torch.Tensor, *, has_bias: bool, out: torch.Tensor
) -> None:
    """Compiles in parallel what `gemm` of such tensors needs and this process lacks. What does not compile is left to `gemm` to
    complain about."""
    k, n = x.shape[1], w.shape[0]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        for tile in tiles:
            gemm_kernel.warmup(
                x, w, w, out, 2, n, k, x.stride(0), w.stride(0), out.stride(0), grid=(1,), **_options(tile, k, has_bias)
            )
