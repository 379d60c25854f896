"""The whole loop of services on this machine: how a step's time is split, and the TIM of every token.

`python -m benchmarks.loop [--out FILE] [--tiny] [key=value ...]`

Starts gateway, rollout, trainer, weight_sync and Valkey as `timzero train --local` does, from benchmarks/loop.toml; keys are
those of that command (`run.model=DIR`, `num_steps=6`, `rollout.kv_cache_tokens=65536`). Needs no network where the model is a
directory.
"Generation" is the time in which the replica computes, "training" that in which the trainer scores or trains; the rest of a
step, in which neither does, is told by the phase that the trainer is in meanwhile.
How long the GPU waits for the host is only known where the trainer does not use it at the same time: run `lag=0` for that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Record, Recorder, machine, quarters, report, verdict
from benchmarks.timeline import Scraper, Series, Span, outside, split, windows
from shared.wire.ports import HeldPort
from timzero import model
from timzero.connect import connect
from timzero.display import TerminalDisplay
from timzero.job import Job, load_job
from timzero.local import stack_of
from timzero.outcome import Outcome
from timzero.report import collect, write
from timzero.steps import StepSummary
from timzero.train import Display, Driver

CONFIG = Path(__file__).with_name("loop.toml")
BUSY = "timzero_engine_step_seconds_sum"
"""The replica's seconds inside its step."""
DEVICE = ("timzero_engine_seconds_total:forward", "timzero_engine_seconds_total:sample")
IDLE = "timzero_engine_seconds_total:idle"
"""The replica's GPU seconds, and those in which its GPU waited for the host although there was work."""
FULL, FULL_IDLE = "timzero_engine_seconds_total:full", "timzero_engine_seconds_total:full_idle"
"""The same of steps in which every place sampled."""
STEPS = "timzero_engine_steps_total"
PHASES = ("schedule", "prepare", "wait", "read", "forward", "sample", "idle")
"""Of an engine step: four of the host, three of the device."""
LEAST_ALONE = 0.1
"""Of a step's generation, beside which nothing trains, before its share of waiting says anything."""
GOAL_SETTING = 512, 128
"""Samples of a step and tokens of each, for which there are targets."""
NOT_TIMED = 3
"""The first two steps and the last."""
MAX_NEITHER, MAX_IDLE = 0.20, 0.05
"""Targets: share of a step that is neither generation nor training; of generation in which the GPU waits."""
TINY = (
    "run.model=tiny-sort", "num_steps=5", "prompts_per_step=4", "samples_per_prompt=4", "checkpoint_interval=2", "dtype=float32",
    "sampling.max_tokens=12", "rollout.kv_cache_tokens=4096", "rollout.max_running=16",
)  # fmt: skip


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for the records")
    parser.add_argument("--tiny", action="store_true", help="a model of 76k parameters and few samples")
    parser.add_argument(
        "--against", type=Path, help="records of another machine, to compare with where the setting is the same"
    )
    parser.add_argument("keys", nargs="*", metavar="key=value")
    return parser.parse_args(words)


def job_of(keys: Sequence[str], *, is_tiny: bool, name: str | None = None) -> Job:
    """benchmarks/loop.toml with these keys, its model in place. Raises ValueError when no step of it would be timed.

    Args:
        name: of the run.
    """
    job = load_job(CONFIG, [*(TINY if is_tiny else ()), *keys])
    if job.run.num_steps <= NOT_TIMED:
        raise ValueError(
            f"num_steps must be at least 4, got {job.run.num_steps}: the first two steps and the last are not timed"
        )
    return job.with_run(model=str(model.get(job.run.model)), run=name or job.run.run)


@dataclass(frozen=True)
class SoFar:
    """What there is of an outcome while the run goes on."""

    steps: tuple[StepSummary, ...]

    @property
    def is_timed(self) -> bool:
        return len(self.steps) > NOT_TIMED


OnStep = Callable[[SoFar, Series], object]


@dataclass
class Following:
    """A display whose steps are handed on as well."""

    display: Display
    series: Series
    on_step: OnStep
    _steps: dict[int, StepSummary] = field(default_factory=dict)

    def note(self, line: str) -> None:
        self.display.note(line)

    def step(self, step: StepSummary, num_steps: int) -> None:
        self.display.step(step, num_steps)
        # One that is trained again after a restart comes again.
        self._steps[step.step] = step
        self.on_step(SoFar(tuple(self._steps[n] for n in sorted(self._steps))), self.series)


def run(
    job: Job, directory: Path, display: TerminalDisplay, *, page: Path | None = None, on_step: OnStep | None = None
) -> tuple[Outcome, Series]:
    """The job on services of its own, and what its replica's counters said meanwhile.

    Args:
        page: where its report goes.
        on_step: called after every step.
    """
    held = HeldPort()
    table = replace(job.local, rollout={**job.local.rollout, "metrics_port": held.port})
    with (
        stack_of(table, directory, announce=display.note) as stack,
        Scraper(f"http://127.0.0.1:{held.port}/metrics") as scraper,
        connect(stack.base_url) as client,
    ):
        shown = display if on_step is None else Following(display, scraper.series, on_step)
        outcome = Driver(client, job, shown, check=stack.check).drive()
        if page is not None:
            write(collect(client, job.run.run), page)
    held.close()
    return outcome, scraper.series


def settings(job: Job) -> dict[str, Any]:
    """What two runs must have in common to be compared."""
    return {
        "model": Path(job.run.model).name,
        "samples": job.run.prompts_per_step * job.run.samples_per_prompt,
        "tokens": job.sampling.max_tokens,
        "lag": job.run.lag,
    }


def unshared(job: Job, num_steps: int) -> dict[str, Any]:
    """What else a record names; runs that differ in it are compared all the same."""
    return {"steps": num_steps, "max_running": job.local.rollout.get("max_running")}


def exactness(outcome: Outcome | SoFar, job: Job) -> Iterator[Record]:
    """Bits of every trained token, all steps."""
    params = settings(job) | unshared(job, len(outcome.steps))
    compared = sum(s.compared_tokens for s in outcome.steps)
    yield Record("loop", "tim", params, job.run.numerics, "compared_tokens", compared, "tokens")
    yield Record(
        "loop", "tim", params, job.run.numerics, "trained_tokens", sum(s.tokens for s in outcome.steps), "tokens"
    )
    differing = sum(s.differing_bits for s in outcome.steps)
    yield Record("loop", "tim", params, job.run.numerics, "differing_bits", differing, "bits")


def times(outcome: Outcome | SoFar, job: Job, series: Series) -> Iterator[Record]:
    """Medians over the steps that are neither the first ones nor the last."""
    found = [
        (window, row, split(window, row["phases"], series, BUSY))
        for window, row in windows([s.metrics for s in outcome.steps])
    ]
    params = settings(job) | unshared(job, len(found))

    def record(metric: str, values: list[float], unit: str, **more: Any) -> Record:
        value, spread = statistics.median(values), quarters(values)
        return Record("loop", "step", params, job.run.numerics, metric, value, unit, spread=spread, **more)

    def share(metric: str, values: list[float], unit: str, most: float) -> Record:
        """With its target, in the setting that has one."""
        against: dict[str, Any] = {}
        if (params["samples"], params["tokens"]) == GOAL_SETTING:
            against = {"baseline": f"at most {most}", "ratio": most / max(statistics.median(values), 1e-9)}
        return record(metric, values, unit, **against)

    lengths = [window[1] - window[0] for window, _, _ in found]
    yield record("step_s", lengths, "s")
    yield record("tokens_per_s", [row["tokens"] / n for (_, row, _), n in zip(found, lengths, strict=True)], "tokens/s")
    for part in dict.fromkeys(name for _, _, parts in found for name in parts):
        yield record(f"{part}_s", [parts.get(part, 0.0) for _, _, parts in found], "s")
    beside = [neither(parts) / n for (_, _, parts), n in zip(found, lengths, strict=True)]
    yield share("neither_share", beside, "of a step", MAX_NEITHER)
    steps = [max(series.increase(STEPS, window), 1.0) for window, _, _ in found]
    for phase in PHASES:
        seconds = [series.increase(f"timzero_engine_seconds_total:{phase}", window) for window, _, _ in found]
        yield record(f"engine_{phase}_ms", [1e3 * s / n for s, n in zip(seconds, steps, strict=True)], "ms/engine step")
    if torch.cuda.is_available() and series.has(IDLE):
        idle = [waiting(series, window) for window, _, _ in found]
        yield share("gpu_waits_share", idle, "of generation", MAX_IDLE)
        spans = [(window, outside(window, row["phases"])) for window, row, _ in found]
        alone = [
            waiting(series, *parts)
            for window, parts in spans
            if on_device(series, *parts) > LEAST_ALONE * on_device(series, window)
        ]
        if alone:
            yield share("gpu_waits_alone_share", alone, "of generation beside no training", MAX_IDLE)
        full = [
            waiting(series, *parts, device=(FULL,), idle=FULL_IDLE)
            for window, parts in spans
            if on_device(series, *parts, names=(FULL,)) > LEAST_ALONE * on_device(series, window)
        ]
        if full:
            yield share(
                "gpu_waits_full_share", full, "of generation with every place taken, beside no training", MAX_IDLE
            )


def neither(parts: Mapping[str, float]) -> float:
    return sum(seconds for name, seconds in parts.items() if name not in ("overlapped", "training", "generation"))


def waiting(series: Series, *spans: Span, device: Sequence[str] = DEVICE, idle: str = IDLE) -> float:
    """Share of the GPU's time in generation that it waited for the host.

    Where the trainer computes on the same GPU this is a bound from above: a GPU that has nothing of the replica's to do turns to
    the trainer's work, and what it takes to come back counts as waiting too.
    """
    waited_s = sum(series.increase(idle, span) for span in spans)
    return waited_s / max(on_device(series, *spans, names=device) + waited_s, 1e-9)


def on_device(series: Series, *spans: Span, names: Sequence[str] = DEVICE) -> float:
    """Seconds that the replica's GPU computed for it."""
    return sum(series.increase(name, span) for name in names for span in spans)


def compare(records: list[Record], path: Path) -> None:
    """Fills in ratios to the records of another machine that has run the same setting."""
    others = {(r["case"], r["metric"], key(r["params"])): r for r in json.loads(path.read_text())}
    for record in records:
        other = others.get((record.case, record.metric, key(record.params)))
        if other is not None and record.metric == "tokens_per_s":
            record.baseline, record.ratio = other["machine"], record.value / other["value"]


def key(params: Mapping[str, Any]) -> str:
    return json.dumps({name: params[name] for name in params if name not in ("steps", "max_running")}, sort_keys=True)


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    try:
        job = job_of(args.keys, is_tiny=args.tiny)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    recorder = Recorder(args.out)

    def keep(outcome: Outcome | SoFar, series: Series) -> None:
        timed = times(outcome, job, series) if not isinstance(outcome, SoFar) or outcome.is_timed else ()
        recorder.renew([*exactness(outcome, job), *timed], since=0)

    with (
        recorder,
        tempfile.TemporaryDirectory(prefix="timzero-loop-") as directory,
        TerminalDisplay("loop") as display,
    ):
        display.note(f"{settings(job)} on {machine()}")
        outcome, series = run(job, Path(directory) / "run", display, on_step=keep)
    keep(outcome, series)
    if args.against:
        compare(recorder.records, args.against)
    recorder.save()
    report(recorder.records)
    return verdict(outcome.problems)


if __name__ == "__main__":
    sys.exit(main())
