"""Sampling on the device: the head's product, the filters, and the draw that `head.read_head` makes.

Filters are applied to sorted logits by one program a row, in a fixed order, so what a row keeps does not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from shared.kernels.cuda.head import ROWS, Draw, Head, empty_head, read_head
from shared.kernels.sampling import SampleOutput, SamplingParams

FILTERED_ROWS = 64
"""Rows that are sorted at one time."""
SEGMENT = 4096


@triton.jit
def support_kernel(
    ordered, top_k, top_p, log_min_p, kept, V, SEG: tl.constexpr,
    HAS_K: tl.constexpr, HAS_P: tl.constexpr, HAS_M: tl.constexpr,
):  # fmt: skip
    """kept [R] int32: how many of the entries in descending order survive top-k, top-p and min-p, in this order."""
    row = tl.program_id(0)
    z_row = ordered + row.to(tl.int64) * V
    rv = tl.arange(0, SEG)
    top = tl.load(z_row)
    count = V
    if HAS_K:
        k = tl.load(top_k + row).to(tl.int32)
        count = tl.where(k == 0, count, tl.minimum(k, count))
    if HAS_P:
        limit = count
        total = 0.0
        for s in range(0, V, SEG):
            total += tl.sum(tl.exp(tl.load(z_row + s + rv, mask=s + rv < limit, other=-float("inf")) - top), 0)
        p = tl.load(top_p + row)
        inside = 0
        mass = 0.0
        for s in range(0, V, SEG):
            e = tl.exp(tl.load(z_row + s + rv, mask=s + rv < limit, other=-float("inf")) - top)
            # the mass before a token decides: the one that crosses top_p is kept
            before = mass + (tl.cumsum(e, 0) - e)
            inside += tl.sum(((before < p * total) & (s + rv < limit)).to(tl.int32), 0)
            mass += tl.sum(e, 0)
        count = tl.where(p >= 1.0, limit, inside)
    if HAS_M:
        floor = tl.load(log_min_p + row)
        above = 0
        for s in range(0, V, SEG):
            z = tl.load(z_row + s + rv, mask=s + rv < V, other=-float("inf"))
            above += tl.sum(((z - top >= floor) & (s + rv < V)).to(tl.int32), 0)
        count = tl.minimum(count, above)
    tl.store(kept + row, tl.maximum(count, 1))


@triton.jit
def drop_kernel(logits, order, kept, V, stride, SEG: tl.constexpr):
    """logits of the entries that did not survive = -inf."""
    row = tl.program_id(0)
    rank = tl.program_id(1) * SEG + tl.arange(0, SEG)
    gone = (rank >= tl.load(kept + row)) & (rank < V)
    entry = tl.load(order + row.to(tl.int64) * V + rank, mask=gone, other=0)
    tl.store(logits + row.to(tl.int64) * stride + entry, -float("inf"), mask=gone)


def count_kept(
    ordered: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None, min_p: torch.Tensor | None
) -> torch.Tensor:
    """[R] int32, at least 1. Args: ordered [R, V] float32 logits over temperature, descending; filters [R] or None."""
    kept = torch.empty(ordered.shape[0], dtype=torch.int32, device=ordered.device)
    blank = ordered
    support_kernel[(ordered.shape[0],)](
        ordered, blank if top_k is None else top_k, blank if top_p is None else top_p,
        blank if min_p is None else min_p.log(), kept, ordered.shape[1], SEG=SEGMENT, HAS_K=top_k is not None,
        HAS_P=top_p is not None, HAS_M=min_p is not None, num_warps=8,
    )  # fmt: skip
    return kept


def drop_filtered(logits: torch.Tensor, params: SamplingParams) -> None:
    """Sets the logits [R, V] of what the filters exclude to -inf, in place."""
    divisor = torch.where(params.temperature == 0, 1.0, params.temperature)
    vocab = logits.shape[1]
    for r in range(0, logits.shape[0], FILTERED_ROWS):
        rows = slice(r, min(r + FILTERED_ROWS, logits.shape[0]))
        filters = [None if f is None else f[rows] for f in (params.top_k, params.top_p, params.min_p)]
        # stable: equal logits keep their lowest ids
        ordered, order = (logits[rows] / divisor[rows, None]).sort(dim=-1, descending=True, stable=True)
        kept = count_kept(ordered, *filters)
        drop_kernel[(rows.stop - r, triton.cdiv(vocab, SEGMENT))](
            logits[rows], order, kept, vocab, logits.stride(0), SEG=SEGMENT
        )


def sample(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    params: SamplingParams,
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> SampleOutput:
    """One token per row; without filters its logprob has the bits that `head.LmLogprob` gives it.

    Args:
        hidden: [R, D]; weight: [V, D].
        params: on the device of `hidden`.
        product: (x, w) -> float32 [rows, V], the certified one.
    """
    out = empty_head(hidden.shape[0], hidden.device)
    draw = Draw(params.seed, params.prompt, params.sample, params.position)
    is_filtered = any(f is not None for f in (params.top_k, params.top_p, params.min_p))
    for r in range(0, hidden.shape[0], ROWS):
        rows = slice(r, min(r + ROWS, hidden.shape[0]))
        logits = product(hidden[rows], weight)
        if is_filtered:
            drop_filtered(logits, params.rows(rows))
        read_head(
            logits,
            params.temperature[rows],
            draw=Draw(*(x[rows] for x in draw)),
            out=Head(*(x[rows] for x in out)),
        )
    return SampleOutput(out.token, out.logprob, out.top1)
