"""Captured steps: which sizes are captured, and their capture and replay.

A step is padded to a captured shape by rows that read nothing and write nowhere; a row's bits do not depend on its company, so
padding, capture and replay change none. What fits no shape runs eagerly, which is never an error.

Legend: T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

MOST_TOKENS = 1024
"""Of a captured step. A larger one keeps the device busy for longer than its launch takes."""
PROMPTS = 16
"""Chunks of prompts in a captured step, at most."""
SCRATCH_BYTES = 1 << 30
"""Of the partial results of a captured step's split contexts, at most."""


class Shape(NamedTuple):
    """What the launches of a step depend on."""

    tokens: int
    ones: int
    """Attention tiles of sequences with one query, whose keys one program walks."""
    longs: int
    """Tiles of sequences with one query and more than one chunk of keys: programs in parallel."""
    chunks: int
    """Chunks of the longest of these."""
    chunk: int
    """Keys of a chunk."""
    tiles: int
    """Tiles of prompts."""


def padded(size: int) -> int:
    """The captured size that holds `size`: 1, 2, 4, 8, then eighths of powers of two, so that less than 1/8 is padding.

    >>> [padded(n) for n in (1, 3, 8, 9, 17, 130, 257)]
    [1, 4, 8, 9, 18, 144, 288]
    """
    if size <= 8:
        return 1 << max(size - 1, 0).bit_length()
    step = 1 << ((size - 1).bit_length() - 4)
    return -(-size // step) * step


def padded_sizes(largest: int) -> list[int]:
    """Every captured size up to the one that holds `largest`, descending."""
    sizes = [padded(largest)]
    while sizes[-1] > 1:
        # The largest size that holds one less than what the last one's predecessor cannot.
        below = sizes[-1] - 1
        while padded(below) == sizes[-1]:
            below -= 1
        sizes.append(padded(below))
    return sizes


def capturable(shape: Shape, *, num_prompts: int, tile_queries: int, max_running: int) -> Shape | None:
    """The captured shape that holds an exact one, or None.

    Args:
        num_prompts: chunks with more than one token.
        tile_queries: of a prompt's tile.
        max_running: sequences in a step, at most.
    """
    tokens = padded(shape.tokens)
    if tokens > MOST_TOKENS or num_prompts > PROMPTS:
        return None
    most_ones = min(tokens, padded(max_running))
    longs = 0
    if shape.longs:
        # Two sizes: few long ones beside many short, or all of them.
        few = max(8, padded(most_ones // 8))
        longs = few if shape.longs <= few < most_ones else most_ones
    return Shape(
        tokens=tokens,
        ones=0 if longs == most_ones else most_ones,
        longs=longs,
        chunks=1 << (shape.chunks - 1).bit_length() if longs else 1,
        chunk=shape.chunk,
        # Tiles are cut per chunk of a prompt, so that each may leave one partly filled.
        tiles=tokens // tile_queries + PROMPTS if shape.tiles else 0,
    )


class Graphs:
    """Captured functions by key, in one pool of memory.

    A function reads and writes fixed tensors. Its result is overwritten by the next replay of any key: use it in the same stream
    before that. Weights are swapped in place, so a capture stays valid for as long as its runner lives.
    """

    def __init__(self, device: torch.device, *, is_enabled: bool) -> None:
        self._is_enabled = is_enabled and device.type == "cuda"
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._pool: Any = None

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable, function: Callable[[], Any]) -> Any:
        """Replays the function; the first time it runs as it is, which compiles and certifies what it needs, and is captured."""
        if not self._is_enabled:
            return function()
        if key in self._graphs:
            graph, result = self._graphs[key]
            graph.replay()
            return result
        result = function()
        self._capture(key, function)
        return result

    def _capture(self, key: Hashable, function: Callable[[], Any]) -> None:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Thread-local: a thread that stages weights may allocate meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = function()
        self._graphs[key] = graph, result
