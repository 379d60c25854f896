"""The records of benchmarks.kernels, made by its own code on tensors without memory: no kernel runs, every clock is invented."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from triton.runtime.jit import KernelInterface

from benchmarks import kernels
from benchmarks.harness import Record, Recorder, Timing
from benchmarks.kernel_cases import attention, gemm, grouped, head, rowwise
from shared.kernels.certify import Entry

LIMITS = {"bandwidth": 4.2e12, "matmul": 7.9e14}


class WithoutMemory(TorchFunctionMode):
    """What asks for a GPU gets the meta device; what is read from it is 0, or 0.5 where a fraction is asked for."""

    def __torch_function__(
        self, function: Callable, types: Any, args: Sequence = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and first.is_meta:
            if function is torch.Tensor.__int__:
                return 0
            if function is torch.Tensor.__float__:
                return 0.5
            if function is torch.Tensor.unique:
                return first
        if "device" in kwargs:
            kwargs["device"] = elsewhere(kwargs["device"])
        return function(*map(elsewhere, args), **kwargs)


def elsewhere(device: Any) -> Any:
    is_gpu = str(device) == "cuda" if isinstance(device, str | torch.device) else False
    return torch.device("meta") if is_gpu else device


class TableOfNothing:
    """A table of certified products in which every weight has an entry."""

    def entry(self, n: int, k: int, dtype: torch.dtype, out_dtype: torch.dtype) -> Entry:
        rejected = {"m64n64k64": "differs at 3 rows", "m256n256k64": "does not fit this device: memory"}
        return Entry(["few"] * 6 + ["many"] * 11, [1.0] * 17, "cublaslt", 8192, rejected, checked=1080)

    def linear(
        self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        return torch.empty(x.shape[0], w.shape[0], dtype=options.get("out_dtype"), device="meta")


def clock(us: float) -> Timing:
    return Timing(us, 0.98 * us, 1.02 * us)


def make(monkeypatch: pytest.MonkeyPatch) -> list[Record]:
    """Of every section; ratios to cuBLAS go from 0.80 to 1.09, those of the fixed tile are 0.5."""
    turns = itertools.count()

    def in_turns(series: Sequence, **_: Any) -> list[Timing]:
        ours = 100.0 / (0.8 + 0.01 * (next(turns) % 30))
        return [clock(us) for us in (100.0, ours, 200.0)[: len(series)]]

    monkeypatch.setattr(KernelInterface, "__getitem__", lambda kernel, grid: lambda *args, **options: None)
    monkeypatch.setattr(gemm, "TABLE", TableOfNothing())
    monkeypatch.setattr(gemm, "graph_times", in_turns)
    monkeypatch.setattr(gemm, "copies_beyond_cache", lambda num_bytes: 2)
    monkeypatch.setattr(attention, "NUM_CASES", len(attention.SHAPES))
    for module in (attention, grouped, head, rowwise):
        monkeypatch.setattr(module, "cuda_time", lambda run, **_: clock(150.0))
    monkeypatch.setattr(attention, "graph_time", lambda runs, **_: clock(120.0))
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name, num_bytes in (("memory_allocated", 0), ("max_memory_allocated", 2_500_000_000)):
        monkeypatch.setattr(torch.cuda, name, lambda num_bytes=num_bytes: num_bytes)
    monkeypatch.setattr("torch.fx.experimental._config.meta_nonzero_assume_all_nonzero", True)
    recorder = Recorder(None)
    recorder.add_ceilings("kernels", LIMITS)
    with WithoutMemory():
        for name, section in kernels.SECTIONS.items():
            found: kernels.Section = section if name != "gemm" else gemm.Products(list(gemm.MODELS))
            assert kernels.run_section(name, found, LIMITS, recorder), name
    return recorder.records
