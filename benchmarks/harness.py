"""What every benchmark shares: records, the machine's name and versions, timing, the table."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from shared.kernels.machine import cpu_model


def machine() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{cpu_model()}, {os.cpu_count()} cores"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.cuda.is_available():
        import triton

        found |= {"triton": triton.__version__, "cuda": str(torch.version.cuda)}
    return found


@cache
def tree() -> str:
    """The commit checked out, and whether anything differs from it."""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


@dataclass
class Record:
    """One measured number. `ratio` above 1 means that ours is better than `baseline`."""

    bench: str
    case: str
    params: dict[str, Any]
    mode: str
    metric: str
    value: float
    unit: str
    baseline: str | None = None
    ratio: float | None = None
    spread: list[float] | None = None
    """[25th, 75th] percentile in the unit of `value`."""
    machine: str = field(default_factory=machine)
    versions: dict[str, str] = field(default_factory=versions)
    commit: str = field(default_factory=tree)


GRADIENT_TOLERANCE = 1.02
"""Ways that round at the same points, in another order of sums, are told apart by less."""


def gradient_errors(
    case: str,
    ours: Callable[..., torch.Tensor],
    plain: Callable[..., torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    params: Mapping[str, Any] | None = None,
) -> Iterator[Record]:
    """The error of each of our gradients against float64, over that of plain PyTorch in bfloat16: at most 1, or as good as that.

    Args:
        ours, plain: of the inputs in their order; `plain` of float64 too.
        inputs: name -> tensor, all of one dtype, bfloat16 on a device.
    """

    (dtype,) = {x.dtype for x in inputs.values()}

    def gradients(run: Callable[..., torch.Tensor], wanted: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(wanted, copy=True).requires_grad_() for x in inputs.values()]
        out = run(*leaves)
        # what all of them are given must be exact in the narrowest
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out.device, dtype)
        out.backward(grad.to(out.dtype))
        return [leaf.grad.double() for leaf in leaves]  # type: ignore[union-attr]

    found = (gradients(plain, torch.float64), gradients(plain, dtype), gradients(ours, dtype))
    for name, exact, theirs, got in zip(inputs, *found, strict=True):
        ratio = float((got - exact).norm() / (theirs - exact).norm())
        of = {**(params or {}), "gradient": name}
        yield Record("kernels", case, of, "exact", "gradient_error_ratio", ratio, "", "torch bf16")


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call."""

    median: float
    low: float
    high: float

    @property
    def spread(self) -> list[float]:
        return [round(self.low, 2), round(self.high, 2)]


def cuda_time(run: Callable[[], Any], *, warmup_ms: int = 3, rep_ms: int = 15) -> Timing:
    """Device time with a cold L2 (triton's do_bench: events around every call)."""
    import triton

    ms = triton.testing.do_bench(run, warmup=warmup_ms, rep=rep_ms, quantiles=[0.5, 0.25, 0.75])
    return Timing(*(1e3 * x for x in ms))


def ceilings(device: str = "cuda") -> dict[str, float]:
    """Copy bandwidth in bytes/s (read and written) and matrix rate in FLOP/s (bfloat16; float32 on a CPU), measured now."""
    is_cuda = device == "cuda"
    size, side = (2**31, 8192) if is_cuda else (2**26, 512)
    a = torch.empty(size, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    x, y = (
        torch.randn(side, side, dtype=torch.bfloat16 if is_cuda else torch.float32, device=device) for _ in range(2)
    )

    def microseconds(run: Callable[[], Any]) -> float:
        return cuda_time(run, rep_ms=60).median if is_cuda else cpu_time(run).median

    bandwidth = 2 * size / (microseconds(lambda: b.copy_(a)) * 1e-6)
    return {"bandwidth": bandwidth, "matmul": 2 * side**3 / (microseconds(lambda: x @ y) * 1e-6)}


def cpu_time(run: Callable[[], Any], *, repeats: int = 3) -> Timing:
    """Wall time of a few calls."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(1e6 * (time.perf_counter() - begin))
    return Timing(statistics.median(times), min(times), max(times))


def graph_time(runs: Sequence[Callable[[], Any]], *, repeats: int = 10) -> Timing:
    """Device time of one call inside a replayed graph of several, each over buffers of its own: the data comes from memory
    and the launch is not on the clock."""
    return graph_times([runs], repeats=repeats)[0]


def graph_times(series: Sequence[Sequence[Callable[[], Any]]], *, repeats: int = 10) -> list[Timing]:
    """`graph_time` of each series, replayed in turns: a device that grows warm is slower for all of them alike."""
    from shared.kernels.cuda.replay import replay_times

    found = []
    for times in replay_times(series, repeats=repeats):
        quarters = statistics.quantiles(times, n=4)
        found.append(Timing(statistics.median(times), quarters[0], quarters[2]))
    return found


class Budget:
    """Seconds that a section may take. What does not fit is recorded as not run, never left out in silence."""

    def __init__(self, seconds: float | None = None) -> None:
        """Args: seconds, None for no limit."""
        self._end = None if seconds is None else time.monotonic() + seconds

    @property
    def is_spent(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end


class Recorder:
    """The records of a run, on disk soon after they are made, so that a run that is cut off has told what it found.

    >>> with Recorder(path) as recorder:  # within the block SIGTERM, which `timeout` sends, saves and prints them too
    ...     recorder.add(record)
    """

    def __init__(self, out: Path | None, *, interval_s: float = 5.0) -> None:
        self.records: list[Record] = []
        self._out, self._interval_s, self._saved = out, interval_s, time.monotonic()
        self._handler: Any = None

    def __enter__(self) -> Recorder:
        self._handler = signal.signal(signal.SIGTERM, self._end)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._handler)
        self.save()

    def _end(self, number: int, _: object) -> None:
        """Before what the block has open is closed, which may take longer than there is time."""
        self.save()
        # It may have come within a print.
        with contextlib.suppress(RuntimeError):
            report(self.records)
        raise SystemExit(128 + number)

    def add(self, record: Record) -> Record:
        self.records.append(record)
        if time.monotonic() - self._saved > self._interval_s:
            self.save()
        return record

    def renew(self, records: Iterable[Record], *, since: int) -> None:
        """What was measured again, with more to go by, in place of all records from `since` on; saved at once."""
        self.records = [*self.records[:since], *records]
        self.save()

    def add_ceilings(self, bench: str, limits: dict[str, float]) -> None:
        """What `ceilings` measured, as the first records of a benchmark."""
        self.add(Record(bench, "ceiling", {}, "peer", "bytes_per_s", limits["bandwidth"], "B/s"))
        self.add(Record(bench, "ceiling", {}, "peer", "flop_per_s", limits["matmul"], "FLOP/s"))

    def save(self) -> None:
        self._saved = time.monotonic()
        save(self.records, self._out)


def quarters(values: Sequence[float]) -> list[float]:
    """[25th, 75th] percentile, of a single value that value twice."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return [round(low, 6), round(high, 6)]


def attempt(run: Callable[[], bool | None]) -> bool:
    """Whether a run ended well: it neither returned False nor raised. What others find is still worth the device's time."""
    try:
        return run() is not False
    except Exception:
        traceback.print_exc()
        return False


def verdict(problems: Sequence[str]) -> int:
    """Prints the problems. Returns the exit code."""
    for problem in problems:
        print(f"error: {problem}")
    return 1 if problems else 0


def parser(description: str) -> argparse.ArgumentParser:
    """What every benchmark takes."""
    found = argparse.ArgumentParser(description=description)
    found.add_argument("--out", type=Path, help="JSON file for the records")
    found.add_argument("--only", nargs="*", help="sections to run")
    return found


def save(records: list[Record], out: Path | None) -> None:
    """Writes the records as a JSON list, one a line. The file is whole at any moment."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = out.with_name(f".{out.name}.tmp")
        # A signal's handler may have interrupted a save: not into the file that it has open.
        temporary.unlink(missing_ok=True)
        temporary.write_text("[\n" + ",\n".join(json.dumps(asdict(r)) for r in records) + "\n]\n")
        temporary.replace(out)


def report(records: list[Record]) -> None:
    """Prints the records as a table."""
    table = Table(title=f"{records[0].bench} on {records[0].machine}" if records else "no records")
    for column in ("case", "params", "mode", "metric", "value", "spread", "baseline", "ratio"):
        table.add_column(column)
    for r in records:
        params = " ".join(f"{k}={v}" for k, v in r.params.items())
        ratio = "" if r.ratio is None else f"{r.ratio:.2f}"
        spread = "" if r.spread is None else " to ".join(f"{x:g}" for x in r.spread)
        table.add_row(r.case, params, r.mode, r.metric, f"{r.value:,.5g} {r.unit}", spread, r.baseline or "", ratio)
    Console(width=170).print(table)
