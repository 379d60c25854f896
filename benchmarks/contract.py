"""The row contract of the whole engine: no company, order, chunking, graph, cache hit or preemption changes one bit of one token.

`python -m benchmarks.contract [--out FILE] [--only qwen3 smollm2] [--model DIR] [--tiny]`

Over a million sampled tokens on a GPU, at three temperatures in one batch, against the trainer's packed forward as well; then
the control: library products, and scaled_dot_product_attention, on one side must show. `--model` (or TIMZERO_SMOLLM2) names a
directory with SmolLM2's weights; without it they are random. `--tiny` shows on a CPU that the code works.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.architectures import QWEN3_1_7B, SMOLLM2_135M, TINY
from benchmarks.engine_cases.arms import Arms, Finding, Plan
from benchmarks.engine_cases.drive import Weights
from benchmarks.harness import Record, Recorder, machine, verdict
from services.rollout.weights import DTYPES
from shared.kernels import build_ops
from shared.models import load_model, named_weights

LEAST_TOKENS, LEAST_IN_AN_ARM = 1_000_000, 20_000
"""Sampled tokens that a proof on a GPU takes, over all models and in every arm of each."""
QWEN3 = Plan(
    name="qwen3", model=QWEN3_1_7B, device="cuda", dtype="bfloat16", num_requests=257, new_tokens=256,
    batch_sizes=(1, 2, 8, 32, 44, 45, 128, 256), least_requests=80, chunk_sizes=(1, 17, 64, 512), prompt_tokens=(1, 300),
    long_prompt=1100, page_size=64, max_step_tokens=8192, scored_tokens=16384,
)  # fmt: skip
PLANS = {"qwen3": QWEN3, "smollm2": replace(QWEN3, name="smollm2", model=SMOLLM2_135M)}
SMALL = Plan(
    name="tiny", model=TINY, device="cpu", dtype="float32", num_requests=9, new_tokens=12, batch_sizes=(1, 2, 4, 8),
    least_requests=3, chunk_sizes=(1, 17), prompt_tokens=(1, 40), long_prompt=70, page_size=4, max_step_tokens=128,
    scored_tokens=512,
)  # fmt: skip


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for the records")
    parser.add_argument("--only", nargs="*", choices=list(PLANS), help="models to run")
    parser.add_argument(
        "--model", type=Path, default=os.environ.get("TIMZERO_SMOLLM2"), help="directory of SmolLM2-135M"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    return parser.parse_args(words)


def weights(plan: Plan, directory: Path | None) -> tuple[Plan, Weights]:
    """The plan, for the directory's model if it is to have one, and the weights it runs over."""
    if directory is None or plan.name != "smollm2":
        return plan, Weights(plan.model, plan.device, plan.dtype)
    decoder = load_model(directory, build_ops("exact", plan.device), DTYPES[plan.dtype])
    plan = replace(plan, model=decoder.config)
    return plan, Weights(plan.model, plan.device, plan.dtype, dict(named_weights(decoder)))


def show(findings: dict[str, list[Finding]]) -> None:
    table = Table(title=f"row contract on {machine()}")
    for column in ("model", "arm", "tokens", "differing", "by temperature", ""):
        table.add_column(column)
    for name, found in findings.items():
        for f in found:
            by_temperature = "  ".join(f"{t}: {f.differing[t]} of {n:,}" for t, n in sorted(f.compared.items()))
            table.add_row(name, f.arm, f"{f.num_compared:,}", f"{f.num_differing:,}", by_temperature, f.problem)
    Console(width=170).print(table)


def records(name: str, kind: str, finding: Finding) -> Iterator[Record]:
    for t, compared in sorted(finding.compared.items()):
        params = {"model": name, "temperature": t, "kind": kind}
        yield Record("contract", finding.arm, params, "exact", "compared_tokens", compared, "tokens")
        yield Record("contract", finding.arm, params, "exact", "differing_tokens", finding.differing[t], "tokens")


def problems(arms: dict[str, list[Finding]], controls: dict[str, list[Finding]], *, is_proof: bool) -> list[str]:
    """Why the contract is not shown to hold; empty when it is."""
    found = []
    every = [(name, f) for name, fs in arms.items() for f in fs]
    found += [
        f"{name}, {f.arm}: {f.num_differing} of {f.num_compared} tokens differ" for name, f in every if f.num_differing
    ]
    found += [f"{name}, {f.arm}: {f.problem}" for name, f in every if f.problem]
    found += [
        f"{name}: nothing differs in any control"
        for name, fs in controls.items()
        if not any(f.num_differing for f in fs)
    ]
    if is_proof:
        counts = [f.num_compared for _, f in every]
        if sum(counts) < LEAST_TOKENS * len(arms) / len(PLANS) or min(counts) < LEAST_IN_AN_ARM:
            found.append(
                f"{sum(counts):,} tokens were compared and {min(counts):,} in the smallest arm: too few to say"
            )
    return found


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    if not args.tiny and not torch.cuda.is_available():
        print("benchmarks.contract needs a CUDA device, found none; --tiny runs on the CPU", file=sys.stderr)
        return 2
    plans = [SMALL] if args.tiny else [PLANS[name] for name in args.only or PLANS]
    arms: dict[str, list[Finding]] = {}
    controls: dict[str, list[Finding]] = {}
    with Recorder(args.out) as recorder:
        for plan in plans:
            plan, decoder = weights(plan, args.model)
            runner = Arms(plan, decoder)
            for kind, found, run in (("arm", arms, runner.run), ("control", controls, runner.controls)):
                begin = time.monotonic()
                for finding in run():
                    found.setdefault(plan.name, []).append(finding)
                    for record in records(plan.name, kind, finding):
                        recorder.add(record)
                    line = f"{finding.num_differing} of {finding.num_compared:,} tokens differ {finding.problem}"
                    print(f"{plan.name}: {finding.arm}: {line} ({time.monotonic() - begin:.0f} s)", flush=True)
                    begin = time.monotonic()
            recorder.save()
    show({name: [*arms[name], *controls[name]] for name in arms})
    return verdict(problems(arms, controls, is_proof=not args.tiny))


if __name__ == "__main__":
    sys.exit(main())
