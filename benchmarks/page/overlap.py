"""A step of the loop with and without overlap, against the longer of generation and training."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.page import charts
from benchmarks.page.goals import Goal, none_differ
from benchmarks.page.results import Results, percent, table

WITHOUT = "lag 0"
PLOT = "overlap_{}"


def settings(r: Results) -> list[str]:
    """In the file's order."""
    return list(dict.fromkeys(f["case"] for f in r.all(None, "step_s", None)))


def parts(r: Results, case: str) -> dict[str, float]:
    """Seconds of the median step; they add up to it."""
    step, generation, training, both = (
        r.value(case, f"{name}_s", None) for name in ("step", "generation", "training", "overlapped")
    )
    alone = {"training alone": max(training - both, 0.0), "generation alone": max(generation - both, 0.0)}
    found = {"both compute": both} | alone
    return found | {"neither": max(step - sum(found.values()), 0.0)}


def step_chart(r: Results) -> str:
    title = f"A step of the loop by part, {r.where} (dashed: the longer of generation and training)"
    marks = {case: r.value(case, "larger_s", None) for case in settings(r)}
    return charts.stacked(title, "s", [(case, parts(r, case)) for case in marks], digits=2, marks=marks)


def plots(every: Sequence[Results]) -> dict[str, str]:
    """One picture for each machine."""
    return {PLOT.format(r.where.lower()): step_chart(r) for r in every if r.records}


def rows(r: Results) -> list[list[str]]:
    first = r.maybe(WITHOUT, "step_s", None)
    found = []
    for case in settings(r):
        step = r.value(case, "step_s", None)
        seconds = (f"{r.value(case, f'{name}_s', None):.2f}" for name in ("generation", "training"))
        found.append([
            r.where, case, f"{step:.2f}", *seconds, f"{r.value(case, 'step_to_larger', None):.2f}",
            percent(r.value(case, "hidden", None)), f"{first['value'] / step:.2f}" if first else "-",
            f"{r.value(case, 'differing_bits', None):,.0f}",
        ])  # fmt: skip
    return found


def goals(every: Sequence[Results]) -> list[Goal]:
    return [
        none_differ(f"overlap: {r.where}, differing bits of trained tokens", differing, f"{len(differing)} runs")
        for r in every
        for differing in [r.all(None, "differing_bits")]
    ]


def work(r: Results) -> str:
    """What a run is, in words."""
    p = r.first(settings(r)[0], "step_s", None)["params"]
    return f"{r.where}: {p['samples']} samples of {p['tokens']} tokens of {p['model']}, {p['steps']} timed steps"


def section(every: Sequence[Results]) -> str:
    there = [r for r in every if r.records]
    if not there:
        return ""
    pictures = "\n\n".join(f"![A step of the loop by part](plots/{PLOT.format(r.where.lower())}.svg)" for r in there)
    header = ["machine", "setting", "step, s", "generation, s", "training, s", "step to the longer of them",
              "of the shorter one, hidden", "faster than lag 0", "differing bits"]  # fmt: skip
    return f"""\
## Generation beside training

The same job with `lag = 0` (generation waits for the weights of the step before), `lag = 1` and `max_lag = 1`
(samples go on across versions). {"; ".join(map(work, there))}. "Generation" is the time of a step in which the
replica computes, "training" that in which the trainer scores or trains. Without overlap a step takes their sum and
what neither needs, with a perfect one the longer of the two; where both share a device or its cores, each is slower
while the other runs. Medians over steps; in the pictures "neither" is what the other parts leave of the step.

{table(header, [row for r in there for row in rows(r)])}

{pictures}
"""
