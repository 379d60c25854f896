"""Mixture of experts (Qwen3-30B-A3B's shape): equal bits for any batch, time against one cuBLAS product of the same work."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Record, cuda_time, gradient_errors
from shared.kernels.cuda.gemm import REFERENCE, gemm
from shared.kernels.cuda.grouped import combine, grouped_linear, route

EXPERTS, TOP_K, HIDDEN, INNER = 128, 8, 2048, 768


def batch(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    chosen = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K, dim=-1)
    return x, chosen.indices, torch.softmax(chosen.values, -1)


def check() -> Iterator[Record]:
    x, experts, gates = batch(1000)
    weight = torch.randn(EXPERTS, INNER, HIDDEN, device="cuda", dtype=torch.bfloat16)
    back = torch.randn(EXPERTS, HIDDEN, INNER, device="cuda", dtype=torch.bfloat16)

    def run(rows: slice, block: int) -> torch.Tensor:
        routing = route(experts[rows].contiguous(), EXPERTS, block)
        inner = grouped_linear(x[rows].contiguous(), weight, routing, gather=True)
        return combine(grouped_linear(inner, back, routing, gather=False), gates[rows].contiguous(), routing)

    whole = run(slice(0, 1000), 64)
    bits = 0
    for block in (16, 32, 64, 128):
        for rows in (slice(0, 1000), slice(999, 1000), slice(3, 47), slice(100, 357)):
            bits += int((run(rows, block).view(torch.int16) != whole[rows].view(torch.int16)).sum())
    routing = route(experts, EXPERTS)
    grouped = grouped_linear(x, weight, routing, gather=True)
    for e in (0, 5, EXPERTS - 1):
        begin, end = int(routing.group_start[e]), int(routing.group_start[e + 1])
        alone = torch.empty(end - begin, INNER, device="cuda", dtype=torch.bfloat16)
        gemm(x[routing.source[begin:end].long()], weight[e], REFERENCE, bias=None, out=alone)
        bits += int((alone.view(torch.int16) != grouped[begin:end].view(torch.int16)).sum())
    params = {"experts": EXPERTS, "k": TOP_K}
    yield Record("kernels", "grouped_linear", params, "exact", "differing_bits", bits, "bits")
    yield from gradient_checks()


def gradient_checks() -> Iterator[Record]:
    """Two products of each expert and the combine, of a small layer; the last expert has no token."""
    tokens, num_experts, top_k, hidden, inner = 300, 17, 4, 256, 128
    torch.manual_seed(0)
    experts = torch.rand(tokens, num_experts - 1, device="cuda").topk(top_k, dim=-1).indices
    routing = route(experts, num_experts)

    def ours(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        rows = grouped_linear(x, up, routing, gather=True)
        return combine(grouped_linear(rows, down, routing, gather=False), gates.float(), routing)

    def plain(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for e in range(num_experts):
            token, slot = (experts == e).nonzero(as_tuple=True)
            out = out.index_add(0, token, x[token] @ up[e].t() @ down[e].t() * gates[token, slot, None])
        return out

    shapes = {"x": (tokens, hidden), "up": (num_experts, inner, hidden), "down": (num_experts, hidden, inner)}
    inputs = {name: torch.randn(shape, device="cuda", dtype=torch.bfloat16) for name, shape in shapes.items()}
    inputs["gates"] = torch.rand(tokens, top_k, device="cuda", dtype=torch.bfloat16)
    yield from gradient_errors("grouped_linear_gradient", ours, plain, inputs)


def time(limits: dict[str, float]) -> list[Record]:
    weight = torch.randn(EXPERTS, INNER, HIDDEN, device="cuda", dtype=torch.bfloat16)
    records = []
    for tokens in (16, 256, 4096):
        x, experts, _ = batch(tokens)
        routing = route(experts, EXPERTS, 16 if tokens <= 256 else 128)
        ours = cuda_time(lambda: grouped_linear(x, weight, routing, gather=True))
        rows = tokens * TOP_K
        touched = min(EXPERTS, int(experts.unique().numel()))
        floor = (
            max(2 * rows * HIDDEN * INNER / limits["matmul"], 2 * touched * INNER * HIDDEN / limits["bandwidth"]) * 1e6
        )
        params = {"tokens": tokens, "experts": EXPERTS, "k": TOP_K, "hidden": HIDDEN, "inner": INNER}
        records.append(
            Record(
                "kernels",
                "grouped_linear",
                params,
                "exact",
                "grouped_time_us",
                ours.median,
                "us",
                "floor",
                floor / ours.median,
                ours.spread,
            )
        )
    return records
