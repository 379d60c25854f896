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
from shared.wire.run import RunConfig
from shared.wire.tensors import RawTensor, build_manifest, manifest_digest, tensor_entry
from shared.wire.weights import Publisher, ReplicaLink, fetch

DEADLINE_S = 30.0
FINGERPRINT = "cpu-test"
QUICK = ("heartbeat_s=0.2", "lease_s=3.0", "prepare_timeout_s=5.0", "commit_timeout_s=5.0", "abort_timeout_s=0.5",
         "retry_s=0.5")  # fmt: skip


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
        self.data_dir, self.words, self.port = data_dir, words or QUICK, 0
        self.logs: list[dict[str, Any]] = []
        self.process: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> Process:
        words = (f"data_dir={self.data_dir}", f"port={self.port}", *self.words)
        command = [sys.executable, "-m", "services.weight_sync", *words]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=os.environ | {"GRPC_VERBOSITY": "NONE"}
        )
        ready = threading.Event()
        threading.Thread(target=self._read, args=(self.process, ready), daemon=True).start()
        assert ready.wait(DEADLINE_S), self.logs
        assert self.said("ready"), self.logs
        self.port = self.said("ready")[-1]["port"]
        return self

    def _read(self, process: subprocess.Popen[str], ready: threading.Event) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            self.logs.append(json.loads(line) if line.startswith("{") else {"event": line})
            if self.logs[-1]["event"] == "ready":
                ready.set()
        ready.set()

    def said(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.logs if line["event"] == event]

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def terminate(self) -> int:
        """Exit code after SIGTERM."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_S)

    def publisher(self, directory: Path | None = None) -> Publisher:
        return Publisher(self.address, transport="directory" if directory else "grpc", directory=directory)

    @contextlib.contextmanager
    def stub(self) -> Iterator[WeightSyncStub]:
        with rpc.channel(self.address) as channel:
            yield WeightSyncStub(channel)

    def need(self, step: int, *, run: str = "demo") -> bool:
        # Channels of one process share connections, and with them the pause after a refused attempt on a killed server.
        request = pb.SetNeededRequest(run=run, step=step)
        with self.stub() as stub:
            return stub.SetNeeded(request, timeout=DEADLINE_S, wait_for_ready=True).published


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


async def watch(
    address: str, until: Callable[[dict[str, pb.Replica], pb.Fleet], Any], *, deadline_s: float = DEADLINE_S
) -> pb.Fleet:
    """The first snapshot for which `until(replicas by name, fleet)` is true. The stream may break: weight_sync restarts."""
    last = None
    try:
        async with asyncio.timeout(deadline_s), rpc.aio_channel(address) as channel:
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    async for last in WeightSyncStub(channel).Watch(pb.WatchRequest(), wait_for_ready=True):
                        if until({r.replica: r for r in last.replicas}, last):
                            return last
    except TimeoutError:
        raise AssertionError(f"waited {deadline_s} s in vain; the last snapshot was:\n{last}") from None


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
