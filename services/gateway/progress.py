"""Tokens of evaluation samples while they are being sampled, for streamed completions.

The dispatcher shows every chunk, streams read from the position they have sent up to. What is lost here (a restart, an
eviction) arrives with the finished record, and a position always means the same token.

>>> progress.observe(pb.GenerateChunk(trajectory_id="demo.e0.0.0", token_ids=int32_bytes([5, 7]), ...))
>>> progress.after("demo.e0.0.0", 1)
([7], array([-0.2], dtype=float32))
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

import numpy as np

from shared.wire.pb import rollout_pb2 as pb
from shared.wire.types import float32_array, int32_array


class Progress:
    """Args: max_samples: unfinished samples kept; the one that began first goes first."""

    def __init__(self, max_samples: int = 4096) -> None:
        self.generation = 0
        self._max_samples = max_samples
        self._samples: OrderedDict[str, tuple[np.ndarray, np.ndarray]] = OrderedDict()
        """Token ids int32 [S] and logprobs float32 [S] by trajectory id."""
        self._changed = asyncio.Event()

    def observe(self, chunk: pb.GenerateChunk) -> None:
        """Takes the tokens of a chunk; a finished sample is forgotten, since the store has it next."""
        token_ids, logprobs = self._samples.get(chunk.trajectory_id, (int32_array(b""), float32_array(b"")))
        if chunk.finish_reason:
            self._samples.pop(chunk.trajectory_id, None)
        elif chunk.start <= len(token_ids):
            self._samples[chunk.trajectory_id] = (
                np.concatenate([token_ids[: chunk.start], int32_array(chunk.token_ids)]),
                np.concatenate([logprobs[: chunk.start], float32_array(chunk.logprobs)]),
            )
            if len(self._samples) > self._max_samples:
                self._samples.popitem(last=False)
        self.generation += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def after(self, trajectory_id: str, start: int) -> tuple[list[int], np.ndarray]:
        """Tokens from index `start` on and their logprobs, none where nothing is known."""
        token_ids, logprobs = self._samples.get(trajectory_id, (int32_array(b""), float32_array(b"")))
        return token_ids[start:].tolist(), logprobs[start:]

    async def wait_beyond(self, generation: int) -> None:
        """Returns when something changed after `generation` was read."""
        while self.generation <= generation:
            await self._changed.wait()
