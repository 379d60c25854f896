"""The kernels: bits and gradients first, then each one's time against a library or the machine."""

from __future__ import annotations

from benchmarks.page import charts, products
from benchmarks.page.goals import Goal, at_least, at_most, none_differ
from benchmarks.page.results import Found, Results, ratio, table
from timzero.report.style import GREY, TEAL

LEAST_DECODE = {(256, 768): 0.9, (4, 32768): 0.85, (1, 32768): 0.6}
"""(sequences, context) -> target, of the copy bandwidth."""
LEAST_PREFILL = {("forward", "flash"): 1.15, ("forward", "cudnn"): 0.75, ("backward", "flash"): 0.7}
PEERS = {"flash": "FlashAttention", "cudnn": "cuDNN"}
MOST_PEAK_GB, MOST_LOGPROB, MOST_GRADIENT = 2.0, 1.25, 1.0
"""Targets of logprob: memory beyond weights and gradients, time over its products alone; of a gradient's error over that of
plain bfloat16."""
IN_GRAPH, ALONE = "decode_in_graph_time_us", "decode_alone_time_us"
CHECKS = {
    "attention_phases": "attention: decode, chunked prefill and packed forward, any page size",
    "attention_packed_forward": "attention: the packed forward that training runs, and the one that defines its bits",
    "attention_forward_shapes": "attention: the ways to compile its forward",
    "logprob": "logprob: sampling and scoring, any row count",
    "rms_norm": "RMSNorm, any row count",
    "grouped_linear": "products grouped by expert, any batch",
}
"""Case -> what must agree; products are checked on their own."""
OTHERS = {
    "rms_norm_add": "RMSNorm with residual", "silu_mul": "SwiGLU", "rope": "rotation", "chunked_prefill": "prefill in chunks",
    "grouped_linear": "products grouped by expert",
}  # fmt: skip


def differing(r: Results, case: str) -> list[Found]:
    return r.all(case, "differing_bits")


def errors(r: Results) -> list[Found]:
    return r.all(None, "gradient_error_ratio")


def checks(r: Results) -> str:
    rows = [
        [
            name,
            f"{f['params']['queries_compared']:,}" if "queries_compared" in f["params"] else "-",
            f"{f['value']:,.0f}",
        ]
        for case, name in CHECKS.items()
        for f in differing(r, case)
    ]
    found = errors(r)
    text = table(["what must agree", "rows compared", "differing bits"], rows) if rows else ""
    if not found:
        return text
    worst = max(found, key=lambda f: f["value"])
    return f"""\
{text}

{len(found)} gradients were compared with float64: the error of ours is {min(f["value"] for f in found):.2f} to
{worst["value"]:.2f} of that of plain PyTorch in bfloat16 (at most {MOST_GRADIENT:g} was the target)."""


def decodes(r: Results) -> list[tuple[Found, Found]]:
    """(in a graph, alone)."""
    return [
        (f, r.first("decode_attention", ALONE, **f["params"])) for f in r.all("decode_attention", IN_GRAPH)
    ]  # fmt: skip


def setting(found: Found) -> str:
    return f"{found['params']['sequences']} x {found['params']['context']:,}"


def wanted(found: Found) -> float | None:
    return LEAST_DECODE.get((found["params"]["sequences"], found["params"]["context"]))


def attention(r: Results) -> str:
    pairs = decodes(r)
    if not pairs:
        return ""
    rows = []
    for graph, alone in pairs:
        target = wanted(graph)
        cells = [text for f in (graph, alone) for text in (f"{f['value']:,.1f}", f"{f['ratio']:.3f}")]
        rows.append([setting(graph), *cells, "-" if target is None else f"{target:.2f}"])
    p = pairs[0][0]["params"]
    header = [
        "sequences x context",
        "in a graph, us",
        "of the copy bandwidth",
        "alone, us",
        "of the copy bandwidth",
        "target",
    ]
    return f"""\
### Attention

Decode with {p["heads"]} heads, {p["kv_heads"]} of keys and values, dimension {p["dim"]}, pages of {p["page"]} tokens:
bytes of keys and values over the time, as a share of the copy bandwidth. "In a graph" is how the engine runs it,
call after call over caches of their own; "alone" a launch is on the clock. Targets are for the graph.

{table(header, rows)}

![Decode attention's share of the copy bandwidth](plots/kernel_decode.svg)

{prefill(r)}"""


def decode_chart(r: Results) -> str:
    rows, marks = [], {}
    for graph, alone in decodes(r):
        name, target = setting(graph), wanted(graph)
        rows += [(name, "in a graph", graph["ratio"], ""), (name, "alone", alone["ratio"], "")]
        if target is not None:
            marks[name] = target
    return charts.bars(
        "Decode attention's share of the copy bandwidth, by sequences x context (dashed: targets)",
        rows, floor=None, unit="of the copy bandwidth", digits=2, colors={"in a graph": TEAL, "alone": GREY}, marks=marks,
    )  # fmt: skip


def prefills(r: Results, part: str, peer: str) -> Found | None:
    return r.maybe("prefill_attention", f"{part}_{peer}_time_us", part=part)


def prefill(r: Results) -> str:
    """Forward and backward against both of torch's backends."""
    rows, params = [], {}
    for part in ("forward", "backward"):
        found = {peer: prefills(r, part, peer) for peer in PEERS}
        first = next((f for f in found.values() if f), None)
        if first is None:
            continue
        params = first["params"]
        rows.append([part, f"{first['value']:,.0f}"])
        for peer, f in found.items():
            target = LEAST_PREFILL.get((part, peer))
            rows[-1] += ["-" if f is None else f"{f['ratio']:.2f}", "-" if target is None else f"{target:.2f}"]
    if not rows:
        return ""
    header = ["", "ours, us", *(text for name in PEERS.values() for text in (f"to {name}", "target"))]
    return f"""\
The packed forward and backward of training, {params["sequences"]} x {params["context"]:,} tokens, causal, the same heads: the
time of torch's backends, each with its keys and values repeated for every head, over ours.

{table(header, rows)}"""


def logprob(r: Results) -> str:
    time, peak = logprob_records(r)
    if time is None or peak is None:
        return ""
    p = time["params"]
    return f"""\
### Logprobs

Forward and backward over {p["tokens"]:,} tokens x {p["d"]:,} x {p["v"]:,}, never with all logits in memory: peak
memory beyond weights and gradients is {peak["value"] / 1e9:.2f} GB (at most {MOST_PEAK_GB:g} was the target; the
logits alone would be {4 * p["tokens"] * p["v"] / 1e9:.1f}), and {time["value"] / 1e3:.1f} ms are
{1 / time["ratio"]:.2f} of its products alone (at most {MOST_LOGPROB} was the target)."""


def logprob_records(r: Results) -> tuple[Found | None, Found | None]:
    """(time, peak memory)."""
    return r.maybe("logprob", "logprob_time_us"), r.maybe("logprob", "peak_bytes_beyond_gradients")


def others(r: Results) -> str:
    """What has no target, the fastest where there are several ways."""
    rows = []
    for case, name in OTHERS.items():
        metric = "grouped_time_us" if case == "grouped_linear" else f"{case}_time_us"
        found = r.all(case, metric)
        if case == "chunked_prefill":
            found = sorted(found, key=lambda f: f["value"])[:1]
        for f in found:
            p = f["params"]
            size = f"{p['tokens']:,} tokens" if "tokens" in p else f"{p['rows']:,} rows"
            if "queries" in p:
                size = f"{p['sequences']} x {p['queries']} queries behind {p['context']:,} keys, tiles of {p['rows']}"
            rows.append([name, size, f"{f['value']:,.0f}", f"{f['ratio']:.2f}", f["baseline"]])
    if not rows:
        return ""
    return f"""\
### Other kernels

How near each comes to what its bytes need at the copy bandwidth or its FLOP in a large product, and to the larger of
both where a floor is named.

{table(["", "size", "us", "share", "of"], rows)}"""


def goals(r: Results) -> list[Goal]:
    phases = differing(r, "attention_phases")
    queries = sum(f["params"]["queries_compared"] for f in phases)
    found = [*products.goals(r), none_differ("kernels: differing bits of attention", phases, f"{queries:,} queries")]
    for (sequences, context), least in LEAST_DECODE.items():
        share = ratio(r.maybe("decode_attention", IN_GRAPH, sequences=sequences, context=context))
        found.append(at_least(f"kernels: decode, {sequences} x {context:,}, of the copy bandwidth", least, share))
    for (part, peer), least in LEAST_PREFILL.items():
        found.append(at_least(f"kernels: attention {part} to {PEERS[peer]}", least, ratio(prefills(r, part, peer))))
    time, peak = logprob_records(r)
    worst = max((f["value"] for f in errors(r)), default=None)
    return [
        *found,
        at_most(
            "kernels: logprob, peak beyond weights and gradients",
            MOST_PEAK_GB,
            peak["value"] / 1e9 if peak else None,
            "GB",
        ),
        at_most("kernels: logprob, time to its products", MOST_LOGPROB, 1 / time["ratio"] if time else None),
        at_most("kernels: worst gradient's error to plain bfloat16", MOST_GRADIENT, worst),
    ]


def plots(r: Results) -> dict[str, str]:
    return products.plots(r) | ({"kernel_decode": decode_chart(r)} if decodes(r) else {})


def section(r: Results) -> str:
    if not r.records:
        return ""
    bandwidth, matmul = (r.value("ceiling", metric, None) for metric in ("bytes_per_s", "flop_per_s"))
    pieces = filter(None, (checks(r), products.section(r), attention(r), logprob(r), others(r)))
    return "\n\n".join([
        "## The kernels",
        f"""\
Bits and gradients are checked first, and nothing is timed where one is wrong. The machine's own ceilings, measured
in the same run: {bandwidth / 1e12:.2f} TB/s copied, {matmul / 1e12:,.0f} TFLOP/s in a large product.""",
        *pieces,
    ])  # fmt: skip
