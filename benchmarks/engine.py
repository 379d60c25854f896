"""The rollout engine, exact against fast in one run: bits first (a red gate refuses to time), then tokens per second and where
the time goes.

`python -m benchmarks.engine [--out FILE] [--only uniform prefill group long_tail long_context tiny] [--tiny]`

Both modes run the same requests over the same weights in turns. Requests are submitted at once, end-of-sequence is ignored,
temperature is 1, the logprob of every token is recorded. The floor is what the machine's own copy bandwidth and matrix rate,
measured now, leave: prompts through the products and the attention once, then weights and contexts read once a step.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.engine_cases import budget
from benchmarks.engine_cases.drive import Gate, Pass, Weights, build, gate, timed
from benchmarks.engine_cases.workloads import SMALL_WORKLOADS, WORKLOADS, Workload
from benchmarks.harness import Record, Recorder, attempt, ceilings, report
from shared.kernels import Mode

MODES: tuple[Mode, ...] = ("exact", "fast")
MOST_DELTA = 0.05
"""Mean |fast - exact| logprob of a fast engine that works: bfloat16's rounding, and no more."""
HOST = ("schedule_s", "prepare_s", "read_s")
"""Parts of a step in which the host computes."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What the arguments come to."""

    workloads: tuple[Workload, ...]
    device: str
    dtype: str
    repeats: int
    limit_s: float
    """Of the timed passes of one workload; those under way are finished."""


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for the records")
    parser.add_argument("--only", nargs="*", metavar="WORKLOAD", help="workloads to run")
    parser.add_argument("--repeats", type=int, default=3, help="timed passes of each mode")
    parser.add_argument("--limit", type=float, default=100.0, help="seconds of timed passes for each workload")
    parser.add_argument(
        "--tiny", action="store_true", help="the same kinds over a tiny model on the CPU; no speed is meant"
    )
    return parser.parse_args(words)


def setting(args: argparse.Namespace) -> Setting:
    """Raises ValueError for an unknown workload or a machine without a GPU."""
    known = {w.name: w for w in (SMALL_WORKLOADS if args.tiny else WORKLOADS)}
    unknown = set(args.only or ()) - known.keys()
    if unknown:
        raise ValueError(f"no workload {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if not args.tiny and not torch.cuda.is_available():
        raise ValueError("benchmarks.engine needs a CUDA device, found none; --tiny runs on the CPU")
    chosen = tuple(known[name] for name in args.only or known)
    if args.tiny:
        return Setting(chosen, "cpu", "float32", min(args.repeats, 2), args.limit)
    return Setting(chosen, "cuda", "bfloat16", args.repeats, args.limit)


class Bench:
    """Runs workloads; weights of one architecture are made once."""

    def __init__(self, chosen: Setting, limits: dict[str, float], recorder: Recorder, progress: Progress) -> None:
        self.setting, self.limits, self.recorder, self.progress = chosen, limits, recorder, progress
        self._weights: Weights | None = None
        """Of the architecture at work."""

    def run(self, workload: Workload) -> bool:
        """Gates both modes, then times them in turns. Returns whether the exact one's bits were equal."""
        # Engines of the workload before hold caches that this one needs, and refer to themselves.
        gc.collect()
        if self.setting.device == "cuda":
            torch.cuda.empty_cache()
        task = self.progress.add_task(workload.name, total=2 * (2 + self.setting.repeats))
        weights, engines, gates = self._weights_of(workload), {}, {}
        for mode in MODES:
            begin = time.monotonic()
            engines[mode] = build(workload, mode, weights)
            gates[mode] = gate(engines[mode], workload, weights.judge)
            self._gate_records(workload, mode, gates[mode], time.monotonic() - begin)
            self.progress.advance(task)
        problem = red(gates)
        if problem:
            self.progress.console.print(f"{workload.name}: red, not timed: {problem}")
            return False
        for mode in MODES:
            # Compiles and captures what only the whole workload asks for.
            timed(engines[mode], workload, self.setting.repeats)
            self.progress.advance(task)
        passes: dict[Mode, list[Pass]] = {mode: [] for mode in MODES}
        begin = time.monotonic()
        for repeat in range(self.setting.repeats):
            for mode in MODES:
                passes[mode].append(timed(engines[mode], workload, repeat))
                self.progress.advance(task)
            if time.monotonic() - begin > self.setting.limit_s * (repeat + 1) / (repeat + 2):
                # another pair would end beyond the limit
                break
        for record in records(workload, passes, self.limits):
            self.recorder.add(record)
        if workload.name == budget.WORKLOAD:
            for mode in MODES:
                for record in budget.measure(engines[mode], workload, weights):
                    self.recorder.add(record)
        self.recorder.save()
        return True

    def _weights_of(self, workload: Workload) -> Weights:
        if self._weights is None or self._weights.model != workload.model:
            # Two architectures at once need not fit.
            self._weights = None
            self._weights = Weights(workload.model, self.setting.device, self.setting.dtype)
        return self._weights

    def _gate_records(self, workload: Workload, mode: Mode, found: Gate, start_s: float) -> None:
        def add(metric: str, value: float, unit: str) -> None:
            params = {"sequences": workload.num_sequences}
            self.recorder.add(Record("engine", workload.name, params, mode, metric, value, unit))

        add("compared_tokens", found.tokens, "tokens")
        add("differing_bits", found.differing_bits, "bits")
        add("mean_delta", found.mean_delta, "nats")
        add("start_s", start_s, "s")
        line = (
            f"{found.differing_bits} of {found.tokens} logprobs differ from the trainer's, ready after {start_s:.0f} s"
        )
        self.progress.console.print(f"{workload.name}: {mode}: {line}")


def red(gates: dict[Mode, Gate]) -> str:
    """Why nothing may be timed; empty when all is well."""
    if gates["exact"].differing_bits or not gates["exact"].tokens:
        return f"{gates['exact'].differing_bits} of {gates['exact'].tokens} tokens of the exact engine differ from the trainer's"
    if not gates["fast"].mean_delta < MOST_DELTA:
        return f"the fast engine is off by {gates['fast'].mean_delta:.3g} nats a token: it computes something else"
    return ""


def records(workload: Workload, passes: dict[Mode, list[Pass]], limits: dict[str, float]) -> Iterator[Record]:
    """Tokens per second, their ratios, the floor's share, and the split of a step."""
    rates = {mode: [workload.counted_tokens / p.wall_s for p in found] for mode, found in passes.items()}
    floor = workload.counted_tokens / sum(workload.floor_s(bandwidth=limits["bandwidth"], matmul=limits["matmul"]))
    fast = statistics.median(rates["fast"])
    params = {
        "sequences": workload.num_sequences,
        "prompt_tokens": workload.prompt_tokens,
        "tokens": workload.counted_tokens,
    }

    def record(mode: str, metric: str, value: float, unit: str, **more: object) -> Record:
        return Record("engine", workload.name, params, mode, metric, value, unit, **more)  # type: ignore[arg-type]

    for mode, found in rates.items():
        value = statistics.median(found)
        spread = [min(found), max(found)]
        to_fast = {"baseline": "fast", "ratio": value / fast} if mode == "exact" else {}
        yield record(mode, workload.unit, value, "tokens/s", spread=spread, **to_fast)
        yield record(mode, "floor_share", value / floor, "of the floor", baseline=f"floor {floor:,.0f} tokens/s")
        for peer, rate in workload.peers.items():
            yield record(mode, f"{workload.unit}_to_peer", value, "tokens/s", baseline=peer, ratio=value / rate)
    exact = statistics.median(rates["exact"])
    if workload.target is not None:
        yield record(
            "exact",
            "target",
            exact,
            "tokens/s",
            baseline=f"target {workload.target:,.0f}",
            ratio=exact / workload.target,
        )
    if workload.least_ratio is not None:
        baseline = f"at least {workload.least_ratio}"
        yield record(
            "exact", "exact_to_fast", exact / fast, "", baseline=baseline, ratio=exact / fast / workload.least_ratio
        )
    for mode, timed_passes in passes.items():
        yield from split(mode, timed_passes, record)


def split(mode: str, found: list[Pass], record: object) -> Iterator[Record]:
    """Where the time of the median pass went, in milliseconds a step; sums over the host and over the device each."""
    middle = sorted(found, key=lambda p: p.wall_s)[len(found) // 2]
    times = middle.times
    steps = max(times["num_steps"], 1)
    parts = {
        name: times[name] for name in ("schedule_s", "prepare_s", "wait_s", "read_s", "device_s", "sample_s", "idle_s")
    }
    for name, seconds in (*parts.items(), ("host_s", sum(times[n] for n in HOST)), ("step_s", middle.wall_s)):
        yield record(mode, f"{name.removesuffix('_s')}_ms", 1e3 * seconds / steps, "ms/step")  # type: ignore[operator]
    device = times["device_s"] + times["sample_s"] + times["idle_s"]
    yield record(mode, "gpu_waits_share", times["idle_s"] / max(device, 1e-9), "of device time")  # type: ignore[operator]
    yield record(mode, "graph_share", times["num_graph_steps"] / steps, "of steps")  # type: ignore[operator]


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    try:
        chosen = setting(args)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    limits = ceilings(chosen.device)
    is_well = True
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Recorder(args.out) as recorder, Progress(*columns, console=Console(soft_wrap=True)) as progress:
        recorder.add_ceilings("engine", limits)
        bench = Bench(chosen, limits, recorder, progress)
        for workload in chosen.workloads:
            is_well &= attempt(partial(bench.run, workload))
            recorder.save()
    report(recorder.records)
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
