"""A replica's gRPC server, a process of its own: `python -m services.rollout.front FD HOST:PORT LEVEL`, started by the replica.

    clients --gRPC--> this process --frames--> the engine's process

gRPC takes the interpreter for a quarter of a millisecond a call. In the engine's process that would come off the thread that
launches steps, and a step takes a millisecond. This process knows no message: it hands on bytes, and ends with the engine's. It
costs 40 MB of memory.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import socket
import sys
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
from grpc_health.v1._async import HealthServicer

from services.rollout.frames import Frames
from shared.process import setup_logging
from shared.wire import rpc
from shared.wire.pb import rollout_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["RolloutEngine"]
SILENT = "the engine's process stands still"
LAST_WORD_S = 1.0
"""For calls to say that the engine's process is gone."""
_STATUS = {code.value[0]: code for code in grpc.StatusCode}


class Front(grpc.GenericRpcHandler):
    """Calls by number, and the health of the engine's process (`rpc.Health`)."""

    def __init__(self, frames: Frames, health: HealthServicer) -> None:
        self._frames, self._health = frames, health
        self._said: dict[str, int] = {}
        """Of each name, the last health heard."""
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Queue[tuple[Any, ...]]] = {}
        self._methods = {f"/{SERVICE.full_name}/{method.name}": method.name for method in SERVICE.methods}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        method = self._methods.get(handler_call_details.method)
        # On the wire one reply is a stream of one.
        return None if method is None else grpc.unary_stream_rpc_method_handler(partial(self._call, method))

    def put(self, number: int, *news: Any) -> None:
        """A reply (bytes) or the end (code, details) of a call, unless its client is gone."""
        if number in self._calls:
            self._calls[number].put_nowait(news)

    def end(self, reason: str) -> None:
        """No open call will hear from the engine's process."""
        for number in self._calls:
            self.put(number, grpc.StatusCode.UNAVAILABLE.value[0], reason)
            self._frames.send("cancel", number)

    async def set(self, service: str, status: int) -> None:
        """The engine's process says so of its health."""
        self._said[service] = status
        await self._health.set(service, status)

    async def watch(self) -> None:
        """Lets nobody wait for an engine's process that stands still, nor take it for one that serves, until it goes on."""
        was_silent = False
        async for is_silent in self._frames.beats():
            if is_silent:
                self.end(SILENT)
            if is_silent != was_silent:
                was_silent = is_silent
                for service in [*self._said]:
                    if is_silent:
                        await rpc.set_health(self._health, serving=False, service=service)
                    else:
                        await self._health.set(service, self._said[service])

    async def _call(self, method: str, request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        if self._frames.is_other_silent:
            await context.abort(grpc.StatusCode.UNAVAILABLE, SILENT)
        number = next(self._numbers)
        # Bounded by the tokens that the call's samples may have.
        news = self._calls[number] = asyncio.Queue()
        self._frames.send("call", number, method, context.time_remaining(), request)
        is_over = False
        try:
            while not is_over:
                reply, *details = await news.get()
                is_over = bool(details)
                if not is_over:
                    yield reply
            if reply:
                await context.abort(_STATUS[reply], details[0])
        finally:
            del self._calls[number]
            if not is_over:
                self._frames.send("cancel", number)


async def serve(end: socket.socket, address: str) -> None:
    """Prints the port that it bound, or why it could not; then serves.

    consumes: calls of clients; replies, ends and health from the engine's process
    produces: calls and cancellations to it
    waits for: its next frame
    unblocked by: that process, which pings every PING_S, or its end; a call also by its client, and by `watch`
    """
    frames = await Frames.over(end)
    server, health = rpc.aio_server()
    front = Front(frames, health)
    # A HealthServicer begins with SERVING; the engine's process will say so.
    await rpc.set_health(front, serving=False)
    server.add_generic_rpc_handlers((front,))
    try:
        port = rpc.bind(server, address)
    except OSError as error:
        print(error, flush=True)
        return
    await server.start()
    print(port, flush=True)
    watch = asyncio.create_task(front.watch())
    async for kind, *values in frames.received():
        if kind in ("reply", "end"):
            front.put(*values)
        elif kind == "health":
            await front.set(*values)
        elif kind == "ping":
            frames.send("pong")
        elif kind == "drain":
            await health.enter_graceful_shutdown()
        else:
            # What open calls still say is handed on meanwhile.
            stopping = asyncio.create_task(server.stop(*values))
            stopping.add_done_callback(lambda _: frames.close())
    watch.cancel()
    front.end("the engine's process is gone")
    await server.stop(LAST_WORD_S)


def main() -> None:
    descriptor, address, log_level = sys.argv[1:]
    setup_logging("rollout", level=log_level)
    # The engine's process hears them too, and says when to stop.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    asyncio.run(serve(socket.socket(fileno=int(descriptor)), address))


if __name__ == "__main__":
    main()
