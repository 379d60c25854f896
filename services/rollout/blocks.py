"""The inputs of a step in one block of memory: a pinned copy that the host fills, and one on the device that graphs read.

Legend: T tokens, R rows, N slots, n tiles.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from services.rollout.graphs import padded

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
