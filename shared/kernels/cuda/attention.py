"""From an attention layout to kernels: packed rows for training, pages for the engine.

A plan is made once per layout and shared by all layers. All kernels give equal bits (`attention_math`), so which one runs is a
question of speed:
    gradients, or a store that is this forward's own rows    `attention_packed`, its forward by `attention_hopper` where
                                                             `attention_choice` says so
    a paged store, one query a sequence, up to one chunk     `attention_cached`
    a paged store, few queries, longer contexts              `attention_cached`, chunks in parallel, then merged
    a paged store, chunks of a prompt                        `attention_cached`, serially in taller tiles

Legend: T query rows, S sequences, H query heads, Hkv KV heads, D head dim, R store rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import triton

from shared.kernels.attention_layout import AttentionLayout
from shared.kernels.cuda import attention_choice
from shared.kernels.cuda.attention_cached import CachedRows, Partials, allocate_partials, attend_cached
from shared.kernels.cuda.attention_math import CHUNK, Tiles, cut_tiles, to_device
from shared.kernels.cuda.attention_packed import FORWARD_ROWS, Packed, PackedAttention, pack
from shared.kernels.cuda.attention_schedule import Schedule, deal, num_multiprocessors

DECODE_ROWS = 16
"""Rows of a tile for few queries, a power of two that holds the query heads of one KV head."""
PREFILL_ROWS = 64

ChooseChunk = Callable[[int, int], int]
"""(programs of a launch before its contexts are cut, keys of the longest one) -> keys of a chunk."""


def anchored(num_programs: int, longest: int) -> int:
    """The chunk that the exact mode's bits are defined by."""
    return CHUNK


@dataclass(frozen=True, slots=True)
class Launch:
    """Tiles of one kind."""

    tiles: Tiles
    partials: Partials | None
    chunk: int
    walks: bool = False
    """One program walks all chunks of a context."""


@dataclass(frozen=True, slots=True)
class CachedPlan:
    """How the queries of one step meet the paged store."""

    where: CachedRows
    launches: tuple[Launch, ...]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: AttentionLayout,
    scale: float,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    choose_chunk: ChooseChunk = anchored,
) -> torch.Tensor:
    """The device's twin of `shared.kernels.attention.attention`, same arguments but the last, which the fast mode gives.

    Raises:
        ValueError: shapes that do not fit each other, the layout or the kernels.
    """
    heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[2]
    if heads % kv_heads or k.shape != v.shape or q.shape[0] != layout.num_queries:
        raise ValueError(
            f"attention got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)} and a layout of {layout.num_queries} "
            "queries; q needs one row per query, k and v equal shapes and a head count that divides q's"
        )
    if dim % 8 or not 16 <= dim <= 256 or heads // kv_heads > FORWARD_ROWS:
        raise ValueError(
            f"the CUDA attention takes head dims that are multiples of 8 from 16 to 256 and up to {FORWARD_ROWS} query heads "
            f"per KV head, got {dim} and {heads // kv_heads}; use device 'cpu' or mode 'fast'"
        )
    window, cap = sliding_window or 0, softcap or 0.0
    if q.shape[0] == 0:
        return torch.empty_like(q)
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if needs_grad or (layout.page_size == 1 and k.shape[0] == q.shape[0]):
        packed = layout.derived(
            ("packed", q.device, heads // kv_heads, k.shape[0]), partial(_packed_plan, layout, q, k)
        )
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        schedule = None
        if attention_choice.takes(q, k, window, cap):
            schedule = layout.derived(("schedule", q.device, heads, kv_heads), partial(_schedule, layout, q, k))
        return PackedAttention.apply(q, k, v, packed, scale, window, cap, schedule)
    key = ("cached", q.device, heads, kv_heads, dim, choose_chunk)
    plan = layout.derived(key, partial(_cached_plan, layout, q, k, choose_chunk))
    return attend(q, k, v, plan, scale, window=window, softcap=cap)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: CachedPlan,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """[T, H, D]: the plan's launches over a paged store; a query that none covers is left as it was allocated."""
    out = torch.empty_like(q)
    for launch in plan.launches:
        attend_cached(
            q,
            k,
            v,
            plan.where,
            launch.tiles,
            scale=scale,
            out=out,
            partials=launch.partials,
            walks=launch.walks,
            window=window,
            softcap=softcap,
            chunk=launch.chunk,
        )
    return out


def _packed_plan(layout: AttentionLayout, q: torch.Tensor, k: torch.Tensor) -> Packed:
    rows = layout.context_rows.numpy()
    is_in_order = len(rows) == k.shape[0] and np.array_equal(rows, np.arange(len(rows)))
    return pack(
        layout.q_lens.tolist(),
        q.shape[1] // k.shape[1],
        q.device,
        context_lens=layout.context_lens.tolist(),
        rows=None if is_in_order else rows,
        num_store_rows=k.shape[0],
    )


def _schedule(layout: AttentionLayout, q: torch.Tensor, k: torch.Tensor) -> Schedule:
    num_programs = num_multiprocessors(q.device)
    lens = layout.q_lens.numpy(), layout.context_lens.numpy()
    return deal(*lens, q.shape[1], k.shape[1], q.device, num_programs=num_programs)


def _cached_plan(layout: AttentionLayout, q: torch.Tensor, k: torch.Tensor, choose_chunk: ChooseChunk) -> CachedPlan:
    _, heads, dim = q.shape
    kv_heads, device = k.shape[1], q.device
    group = heads // kv_heads
    q_lens, contexts = layout.q_lens.numpy(), layout.context_lens.numpy()
    few = max(DECODE_ROWS, triton.next_power_of_2(group))
    chunk = choose_chunk(len(q_lens) * kv_heads, int(contexts.max()))
    is_one, is_few, is_long = q_lens == 1, q_lens * group <= few, contexts > chunk
    launches = []
    for members, rows, queries, walks in (
        (is_one & ~is_long, few, 1, False),
        (is_one & is_long, few, 1, False),
        (is_few & ~is_one, few, None, False),
        (~is_few & ~is_one, max(PREFILL_ROWS, few), None, True),
    ):
        if members.any():
            tiles = cut_tiles(q_lens, group, rows, device, of=members.nonzero()[0], queries=queries)
            longest = int(contexts[members].max())
            is_cut = longest > chunk and not walks
            scratch = allocate_partials(tiles, heads, kv_heads, dim, longest, chunk=chunk) if is_cut else None
            launches.append(Launch(tiles, scratch, chunk, walks))
    where = CachedRows(
        context=to_device(contexts, device),
        q_start=to_device(np.concatenate([[0], q_lens.cumsum()]), device),
        pages=to_device(layout.pages.numpy(), device),
        page_size=layout.page_size,
    )
    return CachedPlan(where, tuple(launches))
