"""Group commit: one WAITAOF for everybody who waits at the same time.

WAITAOF answers for the writes of its own connection only. It is therefore sent behind a write of its own: the append-only
file is ordered, so once that write is on disk every earlier one is. A server that was restarted in between may have lost
the earlier ones and kept ours, so its `run_id` must be the one that was known before they were made.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from redis.exceptions import RedisError

from shared.wire import valkey
from shared.wire.gathered import Gathered
from shared.wire.records import NotDurable

MARK = "tz:durable"


class GroupCommit:
    """
    >>> async with commit.durable():
    ...     await client.set("k", "v")
    ... # on disk here, or NotDurable was raised
    """

    def __init__(self, client: valkey.Client, *, timeout_s: float) -> None:
        """`client`: its retries bound how long a vanished server is waited for, so it should have few of them."""
        self._client = client
        self._timeout_s = timeout_s
        self._server_id = ""
        # A flush that is already under way may have begun before the caller's writes.
        self._flushes: Gathered[None, str] = Gathered(self._flush_for)

    async def start(self) -> None:
        """Learns which server this is. Raises NotDurable."""
        self._server_id = await self._flush()

    async def close(self) -> None:
        await self._client.aclose()

    @asynccontextmanager
    async def durable(self) -> AsyncIterator[None]:
        """On exit the writes made inside are on disk. Raises NotDurable at the deadline or after a server restart."""
        server_id = self._server_id
        yield
        flushed = await self._flushes(None)
        self._server_id = flushed
        if flushed != server_id:
            raise NotDurable("Valkey was restarted while the request was served; repeat the request")

    async def _flush_for(self, waiting: Sequence[None]) -> list[str]:
        return [await self._flush()] * len(waiting)

    async def _flush(self) -> str:
        """Returns the server's run id."""
        pipe = self._client.pipeline(transaction=False)
        pipe.incr(MARK)
        pipe.execute_command("WAITAOF", 1, 0, int(self._timeout_s * 1000))
        pipe.info("server")
        try:
            _, (num_local, _), info = await pipe.execute()
        except RedisError as error:
            raise NotDurable(f"Valkey can't say that the data is on disk ({error}); repeat the request") from error
        if num_local < 1:
            raise NotDurable(
                f"the data is not on disk after {self._timeout_s:g} s (is Valkey's disk slow or full?); repeat the request"
            )
        return info["run_id"]
