"""The trainer on one device: bits first (a red check refuses to time), then tokens/s, MFU, peak memory and a step by part.

`python -m benchmarks.trainer [--out FILE] [--tiny] [--only ours long parts eager compiled] [--limit_s 330]`

The Qwen3-1.7B shape on random weights; our exact and fast kernels at each degree of recomputation, and transformers with SDPA and
fused AdamW, eager and compiled. MFU counts 6 x parameters x tokens and causal attention, recomputation not, against the device's
989 TFLOP/s. Sections that would begin behind the limit are left out; what was measured is on disk by then.
`--tiny` is a model of 100k parameters that runs on a CPU in seconds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.architectures import QWEN3_1_7B
from benchmarks.harness import Record, Recorder, attempt, report
from benchmarks.trainer_cases.clock import Measured, collect, measure
from benchmarks.trainer_cases.ours import Trainer, check, exact_ops
from benchmarks.trainer_cases.parts import split
from benchmarks.trainer_cases.peers import Peer
from benchmarks.trainer_cases.shapes import Case, flops, mfu, tiny
from services.trainer.distributed import join, leave
from shared.kernels import Ops, build_ops
from shared.models import Recompute

SECTIONS = ("ours", "long", "parts", "eager", "compiled")
BASELINES = ("fast", "transformers", "transformers compiled")
BEST: Recompute = "mlp"
"""The degree of recomputation that meets both targets, half the memory of the compiled peer and its speed."""


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for the records")
    parser.add_argument("--tiny", action="store_true", help="a model of 100k parameters, for a CPU")
    parser.add_argument("--only", nargs="*", choices=SECTIONS, help="sections to run")
    parser.add_argument("--limit_s", type=float, default=330.0, help="no section begins later than this")
    return parser.parse_args(words)


class Bench:
    """What the sections share: the model's shape, where it runs, and the records."""

    def __init__(self, recorder: Recorder, *, is_tiny: bool, directory: Path) -> None:
        self.recorder, self.is_tiny = recorder, is_tiny
        self.world = join("cpu" if is_tiny else "cuda", timeout_s=600)
        self.config = tiny() if is_tiny else QWEN3_1_7B
        self.dtype = torch.float32 if is_tiny else torch.bfloat16
        self.cases = [Case(4, 64), Case(1, 256)] if is_tiny else [Case(4, 4096), Case(1, 16384)]
        self.longest = Case(1, 512) if is_tiny else Case(1, 32768)
        self.repeats = 2 if is_tiny else 6
        begin = time.monotonic()
        self.exact = exact_ops(self.config, self.world, self.dtype, directory)
        self.fast = build_ops("fast", self.world.device)
        self.add("certify", {}, "exact", "seconds", time.monotonic() - begin, "s")
        self.trainer: Trainer | None = None

    def ours(self, ops: Ops, recompute: Recompute, *, reshard: bool = True) -> Trainer:
        """The one trainer, with these kernels."""
        if self.trainer is None:
            self.trainer = Trainer(self.config, self.exact, self.world, self.dtype)
        self.trainer.use(ops, recompute, reshard=reshard)
        return self.trainer

    def add(
        self, case: str, params: dict[str, Any], mode: str, metric: str, value: float, unit: str, **more: Any
    ) -> None:
        self.recorder.add(Record("trainer", case, params, mode, metric, value, unit, **more))

    def time(self, name: str, case: Case, mode: str, run: Callable[[], Any], **params: Any) -> Measured:
        """Times a forward or a step and records its speed, MFU and peak memory."""
        is_step = name == "step"
        found = measure(run, self.world.device, repeats=self.repeats)
        params = case.params | params
        spread = [case.tokens / s for s in reversed(found.spread)]
        self.add(name, params, mode, "tokens_per_s", case.tokens / found.seconds, "tokens/s", spread=spread)
        self.add(name, params, mode, "mfu", mfu(self.config, case, found.seconds, is_step=is_step), "")
        if found.peak_bytes is not None:
            self.add(name, params, mode, "peak_bytes", found.peak_bytes, "B")
        text = f"{mode} {name} {params}: {case.tokens / found.seconds:,.0f} tokens/s"
        print(f"{text}, peak {(found.peak_bytes or 0) / 1e9:.1f} GB", flush=True)
        return found


def is_exact(bench: Bench) -> bool:
    """Whether every bit agrees; nothing is timed otherwise."""
    trainer = bench.ours(bench.exact, "none")
    red = []
    for record in check(trainer, bench.exact, scale=1 if bench.is_tiny else 10):
        bench.recorder.add(record)
        red += [record] if record.value else []
    for record in red:
        print(f"red: {record.case} {record.params}: {record.value:,.0f} elements differ", flush=True)
    return not red


def time_ours(bench: Bench) -> None:
    for case, modes in zip(bench.cases, (("none", "elementwise", BEST, "layer"), (BEST,)), strict=True):
        micro = bench.ours(bench.exact, BEST).batch(case)
        for name, ops in (("exact", bench.exact), ("fast", bench.fast)):
            trainer = bench.ours(ops, "none")
            bench.time("forward", case, name, partial(trainer.forward, micro))
            for recompute in modes if name == "exact" else ("none", BEST)[-len(modes) :]:
                bench.ours(ops, recompute)
                bench.time("step", case, name, partial(trainer.step, micro), recompute=recompute)
    case = bench.cases[0]
    for recompute in ("elementwise", BEST):
        trainer = bench.ours(bench.exact, recompute, reshard=False)
        run = partial(trainer.step, trainer.batch(case))
        bench.time("step", case, "exact", run, recompute=recompute, reshard=False)


def time_long(bench: Bench) -> None:
    """The longest sequence on one device."""
    trainer = bench.ours(bench.exact, BEST)
    micro = trainer.batch(bench.longest)
    bench.time("step", bench.longest, "exact", partial(trainer.step, micro), recompute=BEST)


def time_parts(bench: Bench) -> None:
    for name, ops in (("exact", bench.exact), ("fast", bench.fast)):
        trainer = bench.ours(ops, BEST)
        case = bench.cases[0]
        seconds = split(trainer, trainer.batch(case))
        for part, value in sorted(seconds.items(), key=lambda item: -item[1]):
            params = case.params | {"part": part, "recompute": BEST}
            bench.add("step_part", params, name, "milliseconds", 1e3 * value, "ms")
        shares = ", ".join(f"{part} {1e3 * s:.1f}" for part, s in sorted(seconds.items(), key=lambda item: -item[1]))
        print(f"{name} step by part, ms: {shares}", flush=True)


def time_peer(bench: Bench, *, is_compiled: bool) -> None:
    bench.trainer = None
    collect()
    # What others run: the library as it comes.
    bench.fast.activate()
    torch.use_deterministic_algorithms(False)
    mode = BASELINES[1 + is_compiled]
    peer = Peer(bench.config, bench.world.device, bench.dtype, is_compiled=is_compiled)
    try:
        for case in bench.cases[: 1 if is_compiled else 2]:
            ids = peer.batch(case)
            # The step first: compiling takes minutes, and what is asked for most should be there if they run out.
            bench.time("step", case, mode, partial(peer.step, ids))
            bench.time("forward", case, mode, partial(peer.forward, ids))
    finally:
        torch.use_deterministic_algorithms(True)
        del peer
        collect()


def compared(records: Sequence[Record]) -> Iterator[Record]:
    """Exact against every baseline, where case and tokens are the same; memory too, where less is better."""
    for ours in records:
        if ours.mode != "exact" or ours.metric not in ("tokens_per_s", "peak_bytes"):
            continue
        for other in records:
            is_same = (other.case, other.metric) == (ours.case, ours.metric) and all(
                other.params.get(key, value) == value for key, value in ours.params.items()
            )
            if other.mode in BASELINES and is_same:
                ratio = ours.value / other.value if ours.metric == "tokens_per_s" else other.value / ours.value
                yield Record("trainer", ours.case, ours.params, "exact", f"{ours.metric}_ratio", ratio, "",
                             baseline=other.mode, ratio=ratio)  # fmt: skip


def run_sections(bench: Bench, names: Sequence[str], limit_s: float) -> bool:
    """Whether all of them went well; each is on disk as soon as it is through."""
    sections: dict[str, Callable[[], None]] = {
        "ours": partial(time_ours, bench),
        "long": partial(time_long, bench),
        "parts": partial(time_parts, bench),
        "eager": partial(time_peer, bench, is_compiled=False),
        "compiled": partial(time_peer, bench, is_compiled=True),
    }
    begin, is_well = time.monotonic(), True
    for name in names:
        if time.monotonic() - begin > limit_s:
            print(f"{name}: left out, {limit_s:.0f} s are over", flush=True)
            continue
        started = time.monotonic()
        is_well &= attempt(sections[name])
        bench.recorder.save()
        print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
    return is_well


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    if not args.tiny and not torch.cuda.is_available():
        print("benchmarks.trainer needs a CUDA device, found none; --tiny runs on a CPU", file=sys.stderr)
        return 2
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    default = [name for name in SECTIONS if not (args.tiny and name == "compiled")]
    with Recorder(args.out) as recorder, tempfile.TemporaryDirectory() as directory:
        try:
            bench = Bench(recorder, is_tiny=args.tiny, directory=Path(directory))
            case = bench.cases[0]
            bench.add("arithmetic", case.params, "exact", "flop", flops(bench.config, case, is_step=True), "FLOP")
            if not is_exact(bench):
                return 1
            is_well = run_sections(bench, args.only if args.only is not None else default, args.limit_s)
        finally:
            leave()
            for record in list(compared(recorder.records)):
                recorder.add(record)
            recorder.save()
    report(recorder.records)
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
