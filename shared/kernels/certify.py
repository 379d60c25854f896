"""Which GEMM may run for which shape and row count on this device: measured for bits first, then for speed.

The class is "K ascending, one float32 accumulator" (`cuda.gemm.REFERENCE`). A member enters the table for a weight shape only if
its bits equal the reference's for every row count it may be asked for, on wide exponents, with NaN and infinite rows around, at
odd row offsets. The fastest certified member of a bucket of row counts is dispatched; where none is left, the reference itself.
The table is cached on disk under a key of device, driver, libraries and the kernels' source.

Legend: T tokens (rows), N outputs, K inputs.
"""

from __future__ import annotations

import bisect
import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from shared.kernels.cuda import identity
from shared.kernels.cuda.gemm import REFERENCE
from shared.kernels.cuda.members import CUBLASLT, candidates, run_member
from shared.kernels.cuda.probe import Probe
from shared.kernels.ops import InexactKernelError

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""A bucket holds the row counts from behind the one before it up to this one."""
LARGE = 128
"""Above the last bucket rows run in whole multiples of this, and the rest as a bucket of its own."""
FINALISTS = 5
CLOSE = 1.2
"""Candidates this much slower than the best at first sight may still be it."""
MISFIT = "does not fit this device"
LOCK_S = 60.0
"""That a process waits for another which certifies."""

_SOURCES = (
    Path(__file__),
    *(Path(__file__).parent / f"cuda/{name}.py" for name in ("gemm", "members", "probe", "replay")),
)

Shape = tuple[int, int]
"""(N, K) of a weight."""


class UncertifiedError(InexactKernelError):
    """No exact kernel is certified for this shape on this device."""


def use_cublaslt_without_split_k() -> None:
    """Puts the process's library GEMMs into the class (the flag's second entry forbids split-K). The backward loses nothing."""
    if not torch.cuda.is_available():
        return
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.matmul.allow_tf32 = False


@dataclass
class Entry:
    """What was found for one weight shape."""

    members: list[str]
    """One per bucket."""
    times_us: list[float]
    large: str
    """For whole multiples of LARGE rows above the last bucket, up to `limit`."""
    limit: int
    """Rows of the largest product certified; more rows run in pieces."""
    rejected: dict[str, str] = field(default_factory=dict)
    """Members that were fast enough to try and failed, with the first row count that differed."""
    checked: int = 0
    """(member, row count) pairs compared; those of the members above without a differing bit."""

    def member(self, rows: int) -> str:
        """That runs a product of so many rows, or all of it but the last few."""
        return self.large if rows > BUCKETS[-1] else self.members[bisect.bisect_left(BUCKETS, rows)]


def certify(n: int, k: int, *, dtype: torch.dtype, out_dtype: torch.dtype, has_bias: bool = False) -> Entry:
    """Certifies and times every bucket of one weight shape [N, K] on the current CUDA device.

    Raises:
        UncertifiedError: not even the reference gives a row the same bits at every row count.
    """
    use_cublaslt_without_split_k()
    probe = Probe(n, k, dtype, out_dtype, has_bias)
    probe.compile([REFERENCE.name, *(name for top in BUCKETS for name in candidates(n, top))])
    entry = Entry([], [], "", probe.rows)
    for low, top in zip((1, *(b + 1 for b in BUCKETS)), BUCKETS, strict=False):
        name, us = _pick(probe, entry, _ranked(probe, entry, low, top), range(low, top + 1))
        entry.members.append(name)
        entry.times_us.append(us)
    entry.large, _ = _pick(probe, entry, [(0.0, CUBLASLT)], _large_counts(probe))
    return entry


def certify_large(n: int, k: int, *, dtype: torch.dtype, out_dtype: torch.dtype) -> Entry:
    """Certifies the products of many rows alone, and leaves those of few to the reference: a moment instead of seconds.

    Raises:
        UncertifiedError: as `certify`.
    """
    use_cublaslt_without_split_k()
    probe = Probe(n, k, dtype, out_dtype, False)
    entry = Entry([REFERENCE.name] * len(BUCKETS), [0.0] * len(BUCKETS), "", probe.rows)
    entry.large, _ = _pick(probe, entry, [(0.0, CUBLASLT)], _large_counts(probe))
    return entry


def _large_counts(probe: Probe) -> range:
    return range(BUCKETS[-1] + LARGE, probe.rows + 1, LARGE)


def _pick(probe: Probe, entry: Entry, ranked: list[tuple[float, str]], counts: Sequence[int]) -> tuple[str, float]:
    """The first member that is exact at every row count, and its time; the reference if none is."""
    for us, name in [*ranked, (0.0, REFERENCE.name)]:
        different = probe.first_difference(name, counts)
        entry.checked += len(counts)
        if different is None:
            return name, us
        entry.rejected[name] = f"differs at {different} rows"
    raise UncertifiedError(
        f"no exact kernel for weights {list(probe.w.shape)} at {counts[0]} to {counts[-1]} rows on {identity.describe_device()}: "
        f"{entry.rejected}; use mode 'fast' or device 'cpu'"
    )


def _ranked(probe: Probe, entry: Entry, low: int, top: int) -> list[tuple[float, str]]:
    """(microseconds, member) of every candidate that fits the device, fastest first.

    All are timed at the bucket's largest row count, and those close to the best again, longer, at both its ends.
    """
    names = [name for name in candidates(probe.w.shape[0], top) if not entry.rejected.get(name, "").startswith(MISFIT)]
    for name in list(names):
        if problem := probe.misfit(name, top):
            entry.rejected[name] = f"{MISFIT}: {problem}"
            names.remove(name)
    if not names:
        return []
    timed = sorted(zip(probe.times_us(names, top, repeats=4), names, strict=True))
    close = [name for us, name in timed[:FINALISTS] if us <= CLOSE * timed[0][0]]
    ends = [probe.times_us(close, rows, repeats=12) for rows in sorted({low, top})]
    final = sorted((sum(us) / len(us), name) for *us, name in zip(*ends, close, strict=True))
    return final + [(us, name) for us, name in timed if name not in close]


def cache_key() -> str:
    """Everything that the bits of a member and the choice among them may depend on."""
    parts = (identity.describe_machine(), torch.__version__, *(path.read_text() for path in _SOURCES))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def shape_key(n: int, k: int, dtype: torch.dtype, out_dtype: torch.dtype, has_bias: bool) -> str:
    """An entry's name in the table."""
    return f"{n}x{k} {dtype} {out_dtype}{' bias' if has_bias else ''}".replace("torch.", "")


class Table:
    """Dispatch over certified members; `linear` is the only way in."""

    def __init__(self, directory: Path | None = None) -> None:
        """Args: directory of the cache; None: timzero's in the user's cache directory."""
        use_cublaslt_without_split_k()
        base = directory or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "timzero"
        self.path = base / f"gemm-{cache_key()}.json"
        self.entries = self._read()
        self._found: dict[tuple[torch.Size, torch.dtype, torch.dtype, bool], Entry] = {}

    def entry(self, n: int, k: int, dtype: torch.dtype, out_dtype: torch.dtype, *, has_bias: bool = False) -> Entry:
        """The shape's entry, certified now if it is new. Never inside a graph capture: call `prepare` first."""
        key = shape_key(n, k, dtype, out_dtype, has_bias)
        if key not in self.entries:
            if not torch.cuda.is_available():
                raise UncertifiedError(f"the product {key} is not in {self.path} and certifying it needs a CUDA device")
            with self._alone():
                self.entries = {**self._read(), **self.entries}
                if key not in self.entries:
                    self.record(key, certify(n, k, dtype=dtype, out_dtype=out_dtype, has_bias=has_bias))
        return self.entries[key]

    def prepare(self, shapes: list[Shape], dtype: torch.dtype, out_dtype: torch.dtype | None = None) -> None:
        """Certifies every shape, without bias, that is not in the table yet."""
        for n, k in shapes:
            self.entry(n, k, dtype, out_dtype or dtype)

    def record(self, key: str, entry: Entry) -> None:
        """Adds an entry, here and on disk; what other processes added meanwhile stays."""
        self.entries = {**self._read(), **self.entries, key: entry}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps({name: asdict(e) for name, e in self.entries.items()}, indent=1))
        temporary.replace(self.path)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Holds the table's lock: of processes that start together one certifies a shape, undisturbed, and the others read it.
        After LOCK_S it goes on without: another's entry is a convenience."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.with_suffix(".lock").open("w")
        held, is_given_up = threading.Event(), threading.Event()

        def acquire() -> None:
            fcntl.flock(file, fcntl.LOCK_EX)
            held.set()
            if is_given_up.is_set():
                file.close()

        # flock has no deadline of its own
        threading.Thread(target=acquire, daemon=True).start()
        if not held.wait(LOCK_S):
            is_given_up.set()
        try:
            yield
        finally:
            if held.is_set():
                file.close()

    def _read(self) -> dict[str, Entry]:
        if not self.path.exists():
            return {}
        return {key: Entry(**value) for key, value in json.loads(self.path.read_text()).items()}

    def linear(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, N] = x [T, K] @ w [N, K].T (+ bias [N]) in `out_dtype` (default: of x); any T, forward only."""
        tokens = x.shape[0]
        if out is None:
            out = torch.empty(tokens, w.shape[0], dtype=out_dtype or x.dtype, device=x.device)
        entry = self._found.get((w.shape, x.dtype, out.dtype, bias is not None)) or self._find(x, w, bias, out)
        whole = tokens // LARGE * LARGE if tokens > BUCKETS[-1] else 0
        for begin in range(0, whole, entry.limit):
            piece = slice(begin, min(begin + entry.limit, whole))
            run_member(entry.large, x[piece], w, bias, out[piece])
        if tokens > whole:
            run_member(entry.member(tokens - whole), x[whole:], w, bias, out[whole:])
        return out

    def _find(self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> Entry:
        entry = self.entry(w.shape[0], w.shape[1], x.dtype, out.dtype, has_bias=bias is not None)
        self._found[(w.shape, x.dtype, out.dtype, bias is not None)] = entry
        return entry

    def describe(self) -> dict[str, str]:
        """Shape -> members, of what this process has multiplied: the cache holds other models' shapes too."""
        # a copy, since the thread that computes may add to it meanwhile
        return {
            shape_key(n, k, dtype, out_dtype, has_bias): ", ".join(dict.fromkeys([*e.members, e.large]))
            for ((n, k), dtype, out_dtype, has_bias), e in self._found.copy().items()
        }
