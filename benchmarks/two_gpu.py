"""Trainer and rollout on two devices: bits first, then seconds.

`python -m benchmarks.two_gpu [--out FILE] [--only fsdp broadcast loop] [--steps N]` on a machine with two GPUs
`python -m benchmarks.two_gpu --cpu --tiny`: the same ways over gloo on a CPU, with models of 100k parameters

fsdp       FSDP2 over 2 ranks: logprobs to the bit those of 1 rank and of the engine; seconds of a step, 2 ranks against 1
broadcast  trainer on GPU 0, replica on GPU 1: NCCL broadcast of the 1.7B shape to a replica that samples; total, pause
loop       the main job with lag 1, weights by broadcast: a step's seconds against max(generation, training), TIM of every token
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import loop
from benchmarks.architectures import QWEN3_1_7B
from benchmarks.harness import Record, Recorder, report, verdict
from benchmarks.trainer_cases.shapes import tiny
from benchmarks.two_gpu_part import NUM_SEQUENCES
from benchmarks.weight_serving import serving
from services.rollout.offline import random_weights
from shared.kernels import build_ops
from shared.models import save_model
from timzero.display import TerminalDisplay

SECTIONS = ("fsdp", "broadcast", "loop")
PART_S = 540.0


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for the records")
    parser.add_argument("--only", nargs="*", choices=SECTIONS, default=list(SECTIONS), help="sections to run")
    parser.add_argument("--steps", type=int, default=8, help="of loop; versions of broadcast")
    parser.add_argument("--cpu", action="store_true", help="gloo on a CPU; goes with --tiny")
    parser.add_argument("--tiny", action="store_true", help="models of 100k parameters")
    args = parser.parse_args(words)
    if args.cpu != args.tiny:
        parser.error("--cpu and --tiny go together: the real shapes take hours on a CPU")
    if args.steps < 4:
        parser.error(
            f"--steps must be at least 4, got {args.steps}: the first two steps of loop and the last are not timed"
        )
    num_gpus = torch.cuda.device_count()
    if not args.cpu and num_gpus < 2:
        parser.error(f"two GPUs are needed, this machine has {num_gpus}; --cpu --tiny runs the same ways over gloo")
    return args


def fsdp(args: argparse.Namespace) -> Iterator[Record]:
    """Raises AssertionError where a bit differs."""
    device, dtype = ("cpu", "float32") if args.cpu else ("cuda", "bfloat16")
    config = tiny() if args.tiny else QWEN3_1_7B
    with tempfile.TemporaryDirectory(prefix="two-gpu-") as root:
        directory, out = Path(root) / "model", Path(root) / "out"
        out.mkdir()
        weights = random_weights(config, 0, ops=build_ops("fast", "cpu"), dtype=getattr(torch, dtype))
        save_model(weights, config, directory)
        del weights
        part = ["-m", "benchmarks.two_gpu_part"]
        words = [str(directory), str(out), device, dtype]
        run([sys.executable, *part, "sample", *words])
        for size in (1, 2):
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
            run([sys.executable, *torchrun, *part, "train", *words])
        yield from compared(out, config.hidden_size)


def run(command: list[str]) -> None:
    """Raises RuntimeError with the end of what the process said."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=PART_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")


def compared(out: Path, hidden_size: int) -> Iterator[Record]:
    engine = [np.load(out / f"sequence-{i}.npz")["logprobs"] for i in range(NUM_SEQUENCES)]
    scored = {n: [np.load(out / f"scored-{n}-{i}.npy") for i in range(NUM_SEQUENCES)] for n in (1, 2)}
    num_tokens = sum(map(len, engine))
    params: dict[str, Any] = {"hidden": hidden_size, "tokens": num_tokens}
    for name, others in (("engine", engine), ("1 rank", scored[1])):
        pairs = zip(scored[2], others, strict=True)
        differing = sum(int((a.view(np.uint32) != b.view(np.uint32)).sum()) for a, b in pairs)
        yield Record("two_gpu", "fsdp", params, "exact", "differing_bits", differing, "logprobs", baseline=name)
        assert not differing, f"{differing} of {num_tokens} logprobs of 2 ranks differ from those of {name}"
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
        num_versions=args.steps,
    )


def main_job(args: argparse.Namespace) -> Iterator[Record]:
    """Raises AssertionError where the run has a problem, a differing bit among them."""
    words = [f"num_steps={args.steps}", "run.lag=1", "trainer.transport=broadcast"]
    if not args.cpu:
        words += ["trainer.device=cuda", "rollout.device=cuda:1"]
    job = loop.job_of(words, is_tiny=args.tiny)
    with tempfile.TemporaryDirectory(prefix="two-gpu-") as directory, TerminalDisplay("loop") as display:
        outcome, series = loop.run(job, Path(directory) / "run", display)
    assert not outcome.problems, outcome.problems
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


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    torch.set_num_threads(1)
    recorder = Recorder(args.out, interval_s=0.0)
    parts = {"fsdp": fsdp, "broadcast": broadcast, "loop": main_job}
    failures = []
    for name in args.only:
        try:
            for record in parts[name](args):
                recorder.add(record)
        except (AssertionError, RuntimeError, subprocess.TimeoutExpired) as error:
            # The device time of the others is not to be lost.
            failures.append(f"{name}: {error}")
    recorder.save()
    report(recorder.records)
    return verdict(failures)


if __name__ == "__main__":
    sys.exit(main())
