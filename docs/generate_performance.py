"""Writes docs/performance.md, its plots and the README's paragraph from benchmarks/results: `make docs`. A test compares them.

No measured number is typed here or in benchmarks/page; those of other engines are in benchmarks/engine_cases/peers.py.
A new section is a module there with `section`, its plots and its targets, named in `document`, `plots` and `targets`, and the
files of its records in `COMMANDS`. A section whose file is missing is left out, and its targets are said to be not measured;
engine, contract, loop and trainer must be there.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from benchmarks.page import contract, engine, kernels, loop, overlap, trainer, two_gpu, weights
from benchmarks.page.goals import Goal, goals_table
from benchmarks.page.results import ROOT, Found, Results, percent, table

TARGET = Path(__file__).with_name("performance.md")
README = TARGET.parents[1] / "README.md"
PLOTS = TARGET.with_name("plots")
COMMANDS = {
    "h200/engine": "python -m benchmarks.engine",
    "h200/contract": "python -m benchmarks.contract --model DIR",
    "h200/loop": "python -m benchmarks.loop run.model=DIR rollout.max_running=N",
    "h200/trainer": "python -m benchmarks.trainer",
    "cpu/loop": "python -m benchmarks.loop run.model=DIR",
    "h200/kernels": "python -m benchmarks.kernels",
    "h200/weight_sync": "python -m benchmarks.weight_sync --device cuda --only serving",
    "cpu/weight_sync": "python -m benchmarks.weight_sync",
    "h200/overlap": "python -m benchmarks.overlap run.model=DIR",
    "cpu/overlap": "python -m benchmarks.overlap run.model=DIR prompts_per_step=N sampling.max_tokens=N",
    "h200x2/two_gpu_fsdp": "python -m benchmarks.two_gpu --only fsdp",
    "h200x2/two_gpu_broadcast": "python -m benchmarks.two_gpu --only broadcast",
    "h200x2/two_gpu_loop": "python -m benchmarks.two_gpu --only loop",
}
"""Of each file of records; `--out` is left out."""
GOAL = re.compile(r"target |at least |at most ")
"""How the baseline of a record begins that says what was to be reached."""


Measured = dict[str, Results]
"""Every file that the page is made of, by name."""


def read(root: Path = ROOT) -> Measured:
    """Args: root, the folder of results."""
    return {name: Results(root, name) for name in COMMANDS}


def on(m: Measured, *names: str) -> tuple[Results, ...]:
    return tuple(m[name] for name in names)


OVERLAP = "h200/overlap", "cpu/overlap"
TWO_GPU = "h200x2/two_gpu_fsdp", "h200x2/two_gpu_broadcast", "h200x2/two_gpu_loop"


def origins(m: Measured) -> str:
    rows = [[f"`{name}.json`", f"`{COMMANDS[name]}`", *r.origin()] for name, r in m.items() if r.records]
    return table(["records", "command", "machine", "versions", "commit"], rows)


def targets(m: Measured) -> str:
    """Every number that was to be reached, whether it was or not."""
    found = [
        f for r in on(m, "h200/engine", "h200/loop") for f in r.records
        if f["mode"] == "exact" and GOAL.match(f["baseline"] or "")
    ]  # fmt: skip
    goals = [Goal(what(f), limit(f), amount(f), f["ratio"] >= 1) for f in found]
    goals += trainer.goals(m["h200/trainer"]) + kernels.goals(m["h200/kernels"])
    goals += weights.goals(m["cpu/weight_sync"], m["h200/weight_sync"]) + overlap.goals(on(m, *OVERLAP))
    return goals_table(goals + two_gpu.goals(m[TWO_GPU[0]], m[TWO_GPU[2]]))


def limit(found: Found) -> str:
    if found["metric"].endswith("_share"):
        return loop.limit(found)
    words = "at most" if found["unit"] == "ms" else "at least"
    return re.sub(r"^target (\S+).*", rf"{words} \1 {found['unit']}", found["baseline"])


def amount(found: Found) -> str:
    value, unit = found["value"], found["unit"]
    if found["metric"].endswith("_share"):
        return percent(value)
    return f"{value:,.0f} {unit}" if unit == "tokens/s" else f"{value:.3f} {unit}".strip()


def what(found: Found) -> str:
    """A record's name in the table of targets."""
    words = {"target": "exact", "exact_to_fast": "exact / fast", "neither_share": "neither generation nor training",
             "gpu_waits_share": "GPU waits for the host",
             "gpu_waits_alone_share": "GPU waits for the host while nothing trains",
             "gpu_waits_full_share": "GPU waits for the host while every place is taken"}  # fmt: skip
    part = found["metric"].removesuffix("_ms")
    metric = words.get(found["metric"], engine.PARTS.get(part, part))
    lag = f", lag {found['params']['lag']}" if "lag" in found["params"] else ""
    running = f", {found['params']['max_running']} running" if "max_running" in found["params"] else ""
    return f"{found['bench']}: {found['case']}{lag}{running}, {metric}"


def headline(m: Measured) -> str:
    """The README's paragraph."""
    rate = m["h200/engine"].first("uniform", "output_tokens_per_s")
    compared, differing = contract.totals(m["h200/contract"])
    peer = trainer.compiled(m["h200/trainer"])
    ratios: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for s in trainer.steps(m["h200/trainer"], mode="exact"):
        pair = (s["value"] / peer["value"], trainer.peak(m["h200/trainer"], s) / trainer.peak(m["h200/trainer"], peer))
        ratios[s["params"]["recompute"] == "layer"].append(pair)
    speeds, peaks = zip(*ratios[False], strict=True)
    layer = ratios[True][0]
    return fill(f"""\
On one H200, with random weights in the shape of Qwen3-1.7B, the exact engine samples {rate["value"]:,.0f} tokens a
second, {rate["ratio"]:.3f} of what it samples with `numerics = "fast"`. {differing:,} of {compared:,} tokens of
this shape and of SmolLM2-135M differ in a bit between batch sizes, chunks, graphs, cache hits, preemption, and the
trainer's packed forward. A full training step handles {min(speeds):.2f} to {max(speeds):.2f} times the tokens of
compiled transformers in {min(peaks):.2f} to {max(peaks):.2f} of its memory ({layer[0]:.2f} times in {layer[1]:.2f}
where every layer is computed again). [docs/performance.md](docs/performance.md) has all numbers, and the targets
that were missed.""")


def fill(text: str) -> str:
    """Paragraphs and items of lists in lines of one length; tables, headings and pictures as they are."""
    blocks = []
    for block in filter(str.strip, text.split("\n\n")):
        if block.startswith("- "):
            items = [" ".join(item.split()) for item in re.split(r"^- ", block, flags=re.MULTILINE)[1:]]
            block = "\n".join(wrap(item, "- ", "  ") for item in items)
        elif not block.lstrip().startswith(("|", "#", "!")):
            block = wrap(" ".join(block.split()))
        blocks.append(block.strip("\n"))
    return "\n\n".join(blocks)


def wrap(text: str, first: str = "", then: str = "") -> str:
    return textwrap.fill(
        text, 140, initial_indent=first, subsequent_indent=then, break_long_words=False, break_on_hyphens=False
    )


def document(m: Measured) -> str:
    """The page."""
    return (
        fill(f"""\
# Performance

Made by `docs/generate_performance.py` from the records in `benchmarks/results/`; do not edit. Numbers are of the
commit that the table names; nothing is extrapolated, and what was not reached is said.

## How it was measured

{origins(m)}

A commit is the one that was checked out; what came after it is not in its numbers. Every command takes `--out FILE`
for its records. Bits are compared first: engine and trainer are not timed where one differs, and the loop stops.
"exact" and "fast" are the two values of `numerics` ([numerics.md](numerics.md)): on a GPU fast runs the same Triton
kernels over cuBLAS as PyTorch calls it, so the ratio of the two is the price of exactness.

## Targets

{targets(m)}

{engine.section(m["h200/engine"])}

{contract.section(m["h200/contract"])}

{loop.section(m["h200/loop"], m["cpu/loop"], m["h200/engine"])}

{trainer.section(m["h200/trainer"], m["h200/engine"])}

{kernels.section(m["h200/kernels"])}

{weights.section(m["cpu/weight_sync"], m["h200/weight_sync"])}

{overlap.section(on(m, *OVERLAP))}

{two_gpu.section(*on(m, *TWO_GPU))}

Corrections of inexact engines are measured in [corrections.md](corrections.md).
""")
        + "\n"
    )


def plots(m: Measured) -> dict[str, str]:
    """Name -> SVG."""
    drawn = {
        name: draw(m[f"h200/{module.__name__.rpartition('.')[2]}"])
        for module in (engine, contract, loop, trainer)
        for name, draw in module.PLOTS.items()
    }
    drawn |= kernels.plots(m["h200/kernels"]) | weights.plots(m["cpu/weight_sync"])
    return drawn | overlap.plots(on(m, *OVERLAP))


def readme(m: Measured) -> str:
    """The README with its paragraph made anew."""
    pattern = r"(<!-- performance -->\n).*?(\n<!-- end -->)"
    text, count = re.subn(pattern, lambda found: found[1] + headline(m) + found[2], README.read_text(), flags=re.DOTALL)
    assert count == 1, f"{README} has {count} places for the paragraph on performance"
    return text


if __name__ == "__main__":
    measured = read()
    TARGET.write_text(document(measured))
    README.write_text(readme(measured))
    for name, text in plots(measured).items():
        (PLOTS / f"{name}.svg").write_text(text)
