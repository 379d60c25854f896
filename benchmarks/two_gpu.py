"""Trainer and rollout on two devices: bits first, then seconds.

`python -m benchmarks.two_gpu [--out FILE] [--only SECTION ...] [--versions N] [key=value ...]` on a machine with two GPUs
`python -m benchmarks.two_gpu --cpu --tiny`: the same ways over gloo on a CPU, with models of 100k parameters

certify    the products that both models need, one model on each device, so that no section below waits for them
fsdp       FSDP2 over 2 ranks: logprobs to the bit those of 1 rank and of the engine; seconds of a step, 2 ranks against 1
broadcast  trainer on GPU 0, replica on GPU 1: NCCL broadcast of the 1.7B shape to a replica that samples; total, pause
loop       the main job with lag 1, weights by broadcast: a step's seconds against max(generation, training), TIM of every token

Keys are those of `benchmarks.loop`, for the section of that name: `num_steps=6`, `run.micro_batch_tokens=65536`,
`rollout.max_running=256`. A section that fails or takes too long says how far its processes came, and the next one runs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import loop
from benchmarks.architectures import QWEN3_1_7B
from benchmarks.harness import Record, Recorder, attempt, report, verdict
from benchmarks.parts import Part, run_parts
from benchmarks.timeline import Series
from benchmarks.trainer_cases.shapes import tiny
from benchmarks.weight_serving import BYTES_MOVED, FALLBACKS, serving
from shared.models import ModelConfig
from shared.models.loader import save_config
from timzero.display import TerminalDisplay
from timzero.job import Job
from timzero.local import torchrun

SECTIONS = ("certify", "fsdp", "broadcast", "loop")
PART = "benchmarks.two_gpu_part"
PART_S = 180.0
SECTION_S = 240.0


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for the records")
    parser.add_argument("--only", action="append", choices=SECTIONS, help="one section; may be given several times")
    parser.add_argument("--versions", type=int, default=4, help="of broadcast")
    parser.add_argument("--cpu", action="store_true", help="gloo on a CPU; goes with --tiny")
    parser.add_argument("--tiny", action="store_true", help="models of 100k parameters")
    parser.add_argument("keys", nargs="*", metavar="key=value", help="of loop")
    args = parser.parse_args(words)
    if args.cpu != args.tiny:
        parser.error("--cpu and --tiny go together: the real shapes take hours on a CPU")
    if args.versions < 1:
        parser.error(f"--versions must be at least 1, got {args.versions}")
    num_gpus = torch.cuda.device_count()
    if not args.cpu and num_gpus < 2:
        parser.error(f"two GPUs are needed, this machine has {num_gpus}; --cpu --tiny runs the same ways over gloo")
    args.only = args.only or list(SECTIONS)
    if args.keys and "loop" not in args.only:
        parser.error(f"{' '.join(args.keys)}: keys are of the section loop, and --only names one section each time")
    # Before anything runs, because it says which keys are wrong.
    args.job = job_of(args) if {"loop", "certify"} & set(args.only) else None
    return args


def job_of(args: argparse.Namespace) -> Job:
    """The job of the section loop. Raises ValueError."""
    words = ["run.lag=1", "trainer.transport=broadcast"]
    if not args.cpu:
        words += ["trainer.device=cuda", "rollout.device=cuda:1"]
    return loop.job_of([*words, *args.keys], is_tiny=args.tiny)


def certify(args: argparse.Namespace) -> Iterator[Record]:
    """The products of a CPU need no table."""
    if args.cpu:
        return
    from shared.kernels.certify import Table

    table, begin = Table(), time.monotonic()
    num_known = len(table.entries)
    with tempfile.TemporaryDirectory(prefix="two-gpu-") as root:
        model = Path(root) / "model"
        write_config(QWEN3_1_7B, model, "bfloat16")
        parts, directories = [], []
        for index, directory in enumerate((model, Path(args.job.run.model))):
            # A cache for each: the table's lock is for processes that share a device.
            home = Path(root) / f"cache-{index}"
            directories.append(home / "timzero")
            for path in (table.path, directories[-1] / table.path.name):
                path.parent.mkdir(parents=True, exist_ok=True)
            if table.path.exists():
                (directories[-1] / table.path.name).write_bytes(table.path.read_bytes())
            words = ["-m", PART, "certify", str(directory), root, f"cuda:{index}", "bfloat16"]
            parts.append(Part(f"certify on cuda:{index}", words, {"XDG_CACHE_HOME": str(home)}))
        run_parts(parts, deadline_s=PART_S)
        for found in (Table(directory).entries for directory in directories):
            for key in found.keys() - table.entries.keys():
                table.record(key, found[key])
    params = {"known": num_known, "products": len(table.entries)}
    yield Record("two_gpu", "certify", params, "exact", "seconds", time.monotonic() - begin, "s")


def fsdp(args: argparse.Namespace) -> Iterator[Record]:
    """Raises AssertionError where a bit differs."""
    device, dtype = ("cpu", "float32") if args.cpu else ("cuda", "bfloat16")
    config = tiny() if args.tiny else QWEN3_1_7B
    with tempfile.TemporaryDirectory(prefix="two-gpu-") as root:
        directory, out = Path(root) / "model", Path(root) / "out"
        out.mkdir()
        write_config(config, directory, dtype)
        words = [str(directory), str(out), device, dtype]
        run_parts([Part("engine", ["-m", PART, "sample", *words])], deadline_s=PART_S)
        for size in (1, 2):
            run_parts([Part(f"{size} ranks", [*torchrun(size), "-m", PART, "train", *words])], deadline_s=PART_S)
        yield from compared(out, config.hidden_size)


def write_config(config: ModelConfig, directory: Path, dtype: str) -> None:
    directory.mkdir(parents=True)
    save_config(config, directory, dtype=getattr(torch, dtype), companions_from=None)


def compared(out: Path, hidden_size: int) -> Iterator[Record]:
    names = [path.stem.removeprefix("sequence-") for path in out.glob("sequence-*.npz")]
    engine = [np.load(out / f"sequence-{i}.npz")["logprobs"] for i in names]
    scored = {n: [np.load(out / f"scored-{n}-{i}.npy") for i in names] for n in (1, 2)}
    num_tokens = sum(map(len, engine))
    assert num_tokens > 0
    params: dict[str, Any] = {"hidden": hidden_size, "tokens": num_tokens}
    for name, others in (("engine", engine), ("1 rank", scored[1])):
        pairs = zip(scored[2], others, strict=True)
        differing = sum(int((a.view(np.uint32) != b.view(np.uint32)).sum()) for a, b in pairs)
        yield Record("two_gpu", "fsdp", params, "exact", "differing_bits", differing, "logprobs", baseline=name)
        assert differing == 0, f"{differing} of {num_tokens} logprobs of 2 ranks differ from those of {name}"
    times = {n: np.load(out / f"step_s-{n}.npy").tolist() for n in (1, 2)}
    for size, seconds in times.items():
        value = statistics.median(seconds)
        against: dict[str, Any] = {}
        if size == 2:
            against = {"baseline": "1 rank", "ratio": statistics.median(times[1]) / value}
        spread = [min(seconds), max(seconds)]
        yield Record(
            "two_gpu", "fsdp", params | {"ranks": size}, "exact", "step_s", value, "s", spread=spread, **against
        )


def broadcast(args: argparse.Namespace) -> Iterator[Record]:
    device, replica_device = ("cpu", "cpu") if args.cpu else ("cuda:0", "cuda:1")
    yield from serving(
        device=device,
        replica_device=replica_device,
        transport="broadcast",
        is_tiny=args.tiny,
        num_versions=args.versions,
    )


def main_job(args: argparse.Namespace) -> Iterator[Record]:
    """Raises AssertionError where the run has a problem, a differing bit or a way beside the broadcast among them."""
    job = args.job
    with tempfile.TemporaryDirectory(prefix="two-gpu-") as directory, TerminalDisplay("loop") as display:
        run_dir = Path(directory) / "run"
        with tails(run_dir / "logs"):
            outcome, series = loop.run(job, run_dir, display)
            assert not outcome.problems, outcome.problems
            require_broadcast(series)
    yield from loop.exactness(outcome, job)
    times = {r.metric: r for r in loop.times(outcome, job, series)}
    yield from times.values()
    seconds = {name: times[f"{name}_s"].value for name in ("overlapped", "training", "generation")}
    longer = seconds["overlapped"] + max(seconds["training"], seconds["generation"])
    step = times["step_s"]
    yield Record(
        "two_gpu", "loop", step.params, step.mode, "step_s", step.value, "s", spread=step.spread,
        baseline="max(generation, training)", ratio=longer / step.value,
    )  # fmt: skip


def require_broadcast(series: Series) -> None:
    """A replica that a round failed fetches from weight_sync, and goes on as if nothing had been."""
    last = series.totals[-1]
    num_fallbacks, nbytes = last.get(FALLBACKS, 0.0), last.get(f"{BYTES_MOVED}:broadcast", 0.0)
    said = f"{nbytes:,.0f} bytes came by broadcast, {num_fallbacks:.0f} versions did not"
    assert nbytes > 0, said
    assert num_fallbacks == 0, said


@contextlib.contextmanager
def tails(logs: Path) -> Iterator[None]:
    """Says how the logs of a block that fails end, before they are gone."""
    try:
        yield
    except BaseException:
        for path in sorted(logs.glob("*.log")):
            print(f"--- end of {path.name}\n{path.read_text(errors='replace')[-3000:]}", file=sys.stderr)
        raise


@contextlib.contextmanager
def limited(what: str, seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the block, which must be of the main thread, when it takes longer."""

    def ring(*_: object) -> None:
        raise TimeoutError(f"{what} was not over after {seconds:.0f} s")

    handler, timer = signal.signal(signal.SIGALRM, ring), signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        # Whoever had set one has it again.
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def main(words: Sequence[str] | None = None) -> int:
    try:
        args = arguments(words)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    # What NCCL finds wrong is in the logs; it says nothing otherwise.
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    parts = {"certify": certify, "fsdp": fsdp, "broadcast": broadcast, "loop": main_job}

    def section(name: str) -> None:
        with limited(name, SECTION_S):
            for record in parts[name](args):
                recorder.add(record)

    with Recorder(args.out, interval_s=0.0) as recorder:
        failures = [f"{name} failed, see above" for name in args.only if not attempt(partial(section, name))]
    report(recorder.records)
    return verdict(failures)


if __name__ == "__main__":
    sys.exit(main())
