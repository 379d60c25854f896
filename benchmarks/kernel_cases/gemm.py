"""Certification of the projection shapes of real models, and the table's speed against default cuBLAS and a fixed tile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

import torch
from rich.progress import track

from benchmarks.harness import Budget, Record, Timing, gradient_errors, graph_times
from benchmarks.kernel_cases.fixed_tile import fixed_tile
from shared.kernels.certify import Table, use_cublaslt_without_split_k
from shared.kernels.cuda import linear
from shared.kernels.cuda.fast import use_library_defaults
from shared.kernels.cuda.gemm import REFERENCE
from shared.kernels.cuda.gemm import gemm as run_tile
from shared.kernels.cuda.linear import Linear
from shared.kernels.cuda.replay import copies_beyond_cache

MODELS = {
    "Qwen3-1.7B": {"qkv": (4096, 2048), "o": (2048, 2048), "gate_up": (12288, 2048), "down": (2048, 6144)},
    "Qwen3-0.6B": {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)},
    "Qwen3-8B": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)},
    "SmolLM2-135M": {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)},
    "Qwen3-30B-A3B": {
        "qkv": (5120, 2048),
        "o": (2048, 4096),
        "expert_gate_up": (1536, 2048),
        "expert_down": (2048, 768),
    },
}
HEADS = {"Qwen3-1.7B": (151936, 2048), "SmolLM2-135M": (49152, 576)}
ROWS = (1, 2, 3, 7, 16, 17, 32, 44, 45, 64, 128, 255, 256, 257, 512, 777, 1024, 2048, 4096, 8192)
MORE_ROWS = (1025, 1500, 3001, 4097, 8191)
"""Compared, but not timed."""
HEAD_ROWS = 512
"""No more are timed of a head: its rows are cut into chunks elsewhere."""
FIXED_TILE_ROWS = (16, 256, 4096)
GRADIENT_ROWS = (4096, 16384)
FEW, MANY = "linear_few_rows_time_us", "linear_time_us"
CHECK_SHARE = 0.6
"""Of the budget, at most: a table that has to be made first must leave time to time something."""
TABLE: Table | None = None


def table() -> Table:
    global TABLE
    TABLE = TABLE or Table()
    return TABLE


class Case(NamedTuple):
    """One weight of one model."""

    model: str
    part: str
    n: int
    k: int
    out_dtype: torch.dtype

    @property
    def params(self) -> dict[str, Any]:
        return {"model": self.model, "part": self.part, "n": self.n, "k": self.k}


def cases(models: Sequence[str]) -> list[Case]:
    """The projections of these models, then their heads."""
    found = [Case(m, part, n, k, torch.bfloat16) for m in models for part, (n, k) in MODELS[m].items()]
    return found + [Case(m, "lm_head", *HEADS[m], torch.float32) for m in models if m in HEADS]


def not_run(part: str, params: dict[str, Any]) -> Record:
    """What the budget left no time for."""
    return Record("kernels", part, params, "exact", "not_run", 1, "")


class Products:
    """The section: which models, and how long it may take in all."""

    def __init__(self, models: Sequence[str], seconds: float | None = None) -> None:
        """Args: models, keys of MODELS, none: all of them; seconds for checks and times together, None for no limit."""
        self._cases, self._budget = cases(models or list(MODELS)), Budget(seconds)
        self._check_budget = Budget(None if seconds is None else CHECK_SHARE * seconds)

    def check(self) -> Iterator[Record]:
        """What the table has certified, here or before on this device; and the dispatch itself, awkward counts included."""
        for i, case in enumerate(track(self._cases, description="certify")):
            if self._check_budget.is_spent:
                yield from (not_run("certification", missed.params) for missed in self._cases[i:])
                self._cases = self._cases[:i]
                return
            begin = monotonic()
            entry = table().entry(case.n, case.k, torch.bfloat16, case.out_dtype)
            yield Record("kernels", "certification", case.params, "exact", "seconds", monotonic() - begin, "s")
            members = {"members": sorted({*entry.members, entry.large}), "rejected": entry.rejected}
            yield Record(
                "kernels", "certification", case.params | members, "exact", "row_counts_compared", entry.checked, ""
            )
            yield dispatched(case)
            if case.part == "o":
                yield from gradient_checks(case)

    def time(self, limits: dict[str, float]) -> Iterator[Record]:
        """Inside replayed graphs, as the engine runs them, over as many weights as overflow the L2."""
        work = [*map(partial(self._forward, limits), self._cases), *map(self._weight_gradient, self._cases)]
        for part in track(work, description="time GEMMs"):
            for params, measure in part:
                if self._budget.is_spent:
                    yield not_run("weight_gradient" if "gradient" in params else "linear", params)
                else:
                    yield from measure()

    def _forward(
        self, limits: dict[str, float], case: Case
    ) -> Iterator[tuple[dict[str, Any], Callable[[], Iterator[Record]]]]:
        weights: list[torch.Tensor] = []
        for m in ROWS:
            if m > HEAD_ROWS and case.part == "lm_head":
                continue
            params = case.params | {"m": m}
            yield params, partial(time_rows, params, weights, case.out_dtype, limits)

    def _weight_gradient(self, case: Case) -> Iterator[tuple[dict[str, Any], Callable[[], Iterator[Record]]]]:
        if case.part == "lm_head":
            # accumulated in float32, and timed by the section of the head
            return
        for m in GRADIENT_ROWS:
            params = case.params | {"m": m, "gradient": "weight"}
            yield params, partial(weight_gradient, params)


def gradient_checks(case: Case) -> Iterator[Record]:
    x, weight = (torch.randn(rows, case.k, device="cuda", dtype=torch.bfloat16) for rows in (300, case.n))

    def ours(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return Linear.apply(x, weight, None, table().linear)

    yield from gradient_errors(
        "linear_gradient", ours, torch.nn.functional.linear, {"x": x, "weight": weight}, case.params
    )


def dispatched(case: Case) -> Record:
    """Bits in which the dispatch differs from the reference's product of all rows at once, over every row count."""
    rows = 8192 if case.n < 100_000 else 1024
    x = torch.randn(rows, case.k, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(case.n, case.k, device="cuda", dtype=torch.bfloat16)
    whole = run_tile(x, w, REFERENCE, bias=None, out=torch.empty(rows, case.n, device="cuda", dtype=case.out_dtype))
    kind = torch.int32 if case.out_dtype == torch.float32 else torch.int16
    counts = [m for m in (*ROWS, *MORE_ROWS) if m <= rows]
    bits = torch.zeros((), dtype=torch.int64, device="cuda")
    for m in counts:
        out = table().linear(x[-m:], w, out_dtype=case.out_dtype)
        bits += (out.view(kind) != whole[-m:].view(kind)).sum()
    params = case.params | {"rows": counts}
    return Record("kernels", "dispatch", params, "exact", "differing_bits", int(bits), "bits")


def time_rows(
    params: dict[str, Any], weights: list[torch.Tensor], out_dtype: torch.dtype, limits: dict[str, float]
) -> Iterator[Record]:
    """One row count: the table, default cuBLAS, and for some counts the fixed tile; weights are drawn on first use."""
    m, n, k = params["m"], params["n"], params["k"]
    if not weights:
        copies = copies_beyond_cache(2 * n * k)
        weights += [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(m, n, device="cuda", dtype=out_dtype)
    series = {"exact": [partial(table().linear, x, w, out_dtype=out_dtype, out=out) for w in weights]}
    if m in FIXED_TILE_ROWS:
        series["fixed-tile"] = [partial(fixed_tile, x, w, out=out) for w in weights]
    peer, found = against_cublas(
        [partial(torch.mm, x, w.t(), out_dtype=out_dtype, out=out) for w in weights], list(series.values())
    )
    size = 2 * (m * k + n * k) + m * n * out.element_size()
    floor = max(2 * m * n * k / limits["matmul"], size / limits["bandwidth"]) * 1e6
    names = {"exact": FEW if m < 32 else MANY, "fixed-tile": "fixed_tile_time_us"}
    entry = table().entry(n, k, torch.bfloat16, out_dtype)
    common = ("kernels", "linear", params | {"member": entry.member(m)})
    for mode, ours in zip(series, found, strict=True):
        ratio = peer.median / ours.median
        yield Record(*common, mode, names[mode], ours.median, "us", "cublas", ratio, ours.spread)
    yield Record(*common, "exact", "fraction_of_floor", floor / found[0].median, "")


def weight_gradient(params: dict[str, Any]) -> Iterator[Record]:
    """dW = dY.T X as the backward calls it, against default cuBLAS."""
    m, n, k = params["m"], params["n"], params["k"]
    dy, x = (torch.randn(m, size, device="cuda", dtype=torch.bfloat16) for size in (n, k))
    out = torch.empty(n, k, device="cuda", dtype=torch.bfloat16)
    first, again = (linear.weight_gradient(dy, x) for _ in range(2))
    differing = int((first.view(torch.int16) != again.view(torch.int16)).sum())
    assert not differing, f"{differing} numbers of a gradient [{n}, {k}] over {m} tokens are others when it is repeated"
    peer, (ours,) = against_cublas(
        [partial(torch.mm, dy.t(), x, out=out)] * 2, [[partial(linear.weight_gradient, dy, x)] * 2]
    )
    ratio = peer.median / ours.median
    yield Record(
        "kernels", "weight_gradient", params, "exact", "weight_gradient_time_us", ours.median, "us", "cublas", ratio, ours.spread
    )  # fmt: skip


def against_cublas(
    peer: Sequence[Callable[[], Any]], ours: Sequence[Sequence[Callable[[], Any]]]
) -> tuple[Timing, list[Timing]]:
    """Default cuBLAS, and each of ours under the exact mode's settings, replayed in turns."""
    series = [under(use_library_defaults, peer), *(under(use_cublaslt_without_split_k, calls) for calls in ours)]
    first, *others = graph_times(series)
    return first, others


def under(setting: Callable[[], None], calls: Sequence[Callable[[], Any]]) -> list[Callable[[], Any]]:
    """The calls under the library's settings, which count when a graph is captured, right after a first run of its calls."""

    def first() -> None:
        if not torch.cuda.is_current_stream_capturing():
            setting()
        calls[0]()

    return [first, *calls[1:]]
