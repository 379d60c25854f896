"""Where the time of steps goes: on the host, on the device, and in either waiting for the other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(slots=True)
class StepTimes:
    """Sums over steps."""

    num_steps: int = 0
    num_graph_steps: int = 0
    """Steps that replayed a captured graph."""
    num_tokens: int = 0
    num_sampled: int = 0
    schedule_s: float = 0.0
    prepare_s: float = 0.0
    """Building inputs and launching; on a CPU without the computation itself."""
    wait_s: float = 0.0
    """The host waiting for results."""
    read_s: float = 0.0
    """The host handing results on."""
    device_s: float = 0.0
    """The forward, on the device."""
    sample_s: float = 0.0
    """Head and sampling, on the device."""
    idle_s: float = 0.0
    """The device waiting for the host: standing still between two steps that were in flight one after the other, the second of
    which came too late. (A device that another process uses stands still between steps that are there in time, too.)"""
    full_s: float = 0.0
    """Of `device_s` and `sample_s`, what steps took in which every place sampled."""
    full_idle_s: float = 0.0
    """Of `idle_s`, what came before such steps."""

    @property
    def idle_share(self) -> float:
        """Share of the device's time in which it waited for the host."""
        total = self.device_s + self.sample_s + self.idle_s
        return self.idle_s / total if total else 0.0

    def reset(self) -> None:
        """Back to nothing, in place."""
        for name, value in asdict(StepTimes()).items():
            setattr(self, name, value)


class Laps:
    """Seconds of the host from lap to lap, by name.

    >>> lap = Laps()
    >>> lap("first"); lap("second")  # lap.seconds has both
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def __call__(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name], self._last = now - self._last, now


@contextmanager
def own_stream(device: str) -> Iterator[None]:
    """On a GPU, makes it this thread's device and its work a stream of its own: other threads that stage weights there neither
    wait for it nor hold it up."""
    if not device.startswith("cuda"):
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device, priority=-1)):
        yield


class Clock:
    """Marks in the order of computation: events of a GPU's current stream, the host's time elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._is_device = device.type == "cuda"

    def mark(self) -> Any:
        if not self._is_device:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, mark: Any) -> None:
        """Until the computation has come to the mark. Other threads run meanwhile."""
        if self._is_device:
            mark.synchronize()

    def passed(self, mark: Any | None) -> Any | None:
        """The mark if the computation has come to it, else None: the device still has work."""
        return mark if mark is None or not self._is_device or mark.query() else None

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two marks that were waited for."""
        return begin.elapsed_time(end) / 1e3 if self._is_device else end - begin
