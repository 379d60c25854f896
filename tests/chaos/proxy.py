"""A TCP proxy between two processes, with a person's hands on the wire: frames are held, damaged, or never arrive.

    with Proxy() as proxy:
        service(weight_sync=proxy.address)
        proxy.connect_to(weight_sync_address)
        cut = proxy.once(answers("CommitWeights"), lambda frame: CUT)
        cut.wait()

Runs in a thread of its own. What no rule looks for passes as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum

from tests.chaos.http2 import DATA, HEADERS, Calls, Frame, FrameReader
from tests.deadline import DEADLINE_S

HOST = "127.0.0.1"


class Verdict(Enum):
    CUT = "cut"
    """The frame is lost, and the connection with it, in both directions."""


CUT = Verdict.CUT
Act = Callable[[Frame], Verdict | None]
"""What to do with a frame; may change its payload, may block (the frame waits, other connections go on)."""


@dataclass(eq=False)
class Rule:
    """A fault that happens once, at the `skip + 1`-th frame that it looks for."""

    matches: Callable[[Frame], bool]
    act: Act
    skip: int
    happened: threading.Event = field(default_factory=threading.Event)

    def do(self, frame: Frame) -> Verdict | None:
        verdict = self.act(frame)
        self.happened.set()
        return verdict

    def wait(self) -> None:
        """Until it has happened. Raises TimeoutError."""
        if not self.happened.wait(DEADLINE_S):
            raise TimeoutError(f"no such frame passed within {DEADLINE_S:.0f} s")


def requests(call: str) -> Callable[[Frame], bool]:
    """The beginning of a call."""
    return lambda frame: frame.is_request and frame.kind == HEADERS and frame.call == call


def answers(call: str) -> Callable[[Frame], bool]:
    """A message, or a part of one, that the server answers."""
    return lambda frame: not frame.is_request and frame.kind == DATA and frame.call == call


def sends(call: str) -> Callable[[Frame], bool]:
    """A message, or a part of one, that the client sends."""
    return lambda frame: frame.is_request and frame.kind == DATA and frame.call == call


def full(matches: Callable[[Frame], bool]) -> Callable[[Frame], bool]:
    """Such a part from the middle of a long message."""
    return lambda frame: len(frame.payload) >= 4096 and matches(frame)


def flip_one_bit(frame: Frame) -> None:
    frame.payload[len(frame.payload) // 2] ^= 0x10


class Proxy:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._target: Future[str] = Future()
        self._rules: list[Rule] = []
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""

    def __enter__(self) -> Proxy:
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(DEADLINE_S)
        self.address = f"{HOST}:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(DEADLINE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)
        self._loop.close()

    def connect_to(self, address: str) -> None:
        """Where connections go; until it is known they wait."""
        self._target.set_result(address)

    def once(self, matches: Callable[[Frame], bool], act: Act = lambda frame: None, *, skip: int = 0) -> Rule:
        """Arms a rule. The first armed rule that matches a frame acts on it."""
        rule = Rule(matches, act, skip)
        self._loop.call_soon_threadsafe(self._rules.append, rule)
        return rule

    def disarm(self) -> None:
        """Forgets what has not happened."""
        self._loop.call_soon_threadsafe(self._rules.clear)

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._accept, HOST, 0)

    async def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until an end closes it or a rule cuts it."""
        writers, is_cut = [writer], True
        try:
            host, _, port = (await asyncio.wrap_future(self._target)).rpartition(":")
            with contextlib.suppress(OSError):
                there, onward = await asyncio.open_connection(host, int(port))
                writers.append(onward)
                calls = Calls()
                pumps = {
                    asyncio.create_task(self._pump(reader, onward, calls, is_request=True)),
                    asyncio.create_task(self._pump(there, writer, calls, is_request=False)),
                }
                try:
                    done, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                    is_cut = any(pump.exception() is None and pump.result() is CUT for pump in done)
                finally:
                    for pump in pumps:
                        pump.cancel()
                    await asyncio.gather(*pumps, return_exceptions=True)
        finally:
            for each in writers:
                # `close` still sends what was passed on before.
                each.transport.abort() if is_cut else each.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, calls: Calls, *, is_request: bool
    ) -> Verdict | None:
        frames = FrameReader(is_request)
        while data := await reader.read(2**16):
            for frame in frames.feed(data):
                calls.name(frame)
                if await self._judge(frame) is CUT:
                    return CUT
                writer.write(frame.wire)
            await writer.drain()
        return None

    async def _judge(self, frame: Frame) -> Verdict | None:
        for rule in self._rules:
            if rule.matches(frame):
                if rule.skip:
                    rule.skip -= 1
                    continue
                self._rules.remove(rule)
                return await asyncio.to_thread(rule.do, frame)
        return None
