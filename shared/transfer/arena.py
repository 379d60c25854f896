"""One version as one flat buffer: the same offsets in the trainer's memory, on the wire and in a replica's staging.

>>> layout = ArenaLayout.of_manifest(manifest)
>>> flat = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
>>> tensors = layout.views(flat)  # by name, sharing the memory of `flat`
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.wire.pb.weight_sync_pb2 import Manifest
from shared.wire.tensors import ITEM_BYTES, RawTensor

ALIGNMENT = 256
"""Bytes; what the CUDA allocator gives, and more than any kernel asks for."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one tensor lies."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Bytes from the beginning of the buffer."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """Tensors in name order, each at a multiple of ALIGNMENT."""

    places: tuple[Place, ...]
    nbytes: int
    """Of the whole buffer."""

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> ArenaLayout:
        """Args:
        tensors: (name, dtype name, shape).
        """
        places, end = [], 0
        for name, dtype, shape in sorted(tensors):
            places.append(Place(name, dtype, shape, end))
            end += -(-places[-1].nbytes // ALIGNMENT) * ALIGNMENT
        return cls(tuple(places), end)

    @classmethod
    def of_manifest(cls, manifest: Manifest) -> ArenaLayout:
        return cls.of((e.name, e.dtype, tuple(e.shape)) for e in manifest.tensors)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Args:
        flat: [nbytes] uint8, at an address that ALIGNMENT or the elements' size divides.
        """
        return {
            p.name: flat[p.offset : p.offset + p.nbytes].view(getattr(torch, p.dtype)).view(p.shape)
            for p in self.places
        }

    def raw(self, flat: Tensor) -> dict[str, RawTensor]:
        """As `views`, of a buffer in the CPU's memory."""
        data = flat.numpy()
        return {p.name: RawTensor(p.dtype, p.shape, data[p.offset : p.offset + p.nbytes]) for p in self.places}

    def buckets(self, flat: Tensor, bucket_bytes: int) -> Iterator[Tensor]:
        """The buffer in pieces of at most `bucket_bytes`."""
        for begin in range(0, self.nbytes, bucket_bytes):
            yield flat[begin : min(self.nbytes, begin + bucket_bytes)]
