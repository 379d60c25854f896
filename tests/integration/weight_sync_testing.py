"""weight_sync as a real process; replicas whose gRPC, registration and fetches are real and whose model is a dict of bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from shared.config import unstructure
from shared.wire import rpc
from shared.wire.pb import rollout_pb2 as engine_pb
from shared.wire.pb import weight_sync_pb2 as pb
from shared.wire.pb.rollout_pb2_grpc import RolloutEngineServicer, add_RolloutEngineServicer_to_server
from shared.wire.pb.weight_sync_pb2_grpc import WeightSyncStub
from shared.wire.ports import HeldPort
from shared.wire.run import RunConfig
from shared.wire.tensors import RawTensor, build_manifest, manifest_digest, tensor_entry
from shared.wire.weight_calls import call, retry
from shared.wire.weights import Publisher, ReplicaLink, fetch
from tests.deadline import DEADLINE_S

FINGERPRINT = "cpu-test"
QUICK = ("heartbeat_s=0.2", "lease_s=60", "abort_timeout_s=0.5", "retry_s=0.5")
"""Short is only what decides how soon something goes on; what a slow machine could miss is long."""


def weights(step: int, *, num_tensors: int = 3, elements: int = 700_000) -> dict[str, RawTensor]:
    """bfloat16 tensors that differ from step to step, a few chunks long, and a small float32 one."""
    rng = np.random.default_rng(step)
    big = {f"layer.{i}": RawTensor("bfloat16", (elements,), rng.bytes(2 * elements)) for i in range(num_tensors)}
    return big | {"norm": RawTensor("float32", (5,), np.full(5, step, dtype="<f4"))}


def manifest_of(
    step: int, tensors: Mapping[str, RawTensor], *, run: str = "demo", lineage: int = 0, **config: Any
) -> pb.Manifest:
    return build_manifest(
        run=run,
        lineage=lineage,
        step=step,
        tensors=tensors,
        model_config_json="{}",
        run_config_json=json.dumps(unstructure(RunConfig(run=run, model="m", **config))),
        fingerprint=FINGERPRINT,
        probe_token_ids=[np.arange(5, dtype="<i4").tobytes()],
        probe_logprobs=[np.zeros(4, dtype="<f4").tobytes()],
    )


class Process:
    """`python -m services.weight_sync`, on the same port and data after every `start`."""

    def __init__(self, data_dir: Path, *words: str) -> None:
        self.data_dir, self.words, self._held = data_dir, words or QUICK, HeldPort()
        self._num_starts = 0
        self.logs: list[dict[str, Any]] = []
        self.process: subprocess.Popen[str] | None = None
        self._read_on = threading.Condition()
        """Notified at every line of the log, and at its end."""
        self._has_ended = False

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._held.port}"

    def start(self) -> Process:
        words = (f"data_dir={self.data_dir}", f"port={self._held.port}", *self.words)
        command = [sys.executable, "-m", "services.weight_sync", *words]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=os.environ | {"GRPC_VERBOSITY": "NONE"}
        )
        self._has_ended, self._num_starts = False, self._num_starts + 1
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()
        self.said("ready", at_least=self._num_starts)
        return self

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            with self._read_on:
                self.logs.append(json.loads(line) if line.startswith("{") else {"event": line})
                self._read_on.notify_all()
        with self._read_on:
            self._has_ended = True
            self._read_on.notify_all()

    def said(self, event: str, *, at_least: int = 1) -> list[dict[str, Any]]:
        """The log lines of this event, as soon as there are so many. What a snapshot shows may be logged a moment later."""

        def found() -> list[dict[str, Any]]:
            return [line for line in self.logs if line["event"] == event]

        with self._read_on:
            self._read_on.wait_for(lambda: self._has_ended or len(found()) >= at_least, DEADLINE_S)
        assert len(found()) >= at_least, f"{event!r} was not logged {at_least} times: {self.logs}"
        return found()

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def terminate(self) -> int:
        """Exit code after SIGTERM."""
        return self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> int:
        """Exit code, once the log was read to its end."""
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(DEADLINE_S)
        with self._read_on:
            assert self._read_on.wait_for(lambda: self._has_ended, DEADLINE_S)
        return code

    def publisher(self, directory: Path | None = None) -> Publisher:
        return Publisher(self.address, transport="directory" if directory else "grpc", directory=directory)

    @contextlib.contextmanager
    def stub(self) -> Iterator[WeightSyncStub]:
        with rpc.channel(self.address) as channel:
            yield WeightSyncStub(channel)

    def need(self, step: int, *, run: str = "demo") -> bool:
        """As the dispatcher says it, also to a process that was just started again."""
        request = pb.SetNeededRequest(run=run, step=step)
        with self.stub() as stub:
            return retry(
                lambda left_s: stub.SetNeeded(request, **call(left_s)).published,
                address=self.address,
                deadline_s=DEADLINE_S,
            )


@contextlib.contextmanager
def running(data_dir: Path, *words: str) -> Iterator[Process]:
    process = Process(data_dir, *words).start()
    try:
        yield process
    finally:
        process.kill()


class Peer(RolloutEngineServicer):
    """A replica. Faults are switched on by its fields."""

    def __init__(self, weight_sync: str, name: str) -> None:
        self.weight_sync, self.name, self.incarnation = weight_sync, name, f"{name}-1"
        self.fingerprint = FINGERPRINT
        self.staged: tuple[pb.Manifest, dict[str, RawTensor]] | None = None
        self.held: tuple[pb.Manifest, dict[str, RawTensor]] | None = None
        self.go_on = asyncio.Event()
        """Cleared: Prepare never answers."""
        self.go_on.set()
        self.num_acks_to_lose = 0
        self.flip_held_bit = False
        self.probe_differing = 0
        self.fetched_steps: list[int] = []
        self.num_prepares = self.num_commits = self.num_swaps = self.num_aborts = 0
        self.called = asyncio.Condition()
        """Notified at every call and at every answer to one."""

    @property
    def held_step(self) -> int | None:
        return self.held[0].version.step if self.held else None

    async def PrepareWeights(
        self, request: engine_pb.PrepareWeightsRequest, context: Any
    ) -> engine_pb.PrepareWeightsReply:
        self.num_prepares += 1
        await self._notify()
        await self.go_on.wait()
        manifest = request.manifest
        digest = manifest.version.digest
        for kept in (self.staged, self.held):
            if kept and kept[0].version.digest == digest:
                self.staged = (manifest, kept[1])
                break
        else:
            self.fetched_steps.append(manifest.version.step)
            tensors = await asyncio.to_thread(fetch, manifest, address=self.weight_sync, deadline_s=DEADLINE_S)
            self.staged = (manifest, {n: RawTensor(t.dtype, t.shape, bytearray(t.data)) for n, t in tensors.items()})
        await self._notify()
        return engine_pb.PrepareWeightsReply(manifest_digest=digest, fingerprint=self.fingerprint)

    async def CommitWeights(
        self, request: engine_pb.CommitWeightsRequest, context: Any
    ) -> engine_pb.CommitWeightsReply:
        self.num_commits += 1
        if self.staged and self.staged[0].version.digest == request.manifest_digest:
            self.held, self.staged = self.staged, None
            self.num_swaps += 1
        elif not self.held or self.held[0].version.digest != request.manifest_digest:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not staged")
        if self.num_acks_to_lose:
            self.num_acks_to_lose -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the answer was lost")
        assert self.held is not None
        if self.flip_held_bit:
            self.held[1]["layer.0"].data[7] ^= 1
        digest = manifest_digest(tensor_entry(n, t) for n, t in self.held[1].items())
        return engine_pb.CommitWeightsReply(
            manifest_digest=digest, probe_tokens=4, probe_differing=self.probe_differing
        )

    async def AbortWeights(self, request: engine_pb.AbortWeightsRequest, context: Any) -> engine_pb.AbortWeightsReply:
        self.num_aborts += 1
        self.staged = None
        return engine_pb.AbortWeightsReply()

    async def _notify(self) -> None:
        async with self.called:
            self.called.notify_all()

    async def until(self, is_true: Callable[[], Any]) -> None:
        """Waits for something that a call to this replica brings about."""
        async with asyncio.timeout(DEADLINE_S), self.called:
            await self.called.wait_for(is_true)

    @contextlib.asynccontextmanager
    async def serving(self, *, kv_capacity_tokens: int = 4096) -> AsyncIterator[Peer]:
        """Serves and stays registered until the end of the block."""
        server, _ = rpc.aio_server()
        add_RolloutEngineServicer_to_server(self, server)
        address = f"127.0.0.1:{rpc.bind(server, '127.0.0.1:0')}"
        await server.start()
        self.stop = asyncio.Event()
        self.link = ReplicaLink(
            self.weight_sync,
            replica=self.name,
            incarnation=self.incarnation,
            engine_address=address,
            kv_capacity_tokens=kv_capacity_tokens,
        )
        self.registration = asyncio.create_task(self.link.run(self.stop))
        try:
            yield self
        finally:
            self.stop.set()
            self.go_on.set()
            await asyncio.gather(self.registration, return_exceptions=True)
            await server.stop(0)


async def watch(address: str, until: Callable[[dict[str, pb.Replica], pb.Fleet], Any]) -> pb.Fleet:
    """The first snapshot for which `until(replicas by name, fleet)` is true. The stream may break: weight_sync restarts."""
    last = None
    try:
        async with asyncio.timeout(DEADLINE_S), rpc.aio_channel(address) as channel:
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    async for last in WeightSyncStub(channel).Watch(pb.WatchRequest(), wait_for_ready=True):
                        if until({r.replica: r for r in last.replicas}, last):
                            return last
    except TimeoutError:
        raise AssertionError(f"waited {DEADLINE_S:g} s in vain; the last snapshot was:\n{last}") from None


def is_ready(name: str) -> Callable[[dict[str, pb.Replica], pb.Fleet], bool]:
    return lambda replicas, _: name in replicas and replicas[name].state == "ready"


def all_ready(step: int, names: str) -> Callable[[dict[str, pb.Replica], pb.Fleet], bool]:
    """Exactly these replicas, and each of them ready at this step."""

    def until(replicas: dict[str, pb.Replica], _: pb.Fleet) -> bool:
        return sorted(replicas) == sorted(names) and all(
            r.state == "ready" and r.version.digest and r.version.step == step for r in replicas.values()
        )

    return until


def is_ejected(name: str, *, because: str) -> Callable[[dict[str, pb.Replica], pb.Fleet], bool]:
    return lambda replicas, _: (
        name in replicas and replicas[name].state == "ejected" and because in replicas[name].reason
    )
