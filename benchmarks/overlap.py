"""How far generation and training hide each other: one job with lag 0, lag 1 and max_lag 1, a step's time against both parts.

`python -m benchmarks.overlap [--out FILE] [--reports DIR] [--tiny] [--only NAME ...] [key=value ...]`

Runs benchmarks/loop.toml (or what the keys make of it, as `python -m benchmarks.loop` takes them) on services of its own, once
for each setting. `generation_s` is the time of a step in which the replica computes, `training_s` that in which the trainer
scores or trains; without overlap a step takes their sum and what neither needs, with a perfect one the larger of the two.
`hidden` is the share of the smaller part that ran beside the larger one. DIR gets every run's report with its timeline.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import loop
from benchmarks.harness import Record, Recorder, machine, quarters, report, verdict
from benchmarks.timeline import Series, split, windows
from timzero.display import TerminalDisplay
from timzero.job import Job
from timzero.outcome import Outcome

SETTINGS = {"lag 0": ("lag=0",), "lag 1": ("lag=1",), "max_lag 1": ("max_lag=1",)}
BASELINE = "lag 0"


@dataclass(frozen=True)
class Parts:
    """Seconds of one step."""

    step: float
    generation: float
    training: float
    overlapped: float

    @property
    def neither(self) -> float:
        return max(0.0, self.step - self.generation - self.training + self.overlapped)

    @property
    def larger(self) -> float:
        return max(self.generation, self.training)

    @property
    def hidden(self) -> float:
        """Share of the smaller part that ran beside the larger one."""
        return self.overlapped / max(min(self.generation, self.training), 1e-9)


def parts_of(outcome: Outcome | loop.SoFar, series: Series) -> list[Parts]:
    """Of every step but the first two and the last."""
    found = []
    for window, row in windows([s.metrics for s in outcome.steps]):
        seconds = split(window, row["phases"], series, loop.BUSY)
        both = seconds["overlapped"]
        found.append(
            Parts(window[1] - window[0], seconds["generation"] + both, seconds["training"] + both, both)
        )  # fmt: skip
    return found


def records(
    name: str, job: Job, outcome: Outcome | loop.SoFar, steps: Sequence[Parts], baseline_s: float | None
) -> Iterator[Record]:
    """Args: baseline_s: a step without overlap."""
    params = loop.settings(job) | {"lag": job.run.oldest_lag, "steps": len(steps)}

    def record(metric: str, values: Sequence[float], unit: str) -> Record:
        value, spread = statistics.median(values), quarters(values)
        return Record("overlap", name, params, job.run.numerics, metric, value, unit, spread=spread)

    step = record("step_s", [p.step for p in steps], "s")
    if baseline_s is not None:
        step.baseline, step.ratio = BASELINE, baseline_s / step.value
    yield step
    for metric in ("generation", "training", "overlapped", "neither", "larger"):
        yield record(f"{metric}_s", [getattr(p, metric) for p in steps], "s")
    yield record("hidden", [p.hidden for p in steps], "of the smaller part")
    yield record("step_to_larger", [p.step / max(p.larger, 1e-9) for p in steps], "of the larger part")
    yield record("staleness", [s.lag for s in outcome.steps], "versions")
    differing = sum(s.differing_bits for s in outcome.steps)
    yield Record("overlap", name, params, job.run.numerics, "differing_bits", differing, "bits")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for the records")
    parser.add_argument("--reports", type=Path, help="directory for one report a setting")
    parser.add_argument("--tiny", action="store_true", help="a model of 76k parameters and few samples")
    parser.add_argument("--only", action="append", choices=SETTINGS, help="one setting; may be given several times")
    parser.add_argument("keys", nargs="*", metavar="key=value")
    return parser.parse_args(words)


def measured(
    name: str, job: Job, recorder: Recorder, baseline_s: float | None, reports: Path | None
) -> tuple[Outcome, list[Parts]]:
    """Runs one setting; its records are kept after every step."""
    since = len(recorder.records)

    def keep(outcome: Outcome | loop.SoFar, series: Series) -> list[Parts]:
        steps = parts_of(outcome, series)
        if steps:
            recorder.renew(records(name, job, outcome, steps, baseline_s), since=since)
        return steps

    page = reports / f"overlap-{job.run.run}.html" if reports else None
    with tempfile.TemporaryDirectory(prefix="timzero-overlap-") as directory, TerminalDisplay(name) as display:
        display.note(f"{name}: {loop.settings(job)} on {machine()}")
        outcome, series = loop.run(job, Path(directory) / "run", display, page=page, on_step=keep)
    return outcome, keep(outcome, series)


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    try:
        jobs = {
            name: loop.job_of([*args.keys, *SETTINGS[name]], is_tiny=args.tiny, name=name.replace(" ", "-"))
            for name in args.only or SETTINGS
        }
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    problems, baseline_s = [], None
    with Recorder(args.out) as recorder:
        for name, job in jobs.items():
            outcome, steps = measured(name, job, recorder, baseline_s, args.reports)
            if name == BASELINE:
                baseline_s = statistics.median(p.step for p in steps)
            problems += [f"{name}: {problem}" for problem in outcome.problems]
    report(recorder.records)
    return verdict(problems)


if __name__ == "__main__":
    sys.exit(main())
