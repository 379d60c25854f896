"""Captured steps: which sizes are captured, and their capture and replay.

A step is padded to a captured shape by rows that read nothing and write nowhere; a row's bits do not depend on its company, so
padding, capture and replay change none. What fits no shape runs eagerly, which is never an error.

Legend: T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, NamedTuple

import structlog
import torch

log = structlog.get_logger()

FEW_TOKENS = 1024
"""A captured step may have so many whatever the model, and no more with long contexts, which come in many combinations."""
LAUNCH_PRODUCTS = 2e11
"""Products of a weight and a token in the time that the host takes to launch a layer: about a millisecond, at 4e14 FLOP/s."""
PROMPT_PARTS, LONG_PARTS = 4, 2
"""Sizes between two powers of two, of steps with prompts and of steps with long contexts."""
SCRATCH_BYTES = 1 << 30
"""Of the partial results of a captured step's split contexts, at most."""
MOST_GRAPHS = 512
"""Captured at one time; what comes later runs eagerly."""


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


def padded(size: int, *, parts: int = 8) -> int:
    """The captured size that holds `size`: 1, 2, 4, 8, then eighths of powers of two, so that less than 1/8 is padding.

    Args:
        parts: of a power of two: 8, or less for fewer sizes.

    >>> [padded(n) for n in (1, 3, 8, 9, 17, 130, 257)]
    [1, 4, 8, 9, 18, 144, 288]
    >>> [padded(n, parts=2) for n in (8, 9, 13, 130, 200)]
    [8, 12, 16, 192, 256]
    """
    power = 1 << max(size - 1, 0).bit_length()
    if size <= 8:
        return power
    step = power // (2 * parts)
    return -(-size // step) * step


def padded_sizes(largest: int, *, parts: int = 8) -> list[int]:
    """Every captured size up to the one that holds `largest`, descending."""
    sizes = [padded(largest, parts=parts)]
    while sizes[-1] > 1:
        # The largest size that holds one less than what the last one's predecessor cannot.
        below = sizes[-1] - 1
        while padded(below, parts=parts) == sizes[-1]:
            below -= 1
        sizes.append(padded(below, parts=parts))
    return sizes


def most_tokens(layer_weights: int) -> int:
    """Of a step that is worth capturing: a larger one keeps the device busy for longer than its launch takes.

    Args:
        layer_weights: of one layer.

    >>> most_tokens(50_000_000), most_tokens(3_500_000), most_tokens(1_000_000_000)
    (4000, 57142, 1024)
    """
    return max(FEW_TOKENS, int(LAUNCH_PRODUCTS / layer_weights))


def most_tiles(tokens: int, *, tile_queries: int, max_running: int) -> int:
    """Of the prompts in a step of so many tokens: each chunk, of two tokens at least, may leave a tile partly filled."""
    return tokens // tile_queries + min(tokens // 2, max_running)


def capturable(shape: Shape, *, tile_queries: int, max_running: int, most_tokens: int) -> Shape | None:
    """The captured shape that holds an exact one, or None.

    Args:
        tile_queries: of a prompt's tile.
        max_running: sequences in a step, at most.
        most_tokens: of a captured step.
    """
    # Prompts come in any size, and a shape that was not seen before costs the time of many steps: all are captured at the start,
    # so they are few. Long contexts come in more combinations still, and beside their keys padded rows cost nothing.
    parts = LONG_PARTS if shape.longs else PROMPT_PARTS if shape.tiles else 8
    tokens = padded(shape.tokens, parts=parts)
    if tokens > (min(most_tokens, FEW_TOKENS) if shape.longs else most_tokens):
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
        tiles=most_tiles(tokens, tile_queries=tile_queries, max_running=max_running) if shape.tiles else 0,
    )


class Graphs:
    """Captured functions by key, in one pool of memory. What cannot be captured runs eagerly, and a log line says why.

    A function reads and writes fixed tensors. Its result is overwritten by the next replay of any key: use it in the same stream
    before that. Weights are swapped in place, so a capture stays valid for as long as its runner lives.
    """

    def __init__(self, device: torch.device, *, is_enabled: bool) -> None:
        self._is_enabled = is_enabled and device.type == "cuda"
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._pool: Any = None

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def describe(self) -> str:
        return f"{len(self._graphs)} captured" if self._is_enabled else "eager"

    def run(self, key: Hashable, function: Callable[[], Any]) -> Any:
        """Replays the function; the first time it runs as it is, which compiles and certifies what it needs, and is captured."""
        if key in self._graphs:
            graph, result = self._graphs[key]
            graph.replay()
            return result
        result = function()
        if self._is_enabled and len(self._graphs) < MOST_GRAPHS:
            self._capture(key, function)
        return result

    def _capture(self, key: Hashable, function: Callable[[], Any]) -> None:
        stream = torch.cuda.current_stream()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            # Thread-local: a thread that stages weights may allocate meanwhile.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=_capture_stream(stream.device), capture_error_mode="thread_local"
            ):
                result = function()
        except RuntimeError as error:
            # A capture that failed leaves its own stream current.
            torch.cuda.set_stream(stream)
            self._is_enabled = False
            log.warning("no more steps are captured, they run eagerly", step=str(key), reason=str(error))
            return
        self._graphs[key] = graph, result


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures on a device. Torch's own comes from the streams of ordinary priority, which are handed out in turns: a
    thread that stages weights may get the same one, and its copies would end up in the graph. Kernels also keep its priority.
    """
    return torch.cuda.Stream(device, priority=-1)
