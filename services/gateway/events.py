"""Who waits for a run's events: the SSE stream, and requests that hold their answer back until an evaluation is complete.

    Valkey stream ──XREAD BLOCK──▶ Feed (one per followed run) ──wake-up──▶ followers ──XRANGE from their own cursor

A follower always reads from its own cursor, so that nothing is lost or given twice whatever the feed does.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.exceptions import RedisError
from sse_starlette import ServerSentEvent

from services.gateway import views
from services.gateway.problems import Problem
from shared.wire.records import EvalRecord, Event
from shared.wire.store import RunStore
from shared.wire.types import State

BLOCK_S = 5.0
_CURSOR = re.compile(r"[0-9]{1,20}(-[0-9]{1,20})?")


class Feed:
    """Wakes the followers of one run whenever it has new events."""

    def __init__(self, closed: bool) -> None:
        self.generation = 0
        self.num_followers = 0
        self.error: RedisError | None = None
        self.closed = closed
        self.reading = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()

    async def wake(self) -> None:
        async with self._changed:
            self.generation += 1
            self._changed.notify_all()

    async def wait_beyond(self, generation: int, timeout_s: float) -> None:
        """Returns when there may be events newer than `generation`, at the timeout, or when the feed is closed.

        Raises: RedisError when Valkey can't be read.
        """
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.generation > generation or self.closed or self.error)
        except TimeoutError:
            pass
        if self.error is not None:
            raise self.error


class Feeds:
    """The feeds of the runs that someone follows."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._feeds: dict[str, Feed] = {}
        self.closed = False

    @property
    def num_followers(self) -> int:
        return sum(f.num_followers for f in self._feeds.values())

    @asynccontextmanager
    async def follow(self, run: str) -> AsyncIterator[Feed]:
        """A feed that wakes for every event behind the one that is newest now."""
        feed = self._feeds.get(run)
        if feed is None or feed.error is not None:
            feed = self._feeds[run] = Feed(self.closed)
            feed.task = asyncio.create_task(self._watch(run, feed))
        feed.num_followers += 1
        try:
            await feed.reading.wait()
            yield feed
        finally:
            feed.num_followers -= 1
            if feed.num_followers == 0:
                if self._feeds.get(run) is feed:
                    del self._feeds[run]
                assert feed.task is not None
                feed.task.cancel()

    async def close(self) -> None:
        """Ends every wait, now and later."""
        self.closed = True
        for feed in list(self._feeds.values()):
            feed.closed = True
            await feed.wake()

    async def _watch(self, run: str, feed: Feed) -> None:
        """Wakes the followers of one run.

        Consumes: the run's event stream.
        Produces: a new generation of the feed per batch of events.
        Waits for: XREAD BLOCK, BLOCK_S at most.
        Unblocked by: an event, that timeout, an error of Valkey (handed to the followers), or the last follower's leaving.
        """
        try:
            cursor = await self._store.last_event(run)
            feed.reading.set()
            while True:
                # Followers read what they need themselves: here it is enough that there is something.
                if await self._store.events(run, after=cursor, block_s=BLOCK_S, limit=1):
                    cursor = await self._store.last_event(run)
                    await feed.wake()
        except RedisError as error:
            feed.error = error
            feed.reading.set()
            await feed.wake()


async def open_stream(
    store: RunStore, feeds: Feeds, run: str, *, after: str, types: frozenset[str], timeout_s: float, max_streams: int
) -> AsyncIterator[bytes]:
    """Server-sent events behind the cursor `after`, until the timeout, the shutdown, or a fault of Valkey.

    The stream just ends then; the client opens it again with the last id it saw.
    Raises: UnknownRun, RedisError, Problem streams-exhausted, shutting-down.
    """
    if feeds.closed:
        raise Problem("shutting-down", "open the stream again", retry_after_s=1)
    if feeds.num_followers >= max_streams:
        raise Problem("streams-exhausted", f"{max_streams} event streams are open", retry_after_s=5, limit=max_streams)
    await store.get_run(run)
    return _stream(store, feeds, run, after, types, time.monotonic() + timeout_s)


async def _stream(
    store: RunStore, feeds: Feeds, run: str, after: str, types: frozenset[str], deadline: float
) -> AsyncIterator[bytes]:
    try:
        async with feeds.follow(run) as feed:
            # What is stored already is told however short the timeout is.
            left_s = math.inf
            while not feed.closed and left_s > 0:
                generation = feed.generation
                events = await store.events(run, after=after)
                # Events come by the hundred, and every piece of the answer is a packet.
                if told := b"".join(_encoded(event) for event in events if not types or event.type in types):
                    yield told
                after = events[-1].cursor if events else after
                left_s = deadline - time.monotonic()
                if not events and left_s > 0:
                    await feed.wait_beyond(generation, left_s)
    except RedisError:
        return


def _encoded(event: Event) -> bytes:
    data = views.event(event).model_dump_json()
    return ServerSentEvent(data=data, event=event.type, id=event.cursor, sep="\n").encode()


async def wait_for_eval(store: RunStore, feeds: Feeds, run: str, eval_id: int, timeout_s: float) -> EvalRecord:
    """The evaluation, as soon as it is complete or at the timeout. Raises UnknownEvaluation, RedisError."""
    deadline = time.monotonic() + timeout_s
    async with feeds.follow(run) as feed:
        cursor = await store.last_event(run)
        record = await store.get_eval(run, eval_id)
        num_missing = record.num_trajectories - record.num_finished
        prefix = f"{run}.e{eval_id}."
        final = {f"trajectory.{s.value}" for s in State if s.is_final}
        while num_missing > 0 and not feed.closed and (left_s := deadline - time.monotonic()) > 0:
            generation = feed.generation
            events = await store.events(run, after=cursor)
            if not events:
                await feed.wait_beyond(generation, left_s)
                continue
            cursor = events[-1].cursor
            num_missing -= sum(e.type in final and e.trajectory_id.startswith(prefix) for e in events)
        return record if record.is_finished else await store.get_eval(run, eval_id)


def checked_cursor(value: str) -> str:
    """A cursor as clients send it: an event's or a step's id, or "0". Raises Problem malformed-request."""
    if not _CURSOR.fullmatch(value) or any(int(part) >= 2**64 for part in value.split("-")):
        raise Problem("malformed-request", f"a cursor is the id of an event or a step, or 0; got {value[:50]!r}")
    return value if "-" in value else f"{value}-0"
