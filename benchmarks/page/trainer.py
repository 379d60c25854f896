"""The trainer: speed and memory by degree of recomputation, beside transformers, and a step by part."""

from __future__ import annotations

from benchmarks.architectures import QWEN3_1_7B
from benchmarks.page import charts
from benchmarks.page.charts import Point
from benchmarks.page.goals import Goal
from benchmarks.page.results import Found, Results, table
from benchmarks.trainer_cases.shapes import PEAK_FLOPS, Case, flops, num_parameters

CASE = Case(4, 4096)
COMPILED = "transformers compiled"
LEAST_MFU, WANTED_MFU, LEAST_FORWARD, MOST_PEAK = 0.40, 0.50, 0.95, 0.5
"""Targets: MFU of a step; what is hoped for; exact forward over fast; peak memory over the compiled peer's."""
EARLIER_PEAK = 74.8e9
"""Bytes that the compiled peer needed when the target was set, with transformers 5.17."""
BEST = "mlp"
COMPUTES_NOTHING = ("norms, rope, swiglu, embedding", "casts and copies of shards", "optimizer", "other")
"""Parts whose work MFU does not count."""


def degree(step: Found) -> str:
    """What is computed again in the backward, as the page calls it."""
    params = step["params"]
    kept = "" if params.get("reshard", True) else ", gathered weights kept"
    return params.get("recompute", "-") + kept


def steps(r: Results, case: Case = CASE, mode: str | None = None) -> list[Found]:
    return r.all("step", "tokens_per_s", mode, **case.params)


def peak(r: Results, step: Found) -> float:
    """Bytes."""
    p = step["params"]
    return r.value("step", "peak_bytes", step["mode"], **p, **{k: None for k in ("recompute", "reshard") if k not in p})


def mfu(r: Results, step: Found) -> float:
    p = step["params"]
    return r.value("step", "mfu", step["mode"], **p, **{k: None for k in ("recompute", "reshard") if k not in p})


def speed(r: Results) -> str:
    """Every step that was timed."""
    every = r.all("step", "tokens_per_s")
    rows = []
    for step in sorted(every, key=lambda s: -s["params"]["sequences"]):
        p = step["params"]
        case, to_peers = Case(p["sequences"], p["length"]), []
        for mode in ("transformers", COMPILED):
            peers = steps(r, case, mode)
            to_peers.append(f"{step['value'] / peers[0]['value']:.2f}" if peers else "-")
        peers = steps(r, case, COMPILED)
        memory = f"{peak(r, step) / peak(r, peers[0]):.2f}" if peers else "-"
        rows.append([f"{p['sequences']} x {p['length']:,}", step["mode"], degree(step), f"{step['value']:,.0f}",
                     f"{mfu(r, step):.3f}", f"{peak(r, step) / 1e9:.1f}", *to_peers, memory])  # fmt: skip
    header = ["tokens", "kernels", "computed again", "tokens/s", "MFU", "peak, GB", "tokens/s to eager",
              "tokens/s to compiled", "peak to compiled"]  # fmt: skip
    return table(header, rows)


def forward(r: Results) -> str:
    found = {f["mode"]: f["value"] for f in r.all("forward", "tokens_per_s", None, **CASE.params)}
    ratio = found["exact"] / found["fast"]
    others = ", ".join(f"{mode} {value:,.0f}" for mode, value in found.items() if mode != "exact")
    is_met = "met" if ratio >= LEAST_FORWARD else "not met"
    return f"""\
Forward alone, {CASE.sequences} x {CASE.length:,}: exact {found["exact"]:,.0f} tokens/s, {others}. Exact over fast
is {ratio:.3f} (at least {LEAST_FORWARD} was the target, {is_met})."""


def memory_chart(r: Results) -> str:
    def of(mode: str, *, label: str = "") -> list[Point]:
        found = sorted(
            ((peak(r, s), s) for s in steps(r, mode=mode) if s["params"].get("reshard", True)), key=lambda f: f[0]
        )
        return [Point(x=b / 1e9, y=s["value"] / 1e3, label=label or s["params"].get("recompute", "")) for b, s in found]

    series = {
        "exact": of("exact"),
        "fast": of("fast", label=" "),
        "transformers, eager": of("transformers", label="eager"),
        "transformers, compiled": of(COMPILED, label="compiled"),
    }
    title = f"A training step of {CASE.sequences} x {CASE.length:,} tokens, by what is computed again in the backward"
    return charts.points(title, ("peak memory, GB", "1,000 tokens / s"), series, low=20.0)


def parts_ms(r: Results, mode: str) -> dict[str, float]:
    return {f["params"]["part"]: f["value"] for f in r.all("step_part", "milliseconds", mode, **CASE.params)}


def parts_chart(r: Results) -> str:
    rows = [(mode, parts_ms(r, mode)) for mode in ("exact", "fast")]
    return charts.stacked(
        f"A training step of {CASE.tokens:,} tokens by part, recomputation {BEST}", "ms", rows, digits=0
    )


def counted() -> dict[str, float]:
    """FLOP of a step by part, as MFU counts them: recomputation and what is done twice in a backward are not in it."""
    head = QWEN3_1_7B.vocab_size * QWEN3_1_7B.hidden_size
    products = 6 * CASE.tokens * (num_parameters(QWEN3_1_7B) - head)
    found = {"gemm": float(products), "head": 6.0 * CASE.tokens * head}
    return found | {"attention": flops(QWEN3_1_7B, CASE, is_step=True) - sum(found.values())}


def missing(r: Results, rate: float) -> str:
    """Where the time goes that separates the step from WANTED_MFU. Args: rate, of products on this machine, FLOP/s."""
    exact, fast = parts_ms(r, "exact"), parts_ms(r, "fast")
    at_rate = {part: 1e3 * flop / rate for part, flop in counted().items()}
    rows = [
        [part, f"{ms:.0f}", f"{fast[part]:.0f}", f"{at_rate[part]:.0f}" if part in at_rate else "-",
         f"{ms - at_rate.get(part, 0.0):.0f}"]
        for part, ms in sorted(exact.items(), key=lambda item: -item[1])
    ]  # fmt: skip
    total = sum(exact.values())
    sums = (total, sum(fast.values()), sum(at_rate.values()), total - sum(at_rate.values()))
    rows.append(["sum", *(f"{ms:.0f}" for ms in sums)])
    wanted = 1e3 * flops(QWEN3_1_7B, CASE, is_step=True) / (WANTED_MFU * PEAK_FLOPS)
    fastest = max(steps(r, mode="exact"), key=lambda s: s["value"])
    ours = {name: 1e3 * CASE.tokens / s["value"] for name, s in ((BEST, best(r)), ("fastest", fastest))}
    m = QWEN3_1_7B
    again = 1e3 * 4 * CASE.tokens * m.num_layers * m.hidden_size * m.intermediate_size / rate
    logits = 1e3 * 2 * CASE.tokens * m.vocab_size * m.hidden_size / rate
    uncounted = sum(exact[part] for part in COMPUTES_NOTHING)
    return f"""\
![A training step by part](plots/trainer_step.svg)

"At the matrix rate" is what MFU counts, at the {rate / 1e12:,.0f} TFLOP/s that a large product reaches on this
machine; "beyond it" is the time that a part takes longer. "host" is the wall time of one step, run on its own, in
which nothing ran on the device.

{table(["part", "exact, ms", "fast, ms", "at the matrix rate, ms", "beyond it, ms"], rows)}

An MFU of {WANTED_MFU} would be a step of {wanted:.0f} ms. `{BEST}` takes {ours[BEST]:.0f},
{ours[BEST] - wanted:.0f} more; the fastest exact step ({degree(fastest)}) takes {ours["fastest"]:.0f},
{ours["fastest"] - wanted:.0f} more. What is missing:

- Attention runs at {at_rate["attention"] / exact["attention"]:.2f} of the matrix rate, forward and backward
  together: {exact["attention"] - at_rate["attention"]:.0f} ms beyond it. Its backward computes the scores again,
  which is not counted.
- Products take {exact["gemm"] - at_rate["gemm"]:.0f} ms beyond it, of which the gate and up products that `{BEST}`
  computes again are {again:.0f} at that rate.
- The head takes {exact["head"] - at_rate["head"]:.0f} ms beyond it, of which {logits:.0f} are logits computed again
  in the backward, because they are never kept.
- Norms, rotation, SwiGLU, casts, the optimizer and what has no other name are {uncounted:.0f} ms that MFU counts as
  nothing; the host adds {exact["host"]:.0f} where steps are run one by one."""


def best(r: Results) -> Found:
    return r.first("step", "tokens_per_s", "exact", **CASE.params, recompute=BEST, reshard=None)


def compiled(r: Results) -> Found:
    return r.first("step", "tokens_per_s", COMPILED, **CASE.params)


def goals(r: Results) -> list[Goal]:
    """Of `BEST`."""
    step, peer = best(r), compiled(r)
    forwards = [r.value("forward", "tokens_per_s", mode, **CASE.params) for mode in ("exact", "fast")]
    to_peer, memory, ratio = step["value"] / peer["value"], peak(r, step) / peak(r, peer), forwards[0] / forwards[1]
    return [
        Goal("trainer: forward, exact / fast", f"at least {LEAST_FORWARD}", f"{ratio:.3f}", ratio >= LEAST_FORWARD),
        Goal(f"trainer: step `{BEST}` to compiled transformers", "at least 1", f"{to_peer:.3f}", to_peer >= 1),
        Goal(f"trainer: MFU of `{BEST}`", f"at least {LEAST_MFU:.2f}", f"{mfu(r, step):.3f}", mfu(r, step) >= LEAST_MFU),
        Goal(f"trainer: peak of `{BEST}` to compiled transformers", f"at most {MOST_PEAK}", f"{memory:.2f}", memory <= MOST_PEAK),
    ]  # fmt: skip


def memory(r: Results) -> str:
    """What half of the peer's memory would take."""
    step, peer = best(r), compiled(r)
    layer = r.first("step", "tokens_per_s", "exact", **CASE.params, recompute="layer", reshard=None)
    p = num_parameters(QWEN3_1_7B)
    return f"""\
Half of compiled transformers' memory was the target. `{BEST}` needs {peak(r, step) / peak(r, peer):.2f} of its peak
in this run ({peak(r, peer) / 1e9:.1f} GB), and {peak(r, step) / EARLIER_PEAK:.2f} of the {EARLIER_PEAK / 1e9} GB
that were measured for it when the target was set. `layer` needs {peak(r, layer) / peak(r, peer):.2f}, at an MFU of
{mfu(r, layer):.3f}. The two do not hold the same: float32 masters, moments and gradients alone are
{16 * p / 1e9:.1f} GB here, whereas the baseline keeps weights, moments and gradients in bfloat16, without masters,
in {8 * p / 1e9:.1f}."""


def section(r: Results, engine: Results) -> str:
    checked = r.all(None, "differing_bits")
    return f"""\
## The trainer

Forward, backward, clipping and AdamW over random weights in the shape of Qwen3-1.7B
({num_parameters(QWEN3_1_7B) / 1e9:.2f}e9 parameters), FSDP2 on one GPU, {CASE.tokens:,} packed tokens a step; and
transformers with SDPA and torch's fused AdamW, all in bfloat16, eager and compiled by `torch.compile`, in the same
run. MFU counts 6 x parameters x tokens and causal attention, recomputation not, against {PEAK_FLOPS / 1e12:.0f}
TFLOP/s. Before anything is timed, packing, prefix sharing, the training forward and a second backward are compared
with the reference at every degree: {len(checked)} checks, {sum(f["value"] for f in checked):,.0f} differing
elements.

{speed(r)}

{forward(r)} Compiling was measured for {CASE.sequences} x {CASE.length:,} only.

![Tokens a second against peak memory](plots/trainer_memory.svg)

{memory(r)}

### A training step by part

{missing(r, engine.value("ceiling", "flop_per_s", None))}
"""


PLOTS = {"trainer_memory": memory_chart, "trainer_step": parts_chart}
