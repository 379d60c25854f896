"""The engine's side of its gRPC server (`front.py`): starts that process, runs its calls, tells it what to say of the health."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import NoReturn

import grpc
import structlog
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from services.rollout.frames import Frames
from services.rollout.front import SERVICE
from shared.wire.pb.rollout_pb2_grpc import RolloutEngineServicer

START_S, STOP_S = 60.0, 5.0
"""Deadlines of the process's start and, behind the streams' grace, of its end."""
_REQUESTS = {method.name: GetMessageClass(method.input_type) for method in SERVICE.methods}

log = structlog.get_logger()


class Ended(Exception):
    """The call is over, with this code: what `Call.abort` raises."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code, self.details = code, details


class Call:
    """Of `grpc.aio.ServicerContext` what the service uses."""

    def __init__(self, seconds_left: float | None) -> None:
        self._end = None if seconds_left is None else time.monotonic() + seconds_left

    def time_remaining(self) -> float | None:
        return None if self._end is None else max(self._end - time.monotonic(), 0.0)

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        raise Ended(code, details)


class FrontProcess:
    """The process, and the calls that it took."""

    def __init__(self, process: asyncio.subprocess.Process, frames: Frames) -> None:
        self._process, self._frames = process, frames
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._is_stopping = False
        self.port = 0

    @classmethod
    async def start(cls, address: str, *, log_level: str) -> FrontProcess:
        """Binds and serves `address`; calls wait until `run`. Raises OSError when the address is taken or the process fails."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "services.rollout.front", str(theirs.fileno()), address, log_level]
            process = await asyncio.create_subprocess_exec(
                *command, pass_fds=[theirs.fileno()], stdout=asyncio.subprocess.PIPE
            )
        front = cls(process, await Frames.over(ours))
        assert process.stdout is not None
        try:
            line = (await asyncio.wait_for(process.stdout.readline(), START_S)).decode().strip()
        except TimeoutError:
            line = f"the gRPC server's process did not start within {START_S:.0f} s"
        if not line.isdecimal():
            await front.stop(0)
            raise OSError(line or f"the gRPC server's process did not start (exit code {process.returncode})")
        front.port = int(line)
        return front

    @property
    def pid(self) -> int:
        return self._process.pid

    async def run(self, service: RolloutEngineServicer) -> None:
        """Runs calls until the process is gone; one that stands still is killed.

        consumes: calls and cancellations; produces: replies and ends
        waits for: the process's next frame
        unblocked by: the process, which answers a ping every PING_S, or its end
        """
        pings = asyncio.create_task(self._ping())
        async for kind, *values in self._frames.received():
            if kind == "call":
                number, method, seconds_left, request = values
                call = asyncio.create_task(self._run(service, number, method, request, Call(seconds_left)))
                self._calls[number] = call
                # Not by the call itself: one that is cancelled before it begins never runs.
                call.add_done_callback(partial(self._forget, number))
            elif kind == "cancel" and values[0] in self._calls:
                self._calls[values[0]].cancel()
        pings.cancel()
        for open_call in self._calls.values():
            open_call.cancel()
        if not self._is_stopping:
            log.error("the gRPC server's process is gone", pid=self._process.pid)

    async def set(self, service: str, status: int) -> None:
        """Of grpc.health.v1."""
        self._frames.send("health", service, int(status))

    def drain(self) -> None:
        """Everything is NOT_SERVING from now on."""
        self._frames.send("drain")

    async def stop(self, grace_s: float) -> None:
        """Takes no more calls, lets those that are open end for `grace_s`, and ends the process."""
        self._is_stopping = True
        self._frames.send("stop", grace_s)
        try:
            await asyncio.wait_for(self._process.wait(), grace_s + STOP_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        self._frames.close()

    def _forget(self, number: int, _call: asyncio.Task[None]) -> None:
        del self._calls[number]

    async def _ping(self) -> None:
        async for is_silent in self._frames.beats():
            if is_silent:
                log.error("the gRPC server's process stands still", pid=self._process.pid)
                self._process.kill()
            self._frames.send("ping")

    async def _run(self, service: RolloutEngineServicer, number: int, method: str, request: bytes, call: Call) -> None:
        code, details = grpc.StatusCode.OK, ""
        try:
            answer = getattr(service, method)(_parsed(method, request), call)
            if isinstance(answer, AsyncGenerator):
                async with aclosing(answer):
                    async for reply in answer:
                        self._frames.send("reply", number, reply.SerializeToString())
                        await self._frames.drain()
            else:
                self._frames.send("reply", number, (await answer).SerializeToString())
        except Ended as ended:
            code, details = ended.code, ended.details
        except Exception as error:  # the call's edge, as gRPC's own
            log.exception("a call failed", method=method)
            code, details = grpc.StatusCode.UNKNOWN, f"{type(error).__name__}: {error}"
        self._frames.send("end", number, code.value[0], details)


def _parsed(method: str, request: bytes) -> Message:
    kind = _REQUESTS[method]
    try:
        return kind.FromString(request)
    except DecodeError as error:
        raise Ended(grpc.StatusCode.INTERNAL, f"no {kind.DESCRIPTOR.name}: {error}") from error
