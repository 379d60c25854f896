"""One weight shape under test: which members give the reference's bits, and how fast each is.

Legend: T tokens (rows), N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
import triton

from shared.kernels.cuda.gemm import REFERENCE, compile_tiles, gemm
from shared.kernels.cuda.members import CUBLASLT, TILES, run_member
from shared.kernels.cuda.replay import copies_beyond_cache, replay_times

DEVICE = "cuda"
MOST_ROWS = 16384
"""Of the largest product that is certified, where the outputs fit."""
MOST_OUTPUTS = 2**31
SHORT_ROWS = 2048
"""Of the largest product where they don't."""


class Probe:
    """Inputs of one weight shape whose products span many exponents, so that any other order of summation shows."""

    def __init__(self, n: int, k: int, dtype: torch.dtype, out_dtype: torch.dtype, has_bias: bool) -> None:
        generator = torch.Generator(device=DEVICE).manual_seed(n * 1_000_003 + k)
        self.rows = MOST_ROWS if n * MOST_ROWS <= MOST_OUTPUTS else SHORT_ROWS
        draw = partial(torch.randn, device=DEVICE, dtype=dtype, generator=generator)
        self.x, self.w = draw(self.rows, k), draw(n, k)
        self.x *= torch.exp2(torch.randint(-6, 7, (1, k), device=DEVICE, generator=generator).float()).to(dtype)
        self.bias = draw(n) if has_bias else None
        expected = torch.empty(self.rows, n, dtype=torch.float32, device=DEVICE)
        gemm(self.x, self.w, REFERENCE, bias=self.bias, out=expected)
        self.expected = expected.to(out_dtype)
        # the same memory for every output and comparison: growing ones would each be allocated anew
        self._out = torch.empty_like(self.expected)
        self._differs = torch.empty(self.expected.shape, dtype=torch.bool, device=DEVICE)
        self._copies: list[torch.Tensor] = []

    def compile(self, members: Iterable[str]) -> None:
        """All at once, on every core."""
        tiles = [TILES[name] for name in dict.fromkeys(members) if name != CUBLASLT]
        compile_tiles(tiles, self.x, self.w, has_bias=self.bias is not None, out=self._out)

    def misfit(self, member: str, rows: int) -> str | None:
        """Why the member can't run on this device, or None."""
        try:
            run_member(member, self.x[:rows], self.w, self.bias, self._out[:rows])
        except triton.runtime.errors.OutOfResources as error:
            return str(error)
        return None

    def times_us(self, members: Sequence[str], rows: int, *, repeats: int) -> list[float]:
        """Each member's fastest turn, over weights that come from memory. What else runs on the device only makes it slower."""
        x, out = self.x[:rows], self._out[:rows]
        self._copies = self._copies or [self.w.clone() for _ in range(copies_beyond_cache(self.w.nbytes) - 1)]
        weights = [self.w, *self._copies]
        calls = [[partial(run_member, name, x, w, self.bias, out) for w in weights] for name in members]
        return [min(times) for times in replay_times(calls, repeats=repeats)]

    def first_difference(self, member: str, counts: Sequence[int]) -> int | None:
        """The first of the ascending row counts whose bits differ from the reference's, or None.

        Rows around are poisoned, the rows stand at odd offsets, and the host waits once.
        """
        kind = torch.int32 if self.expected.dtype == torch.float32 else torch.int16
        poisoned = torch.full((counts[-1] + 8, self.x.shape[1]), float("nan"), dtype=self.x.dtype, device=DEVICE)
        poisoned[::2] = float("inf")
        bad = torch.zeros(len(counts), dtype=torch.bool, device=DEVICE)
        for i, count in enumerate(counts):
            rows = poisoned[i % 3 : i % 3 + count]
            rows.copy_(self.x[:count])
            out = self._out[:count].fill_(float("nan"))
            run_member(member, rows, self.w, self.bias, out)
            differs = torch.ne(out.view(kind), self.expected[:count].view(kind), out=self._differs[:count])
            torch.any(differs, out=bad[i])
            rows.fill_(float("nan"))
        wrong = bad.nonzero().flatten().tolist()
        return counts[wrong[0]] if wrong else None
