"""Mixture of experts (Qwen3-30B-A3B's shape): equal bits for any batch, time against one cuBLAS product of the same work."""

from __future__ import annotations

import torch

from benchmarks.harness import Record, cuda_time
from shared.kernels.cuda.gemm import REFERENCE, gemm
from shared.kernels.cuda.grouped import combine, grouped_linear, route

EXPERTS, TOP_K, HIDDEN, INNER = 128, 8, 2048, 768


def batch(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    chosen = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K, dim=-1)
    return x, chosen.indices, torch.softmax(chosen.values, -1)


def check() -> list[Record]:
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
    return [
        Record("kernels", "grouped_linear", {"experts": EXPERTS, "k": TOP_K}, "exact", "differing_bits", bits, "bits")
    ]


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
