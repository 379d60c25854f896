"""Seconds and peak memory of something that is run again and again."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch


@dataclass(frozen=True)
class Measured:
    seconds: float
    """Median of one run."""
    spread: tuple[float, float]
    """Quartiles, seconds."""
    peak_bytes: int | None
    """Most memory in tensors at one time; None on the CPU, where nobody counts it."""


def measure(run: Callable[[], Any], device: torch.device, *, warmup: int = 2, repeats: int = 6) -> Measured:
    """Runs follow one another without a pause, as in training: on a device the time from the end of one to that of the next."""
    for _ in range(warmup):
        run()
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(repeats):
            run()
            marks.append(time.perf_counter())
        return _measured([b - a for a, b in pairwise(marks)], None)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return _measured([1e-3 * a.elapsed_time(b) for a, b in pairwise(events)], torch.cuda.max_memory_allocated())


def _measured(seconds: list[float], peak_bytes: int | None) -> Measured:
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Measured(median, (low, high), peak_bytes)


def collect() -> None:
    """What was dropped is free for the next model."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
