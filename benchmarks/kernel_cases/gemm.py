"""Certification of the projection shapes of real models, and the table's speed against default cuBLAS and a fixed tile."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from rich.progress import track

from benchmarks.harness import Record, cuda_time, graph_time
from shared.kernels.certify import Table, use_cublaslt_without_split_k
from shared.kernels.cuda.gemm import REFERENCE
from shared.kernels.cuda.gemm import gemm as run_tile

MODELS = {
    "Qwen3-0.6B": {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)},
    "Qwen3-1.7B": {"qkv": (4096, 2048), "o": (2048, 2048), "gate_up": (12288, 2048), "down": (2048, 6144)},
    "Qwen3-8B": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)},
    "SmolLM2-135M": {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)},
    "Qwen3-30B-A3B": {
        "qkv": (5120, 2048),
        "o": (2048, 4096),
        "expert_gate_up": (1536, 2048),
        "expert_down": (2048, 768),
    },
}
HEADS = {"Qwen3-1.7B": (151936, 2048), "SmolLM2-135M": (49152, 576)}
ROWS = (1, 2, 3, 7, 16, 17, 32, 44, 45, 64, 128, 255, 256, 257, 512, 777, 1024, 2048, 4096, 8192)
TABLE: Table | None = None


def table() -> Table:
    global TABLE
    TABLE = TABLE or Table()
    return TABLE


def use_default_cublas() -> None:
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, True)  # type: ignore[assignment]
    torch.backends.cuda.preferred_blas_library("cublas")


def cases() -> list[tuple[str, str, int, int, torch.dtype]]:
    shapes = [(m, p, n, k, torch.bfloat16) for m, ps in MODELS.items() for p, (n, k) in ps.items()]
    return shapes + [(m, "lm_head", n, k, torch.float32) for m, (n, k) in HEADS.items()]


def check() -> Iterator[Record]:
    for model, part, n, k, out_dtype in track(cases(), description="certify"):
        entry = table().entry(n, k, torch.bfloat16, out_dtype)
        params = {"model": model, "part": part, "n": n, "k": k}
        members = {"members": sorted({*entry.members, entry.large})}
        yield Record("kernels", "certification", params | members, "exact", "row_counts_compared", entry.checked, "")
        # and through the dispatch itself, awkward counts included
        x = torch.randn(8192 if n < 100_000 else 1024, k, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        whole = run_tile(x, w, REFERENCE, bias=None, out=torch.empty(x.shape[0], n, device="cuda", dtype=out_dtype))
        kind = torch.int32 if out_dtype == torch.float32 else torch.int16
        bits = sum(
            int((table().linear(x[-m:], w, out_dtype=out_dtype).view(kind) != whole[-m:].view(kind)).sum())
            for m in ROWS
            if m <= x.shape[0]
        )
        yield Record("kernels", "dispatch", params | {"rows": list(ROWS)}, "exact", "differing_bits", bits, "bits")


def time(limits: dict[str, float]) -> Iterator[Record]:
    """Inside replayed graphs, as the engine runs them, over as many weights as overflow the L2."""
    for model, part, n, k, out_dtype in track(cases(), description="time GEMMs"):
        copies = max(2, min(16, 2**27 // (n * k)))
        weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
        for m in ROWS:
            if m > 512 and part == "lm_head":
                continue
            yield from time_rows({"model": model, "part": part, "m": m, "n": n, "k": k}, weights, out_dtype, limits)
    yield from weight_gradients()


def time_rows(
    params: dict[str, Any], weights: list[torch.Tensor], out_dtype: torch.dtype, limits: dict[str, float]
) -> Iterator[Record]:
    """One row count: the table, default cuBLAS, and for some counts the fixed tile."""
    m, n, k = params["m"], params["n"], params["k"]
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(m, n, device="cuda", dtype=out_dtype)
    use_default_cublas()
    peer = graph_time([partial(torch.mm, x, w.t(), out_dtype=out_dtype, out=out) for w in weights])
    use_cublaslt_without_split_k()
    ours = graph_time([partial(table().linear, x, w, out_dtype=out_dtype, out=out) for w in weights])
    size = 2 * (m * k + n * k) + m * n * out.element_size()
    floor = max(2 * m * n * k / limits["matmul"], size / limits["bandwidth"]) * 1e6
    name = "linear_few_rows_time_us" if m < 32 else "linear_time_us"
    common = ("kernels", "linear", params)
    yield Record(*common, "exact", name, ours.median, "us", "cublas", peer.median / ours.median, ours.spread)
    yield Record(*common, "exact", "fraction_of_floor", floor / ours.median, "")
    if m in (16, 256, 4096):
        fixed = graph_time([partial(run_tile, x, w, REFERENCE, bias=None, out=out) for w in weights])
        ratio = peer.median / fixed.median
        yield Record(*common, "fixed-tile", "fixed_tile_time_us", fixed.median, "us", "cublas", ratio, fixed.spread)


def weight_gradients() -> Iterator[Record]:
    """dW = dY.T X under the no-split flag against default cuBLAS."""
    for part, (n, k) in MODELS["Qwen3-1.7B"].items():
        for m in (4096, 16384):
            dy = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            use_default_cublas()
            peer = cuda_time(lambda: dy.t() @ x)
            use_cublaslt_without_split_k()
            ours = cuda_time(lambda: dy.t() @ x)
            yield Record(
                "kernels", "weight_gradient", {"part": part, "m": m, "n": n, "k": k}, "exact", "weight_gradient_time_us",
                ours.median, "us", "cublas", peer.median / ours.median, ours.spread,
            )  # fmt: skip
