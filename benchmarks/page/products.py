"""Matrix products: which kernels may run for which weights, and their time against default cuBLAS."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.page import charts
from benchmarks.page.charts import Point
from benchmarks.page.goals import Goal, at_least, none_differ
from benchmarks.page.results import Found, Results, table

FEW, MANY = "linear_few_rows_time_us", "linear_time_us"
CLASSES = {FEW: "under 32 rows", MANY: "32 rows and more"}
LEAST = {FEW: 0.85, MANY: 0.97}
LEAST_CASE, LEAST_GRADIENT, LEAST_DRAWN = 0.7, 1.0, 0.6
"""Targets for one product, and for weight gradients on average; where the picture's axis begins."""
HEAD = "lm_head"


def mean(found: Iterable[Found]) -> float | None:
    """Geometric, of ratios."""
    logs = [math.log(f["ratio"]) for f in found]
    return math.exp(sum(logs) / len(logs)) if logs else None


def slowest(found: Sequence[Found]) -> Found | None:
    return min(found, key=lambda f: f["ratio"], default=None)


def words(found: Found) -> str:
    p = found["params"]
    return f"{p['model']} {p['part']}, {p['m']:,} row{'s' if p['m'] > 1 else ''}"


def times(r: Results, metric: str, **params: Any) -> list[Found]:
    """Of the table's choice."""
    return r.all("linear", metric, **params)


def gradients(r: Results, **params: Any) -> list[Found]:
    return r.all("weight_gradient", "weight_gradient_time_us", **params)


def models(r: Results) -> list[str]:
    found = [*r.all("dispatch", "differing_bits"), *r.all("linear", FEW), *r.all("linear", MANY)]
    return list(dict.fromkeys(f["params"]["model"] for f in found))


def compared(r: Results, **params: Any) -> tuple[int, int]:
    """(pairs of member and row count certified, products of the dispatch compared with the reference)."""
    pairs = sum(int(f["value"]) for f in r.all("certification", "row_counts_compared", **params))
    return pairs, sum(len(f["params"]["rows"]) for f in r.all("dispatch", "differing_bits", **params))


def certification(r: Results) -> str:
    """Model by model."""
    rows = []
    for model in models(r):
        entries = r.all("certification", "row_counts_compared", model=model)
        members = {name for f in entries for name in f["params"]["members"]}
        rejected = sum("differs" in why for f in entries for why in f["params"]["rejected"].values())
        pairs, products = compared(r, model=model)
        dispatched = r.all("dispatch", "differing_bits", model=model)
        bits = sum(f["value"] for f in dispatched)
        rows.append(
            [
                model,
                str(len(dispatched)),
                f"{pairs:,}",
                str(len(members)),
                str(rejected),
                f"{products:,}",
                f"{bits:,.0f}",
            ]
        )
    counts = r.first("dispatch", "differing_bits")["params"]["rows"]
    header = [
        "model",
        "weights",
        "pairs compared",
        "kernels chosen",
        "kernels rejected",
        "products compared",
        "differing bits",
    ]
    return f"""\
A table says which kernel runs for which weight and row count: the fastest of those that give every row the bits of
one reference kernel at every row count that they may be asked for. "Pairs" are of a kernel and a row count, compared
before the kernel is chosen; one that differs anywhere is rejected. "Products" are what then runs, compared with the
reference once more, at {len(counts)} row counts ({", ".join(map(str, counts[:9]))} and so on).

{table(header, rows)}"""


def cell(found: Sequence[Found]) -> list[str]:
    """Geometric mean and worst."""
    average, worst = mean(found), slowest(found)
    return ["-", "-"] if average is None or worst is None else [f"{average:.3f}", f"{worst['ratio']:.2f}"]


def speed(r: Results) -> str:
    """cuBLAS's time over ours, by model and row class."""
    columns: list[Callable[[dict[str, Any]], list[Found]]] = [
        lambda p: times(r, FEW, **p),
        lambda p: times(r, MANY, **p),
        lambda p: gradients(r, **p),
    ]
    names: dict[str, dict[str, Any]] = {model: {"model": model} for model in models(r)} | {"all": {}}
    rows = [[name, *(text for column in columns for text in cell(column(p)))] for name, p in names.items()]
    header = ["model"]
    for of in (*CLASSES.values(), "weight gradients"):
        header += [f"{of}, mean", "worst"]
    worst = [f"{words(f)} ({f['ratio']:.2f})" for f in sorted(both(r), key=lambda f: f["ratio"])[:5]]
    return f"""\
Default cuBLAS's time over ours, in CUDA graphs that are replayed in turns, over weights that no cache holds: 1 is
as fast. Means are geometric; heads ({HEAD}, float32 logits) are among them.

{table(header, rows)}

The slowest against cuBLAS: {"; ".join(worst)}.

![Default cuBLAS's time over ours, by row count](plots/kernel_products.svg)

{fixed_tile(r)}"""


def both(r: Results) -> list[Found]:
    return [f for metric in CLASSES for f in times(r, metric)]


def fixed_tile(r: Results) -> str:
    """The published way beside ours, where both were timed."""
    found = r.all("linear", "fixed_tile_time_us", "fixed-tile")
    parts = []
    for m in sorted({f["params"]["m"] for f in found}):
        pair = mean(f for f in found if f["params"]["m"] == m), mean(f for f in both(r) if f["params"]["m"] == m)
        parts.append(f"{pair[0]:.2f} against {pair[1]:.2f} at {m:,} rows")
    if not parts:
        return ""
    return f"""\
One fixed tile of 128 x 128 x 64 for every product, which is how others make products independent of the batch,
reaches on the same weights {", ".join(parts)}."""


def chart(r: Results) -> str:
    series = {}
    for model in models(r):
        by_rows: dict[int, list[Found]] = {}
        for f in both(r):
            if f["params"]["model"] == model:
                by_rows.setdefault(f["params"]["m"], []).append(f)
        means = {m: mean(found) for m, found in sorted(by_rows.items())}
        series[model] = [Point(x=m, y=value, label="") for m, value in means.items() if value is not None]
    most = max(f["params"]["m"] for f in both(r))
    doublings = [2**i for i in range(max(1, math.ceil(math.log2(most))) + 1)]
    limits = [(1.0, 31.0, LEAST[FEW]), (32.0, float(doublings[-1]), LEAST[MANY])]
    title = "Default cuBLAS's time over that of the exact product (mean over a model's weights; dashed: targets)"
    low = min([LEAST_DRAWN, *(math.floor(10 * p.y) / 10 for points in series.values() for p in points)])
    return charts.points(title, ("rows", "ratio"), series, low=low, doublings=doublings, limits=limits)


def goals(r: Results) -> list[Goal]:
    differing = r.all("dispatch", "differing_bits")
    _, products = compared(r)
    found = [none_differ("kernels: differing bits of products", differing, f"{products:,} products")]
    for metric, name in CLASSES.items():
        every = times(r, metric)
        worst = slowest(every)
        found.append(at_least(f"kernels: products to cuBLAS, {name}, mean", LEAST[metric], mean(every)))
        found.append(
            at_least(f"kernels: products to cuBLAS, {name}, worst", LEAST_CASE, worst["ratio"] if worst else None)
        )
    return [*found, at_least("kernels: weight gradients to cuBLAS, mean", LEAST_GRADIENT, mean(gradients(r)))]


def missing(r: Results) -> str:
    """What the run left no time for."""
    lines = []
    for case, done, things in (
        ("certification", r.all("dispatch", "differing_bits"), "weights"),
        ("linear", both(r), "row counts"),
        ("weight_gradient", gradients(r), "weight gradients"),
    ):
        if count := len(r.all(case, "not_run")):
            verb = "checked" if case == "certification" else "timed"
            lines.append(f"{count} of {count + len(done)} {things} {'was' if count == 1 else 'were'} not {verb}")
    return f"For lack of time {'; '.join(lines)}." if lines else ""


def plots(r: Results) -> dict[str, str]:
    return {"kernel_products": chart(r)} if both(r) else {}


def section(r: Results) -> str:
    pieces = [certification(r)] if r.all("dispatch", "differing_bits") else []
    pieces += [speed(r)] if both(r) else []
    pieces += list(filter(None, [missing(r)]))
    return "\n\n".join(["### Matrix products", *pieces]) if pieces else ""
