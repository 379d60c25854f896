"""What the process of the engine and that of its gRPC server tell each other: msgpack arrays over a pair of sockets.

    from the server:   ["call", number, method, seconds left or None, request], ["cancel", number], ["pong"]
    from the engine:   ["reply", number, reply], ["end", number, status code, details],
                       ["health", service, status], ["drain"], ["stop", grace in seconds], ["ping"]

Requests and replies are the bytes of their messages.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import msgpack

from shared.wire import rpc

PING_S, MOST_SILENT = 2.0, 5
"""How often the engine's process pings, and after how many such beats without a frame either side takes the other to stand still.
They are counted, not timed: a process that was stopped itself finds nobody silent. gRPC's keepalive gives a peer 15 s."""
READ_BYTES = 1 << 18


class Frames:
    """One end of the pair."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._silent = 0
        """Beats since something was received."""

    @classmethod
    async def over(cls, end: socket.socket) -> Frames:
        return cls(*await asyncio.open_unix_connection(sock=end))

    def send(self, *frame: Any) -> None:
        """Does not wait; `drain` does, where much is sent."""
        if not self._writer.is_closing():
            self._writer.write(msgpack.packb(frame))

    async def drain(self) -> None:
        """Until the other side has taken most of what was sent, or is gone."""
        with suppress(ConnectionError):
            await self._writer.drain()

    @property
    def is_other_silent(self) -> bool:
        return self._silent >= MOST_SILENT

    async def received(self) -> AsyncIterator[list[Any]]:
        """Until the other side is gone."""
        unpacker = msgpack.Unpacker(max_buffer_size=2 * rpc.MAX_MESSAGE_BYTES)
        try:
            while data := await self._reader.read(READ_BYTES):
                self._silent = 0
                unpacker.feed(data)
                for frame in unpacker:
                    yield frame
        except ConnectionError:
            return

    async def beats(self) -> AsyncIterator[bool]:
        """Whether the other side is silent, every PING_S."""
        while True:
            await asyncio.sleep(PING_S)
            self._silent += 1
            yield self.is_other_silent

    def close(self) -> None:
        self._writer.close()
