"""The members of the class of products, and which of them are worth trying for a weight and a number of rows."""

from __future__ import annotations

import torch
import triton

from shared.kernels.cuda.gemm import FEW_TOKENS, MANY_TOKENS, REFERENCE, Tile, gemm

CUBLASLT = "cublaslt"
TILES: dict[str, Tile] = {tile.name: tile for tile in (REFERENCE, *FEW_TOKENS, *MANY_TOKENS)}
MOST_PROGRAMS = 1024
"""A tile that cuts the weights into more pieces reads the rows too often."""
FEWEST_PROGRAMS = 16
"""A tile that cuts a product into fewer pieces leaves most of the device idle."""


def run_member(
    name: str, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """out [T, N] = x [T, K] @ w [N, K].T (+ bias), by one member of the class."""
    if name != CUBLASLT:
        return gemm(x, w, TILES[name], bias=bias, out=out)
    if out.dtype != x.dtype:
        torch.mm(x, w.t(), out_dtype=out.dtype, out=out)
        return out if bias is None else out.add_(bias)
    return torch.mm(x, w.t(), out=out) if bias is None else torch.addmm(bias, x, w.t(), out=out)


def candidates(n: int, rows: int) -> list[str]:
    """Members that may be the fastest for weights [n, K] and so many rows, or some less."""
    found = [CUBLASLT] if rows > 1 else []
    if rows <= 64:
        block = max(8, min(32, triton.next_power_of_2(rows)))
        # 17 rows fill two tiles of 16 better than they fill one of 32
        blocks = {block, 16} if 16 < rows <= 32 else {block}
        found += [t.name for t in FEW_TOKENS if t.block_t in blocks and _is_worthwhile(t, n, rows)]
    if 32 < rows <= 512:
        found += [t.name for t in MANY_TOKENS if _is_worthwhile(t, n, rows)]
    return found


def _is_worthwhile(tile: Tile, n: int, rows: int) -> bool:
    pieces = triton.cdiv(n, tile.block_n)
    is_fine = pieces <= MOST_PROGRAMS or not tile.swap or tile.block_n >= 128
    return is_fine and pieces * triton.cdiv(rows, tile.block_t) >= min(FEWEST_PROGRAMS, triton.cdiv(n, 64))
