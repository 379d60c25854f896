"""Writes docs/performance.md, its plots and the README's paragraph from benchmarks/results: `make docs`. A test compares them.

No measured number is typed here or in benchmarks/page; those of other engines are in benchmarks/engine_cases/peers.py.
A new section is a module there with `section` and `PLOTS`, and its name in `document` and `plots`.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from benchmarks.page import contract, engine, loop, trainer
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
}
"""Of each file of records; `--out` is left out."""
GOAL = re.compile(r"target |at least |at most ")
"""How the baseline of a record begins that says what was to be reached."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Every file that the page is made of."""

    engine: Results
    contract: Results
    loop: Results
    trainer: Results
    cpu_loop: Results


def read(root: Path = ROOT) -> Measured:
    """Args: root, the folder of results."""
    return Measured(*(Results(root, name) for name in COMMANDS))


def origins(m: Measured) -> str:
    rows = []
    for results in (m.engine, m.contract, m.loop, m.trainer, m.cpu_loop):
        rows.append([f"`{results.name}.json`", f"`{COMMANDS[results.name]}`", *results.origin()])
    return table(["records", "command", "machine", "versions", "commit"], rows)


def targets(m: Measured) -> str:
    """Every number that was to be reached, whether it was or not."""
    found = [
        f for r in (m.engine, m.loop) for f in r.records if f["mode"] == "exact" and GOAL.match(f["baseline"] or "")
    ]
    rows = [(what(f), limit(f), amount(f), f["ratio"] >= 1) for f in found] + trainer.targets(m.trainer)
    return table(["", "target", "measured", "met"], [[*row, "yes" if is_met else "**no**"] for *row, is_met in rows])


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
             "gpu_waits_share": "GPU waits for the host"}  # fmt: skip
    part = found["metric"].removesuffix("_ms")
    metric = words.get(found["metric"], engine.PARTS.get(part, part))
    running = f", {found['params']['max_running']} running" if "max_running" in found["params"] else ""
    return f"{found['bench']}: {found['case']}{running}, {metric}"


def headline(m: Measured) -> str:
    """The README's paragraph."""
    rate = m.engine.first("uniform", "output_tokens_per_s")
    compared, differing = contract.totals(m.contract)
    peer = trainer.compiled(m.trainer)
    ratios: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for s in trainer.steps(m.trainer, mode="exact"):
        pair = (s["value"] / peer["value"], trainer.peak(m.trainer, s) / trainer.peak(m.trainer, peer))
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

{engine.section(m.engine)}

{contract.section(m.contract)}

{loop.section(m.loop, m.cpu_loop, m.engine)}

{trainer.section(m.trainer, m.engine)}

Corrections of inexact engines are measured in [corrections.md](corrections.md), weight updates in
[operations.md](operations.md).
""")
        + "\n"
    )


def plots(m: Measured) -> dict[str, str]:
    """Name -> SVG."""
    every = ((engine, m.engine), (contract, m.contract), (loop, m.loop), (trainer, m.trainer))
    return {name: draw(results) for module, results in every for name, draw in module.PLOTS.items()}


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
