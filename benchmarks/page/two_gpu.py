"""Trainer and rollout on two GPUs: FSDP2 over both, weights broadcast from one to the other, the loop over both."""

from __future__ import annotations

from benchmarks.page import loop, weights
from benchmarks.page.goals import Goal, none_differ
from benchmarks.page.results import Results, table

AGAINST = {"1 rank": "those of 1 rank", "engine": "those that the engine recorded"}


def differing(r: Results, baseline: str) -> list[dict]:
    return [f for f in r.all("fsdp", "differing_bits") if f["baseline"] == baseline]


def fsdp(r: Results) -> str:
    steps = r.all("fsdp", "step_s")
    if not steps:
        return ""
    bits = [[AGAINST[b], f"{f['params']['tokens']:,}", f"{f['value']:,.0f}"] for b in AGAINST for f in differing(r, b)]
    rows = [
        [str(f["params"]["ranks"]), f"{f['value']:.3f}", " to ".join(f"{s:.3f}" for s in f["spread"]),
         "-" if f["ratio"] is None else f"{f['ratio']:.2f}"]
        for f in steps
    ]  # fmt: skip
    return f"""\
### FSDP2 over two ranks

Logprobs of two ranks over what the engine has sampled, compared bit by bit:

{table(["with", "tokens", "differing"], bits)}

A step over all of it, forward, backward and optimizer:

{table(["ranks", "step, s", "least to most", "times as fast as 1 rank"], rows)}"""


def broadcast(r: Results) -> str:
    if not weights.servings([r]):
        return ""
    return f"""\
### Weights by broadcast

Trainer on one GPU, replica on the other, which samples meanwhile: NCCL carries the versions.

{weights.serving_table([r])}"""


def main_job(r: Results) -> str:
    found = r.maybe("loop", "step_s")
    if found is None:
        return ""
    longer = found["value"] * found["ratio"]
    return f"""\
### The loop over two GPUs

The job of "The loop of services" with lag 1, trainer and replica on a GPU each: a step takes {found["value"]:.2f} s,
{1 / found["ratio"]:.2f} times the longer of generation and training ({longer:.2f} s).

{loop.comparison(loop.runs(r))}"""


def goals(of_fsdp: Results, of_loop: Results) -> list[Goal]:
    tokens = sum(f["params"]["tokens"] for f in differing(of_fsdp, "engine"))
    trained = sum(f["value"] for f in of_loop.all("tim", "compared_tokens"))
    bits = (none_differ(f"two GPUs: differing logprobs of 2 ranks, with {AGAINST[b]}", differing(of_fsdp, b), f"{tokens:,}")
            for b in AGAINST)  # fmt: skip
    tim = none_differ(
        "two GPUs: differing bits of trained tokens", of_loop.all("tim", "differing_bits"), f"{trained:,.0f} tokens"
    )
    return [*bits, tim]


def section(of_fsdp: Results, of_broadcast: Results, of_loop: Results) -> str:
    pieces = list(filter(None, (fsdp(of_fsdp), broadcast(of_broadcast), main_job(of_loop))))
    return "\n\n".join(["## Two GPUs", *pieces]) if pieces else ""
