"""Device time of short calls inside replayed graphs, where neither their launch nor a warm cache is on the clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch

Call = Callable[[], Any]
MOST_COPIES = 32


def copies_beyond_cache(num_bytes: int) -> int:
    """How many buffers of this size, read in turn, come from memory each time and not from the device's cache."""
    cache_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(2, min(MOST_COPIES, -(-2 * cache_bytes // num_bytes)))


def replay_times(series: Sequence[Sequence[Call]], *, repeats: int) -> list[list[float]]:
    """Microseconds of one call of each series, `repeats` times over.

    Each series is captured in one graph. The graphs are replayed in turns, so that a drift of the clocks meets all of them alike.
    A call reads and writes fixed tensors, and may allocate nothing that outlives it.
    """
    if not series:
        return []
    stream = _stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    pool = torch.cuda.graph_pool_handle()
    with torch.cuda.stream(stream):
        graphs = [_capture(calls, pool) for calls in series]
        for graph in graphs:
            graph.replay()
        turns = [[torch.cuda.Event(enable_timing=True) for _ in range(len(graphs) + 1)] for _ in range(repeats)]
        for marks in turns:
            marks[0].record()
            for graph, mark in zip(graphs, marks[1:], strict=True):
                graph.replay()
                mark.record()
    stream.synchronize()
    found = [[1e3 * begin.elapsed_time(end) for begin, end in pairwise(marks)] for marks in turns]
    return [[turn[i] / len(calls) for turn in found] for i, calls in enumerate(series)]


def _capture(calls: Sequence[Call], pool: Any) -> torch.cuda.CUDAGraph:
    for call in calls:
        # what a first call loads cannot be loaded under capture
        call()
    graph = torch.cuda.CUDAGraph()
    # not `torch.cuda.graph`, which collects garbage and empties the allocator's cache before every capture
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        for call in calls:
            call()
    finally:
        graph.capture_end()
    return graph


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """Of a priority that ordinary streams do not have: another thread's copies must not end up in a graph."""
    return torch.cuda.Stream(device, priority=-1)
