"""The engine: six workloads, other engines beside it, and what a decode step is made of."""

from __future__ import annotations

from benchmarks.architectures import QWEN3_1_7B, kv_elements, num_parameters
from benchmarks.engine_cases.budget import TARGETS_MS
from benchmarks.engine_cases.peers import PEERS
from benchmarks.engine_cases.workloads import BYTES, WORKLOADS, Workload
from benchmarks.page import charts
from benchmarks.page.results import Results, percent, table

UNIFORM, PREFILL = WORKLOADS[0], WORKLOADS[1]
PARTS = {
    "attention": "attention", "gemms": "products", "small": "norms, rotation, SwiGLU, cache", "sampling": "sampling",
    "head": "head",
}  # fmt: skip
"""Of the budget -> as the page calls them."""
UNMEASURED = "rest"
LOGIT_BYTES = 4
"""float32."""


def workloads(r: Results) -> str:
    """Tokens per second of both modes, how near they come to the floor, and who waits."""
    rows = []
    for w in WORKLOADS:
        exact, fast = (r.first(w.name, w.unit, mode) for mode in ("exact", "fast"))
        rows.append([
            w.name, "Qwen3-1.7B" if w.model is QWEN3_1_7B else "SmolLM2-135M", requests(w), f"{exact['value']:,.0f}",
            " to ".join(f"{v:,.0f}" for v in dict.fromkeys(exact["spread"])), f"{fast['value']:,.0f}", f"{exact['ratio']:.3f}",
            f"{r.value(w.name, 'floor_share'):.2f}", percent(r.value(w.name, "gpu_waits_share")),
        ])  # fmt: skip
    header = ["workload", "shape", "requests", "exact, tokens/s", "its passes", "fast, tokens/s", "exact / fast",
              "of the floor", "GPU waits for the host"]  # fmt: skip
    slow = [w.name for w in WORKLOADS if r.value(w.name, "gpu_waits_share") > 0.05]
    text = f"""\
Random weights in the shapes of Qwen3-1.7B and SmolLM2-135M, all requests submitted at once, end-of-sequence
ignored, temperature 1, the logprob of every token recorded. `prefill` counts tokens of prompts, the others sampled
tokens, prefill included in the time. Each number is the median of three passes; a workload ends early when its
passes take long, and one number under "its passes" means one pass. The floor is what this machine's own copy
bandwidth ({r.value("ceiling", "bytes_per_s", None) / 1e12:.2f} TB/s) and matrix rate
({r.value("ceiling", "flop_per_s", None) / 1e12:,.0f} TFLOP/s), measured in the same run, leave: prompts through the
products once, then weights and contexts read once a step.

{table(header, rows)}

{gates(r)}"""
    for name in slow:
        host, device = r.value(name, "host_ms"), r.value(name, "device_ms") + r.value(name, "sample_ms")
        text += f"""

In `{name}` the host is the limit: a step needs {device:.1f} ms on the device and {host:.1f} ms of scheduling,
preparing and reading back on the host, so the device waits."""
    return text


def gates(r: Results) -> str:
    """What was compared before anything was timed."""
    compared, differing = ({mode: [r.value(w.name, metric, mode) for w in WORKLOADS] for mode in ("exact", "fast")}
                           for metric in ("compared_tokens", "differing_bits"))  # fmt: skip
    deltas = [r.value(w.name, "mean_delta", "fast") for w in WORKLOADS]
    return f"""\
Before it is timed, each mode's logprobs are compared with the trainer's forward over the same tokens: exact differs
in {sum(differing["exact"]):,.0f} of {sum(compared["exact"]):,.0f}, fast in {sum(differing["fast"]):,.0f} of
{sum(compared["fast"]):,.0f}, by {min(deltas):.2g} to {max(deltas):.2g} nats a token on average."""


def requests(w: Workload) -> str:
    new = f"1 to {w.longest:,}, median {w.new_tokens}" if w.is_heavy_tailed else str(w.new_tokens)
    samples = f" x {w.samples} samples" if w.samples > 1 else ""
    return f"{w.num_prompts:,}{samples} x {w.prompt_tokens:,}" + ("" if w.is_prefill else f" + {new}")


def rates(r: Results, kind: str) -> list[tuple[str, str, float, str]]:
    """(name, plain | exact, tokens per second, remark): other engines, then ours."""
    w = UNIFORM if kind == "output" else PREFILL
    rows = [(p.name, p.mode, p.rates[kind], p.variant if kind == "output" else "") for p in PEERS if kind in p.rates]
    ours = [
        ("timzero", name, r.value(w.name, w.unit, mode), "") for name, mode in (("plain", "fast"), ("exact", "exact"))
    ]
    return rows + ours


def output_chart(r: Results) -> str:
    floor = r.value("uniform", "output_tokens_per_s") / r.value("uniform", "floor_share")
    return charts.bars("Output tokens a second, workload uniform", rates(r, "output"), floor=floor)


def prefill_chart(r: Results) -> str:
    floor = r.value("prefill", "prompt_tokens_per_s") / r.value("prefill", "floor_share")
    return charts.bars("Prompt tokens a second, workload prefill", rates(r, "prompt"), floor=floor)


def peers(r: Results) -> str:
    """Other engines beside ours."""
    rows = [
        [p.name, p.mode, *(f"{p.rates[k]:,.0f}" if k in p.rates else "-" for k in ("output", "prompt")), p.note]
        for p in PEERS
    ]
    notes = {"fast": ("plain", '`numerics = "fast"`'), "exact": ("exact", "bits of the trainer's forward")}
    for mode, (name, note) in notes.items():
        found = (r.value(w.name, w.unit, mode) for w in (UNIFORM, PREFILL))
        rows.append(["timzero", name, *(f"{value:,.0f}" for value in found), note])
    return f"""\
The others were measured before, not in this run, on a machine of the same kind (one H200) and with the same two
workloads. "plain" is an engine as it comes, for timzero `numerics = "fast"`; "exact" is vLLM where results do not
depend on the batch, VeXact and timzero where they are to be those of the trainer.

{table(["engine", "mode", "output tokens/s", "prompt tokens/s", ""], rows)}

![Output tokens a second of four engines](plots/engine_output.svg)

![Prompt tokens a second of four engines](plots/engine_prefill.svg)"""


def floors_ms(r: Results) -> dict[str, float]:
    """The least that a part may take: its bytes at the copy bandwidth, its FLOP at the matrix rate, the larger of the two."""
    bandwidth, matmul = (r.value("ceiling", metric, None) for metric in ("bytes_per_s", "flop_per_s"))
    params = r.first("budget", "step_ms")["params"]
    head = QWEN3_1_7B.vocab_size * QWEN3_1_7B.hidden_size
    weights = {"gemms": num_parameters(QWEN3_1_7B) - head, "head": head}
    found = {
        part: 1e3 * max(BYTES * n / bandwidth, 2 * n * params["sequences"] / matmul) for part, n in weights.items()
    }
    read = BYTES * kv_elements(QWEN3_1_7B) * params["sequences"] * params["context"]
    logits = LOGIT_BYTES * QWEN3_1_7B.vocab_size * params["sequences"]
    return found | {"attention": 1e3 * read / bandwidth, "sampling": 1e3 * logits / bandwidth}


def parts_ms(r: Results, mode: str) -> dict[str, float]:
    """Of a step, and what no part holds."""
    found = {part: r.value("budget", f"{part}_ms", mode) for part in PARTS}
    return found | {UNMEASURED: r.value("budget", "step_ms", mode) - sum(found.values())}


def budget_chart(r: Results) -> str:
    names = PARTS | {UNMEASURED: UNMEASURED}
    floors = floors_ms(r)
    target = {part: TARGETS_MS[part] for part in PARTS}
    ours = ((mode, parts_ms(r, mode)) for mode in ("exact", "fast"))
    rows = [("target", target), *ours, ("floor", {part: floors[part] for part in PARTS if part in floors})]
    named = [(row, {names[part]: ms for part, ms in parts.items()}) for row, parts in rows]
    return charts.stacked("One decode step of 256 sequences by part", "ms", named, digits=2)


def budget(r: Results) -> str:
    """Part by part, against targets and floors."""
    exact, fast, floors = parts_ms(r, "exact"), parts_ms(r, "fast"), floors_ms(r)
    rows = [
        [
            name, f"{exact[part]:.2f}", f"{fast[part]:.2f}", f"{TARGETS_MS[part]:.2f}",
            "yes" if exact[part] <= TARGETS_MS[part] else f"no, {exact[part] - TARGETS_MS[part]:+.3f}",
            f"{floors[part]:.2f}" if part in floors else "-",
            f"{floors[part] / exact[part]:.2f}" if part in floors else "-",
        ]
        for part, name in PARTS.items()
    ]  # fmt: skip
    rows.append([UNMEASURED, f"{exact[UNMEASURED]:.2f}", f"{fast[UNMEASURED]:.2f}", "-", "-", "-", "-"])
    step = r.value("budget", "step_ms")
    is_met = "yes" if step <= TARGETS_MS["step"] else f"no, {step - TARGETS_MS['step']:+.3f}"
    of_fast = r.value("budget", "step_ms", "fast")
    rows.append(["step", f"{step:.2f}", f"{of_fast:.2f}", f"{TARGETS_MS['step']:.2f}", is_met, "-", "-"])
    left = sorted(((exact[p] - floors[p], PARTS[p]) for p in floors), reverse=True)
    more = ", ".join(f"{ms:.2f} ms in the {name}" for ms, name in left)
    params = r.first("budget", "step_ms")["params"]
    return f"""\
The middle of `uniform`: {params["sequences"]} sequences decode with {params["context"]} tokens of context each. A
part is all its calls of one step, every layer's with its own weights and cache, in one CUDA graph; the rest is the
step's wall time less the parts: copies, page tables, gaps. Targets are what throwaway code reached on this kind of
machine, part by part. A floor is a part's bytes at the copy bandwidth or its FLOP at the matrix rate.

![A decode step by part](plots/decode_budget.svg)

{table(["part", "exact, ms", "fast, ms", "target, ms", "met", "floor, ms", "of the floor"], rows)}

Attention reads keys and values at {floors["attention"] / exact["attention"]:.2f} of the copy bandwidth (the target
is {floors["attention"] / TARGETS_MS["attention"]:.2f}). Left above the floors: {more}. Sampling is arithmetic more
than bytes: a 32-bit word of Philox4x32-10 and two logarithms for each of
{params["sequences"] * QWEN3_1_7B.vocab_size:,} logits, so that a draw depends on seed, prompt, sample and position
alone. The small kernels ({exact["small"]:.2f} ms) and the rest ({exact[UNMEASURED]:.2f}) have no floor but zero."""


def section(r: Results) -> str:
    return f"""\
## The engine

{workloads(r)}

### Beside other engines

{peers(r)}

### One decode step by part

{budget(r)}
"""


PLOTS = {"engine_output": output_chart, "engine_prefill": prefill_chart, "decode_budget": budget_chart}
