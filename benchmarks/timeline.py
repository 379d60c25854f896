"""Where the wall time of a loop's steps went, from the trainer's phases and a replica's counters."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Any

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

TRAINING = ("score", "train")
"""Phases of the trainer that compute."""

Span = tuple[float, float]
"""[begin, end], unix seconds."""


@dataclass
class Series:
    """Totals of a process's counters over time."""

    times: list[float] = field(default_factory=list)
    totals: list[dict[str, float]] = field(default_factory=list)

    def add(self, at: float, totals: dict[str, float]) -> None:
        self.times.append(at)
        self.totals.append(totals)

    def has(self, counter: str) -> bool:
        return bool(self.totals) and counter in self.totals[-1]

    def increase(self, counter: str, span: Span) -> float:
        """By how much a counter grew in a span; it grows evenly between two looks."""
        # Those with a time: another thread may add one meanwhile.
        values = [t.get(counter, 0.0) for t in self.totals.copy()]
        begin, end = np.interp(span, self.times[: len(values)], values)
        return float(end - begin)


class Scraper:
    """Looks at a process's /metrics until the end of the block, seldom enough not to be seen in what it measures.

    consumes: /metrics; produces: `series`; waits for: `interval_s`; unblocked by: the end of the block.
    """

    def __init__(self, url: str, *, interval_s: float = 0.25) -> None:
        self.series = Series()
        self._url, self._interval_s = url, interval_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scraper", daemon=True)

    def __enter__(self) -> Scraper:
        self._thread.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _tb: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join(10.0)

    def _run(self) -> None:
        with httpx.Client(timeout=5.0) as client:
            while not self._stopping.wait(self._interval_s):
                try:
                    text = client.get(self._url).text
                except httpx.TransportError:
                    # Not up yet, or about to end.
                    continue
                self.series.add(time.time(), parse(text))


def parse(text: str) -> dict[str, float]:
    """Every sample of a page by name, summed over its labels; those with a phase or a transport also as `name:phase`."""
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            apart = (sample.labels[label] for label in ("phase", "transport") if sample.labels.get(label))
            names = [sample.name, *(f"{sample.name}:{value}" for value in apart)]
            for name in names:
                totals[name] = totals.get(name, 0.0) + sample.value
    return totals


def split(window: Span, phases: Mapping[str, Sequence[float]], series: Series, busy: str) -> dict[str, float]:
    """Seconds of a window by what they went to; they add up to the window.

    Args:
        window: of one step.
        phases: of the trainer, name -> [begin, end], one after another.
        series: of the replica.
        busy: its counter of seconds in which it computes.

    Returns:
        overlapped    the trainer computes and the replica too
        training      the trainer computes alone
        generation    the replica computes alone
        {phase}       neither does, the trainer being in that phase
        other         neither does, between its phases
    """
    spans = {name: (max(b, window[0]), min(e, window[1])) for name, (b, e) in phases.items()}
    spans = {name: span for name, span in spans.items() if span[1] > span[0]}
    found = {"overlapped": 0.0, "training": 0.0, "generation": 0.0}
    for name, span in spans.items():
        length = span[1] - span[0]
        active = min(series.increase(busy, span), length)
        if name in TRAINING:
            found["overlapped"] += active
            found["training"] += length - active
        else:
            found["generation"] += active
            found[name] = found.get(name, 0.0) + length - active
    covered = sum(end - begin for begin, end in spans.values())
    rest = window[1] - window[0] - covered
    active = series.increase(busy, window) - found["overlapped"] - found["generation"]
    active = min(max(active, 0.0), rest)
    found["generation"] += active
    found["other"] = rest - active
    return found


def outside(window: Span, phases: Mapping[str, Sequence[float]]) -> list[Span]:
    """The parts of a window in which the trainer does not compute."""
    found, at = [], window[0]
    for begin, end in sorted((b, e) for b, e in (phases[name] for name in TRAINING if name in phases)):
        found.append((at, min(begin, window[1])))
        at = max(at, end)
    return [(begin, end) for begin, end in [*found, (at, window[1])] if begin < end]


def windows(rows: Sequence[Mapping[str, Any]]) -> list[tuple[Span, Mapping[str, Any]]]:
    """(from the end of the step before to its own, row) of every step but the first two, which load and compile, and the
    last, during which nothing is left to generate."""
    return [((before["time"], row["time"]), row) for before, row in pairwise(rows[1:-1])]
