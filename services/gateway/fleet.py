"""The dispatcher's line to weight_sync: what the fleet looks like, and which version it is to serve."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping

import grpc
import structlog

from shared.wire import rpc
from shared.wire.pb import weight_sync_pb2 as ws
from shared.wire.pb import weight_sync_pb2_grpc as ws_grpc

log = structlog.get_logger()

MAX_BACKOFF_S = 5.0


class Fleet:
    """The newest snapshot. It outlives a lost connection: without weight_sync no replica changes its version."""

    def __init__(self, address: str, *, on_change: Callable[[], None], rpc_timeout_s: float) -> None:
        self._address = address
        self._channel = rpc.aio_channel(address)
        self._stub = ws_grpc.WeightSyncStub(self._channel)
        self._on_change = on_change
        self._rpc_timeout_s = rpc_timeout_s
        self._told: tuple[str, int] | None = None
        self.snapshot = ws.Fleet()

    @property
    def is_told(self) -> bool:
        """Whether weight_sync knows what is needed, as far as we know."""
        return self._told is not None

    def versions(self, run: str) -> list[ws.Version]:
        """Published and retained versions of the run, ascending; none while weight_sync serves another run."""
        return list(self.snapshot.versions) if self.snapshot.run == run else []

    def replicas_by_state(self) -> Mapping[str, int]:
        return Counter(r.state for r in self.snapshot.replicas)

    async def follow(self) -> None:
        """consumes: weight_sync's Watch stream
        produces: `snapshot`, and `on_change`
        waits for: the next snapshot, or a second connection after a backoff
        unblocked by: weight_sync, or gRPC's keepalive when it is gone
        """
        backoff_s = 0.1
        while True:
            try:
                async for snapshot in self._stub.Watch(ws.WatchRequest()):
                    backoff_s = 0.1
                    self.snapshot = snapshot
                    self._on_change()
                reason = "the stream ended"
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            # A weight_sync that was started again does not know what is needed.
            self._told = None
            log.warning("lost weight_sync", address=self._address, reason=reason, retry_s=backoff_s)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def tell_needed(self, run: str, step: int) -> bool:
        """Names the version to serve, if that was not said on this connection. False: weight_sync could not be told."""
        if self._told == (run, step):
            return True
        try:
            await self._stub.SetNeeded(ws.SetNeededRequest(run=run, step=step), timeout=self._rpc_timeout_s)
        except grpc.aio.AioRpcError as error:
            log.warning("SetNeeded failed", run=run, step=step, code=error.code().name, detail=error.details())
            return False
        log.info("needed", run=run, step=step)
        self._told = run, step
        return True

    async def close(self) -> None:
        await self._channel.close()
