"""The row contract of a whole engine, arm by arm."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.contract import PLANS
from benchmarks.engine_cases.arms import CONTROL_BATCH, TEMPERATURES
from benchmarks.page.results import Results, table

NAMES = {"smollm2": "SmolLM2-135M", "qwen3": "Qwen3-1.7B shape"}


def count(r: Results, case: str, metric: str, model: str) -> int:
    """Over every temperature."""
    return sum(int(found["value"]) for found in r.all(case, metric, model=model))


def rows(r: Results, kind: str) -> list[list[str]]:
    """One per arm: tokens compared and differing, for each model."""
    cases = dict.fromkeys(found["case"] for found in r.all(None, "compared_tokens", kind=kind))
    return [
        [case.removeprefix("control: "),
         *(f"{count(r, case, metric, model):,}" for model in NAMES for metric in ("compared_tokens", "differing_tokens"))]
        for case in cases
    ]  # fmt: skip


def totals(r: Results) -> tuple[int, int]:
    """(compared, differing) over every arm of both models."""
    compared, differing = (
        sum(int(f["value"]) for f in r.all(None, metric, kind="arm"))
        for metric in ("compared_tokens", "differing_tokens")
    )
    return compared, differing


def silent_controls(r: Results) -> str:
    """What a control says that shows nothing, so that nobody takes it for a proof."""
    lines = []
    for case in dict.fromkeys(f["case"] for f in r.all(None, "compared_tokens", kind="control")):
        for model, name in NAMES.items():
            if not count(r, case, "differing_tokens", model):
                what = case.removeprefix("control: ")
                lines.append(
                    f'For {name} the control "{what}" differs nowhere in batches of {CONTROL_BATCH}, '
                    "so for this model only the other one shows that a difference would be seen."
                )
    return "\n".join(lines)


def section(r: Results) -> str:
    compared, differing = totals(r)
    arms = rows(r, "arm")
    header = [
        "",
        *(f"{name}, {word}" for name in NAMES.values() for word in ("tokens", "differing")),
    ]
    plan = PLANS["qwen3"]
    least = min(int(row[i].replace(",", "")) for row in arms for i in (1, 3))
    return f"""\
## The row contract

{plan.num_requests} requests with prompts of {plan.prompt_tokens[0]} to {plan.prompt_tokens[1]} tokens (every eighth
has {plan.long_prompt:,}) and {plan.new_tokens} new tokens, at the temperatures {", ".join(map(str, TEMPERATURES))},
are sampled once in one batch; that is compared with the trainer's packed forward. Then requests are sampled again,
under one change for each row of the table, and every token must come out with the same id, the same argmax and the
same 32 bits of logprob. An arm also proves that it did what its name says: a prefix was hit, somebody was
preempted, no graph was replayed.

{table(header, arms)}

**{compared:,} tokens, {differing:,} differing**; {least:,} in the smallest arm. The controls put something else on
one side, and must differ:

{table(header, rows(r, "control"))}

{silent_controls(r)}
"""


PLOTS: dict[str, Callable[[Results], str]] = {}
