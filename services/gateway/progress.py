"""Tokens of evaluation samples while they are being sampled, for streamed completions.

The dispatcher adds and forgets, streams read from the position they have sent up to. What is lost here (a restart) is sampled
again to the same tokens, so that a position always means the same token.

>>> progress.add("demo.e0.0.0", 0, [5, 7], np.float32([-0.1, -0.2]))
>>> progress.after("demo.e0.0.0", 1)
([7], array([-0.2], dtype=float32))
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np


class Progress:
    def __init__(self) -> None:
        self.generation = 0
        self._tokens: dict[str, list[int]] = {}
        self._logprobs: dict[str, list[float]] = {}
        self._changed = asyncio.Event()

    def add(self, trajectory_id: str, start: int, token_ids: Sequence[int], logprobs: np.ndarray) -> None:
        """Args:
        start: index, among the sampled tokens, of the first one given; what was there from `start` on is replaced.
        logprobs: float32, one per token.
        """
        tokens, values = self._tokens.setdefault(trajectory_id, []), self._logprobs.setdefault(trajectory_id, [])
        assert start <= len(tokens), f"{trajectory_id}: tokens from {start} on, but only {len(tokens)} are known"
        tokens[start:] = [int(t) for t in token_ids]
        values[start:] = [float(v) for v in logprobs]
        self._wake()

    def forget(self, trajectory_id: str) -> None:
        """The sample is stored or dropped."""
        self._tokens.pop(trajectory_id, None)
        self._logprobs.pop(trajectory_id, None)
        self._wake()

    def after(self, trajectory_id: str, start: int) -> tuple[list[int], np.ndarray]:
        """Tokens from index `start` on and their logprobs, none where nothing is known."""
        values = self._logprobs.get(trajectory_id, [])[start:]
        return self._tokens.get(trajectory_id, [])[start:], np.asarray(values, dtype=np.float32)

    async def wait_beyond(self, generation: int) -> None:
        """Returns when something changed after `generation` was read."""
        while self.generation <= generation:
            await self._changed.wait()

    def _wake(self) -> None:
        self.generation += 1
        self._changed.set()
        self._changed = asyncio.Event()
