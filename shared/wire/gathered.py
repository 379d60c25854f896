"""Calls that are made at the same time, as one: what a pipeline saves, for callers that know nothing of each other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Gathered(Generic[Item, Answer]):
    """What comes while a call is under way goes together in the next one, which begins after all of it came.

    Args:
        call: takes items in the order in which they came, and gives one answer for each. What it raises, each of its callers
            raises; one that is cancelled does not take the others' call with it.

    >>> store = Gathered(store_many)
    >>> await asyncio.gather(*(store(record) for record in records))  # one call of store_many
    """

    def __init__(self, call: Callable[[Sequence[Item]], Awaitable[Sequence[Answer]]]) -> None:
        self._call = call
        self._items: list[Item] = []
        """Of the next call."""
        self._running: asyncio.Task[Sequence[Answer]] | None = None
        self._next: asyncio.Task[Sequence[Answer]] | None = None

    async def __call__(self, item: Item) -> Answer:
        if self._next is None:
            self._next = asyncio.create_task(self._call_behind(self._running))
        call, place = self._next, len(self._items)
        self._items.append(item)
        return (await asyncio.shield(call))[place]

    async def close(self) -> None:
        """Gives up the calls whose callers are gone."""
        calls = [call for call in (self._running, self._next) if call is not None]
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    async def _call_behind(self, running: asyncio.Task[Sequence[Answer]] | None) -> Sequence[Answer]:
        if running is not None:
            await asyncio.wait([running])
        items, self._items = self._items, []
        self._running, self._next = self._next, None
        return await self._call(items)
