"""The inputs of a step in one block of memory: a pinned copy that the host fills, and one on the device that graphs read.

Legend: T tokens, R rows, N slots, n tiles.
"""

from __future__ import annotations

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
            ("tile_seqs", "int32", num_tiles),
            ("tile_firsts", "int32", num_tiles),
        ]

    def placed(self, num_tokens: int) -> tuple[list[tuple[str, str, int, int]], int]:
        """(name, dtype, length, first byte) of every field, and the bytes of all."""
        fields, begin = [], 0
        for name, dtype, length in (*self.fixed, *((n, "int64", num_tokens) for n in ("ids", "positions", "kv_slots"))):
            fields.append((name, dtype, length, begin))
            begin += -(-length * np.dtype(dtype).itemsize // ALIGNMENT) * ALIGNMENT
        return fields, begin


class Block:
    """Two copies on the host, used in turn: when a third step is filled in, the first one's results have been read."""

    def __init__(self, fields: Fields, *, num_tokens: int, device: torch.device) -> None:
        """Args: num_tokens, of the largest step."""
        self.fields, self.num_tokens = fields, num_tokens
        num_bytes = fields.placed(num_tokens)[1]
        is_gpu = device.type == "cuda"
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._hosts = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_gpu) for _ in range(2)]
        self._turn = 0
        self._views: dict[tuple[str, int], Views] = {}

    def next_host(self, num_tokens: int) -> Views:
        """Numpy views of the host's copy that is free, for a step of `num_tokens`."""
        self._turn = 1 - self._turn
        self._sent = num_tokens
        return self._of(f"host{self._turn}", num_tokens)

    def send(self) -> None:
        """Copies what `next_host` gave last to the device, in the current stream."""
        num_bytes = self.fields.placed(self._sent)[1]
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
    clear(host, tables.num_slots)
    slots, ends, q_lens = batch.slots_S, batch.ends_S, batch.q_lens_S
    num_tokens, num_rows = batch.num_tokens, len(batch.samples)
    batch.write_ids(host["ids"][:num_tokens])
    positions, slots_T = batch.positions_T, slots.repeat(q_lens)
    host["positions"][:num_tokens] = positions
    host["kv_slots"][:num_tokens] = (
        tables.pages[slots_T, positions // page_size].astype(np.int64) * page_size + positions % page_size
    )
    host["rows"][:num_rows] = batch.rows_R
    host["slots"][:num_rows] = slots[batch.sampled_R]
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


def clear(host: Views, num_slots: int) -> None:
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
        host[name][:] = num_slots
