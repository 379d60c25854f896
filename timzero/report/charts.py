"""The charts of a report. Each function draws one from the data and returns its SVG."""

from __future__ import annotations

from collections import Counter

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from timzero.report.data import ReportData
from timzero.report.style import AMBER, BLUE, GREY, INK, MUTED, PHASES, RED, TEAL, VIOLET, integer_steps, svg


def _series(data: ReportData, key: str) -> tuple[list[int], list[float]]:
    steps = [s for s in data.summaries if s.metrics.get(key) is not None]
    return [s.step for s in steps], [float(s.metrics[key]) for s in steps]


def reward(data: ReportData) -> str:
    """Mean reward of each step with one standard deviation, and the evaluations."""

    def draw(axes: Axes) -> None:
        x, mean = _series(data, "reward_mean")
        _, std = _series(data, "reward_std")
        if len(std) == len(mean):
            seen = [s.reward for s in data.samples if s.reward is not None] or [-np.inf, np.inf]
            low = np.clip(np.array(mean) - std, min(seen), None)
            high = np.clip(np.array(mean) + std, None, max(seen))
            axes.fill_between(x, low, high, color=BLUE, alpha=0.10, linewidth=0, label="± 1 std")
        axes.plot(x, mean, color=BLUE, marker="o", label="mean of the step")
        if data.evaluations:
            axes.plot(
                [e["step"] - 0.5 for e in data.evaluations],
                [e["accuracy"] for e in data.evaluations],
                color=TEAL, linestyle="--", marker="D", markersize=6, label="evaluation accuracy, greedy",
            )  # fmt: skip
        axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=3, columnspacing=1, handlelength=1.6)
        integer_steps(axes)

    return svg("reward", draw)


def tim(data: ReportData) -> str:
    """|trainer - engine| of the same token under the same weights: largest and p99 of each step."""

    def draw(axes: Axes) -> None:
        steps = data.summaries
        x = [s.step for s in steps]
        largest = [s.tim["abs_max"] for s in steps]
        if not any(largest):
            axes.plot(x, largest, color=TEAL, marker="o")
            axes.set_ylim(-1, 1)
            axes.set_yticks([0])
            axes.text(
                0.5,
                0.78,
                "every bit of every token is equal",
                ha="center",
                transform=axes.transAxes,
                color=TEAL,
                size=11,
            )
        else:
            axes.plot(x, largest, color=RED, marker="o", label="max")
            axes.plot(x, [s.tim["abs_p99"] for s in steps], color=AMBER, marker="o", label="p99")
            axes.plot(x, [s.tim["abs_mean"] for s in steps], color=GREY, marker="o", label="mean")
            smallest = min(v for s in steps for v in (s.tim["abs_max"], s.tim["abs_mean"]) if v > 0)
            axes.set_yscale("symlog", linthresh=smallest)
            axes.set_ylim(bottom=0)
            axes.legend(loc="best", ncols=3)
        axes.set_ylabel("|Δ logprob|")
        integer_steps(axes)

    return svg("tim", draw)


def differing(data: ReportData) -> str:
    """Compared tokens of each step, and those whose bits differ."""

    def draw(axes: Axes) -> None:
        steps = data.summaries
        x = [s.step for s in steps]
        unequal = [s.tim["differing_tokens"] for s in steps]
        equal = [s.compared_tokens - u for s, u in zip(steps, unequal, strict=True)]
        axes.bar(x, equal, color=TEAL, width=0.8, label="equal bits")
        axes.bar(x, unequal, bottom=equal, color=RED, width=0.8, label="differing")
        axes.set_ylabel("tokens compared")
        axes.set_ylim(0, 1.25 * max([s.compared_tokens for s in steps], default=1))
        axes.legend(loc="upper right", ncols=2)
        integer_steps(axes)

    return svg("differing", draw)


def staleness(data: ReportData) -> str:
    """Sampled tokens by how many steps older their version was than the step that trained them."""
    tokens: Counter[int] = Counter()
    for sample in data.samples:
        if sample.step is not None and sample.state in ("trained", "leased"):
            for version, count in sample.versions:
                tokens[sample.step - version] += count
    if not tokens:
        for step in data.summaries:
            tokens[round(step.lag)] += step.tokens

    def draw(axes: Axes) -> None:
        lags = range(min(tokens, default=0), max(tokens, default=0) + 1)
        bars = axes.bar(list(lags), [tokens[lag] for lag in lags], color=VIOLET, width=0.6)
        axes.bar_label(bars, fmt="{:,.0f}", color=MUTED, size=9, padding=2)
        axes.set_xlabel("steps between sampling and training")
        axes.set_ylabel("tokens")
        axes.margins(y=0.2)
        axes.set_xticks(list(lags))
        axes.set_xlim(lags[0] - 1, lags[-1] + 1)

    return svg("staleness", draw)


def throughput(data: ReportData) -> str:
    """Trained tokens per second of wall time."""

    def draw(axes: Axes) -> None:
        x, y = _series(data, "tokens_per_s")
        axes.plot(x, y, color=BLUE, marker="o")
        axes.set_ylabel("tokens / s")
        axes.set_ylim(bottom=0)
        integer_steps(axes)

    return svg("throughput", draw)


def step_time(data: ReportData) -> str:
    """Seconds of each trainer phase, stacked. The first step's wait, mostly for services to come up, would dwarf the rest."""

    def draw(axes: Axes) -> None:
        steps = data.summaries
        x = [s.step for s in steps]
        bottom = np.zeros(len(x))
        for phase, colour in PHASES.items():
            seconds = np.array([_seconds(s.metrics.get("phases", {}).get(phase)) for s in steps])
            if phase == "lease":
                seconds[:1] = 0.0
            if seconds.any():
                axes.bar(
                    x, seconds, bottom=bottom, color=colour, width=0.8, label="waiting" if phase == "lease" else phase
                )
                bottom += seconds
        axes.set_ylabel("seconds")
        axes.margins(y=0.25)
        if bottom.any():
            axes.legend(loc="upper right", ncols=5, columnspacing=1, handlelength=1)
        integer_steps(axes)

    return svg("steptime", draw)


def _seconds(interval: list[float] | None) -> float:
    return interval[1] - interval[0] if interval else 0.0


def entropy(data: ReportData) -> str:
    """Mean entropy of the sampled distribution at each token."""
    return _line(data, "entropy", "nats", TEAL)


def grad_norm(data: ReportData) -> str:
    """Gradient norm before clipping."""
    return _line(data, "grad_norm", "norm", AMBER)


def _line(data: ReportData, key: str, unit: str, colour: str) -> str:
    def draw(axes: Axes) -> None:
        x, y = _series(data, key)
        axes.plot(x, y, color=colour, marker="o")
        axes.set_ylabel(unit)
        axes.set_ylim(bottom=0)
        integer_steps(axes)

    return svg(key.replace("_", ""), draw)


def drops(data: ReportData) -> str:
    """Dropped trajectories by reason; empty when there are none."""
    dropped = {reason: n for reason, n in data.metrics["dropped"].items() if n}
    if not dropped:
        return ""

    def draw(axes: Axes) -> None:
        reasons = sorted(dropped, key=lambda r: dropped[r])
        bars = axes.barh([r.replace("_", " ") for r in reasons], [dropped[r] for r in reasons], color=RED, height=0.5)
        axes.bar_label(bars, color=MUTED, size=9, padding=3)
        axes.grid(visible=False, axis="y")
        axes.margins(x=0.15)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    return svg("drops", draw, size=(5.6, 0.9 + 0.45 * len(dropped)))


def timeline(data: ReportData) -> str:
    """Who worked when: each replica's generation by the batch it was for, and the trainer's phases."""
    began = [s.began for s in data.samples if s.began is not None]
    begin = min(began or [a for s in data.summaries for a, _ in s.metrics.get("phases", {}).values()], default=0.0)
    by_replica = _generation(data)

    def draw(axes: Axes) -> None:
        names = [*sorted(by_replica), "trainer"]
        for row, name in enumerate(names[:-1]):
            # Where two batches are in flight, the one that is needed first lies on top.
            for batch, intervals in sorted(by_replica[name].items(), reverse=True):
                bars = [(a - begin, b - a) for a, b in intervals]
                axes.broken_barh(bars, (row - 0.36, 0.72), facecolors=(BLUE, "#93b4f5")[batch % 2], linewidth=0)
        row = len(names) - 1
        for step in data.summaries:
            for phase, (a, b) in step.metrics.get("phases", {}).items():
                # The wait for the first batch began long before there was anything to sample.
                a = max(a, begin)
                colour = PHASES.get(phase, GREY)
                axes.broken_barh([(a - begin, max(0.0, b - a))], (row - 0.36, 0.72), facecolors=colour, linewidth=0)
        axes.set_yticks(range(len(names)), names, color=INK)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("seconds")
        axes.set_xlim(left=0)
        handles = [Patch(color=BLUE, label="generating, even batch"), Patch(color="#93b4f5", label="odd batch")]
        handles += [Patch(color=c, label="waiting for a batch" if p == "lease" else p) for p, c in PHASES.items()]
        axes.legend(
            handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=7, handlelength=1, columnspacing=1.2
        )

    return svg("timeline", draw, size=(11.6, 1.6 + 0.42 * (len(by_replica) + 1)))


def _generation(data: ReportData) -> dict[str, dict[int, list[tuple[float, float]]]]:
    """Replica -> batch -> merged intervals in which it sampled for that batch."""
    size = data.run["config"]["prompts_per_step"]
    are_known = any(s.replicas for s in data.samples)
    raw: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for sample in data.samples:
        if sample.began is None or sample.ended is None:
            continue
        for replica in sample.replicas or ([] if are_known else ["rollout"]):
            raw.setdefault(replica, {}).setdefault(sample.number // size, []).append((sample.began, sample.ended))
    return {name: {batch: _merged(spans) for batch, spans in batches.items()} for name, batches in raw.items()}


def _merged(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged
