"""The loop of services: what a step's time goes to, and the bits of every trained token."""

from __future__ import annotations

from typing import Any

from benchmarks.page import charts
from benchmarks.page.results import Results, percent, table

PARTS = {
    "overlapped_s": "both compute", "training_s": "training alone", "generation_s": "generation alone",
    "lease_s": "waiting for a batch", "publish_s": "publishing", "checkpoint_s": "checkpoint", "other_s": "other",
}  # fmt: skip
"""Metric -> name; the last four are neither generation nor training."""
RATES = {"step_s": "step, s", "tokens_per_s": "trained tokens/s"}
SHARES = {
    "neither_share": "neither generation nor training",
    "gpu_waits_share": "GPU waits for the host, of generation",
    "gpu_waits_alone_share": "the same while nothing trains",
    "gpu_waits_full_share": "the same while every place is taken",
}
ENGINE = {
    f"engine_{name}_ms": f"engine step: {name}, ms"
    for name in ("schedule", "prepare", "wait", "read", "forward", "sample", "idle")
}

Run = tuple[Results, dict[str, Any]]
"""Records, and the parameters that a run's records share."""


def runs(r: Results) -> list[Run]:
    """By every parameter but the number of steps, of which the timed ones are fewer."""
    found = [{k: v for k, v in f["params"].items() if k != "steps"} for f in r.all("step", "step_s")]
    return [(r, params) for params in found]


def step_chart(r: Results) -> str:
    rows = [
        (
            f"{params['samples']} x {params['tokens']}, lag {params['lag']}",
            {name: r.value("step", metric, **params) for metric, name in PARTS.items()},
        )
        for _, params in runs(r)
    ]
    return charts.stacked("A step of the loop on one H200 by part (medians)", "s", rows, digits=2)


def comparison(every: list[Run]) -> str:
    """One column per run."""

    def cells(metric: str, form: str) -> list[str]:
        values = [r.value("step", metric, **p) if r.has("step", metric, **p) else None for r, p in every]
        return ["-" if v is None else percent(v) if form == "%" else f"{v:{form}}" for v in values]

    rows = [["model", *(str(p["model"]) for _, p in every)]]
    rows.append(["samples x tokens", *(f"{p['samples']} x {p['tokens']}" for _, p in every)])
    rows.append(["lag", *(str(p["lag"]) for _, p in every)])
    rows.append(["sequences at once", *(str(p.get("max_running", "-")) for _, p in every)])
    rows += [[name, *cells(metric, ",.1f" if metric == "step_s" else ",.0f")] for metric, name in RATES.items()]
    rows += [[f"{name}, s", *cells(metric, ".2f")] for metric, name in PARTS.items()]
    for names, form in ((SHARES, "%"), (ENGINE, ".2f")):
        rows += [[name, *cells(m, form)] for m, name in names.items() if any(r.has("step", m, **p) for r, p in every)]
    for metric, name in (("compared_tokens", "tokens compared"), ("differing_bits", "with differing bits")):
        rows.append([name, *(f"{r.value('tim', metric, **p):,.0f}" for r, p in every)])
    return table(["", *(r.name.split("/")[0].upper() for r, _ in every)], rows)


def waiting(r: Results, engine: Results) -> str:
    """How long the GPU waits for the host, beside what it waits in the engine alone."""
    found = [f for f in r.all("step", "gpu_waits_share") if f["baseline"]]
    if not found:
        return ""
    shares = " and ".join(f"{percent(f['value'])} with lag {f['params']['lag']}" for f in found)
    unmet = "" if all(f["ratio"] >= 1 for f in found) else ", which is not met"
    return f"""\
The GPU waits for the host in {shares} of generation ({limit(found[0])} was the target{unmet}): while a batch comes in,
and while hundreds of samples end together. In the engine alone it waits for {percent(engine.value("tiny", "gpu_waits_share"))}
with this model and 1,024 sequences, for {percent(engine.value("uniform", "gpu_waits_share"))} with the 1.7B shape."""


def limit(found: dict[str, Any]) -> str:
    """A target for a share, such as `at most 0.05`, in percent."""
    words, share = found["baseline"].rsplit(" ", 1)
    return f"{words} {100 * float(share):g} %"


def beside_cpu(r: Results) -> str:
    """What the records of two CPU cores are good for."""
    same = [f for f in r.all("step", "tokens_per_s") if f["ratio"]]
    if not same:
        return "The runs on two CPU cores have other settings; they are here because anybody can repeat them."
    found = same[0]
    return (
        f"{found['params']['samples']} samples of {found['params']['tokens']} tokens were run on two CPU cores too: the "
        f"H200 trains {found['ratio']:.0f} times the tokens a second. The other run on a CPU is there for anybody to repeat."
    )


def section(r: Results, cpu: Results, engine: Results) -> str:
    compared, differing = (sum(f["value"] for f in r.all("tim", m)) for m in ("compared_tokens", "differing_bits"))
    judged = [f for f in r.all("step", "neither_share") if f["baseline"] and f["params"]["lag"]]
    neither = " and ".join(percent(f["value"]) for f in judged)
    allowed = limit(judged[0])
    return f"""\
## The loop of services

Gateway, Valkey, one replica, the trainer and weight_sync on one machine; replica and trainer share its GPU.
SmolLM2-135M is trained with GRPO. A step lasts from the end of one to the end of the next; the first two
and the last are not timed. Each number is a median over steps, so parts do not add up to the step exactly.

![A step of the loop by part](plots/loop_step.svg)

{comparison([*runs(r), *runs(cpu)])}

On the H200 the trainer compared **{compared:,.0f} tokens** with what the engine had recorded, under the version
that sampled them: **{differing:,.0f} differ**. The share of a step that is neither generation nor training is
{neither} ({allowed} was the target, for 512 samples of 128 tokens and lag 1; with lag 0 nothing hides what a batch's
way to the trainer takes). {beside_cpu(r)}

{waiting(r, engine)}
"""


PLOTS = {"loop_step": step_chart}
