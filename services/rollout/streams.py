"""What Generate calls still have to send: filled by deliveries of the engine loop, emptied by the calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from services.rollout.loop import STOPPED
from services.rollout.samples import InDoubt, OtherVersion, SampleChunk, SampleFailed, ShuttingDown


class Stream:
    """One call's. Bounded by the tokens that its samples may have.

    Args:
        num_samples: of the call.
    """

    def __init__(self, num_samples: int) -> None:
        self.num_open = num_samples
        """Samples whose end was not delivered yet."""
        self._chunks: list[SampleChunk] = []
        self._failure: SampleFailed | None = None
        self._error: Exception | None = None
        self._has_news = asyncio.Event()

    def put(self, chunk: SampleChunk) -> None:
        self._chunks.append(chunk)
        self.num_open -= chunk.finish_reason is not None
        self._has_news.set()

    def fail(self, failure: SampleFailed) -> None:
        """One sample will not go on."""
        self._failure = failure
        self.num_open -= 1
        self._has_news.set()

    def end(self, error: Exception) -> None:
        """Nothing will come any more."""
        self._error = error
        self._has_news.set()

    async def chunks(self) -> AsyncIterator[list[SampleChunk]]:
        """Until every sample is finished. Raises what ended them otherwise, after everything that was sampled.

        consumes: what the engine loop delivers
        produces: chunks in order, all at once that were delivered meanwhile
        waits for: the next delivery
        unblocked by: the engine loop, which delivers the end of every sample, and its own
        """
        is_over = False
        while not is_over:
            await self._has_news.wait()
            self._has_news.clear()
            chunks, self._chunks = self._chunks, []
            is_over = not self.num_open or self._error is not None
            if chunks:
                yield chunks
        if self.num_open and self._error is not None:
            raise self._error
        if self._failure is not None:
            failure = self._failure
            kind = InDoubt if failure.is_in_doubt else ShuttingDown if failure.reason == STOPPED else OtherVersion
            raise kind(failure.reason)
