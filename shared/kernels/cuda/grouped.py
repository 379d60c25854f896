"""Mixtures of experts: one product per expert over the rows routed to it, in the class of `gemm`, and the combine.

Rows are sorted by expert (stably, so that equal experts keep token order). A row's result depends on its input and its expert's
weight alone. The combine adds a token's k results in slot order in float32: the order of arrival of experts never shows.
Who chooses the experts, or replays a record of them: `shared.kernels.router`. The backward is deterministic: no atomics.

Legend: T tokens, k experts per token, E experts, M = T k routed rows, K inputs, N outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable


@triton.jit
def grouped_kernel(
    x, w, y, source, group_start, tile_expert, tile_first, N, K, stride_x, stride_e, stride_w, stride_y,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    # one axis: a grid's others end at 65,535, and a long batch has more tiles
    num_n = tl.cdiv(N, BN)
    tile = tl.program_id(0) // num_n
    expert = tl.load(tile_expert + tile)
    if expert >= 0:
        first = tl.load(tile_first + tile)
        end = tl.load(group_start + expert + 1)
        rt = first + tl.arange(0, BT)
        rn = tl.program_id(0) % num_n * BN + tl.arange(0, BN)
        rk = tl.arange(0, BK)
        ok = rt < end
        if GATHER:
            rows = tl.load(source + rt, mask=ok, other=0).to(tl.int64)
        else:
            rows = tl.where(ok, rt, first).to(tl.int64)
        cols = tl.where(rn < N, rn, 0).to(tl.int64)
        wb = w + expert.to(tl.int64) * stride_e
        acc = tl.zeros((BT, BN), tl.float32)
        for k in range(0, K, BK):
            inside = k + rk < K
            a = tl.load(x + rows[:, None] * stride_x + (k + rk)[None, :], mask=inside[None, :], other=0.0)
            b = tl.load(wb + cols[None, :] * stride_w + (k + rk)[:, None], mask=inside[:, None], other=0.0)
            acc = tl.dot(a, b, acc)
        keep = ok[:, None] & (rn < N)[None, :]
        tl.store(y + rt.to(tl.int64)[:, None] * stride_y + rn[None, :], acc.to(y.dtype.element_ty), mask=keep)


@triton.jit
def combine_kernel(rows, place, gates, out, D, TOPK: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    rd = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(TOPK):
        at = tl.load(place + t * TOPK + slot).to(tl.int64)
        value = tl.load(rows + at * D + rd, mask=rd < D, other=0.0).to(tl.float32)
        acc = tl.fma(value, tl.zeros_like(value) + tl.load(gates + t * TOPK + slot), acc)
    tl.store(out + t * D + rd, acc.to(out.dtype.element_ty), mask=rd < D)


@triton.jit
def grouped_weight_grad_kernel(
    grad, x, out, source, group_start, N, K,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """out[e] = sum over the rows of expert e of grad[r] x[row r]^T, rows in ascending order; 0 where it has none."""
    expert = tl.program_id(2)
    rn = tl.program_id(0) * BN + tl.arange(0, BN)
    rk = tl.program_id(1) * BK + tl.arange(0, BK)
    end = tl.load(group_start + expert + 1)
    acc = tl.zeros((BN, BK), tl.float32)
    for first in range(tl.load(group_start + expert), end, BT):
        rt = first + tl.arange(0, BT)
        ok = rt < end
        at = rt.to(tl.int64)
        rows = tl.load(source + rt, mask=ok, other=0).to(tl.int64) if GATHER else at
        g = tl.load(grad + at[None, :] * N + rn[:, None], mask=ok[None, :] & (rn < N)[:, None], other=0.0)
        a = tl.load(x + rows[:, None] * K + rk[None, :], mask=ok[:, None] & (rk < K)[None, :], other=0.0)
        acc = tl.dot(g, a, acc)
    to = out + expert.to(tl.int64) * N * K + rn.to(tl.int64)[:, None] * K + rk[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=(rn < N)[:, None] & (rk < K)[None, :])


@triton.jit
def combine_backward_kernel(
    grad, rows, place, gates, grad_rows, grad_gates, D, TOPK: tl.constexpr, BLOCK: tl.constexpr
):
    """Of a token's slot: grad_rows = gate grad, grad_gates = rows . grad."""
    t = tl.program_id(0).to(tl.int64)
    slot = t * TOPK + tl.program_id(1)
    at = tl.load(place + slot).to(tl.int64)
    gate = tl.load(gates + slot)
    acc = tl.zeros((BLOCK,), tl.float32)
    for d in range(0, D, BLOCK):
        rd = d + tl.arange(0, BLOCK)
        g = tl.load(grad + t * D + rd, mask=rd < D, other=0.0).to(tl.float32)
        acc += tl.load(rows + at * D + rd, mask=rd < D, other=0.0).to(tl.float32) * g
        tl.store(grad_rows + at * D + rd, (gate * g).to(grad_rows.dtype.element_ty), mask=rd < D)
    tl.store(grad_gates + slot, tl.sum(acc, 0))


@dataclass(frozen=True, slots=True)
class Routing:
    """One batch's assignment, made on the device without a host sync."""

    source: torch.Tensor
    """[M] int32: the token of each sorted row."""
    place: torch.Tensor
    """[T, k] int32: the sorted row of each token's slot."""
    group_start: torch.Tensor
    """[E + 1] int32."""
    tile_expert: torch.Tensor
    """[tiles] int32, -1 for an unused tile."""
    tile_first: torch.Tensor
    """[tiles] int32: first sorted row of the tile."""
    block: int


def route(experts: torch.Tensor, num_experts: int, block: int = 64) -> Routing:
    """Args: experts [T, k] integer ids, distinct in a row; block: rows per tile, 16 to 128."""
    tokens, top_k = experts.shape
    flat = experts.reshape(-1)
    order = torch.sort(flat, stable=True).indices
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device).scatter_add_(
        0, flat.long(), torch.ones_like(flat, dtype=torch.int64)
    )
    start = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    place = torch.empty_like(order)
    place[order] = torch.arange(order.shape[0], device=flat.device)
    tiles = (counts + block - 1) // block
    ends = tiles.cumsum(0)
    # the most tiles there can be, so that nothing is read back from the device
    index = torch.arange(min(flat.shape[0], triton.cdiv(flat.shape[0], block) + num_experts), device=flat.device)
    expert = torch.searchsorted(ends, index, right=True)
    used = expert < num_experts
    safe = expert.clamp(max=num_experts - 1)
    first = start[safe] + (index - (ends - tiles)[safe]) * block
    as_int = lambda t: t.to(torch.int32)  # noqa: E731
    return Routing(
        as_int(order // top_k), as_int(place).view(tokens, top_k), as_int(start), as_int(torch.where(used, expert, -1)),
        as_int(first), block,
    )  # fmt: skip


def _grouped(x: torch.Tensor, weight: torch.Tensor, routing: Routing, gather: bool) -> torch.Tensor:
    n, k = weight.shape[1], weight.shape[2]
    out = torch.empty(routing.source.shape[0], n, dtype=x.dtype, device=x.device)
    block_n, block_k, warps = (64, 128, 4) if routing.block <= 32 else (128, 64, 4 if routing.block <= 64 else 8)
    grouped_kernel[(triton.cdiv(n, block_n) * routing.tile_expert.shape[0],)](
        x, weight, out, routing.source, routing.group_start, routing.tile_expert, routing.tile_first, n, k, x.stride(0),
        weight.stride(0), weight.stride(1), out.stride(0), BT=routing.block, BN=block_n, BK=block_k, GATHER=gather,
        num_warps=warps, num_stages=4,
    )  # fmt: skip
    return out


def _combine(rows: torch.Tensor, gates: torch.Tensor, routing: Routing) -> torch.Tensor:
    tokens, top_k = gates.shape
    dim = rows.shape[1]
    out = torch.empty(tokens, dim, dtype=rows.dtype, device=rows.device)
    combine_kernel[(tokens, triton.cdiv(dim, 1024))](
        rows, routing.place, gates, out, dim, TOPK=top_k, BLOCK=1024, num_warps=4
    )
    return out


class GroupedLinear(torch.autograd.Function):
    """(x, weight, routing, gather) -> [M, N]."""

    @staticmethod
    def forward(ctx: Any, x, weight, routing: Routing, gather: bool) -> torch.Tensor:  # type: ignore[no-untyped-def, override]
        ctx.save_for_backward(x, weight)
        ctx.routing, ctx.gather = routing, gather
        return _grouped(x, weight, routing, gather)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        routing, grad = ctx.routing, grad.contiguous()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = _grouped(grad, weight.transpose(1, 2).contiguous(), routing, False)
            if ctx.gather:
                ones = torch.ones(routing.place.shape, dtype=torch.float32, device=grad.device)
                grad_x = _combine(grad_x, ones, routing)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
            num_experts, n, k = weight.shape
            grouped_weight_grad_kernel[(triton.cdiv(n, 64), triton.cdiv(k, 64), num_experts)](
                grad, x.contiguous(), grad_weight, routing.source, routing.group_start, n, k,
                BT=64, BN=64, BK=64, GATHER=ctx.gather, num_warps=4,
            )  # fmt: skip
        return grad_x, grad_weight, None, None


class Combine(torch.autograd.Function):
    """(rows, gates, routing) -> [T, D]."""

    @staticmethod
    def forward(ctx: Any, rows, gates, routing: Routing) -> torch.Tensor:  # type: ignore[no-untyped-def, override]
        ctx.save_for_backward(rows, gates)
        ctx.routing = routing
        return _combine(rows, gates, routing)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        rows, gates = ctx.saved_tensors
        grad_rows, grad_gates = torch.empty_like(rows), torch.empty_like(gates)
        block = min(1024, triton.next_power_of_2(rows.shape[1]))
        combine_backward_kernel[gates.shape](
            grad.contiguous(), rows, ctx.routing.place, gates, grad_rows, grad_gates, rows.shape[1],
            TOPK=gates.shape[1], BLOCK=block, num_warps=4,
        )  # fmt: skip
        return grad_rows, grad_gates, None


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, routing: Routing, *, gather: bool) -> torch.Tensor:
    """y[r] = x[row r] @ weight[expert of r].T, with gradients of both.

    Args:
        x: [T, K] tokens when `gather`, else [M, K] sorted rows.
        weight: [E, N, K].
    """
    return GroupedLinear.apply(x, weight, routing, gather)


def combine(rows: torch.Tensor, gates: torch.Tensor, routing: Routing) -> torch.Tensor:
    """[T, D]: sum over slots of gates [T, k] float32 times the slot's row of `rows` [M, D], in slot order, in float32.

    Both get their gradients, so that the router learns.
    """
    return Combine.apply(rows, gates, routing)
