"""The inputs of a step in one block of memory: a pinned copy that the host fills, and one on the device that graphs read.

Legend: T tokens, R rows, N slots, n tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from services.rollout.graphs import Shape, padded
from services.rollout.inputs import Batch, SlotTables

ALIGNMENT = 64
"""Bytes. The same for every field, so that a kernel is compiled once for all of them."""

Views = dict[str, Any]
"""Fields by name: numpy arrays of the host's copy, tensors of the device's."""


class Fields:
    """Name, dtype and length of every field; those with one entry per token come last, so that little is sent for few tokens."""

    def __init__(self, *, num_slots: int, num_rows: int, num_tiles: int) -> None:
        self.fixed: list[tuple[str, str, int]] = [
            *((name, "int64", num_rows) for name in ("seed", "prompt", "sample", "position", "rows", "slots")),
            ("temperature", "float32", num_rows),
            ("contexts", "int32", num_slots + 1),
            ("q_starts", "int32", num_slots + 2),
            ("ones", "int32", num_rows),
            ("longs", "int32", num_rows),
            # New entries of the page tables: flat index, page.
            ("page_at", "int64", num_rows),
            ("page_ids", "int32", num_rows),
            ("tile_seqs", "int32", num_tiles),
            ("tile_firsts", "int32", num_tiles),
        ]
        self._fixed_bytes = self.placed(0)[1]

    def num_bytes(self, num_tokens: int) -> int:
        """Of all fields; `placed` says so too, but this is asked at every step."""
        return self._fixed_bytes + 3 * _aligned(8 * num_tokens)

    def placed(self, num_tokens: int) -> tuple[list[tuple[str, str, int, int]], int]:
        """(name, dtype, length, first byte) of every field, and the bytes of all."""
        fields, begin = [], 0
        for name, dtype, length in (*self.fixed, *((n, "int64", num_tokens) for n in ("ids", "positions", "kv_slots"))):
            fields.append((name, dtype, length, begin))
            begin += _aligned(length * np.dtype(dtype).itemsize)
        return fields, begin


@dataclass(frozen=True, slots=True)
class Filled:
    """A decode step that a copy of the host holds: each share is a row and a token."""

    shape: Shape
    stints_S: np.ndarray
    ends_S: np.ndarray
    num_longs: int

    @classmethod
    def of(cls, batch: Batch, shape: Shape) -> Filled:
        num_longs = int((batch.ends_S > shape.chunk).sum())
        return cls(shape, batch.step.stints_S, batch.ends_S, num_longs)

    def is_continued_by(self, other: Filled) -> bool:
        """Whether the other step is of the same sequences, all longer by the same: by slot, and in the order of their lengths."""
        if self.shape != other.shape or not np.array_equal(self.stints_S, other.stints_S):
            return False
        growth_S = other.ends_S - self.ends_S
        return self.num_longs == other.num_longs and bool((growth_S == growth_S[0]).all())


class Block:
    """Copies on the host, used in turn: when a step is filled in, the results of the one that the copy held have been read."""

    def __init__(self, fields: Fields, *, num_tokens: int, device: torch.device, num_hosts: int = 2) -> None:
        """Args:
        num_tokens: of the largest step.
        num_hosts: copies on the host: as many as steps are in flight.
        """
        self.fields, self.num_tokens = fields, num_tokens
        num_bytes = fields.num_bytes(num_tokens)
        is_gpu = device.type == "cuda"
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._hosts = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_gpu) for _ in range(num_hosts)]
        self._turn = 0
        self._filled: list[Filled | None] = [None] * num_hosts
        self._views: dict[tuple[str, int], Views] = {}

    def next_host(self, num_tokens: int) -> Views:
        """Numpy views of the host's copy that is free, for a step of `num_tokens`."""
        self._turn = self._next_turn
        self._sent, self._filled[self._turn] = num_tokens, None
        return self._of(f"host{self._turn}", num_tokens)

    def fill(self, batch: Batch, tables: SlotTables, shape: Shape, page_size: int, tile_queries: int) -> Views:
        """`fill` of what `next_host` gives; where that holds an earlier step of the same sequences, of what has changed."""
        held = self._filled[self._next_turn]
        host = self.next_host(shape.tokens)
        coming = Filled.of(batch, shape) if batch.is_decode else None
        if held is not None and coming is not None and held.is_continued_by(coming):
            refill(host, batch, tables, page_size)
        else:
            fill(host, batch, tables, shape, page_size, tile_queries)
        self._filled[self._turn] = coming
        return host

    @property
    def _next_turn(self) -> int:
        return (self._turn + 1) % len(self._hosts)

    def send(self) -> None:
        """Copies what `next_host` gave last to the device, in the current stream."""
        num_bytes = self.fields.num_bytes(self._sent)
        self._device[:num_bytes].copy_(self._hosts[self._turn][:num_bytes], non_blocking=True)

    def device(self, num_tokens: int) -> Views:
        """Tensors of the device's copy, for a step of `num_tokens`; fields without tokens lie where they lie in any."""
        return self._of("device", num_tokens)

    def _of(self, place: str, num_tokens: int) -> Views:
        key = place, num_tokens
        if key in self._views:
            return self._views[key]
        memory = self._device if place == "device" else self._hosts[int(place[-1])]
        views: Views = {}
        for name, dtype, length, begin in self.fields.placed(num_tokens)[0]:
            size = length * np.dtype(dtype).itemsize
            view = memory[begin : begin + size].view(getattr(torch, dtype))
            views[name] = view if place == "device" else view.numpy()
        if num_tokens == padded(num_tokens):
            # Eager steps have any size; these few come again and again.
            self._views[key] = views
        return views


def fill(host: Views, batch: Batch, tables: SlotTables, shape: Shape, page_size: int, tile_queries: int) -> None:
    """Writes a step into a block.

    Args:
        host: numpy views of `blocks.Fields`, for T = shape.tokens.
        tables: up to date with the batch.
        shape: that holds the batch: exact, or padded.
        tile_queries: of a prompt's tile.
    """
    clear(host, tables)
    slots, ends, q_lens = batch.slots_S, batch.ends_S, batch.q_lens_S
    num_tokens, num_rows = batch.num_tokens, len(batch.samples)
    batch.write_ids(host["ids"][:num_tokens])
    positions, slots_T = batch.positions_T, slots.repeat(q_lens)
    host["positions"][:num_tokens] = positions
    host["kv_slots"][:num_tokens] = tables.kv_slots(slots_T, positions, page_size)
    host["rows"][:num_rows] = batch.rows_R
    host["slots"][:num_rows] = batch.slots_R
    write_pages(host, batch, tables)
    for name, values in tables.sampling(batch).items():
        host[name][:num_rows] = values
    host["contexts"][slots] = ends
    by_slot = np.zeros(tables.num_slots, np.int32)
    by_slot[slots] = q_lens
    np.cumsum(by_slot, dtype=np.int32, out=host["q_starts"][1:-1])
    host["q_starts"][-1] = num_tokens
    # The longest walk first: it would otherwise be the last to end.
    ones = np.flatnonzero(q_lens == 1)
    ones = ones[np.argsort(-ends[ones], kind="stable")]
    is_long = ends[ones] > shape.chunk if shape.ones else np.full(len(ones), shape.longs > 0)
    host["longs"][: is_long.sum()] = slots[ones[is_long]]
    host["ones"][: len(ones) - is_long.sum()] = slots[ones[~is_long]]
    prompts = np.flatnonzero(q_lens > 1)
    counts = -(-q_lens[prompts] // tile_queries)
    seq = prompts.repeat(counts)
    first = (np.arange(len(seq)) - (counts.cumsum() - counts).repeat(counts)) * tile_queries
    order = np.argsort(-(ends[seq] - q_lens[seq] + first), kind="stable")
    host["tile_seqs"][: len(seq)] = slots[seq[order]]
    host["tile_firsts"][: len(seq)] = first[order]


def refill(host: Views, batch: Batch, tables: SlotTables, page_size: int) -> None:
    """Writes a decode step into a block that holds an earlier one of the same sequences."""
    slots, starts, num_rows = batch.slots_S, batch.step.starts_S, batch.num_tokens
    host["positions"][:num_rows] = starts
    host["kv_slots"][:num_rows] = tables.kv_slots(slots, starts, page_size)
    host["position"][:num_rows] = tables.positions(batch)
    host["contexts"][slots] = batch.ends_S
    write_pages(host, batch, tables)


def write_pages(host: Views, batch: Batch, tables: SlotTables) -> None:
    """The new entries of the page tables, as far as there is room for all of them: those of prompts may be too many."""
    at, pages = batch.new_pages
    num_new = len(at) if len(at) <= len(host["page_at"]) else 0
    host["page_at"][:num_new], host["page_ids"][:num_new] = at[:num_new], pages[:num_new]
    host["page_at"][num_new:], host["page_ids"][num_new:] = tables.num_slots * tables.max_pages, 0


def clear(host: Views, tables: SlotTables) -> None:
    """A block of padding: tiles of slot N, which has no queries and no keys, and rows that are written nowhere."""
    for name in (
        "ids",
        "positions",
        "rows",
        "seed",
        "prompt",
        "sample",
        "position",
        "contexts",
        "q_starts",
        "tile_firsts",
    ):
        host[name][:] = 0
    host["kv_slots"][:] = -1
    host["temperature"][:] = 1
    for name in ("slots", "ones", "longs", "tile_seqs"):
        host[name][:] = tables.num_slots
    host["page_at"][:], host["page_ids"][:] = tables.num_slots * tables.max_pages, 0


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
