"""Which GEMM may run for which shape and row count on this device: measured for bits first, then for speed.

The class is "K ascending, one float32 accumulator" (`cuda.gemm.REFERENCE`). A member enters the table for a weight shape only if
its bits equal the reference's for every row count it may be asked for, on wide exponents, with NaN and infinite rows around, at
odd row offsets. The fastest certified member of a bucket of row counts is dispatched. The table is cached on disk under a key of
device, driver, libraries and the kernels' source.

Legend: T tokens (rows), N outputs, K inputs.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from shared.kernels.cuda import gemm as gemm_module
from shared.kernels.cuda.gemm import FEW_TOKENS, MANY_TOKENS, REFERENCE, Tile, gemm

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""A bucket holds the row counts from behind the one before it up to this one."""
LARGE = 128
"""Above the last bucket rows run in whole multiples of this, and the rest as a bucket of its own."""
LARGE_LIMIT = 16384
CUBLASLT = "cublaslt"

Shape = tuple[int, int]


class UncertifiedError(RuntimeError):
    """No exact kernel is certified for this shape on this device."""


def use_cublaslt_without_split_k() -> None:
    """Puts the process's library GEMMs into the class (the flag's second entry forbids split-K). The backward loses nothing."""
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.matmul.allow_tf32 = False


@dataclass
class Entry:
    """What was found for one weight shape."""

    members: list[str]
    """One per bucket; the last one is used above the last bucket too."""
    times_us: list[float]
    rejected: dict[str, str] = field(default_factory=dict)
    """Members that were fast enough to try and failed, with the first row count that differed."""
    checked: int = 0
    """(member, row count) pairs compared; every one of them without a differing bit."""


def tiles_by_name() -> dict[str, Tile]:
    return {tile.name: tile for tile in (REFERENCE, *FEW_TOKENS, *MANY_TOKENS)}


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


_TILES = tiles_by_name()


def _probe(tokens: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [tokens, K] and w [N, K] whose products span many exponents, so that any other order of summation shows."""
    generator = torch.Generator(device="cuda").manual_seed(n * 1_000_003 + k)
    x = torch.randn(tokens, k, device="cuda", dtype=dtype, generator=generator)
    w = torch.randn(n, k, device="cuda", dtype=dtype, generator=generator)
    x *= torch.exp2(torch.randint(-6, 7, (1, k), device="cuda", generator=generator).float()).to(dtype)
    return x, w


def _first_difference(
    member: str, counts: list[int], x: torch.Tensor, w: torch.Tensor, reference: torch.Tensor, out_dtype: torch.dtype
) -> int | None:
    """The first row count whose bits differ from the reference's, or None. Rows behind the count are poisoned."""
    expected = reference.to(out_dtype)
    kind = torch.int32 if out_dtype == torch.float32 else torch.int16
    poisoned = torch.full((counts[-1] + 8, x.shape[1]), float("nan"), dtype=x.dtype, device=x.device)
    poisoned[::2] = float("inf")
    bad = torch.zeros(len(counts), dtype=torch.int64, device=x.device)
    for i, count in enumerate(counts):
        offset = i % 3
        rows = poisoned[offset : offset + count]
        rows.copy_(x[:count])
        out = torch.full((count, w.shape[0]), float("nan"), dtype=out_dtype, device=x.device)
        run_member(member, rows, w, None, out)
        bad[i] = (out.view(kind) != expected[:count].view(kind)).sum()
        poisoned[offset : offset + count] = float("nan")
    wrong = bad.nonzero().flatten().tolist()
    return counts[wrong[0]] if wrong else None


def _candidates(top: int) -> list[str]:
    names = [] if top == 1 else [CUBLASLT]
    if top <= 64:
        block = max(8, min(32, triton.next_power_of_2(top)))
        names += [t.name for t in FEW_TOKENS if t.block_t == block or (top > 32 and t.block_t == 32)]
    if 32 < top <= 512:
        names += [t.name for t in MANY_TOKENS]
    return names


def _time_us(run: Any) -> float:
    return float(triton.testing.do_bench(run, warmup=2, rep=8, return_mode="median")) * 1e3


def certify(n: int, k: int, *, dtype: torch.dtype = torch.bfloat16, out_dtype: torch.dtype | None = None) -> Entry:
    """Certifies and times every bucket of one weight shape [N, K]. Raises UncertifiedError when a bucket stays empty."""
    out_dtype = out_dtype or dtype
    x, w = _probe(LARGE_LIMIT if n * LARGE_LIMIT <= 2**31 else 2048, n, k, dtype)
    reference = torch.empty(x.shape[0], n, dtype=torch.float32, device=x.device)
    gemm(x, w, REFERENCE, bias=None, out=reference)
    entry = Entry([], [])
    low = 1
    for top in BUCKETS:
        out = torch.empty(top, n, dtype=out_dtype, device=x.device)
        timed = []
        for name in _candidates(top):
            try:
                timed.append((_time_us(partial(run_member, name, x[:top], w, None, out)), name))
            except triton.runtime.errors.OutOfResources as error:
                entry.rejected[name] = f"does not fit this device: {error}"
        for us, name in sorted(timed):
            counts = list(range(low, top + 1))
            different = _first_difference(name, counts, x, w, reference, out_dtype)
            entry.checked += len(counts)
            if different is None:
                entry.members.append(name)
                entry.times_us.append(us)
                break
            entry.rejected[name] = f"differs at {different} rows"
        else:
            raise UncertifiedError(
                f"no exact kernel for weights [{n}, {k}] at {low} to {top} rows on {torch.cuda.get_device_name()}"
            )
        low = top + 1
    large = [count for count in range(LARGE, x.shape[0] + 1, LARGE) if count > BUCKETS[-1]]
    for count in large:
        different = _first_difference(CUBLASLT, [count], x, w, reference, out_dtype)
        entry.checked += 1
        if different is not None:
            raise UncertifiedError(
                f"cuBLASLt leaves the class for weights [{n}, {k}] at {count} rows on {torch.cuda.get_device_name()}"
            )
    return entry


def cache_key() -> str:
    """Everything the bits of a member may depend on."""
    parts = (
        torch.cuda.get_device_name(), str(torch.cuda.get_device_capability()), torch.__version__, triton.__version__,
        str(torch.version.cuda), Path(gemm_module.__file__).read_text(), Path(__file__).read_text(),
    )  # fmt: skip
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


class Table:
    """Dispatch over certified members; `linear` is the only way in."""

    def __init__(self, directory: Path | None = None) -> None:
        use_cublaslt_without_split_k()
        base = directory or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "timzero"
        self.path = base / f"gemm-{cache_key()}.json"
        self.entries: dict[str, Entry] = {}
        self._members: dict[tuple[torch.Size, torch.dtype, torch.dtype], list[str]] = {}
        if self.path.exists():
            self.entries = {key: Entry(**value) for key, value in json.loads(self.path.read_text()).items()}

    def entry(self, n: int, k: int, dtype: torch.dtype, out_dtype: torch.dtype) -> Entry:
        """The shape's entry, certified now if it is new. Never inside a graph capture: call `prepare` first."""
        key = f"{n}x{k} {dtype} {out_dtype}".replace("torch.", "")
        if key not in self.entries:
            self.entries[key] = certify(n, k, dtype=dtype, out_dtype=out_dtype)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
            temporary.write_text(json.dumps({name: vars(e) for name, e in self.entries.items()}, indent=1))
            temporary.replace(self.path)
        return self.entries[key]

    def prepare(self, shapes: list[Shape], dtype: torch.dtype, out_dtype: torch.dtype | None = None) -> None:
        for n, k in shapes:
            self.entry(n, k, dtype, out_dtype or dtype)

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
        members = self._members.get((w.shape, x.dtype, out.dtype)) or self._find(w, x.dtype, out.dtype)
        whole = tokens // LARGE * LARGE if tokens > BUCKETS[-1] else 0
        if whole:
            run_member(CUBLASLT, x[:whole], w, bias, out[:whole])
        if tokens > whole:
            rest = tokens - whole
            run_member(members[bisect.bisect_left(BUCKETS, rest)], x[whole:], w, bias, out[whole:])
        return out

    def _find(self, w: torch.Tensor, dtype: torch.dtype, out_dtype: torch.dtype) -> list[str]:
        entry = self.entry(w.shape[0], w.shape[1], dtype, out_dtype)
        self._members[(w.shape, dtype, out_dtype)] = entry.members
        return entry.members

    def describe(self) -> dict[str, str]:
        """Shape -> members in use: what the engine exports."""
        return {key: ", ".join(dict.fromkeys(entry.members)) for key, entry in self.entries.items()}
