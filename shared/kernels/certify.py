"""Which GEMM may run for which shape and row count on this device: measured for bits first, then for speed.

The class is "K ascending, one float32 accumulator" (`cuda.gemm.REFERENCE`). A member enters the table for a weight shape only if
its bits equal the reference's for every row count it may be asked for, on wide exponents, with NaN and infinite rows around, at
odd row offsets. The fastest certified member of a bucket of row counts is dispatched; where none is left, the reference itself.
The table is cached on disk under a key of device, driver, libraries and the kernels' source.

Legend: T tokens (rows), N outputs, K inputs.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from shared.kernels.cuda import identity
from shared.kernels.cuda.gemm import FEW_TOKENS, MANY_TOKENS, REFERENCE, Tile, gemm
from shared.kernels.ops import InexactKernelError

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""A bucket holds the row counts from behind the one before it up to this one."""
LARGE = 128
"""Above the last bucket rows run in whole multiples of this, and the rest as a bucket of its own."""
LARGE_LIMIT = 16384
"""Rows of the largest product that is certified, where the outputs fit."""
CUBLASLT = "cublaslt"

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


_TILES: dict[str, Tile] = {tile.name: tile for tile in (REFERENCE, *FEW_TOKENS, *MANY_TOKENS)}


def run_member(
    name: str, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """out [T, N] = x [T, K] @ w [N, K].T (+ bias), by one member of the class."""
    if name != CUBLASLT:
        return gemm(x, w, _TILES[name], bias=bias, out=out)
    if out.dtype != x.dtype:
        torch.mm(x, w.t(), out_dtype=out.dtype, out=out)
        return out if bias is None else out.add_(bias)
    return torch.mm(x, w.t(), out=out) if bias is None else torch.addmm(bias, x, w.t(), out=out)


def certify(n: int, k: int, *, dtype: torch.dtype, out_dtype: torch.dtype, has_bias: bool = False) -> Entry:
    """Certifies and times every bucket of one weight shape [N, K] on the current CUDA device.

    Raises:
        UncertifiedError: not even the reference gives a row the same bits at every row count.
    """
    probe = _Probe(n, k, dtype, out_dtype, has_bias)
    entry = Entry([], [], "", probe.x.shape[0])
    low = 1
    for top in BUCKETS:
        counts = list(range(low, top + 1))
        name, us = _pick(probe, entry, _timed(probe, entry, top), counts)
        entry.members.append(name)
        entry.times_us.append(us)
        low = top + 1
    entry.large, _ = _pick(probe, entry, [(0.0, CUBLASLT)], _large_counts(probe))
    return entry


def certify_large(n: int, k: int, *, dtype: torch.dtype, out_dtype: torch.dtype) -> Entry:
    """Certifies the products of many rows alone, and leaves those of few to the reference: seconds instead of a minute.

    Raises:
        UncertifiedError: as `certify`.
    """
    probe = _Probe(n, k, dtype, out_dtype, False)
    entry = Entry([REFERENCE.name] * len(BUCKETS), [0.0] * len(BUCKETS), "", probe.x.shape[0])
    entry.large, _ = _pick(probe, entry, [(0.0, CUBLASLT)], _large_counts(probe))
    return entry


def _large_counts(probe: _Probe) -> list[int]:
    return [count for count in range(LARGE, probe.x.shape[0] + 1, LARGE) if count > BUCKETS[-1]]


class _Probe:
    """Inputs of one weight shape whose products span many exponents, so that any other order of summation shows."""

    def __init__(self, n: int, k: int, dtype: torch.dtype, out_dtype: torch.dtype, has_bias: bool) -> None:
        generator = torch.Generator(device="cuda").manual_seed(n * 1_000_003 + k)
        tokens = LARGE_LIMIT if n * LARGE_LIMIT <= 2**31 else 2048
        draw = partial(torch.randn, device="cuda", dtype=dtype, generator=generator)
        self.x, self.w = draw(tokens, k), draw(n, k)
        self.x *= torch.exp2(torch.randint(-6, 7, (1, k), device="cuda", generator=generator).float()).to(dtype)
        self.bias = draw(n) if has_bias else None
        expected = torch.empty(tokens, n, dtype=torch.float32, device="cuda")
        gemm(self.x, self.w, REFERENCE, bias=self.bias, out=expected)
        self.expected = expected.to(out_dtype)

    def run(self, member: str, rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return run_member(member, rows, self.w, self.bias, out)

    def first_difference(self, member: str, counts: list[int]) -> int | None:
        """The first row count whose bits differ from the reference's, or None. Rows around are poisoned."""
        kind = torch.int32 if self.expected.dtype == torch.float32 else torch.int16
        poisoned = torch.full((counts[-1] + 8, self.x.shape[1]), float("nan"), dtype=self.x.dtype, device="cuda")
        poisoned[::2] = float("inf")
        bad = torch.zeros(len(counts), dtype=torch.int64, device="cuda")
        for i, count in enumerate(counts):
            rows = poisoned[i % 3 : i % 3 + count]
            rows.copy_(self.x[:count])
            out = torch.full((count, self.w.shape[0]), float("nan"), dtype=self.expected.dtype, device="cuda")
            self.run(member, rows, out)
            bad[i] = (out.view(kind) != self.expected[:count].view(kind)).sum()
            rows.fill_(float("nan"))
        wrong = bad.nonzero().flatten().tolist()
        return counts[wrong[0]] if wrong else None


def _pick(probe: _Probe, entry: Entry, timed: list[tuple[float, str]], counts: list[int]) -> tuple[str, float]:
    """The fastest member that is exact at every row count, and its time."""
    reference = (0.0, REFERENCE.name)
    for us, name in [*sorted(timed), reference]:
        different = probe.first_difference(name, counts)
        entry.checked += len(counts)
        if different is None:
            return name, us
        entry.rejected[name] = f"differs at {different} rows"
    raise UncertifiedError(
        f"no exact kernel for weights {list(probe.w.shape)} at {counts[0]} to {counts[-1]} rows on {identity.describe_device()}: "
        f"{entry.rejected}; use mode 'fast' or device 'cpu'"
    )


def _candidates(top: int) -> Iterator[str]:
    if top > 1:
        yield CUBLASLT
    if top <= 64:
        block = max(8, min(32, triton.next_power_of_2(top)))
        yield from (t.name for t in FEW_TOKENS if t.block_t == block)
    if 32 < top <= 512:
        yield from (t.name for t in MANY_TOKENS)


def _timed(probe: _Probe, entry: Entry, top: int) -> list[tuple[float, str]]:
    """(microseconds, member) at the bucket's largest row count, of every candidate that fits the device."""
    out = torch.empty(top, probe.w.shape[0], dtype=probe.expected.dtype, device="cuda")
    timed = []
    for name in _candidates(top):
        try:
            timed.append((_time_us(partial(probe.run, name, probe.x[:top], out)), name))
        except triton.runtime.errors.OutOfResources as error:
            entry.rejected[name] = f"does not fit this device: {error}"
    return timed


def _time_us(run: Any, *, repeats: int = 9) -> float:
    """Median over a cold L2. A few calls do: a wrong order of near equals costs nothing but the difference."""
    flushed = torch.empty(2**28, dtype=torch.int8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    run()
    for begin, end in events:
        flushed.zero_()
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return 1e3 * sorted(begin.elapsed_time(end) for begin, end in events)[repeats // 2]


def cache_key() -> str:
    """Everything the bits of a member may depend on."""
    parts = (identity.describe_device(), torch.__version__, Path(__file__).read_text())
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
            member = entry.members[bisect.bisect_left(BUCKETS, tokens - whole)]
            run_member(member, x[whole:], w, bias, out[whole:])
        return out

    def _find(self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> Entry:
        entry = self.entry(w.shape[0], w.shape[1], x.dtype, out.dtype, has_bias=bias is not None)
        self._found[(w.shape, x.dtype, out.dtype, bias is not None)] = entry
        return entry

    def describe(self) -> dict[str, str]:
        """Shape -> members in use: what the engine exports."""
        return {key: ", ".join(dict.fromkeys([*e.members, e.large])) for key, e in self.entries.items()}
