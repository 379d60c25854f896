"""Peers that speak the protocol to the dispatcher: replicas with tokens that are a function of the key, and weight_sync.

The tokens depend on (seed, prompt number, sample, position, version) and on nothing else, as a real replica's do, so a test
can tell what a trajectory must be however often it was interrupted.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import numpy as np

from shared.wire import rpc
from shared.wire.pb import rollout_pb2 as pb
from shared.wire.pb import rollout_pb2_grpc as pb_grpc
from shared.wire.pb import weight_sync_pb2 as ws
from shared.wire.pb import weight_sync_pb2_grpc as ws_grpc
from shared.wire.ports import HeldPort
from shared.wire.types import float32_bytes, int32_array, int32_bytes


def version(step: int) -> ws.Version:
    return ws.Version(lineage=0, step=step, digest=f"digest-{step}")


def expected_tokens(seed: int, number: int, sample: int, step: int, count: int) -> list[int]:
    keys = [f"{seed}/{number}/{sample}/{step}/{i}" for i in range(count)]
    return [hashlib.sha256(key.encode()).digest()[0] for key in keys]


class Engine(pb_grpc.RolloutEngineServicer):
    """One replica. Every message has one more token of each sample."""

    def __init__(self, name: str, *, incarnation: str = "1") -> None:
        self.name, self.incarnation = name, incarnation
        self.address = ""
        self.version = ws.Version()
        self.state = "joining"
        self.reason = ""
        self.requests: list[pb.GenerateRequest] = []
        self.num_running = 0
        self.idle = asyncio.Event()
        self.hold_at: int | None = None
        """Sampled tokens of each sample after which the stream stands still until `go`."""
        self.go = asyncio.Event()
        self.held = asyncio.Event()
        self.break_at: int | None = None
        """Sampled tokens of each sample after which the next stream breaks, once."""
        self.break_code = grpc.StatusCode.UNAVAILABLE
        self.lie: pb.GenerateChunk | ws.Version | None = None
        """Fields that replace those of the next chunk, or of its version, once."""
        self.refuse: list[grpc.StatusCode] = []
        """Answers of the next calls."""
        self.is_busy = False
        """Whether it samples for others, too: so says Status."""
        self.num_sampled_tokens = 0
        self.asked = asyncio.Event()
        """Status was asked for several times."""

    async def Status(self, request: pb.StatusRequest, context) -> pb.StatusReply:
        self.num_sampled_tokens += self.is_busy
        if self.num_sampled_tokens == 4:
            self.asked.set()
        return pb.StatusReply(replica=self.name, num_sampled_tokens=self.num_sampled_tokens)

    async def Generate(self, request: pb.GenerateRequest, context) -> AsyncIterator[pb.GenerateReply]:
        self.requests.append(request)
        if self.refuse:
            await context.abort(self.refuse.pop(0), "refused by the test")
        if request.manifest_digest != self.version.digest:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"holds {self.version.digest}")
        self.num_running += 1
        self.idle.clear()
        try:
            async for reply in self._sample(request, context):
                yield reply
        finally:
            self.num_running -= 1
            if not self.num_running:
                self.idle.set()

    async def _sample(self, request: pb.GenerateRequest, context) -> AsyncIterator[pb.GenerateReply]:
        version, total = self.version, request.sampling.max_tokens
        tokens = {
            s.trajectory_id: expected_tokens(request.seed, request.prompt_number, s.sample_index, version.step, total)
            for s in request.samples
        }
        received = {s.trajectory_id: int32_array(s.token_ids).tolist() for s in request.samples}
        for trajectory_id, begun in received.items():
            assert begun == tokens[trajectory_id][: len(begun)], "continued from other tokens"
        for i in range(total):
            if i == self.hold_at:
                self.held.set()
                await self.go.wait()
            if i == self.break_at:
                self.break_at = None
                await context.abort(self.break_code, "broken by the test")
            names = [s.trajectory_id for s in request.samples if i >= len(received[s.trajectory_id])]
            if names:
                yield self._reply({name: tokens[name][i] for name in names}, i, version, is_last=i == total - 1)

    def _reply(self, tokens: dict[str, int], i: int, version: ws.Version, *, is_last: bool) -> pb.GenerateReply:
        """Token `i` of each trajectory."""
        chunks = [
            pb.GenerateChunk(
                trajectory_id=trajectory_id,
                start=i,
                token_ids=int32_bytes([token]),
                logprobs=float32_bytes(np.array([-token / 256], dtype=np.float32)),
                top1=int32_bytes([token]),
                kv="fresh",
                finish_reason="length" if is_last else "",
            )
            for trajectory_id, token in tokens.items()
        ]
        reply = pb.GenerateReply(version=version, fingerprint="f", chunks=chunks)
        if self.lie is not None:
            (reply.version if isinstance(self.lie, ws.Version) else reply.chunks[0]).MergeFrom(self.lie)
            self.lie = None
        return reply

    def entry(self) -> ws.Replica:
        return ws.Replica(
            replica=self.name, incarnation=self.incarnation, address=self.address, state=self.state,
            reason=self.reason, version=self.version if self.version.digest else None,
        )  # fmt: skip


class WeightSync(ws_grpc.WeightSyncServicer):
    """Brings every engine to the needed version at once, if it is published; notes a swap under running samples."""

    def __init__(self) -> None:
        self.run = "r"
        self.engines: list[Engine] = []
        self.versions: list[ws.Version] = []
        self.needed: list[int] = []
        self.swapped_while_running: list[str] = []
        self._changed = asyncio.Condition()
        self._generation = 0

    async def publish(self, step: int) -> None:
        self.versions.append(version(step))
        await self.change()

    async def change(self) -> None:
        """Tells everybody who watches."""
        target = next((v for v in self.versions if self.needed and v.step == self.needed[-1]), None)
        for engine in self.engines:
            if target is not None and engine.state != "ejected" and engine.version != target:
                if engine.num_running:
                    self.swapped_while_running.append(engine.name)
                engine.version, engine.state = target, "ready"
        async with self._changed:
            self._generation += 1
            self._changed.notify_all()

    async def SetNeeded(self, request: ws.SetNeededRequest, context) -> ws.SetNeededReply:
        assert request.run == self.run
        self.needed.append(request.step)
        await self.change()
        return ws.SetNeededReply(published=True)

    async def Watch(self, request: ws.WatchRequest, context) -> AsyncIterator[ws.Fleet]:
        seen = -1
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda seen=seen: self._generation > seen)
                seen = self._generation
            yield ws.Fleet(
                run=self.run,
                replicas=[e.entry() for e in self.engines],
                versions=self.versions,
                needed_step=self.needed[-1] if self.needed else 0,
            )


@asynccontextmanager
async def serving(servicer: Engine | WeightSync, held_port: HeldPort | None = None) -> AsyncIterator[grpc.aio.Server]:
    """Serves until the block ends, at a port that is held so that a successor can have it; the servicer learns its address."""
    server, _ = rpc.aio_server()
    if isinstance(servicer, Engine):
        pb_grpc.add_RolloutEngineServicer_to_server(servicer, server)
    else:
        ws_grpc.add_WeightSyncServicer_to_server(servicer, server)
    servicer.held_port = held_port or HeldPort()
    servicer.address = f"127.0.0.1:{rpc.bind(server, f'127.0.0.1:{servicer.held_port.port}')}"
    await server.start()
    try:
        yield server
    finally:
        await server.stop(None)
