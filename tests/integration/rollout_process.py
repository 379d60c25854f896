"""A real replica process on loopback, and the part of weight_sync that it talks to."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from queue import Empty, Queue

import grpc
import pytest

from shared.wire import rpc
from shared.wire.pb import rollout_pb2 as pb
from shared.wire.pb import weight_sync_pb2 as ws
from shared.wire.pb.rollout_pb2_grpc import RolloutEngineStub
from shared.wire.pb.weight_sync_pb2_grpc import WeightSyncServicer, add_WeightSyncServicer_to_server
from shared.wire.tensors import RawTensor, chunks
from shared.wire.types import float32_array, int32_array, int32_bytes
from tests.deadline import DEADLINE_S


class Peer(WeightSyncServicer):
    """Registers replicas and serves tensors; the test itself prepares and commits."""

    def __init__(self) -> None:
        self.versions: dict[str, tuple[ws.Manifest, dict[str, RawTensor]]] = {}
        self.registered: Queue[ws.RegisterRequest] = Queue()
        self.heartbeats: Queue[str] = Queue()
        self.deregistered = threading.Event()
        self.min_capacity = 0
        self.hold_fetch = threading.Event()
        """While set, Fetch has begun and waits for `go_on`."""
        self.fetching, self.go_on = threading.Event(), threading.Event()

    def Register(self, request, context):
        if request.kv_capacity_tokens < self.min_capacity:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the cache is too small for the run")
        self.registered.put(request)
        return ws.RegisterReply(heartbeat_s=0.05, run="demo")

    def Heartbeat(self, request, context):
        self.heartbeats.put(request.manifest_digest)
        return ws.HeartbeatReply()

    def Deregister(self, request, context):
        self.deregistered.set()
        return ws.DeregisterReply()

    def Fetch(self, request, context):
        manifest, tensors = self.versions[request.digest]
        if self.hold_fetch.is_set():
            self.fetching.set()
            assert self.go_on.wait(DEADLINE_S)
        yield from chunks(manifest, tensors)

    def heartbeat_of(self, digest: str) -> None:
        """Waits until the replica reports this digest."""
        while self.heartbeats.get(timeout=DEADLINE_S) != digest:
            pass


@contextmanager
def weight_sync_peer() -> Iterator[tuple[Peer, str]]:
    peer = Peer()
    server = grpc.server(futures.ThreadPoolExecutor(8), options=rpc.OPTIONS)
    add_WeightSyncServicer_to_server(peer, server)
    port = rpc.bind(server, "127.0.0.1:0")
    server.start()
    try:
        yield peer, f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait(DEADLINE_S)


class Service:
    """One process; its log lines are read by a thread so that it never blocks on a full pipe."""

    def __init__(self, name: str, **config) -> None:
        words = [f"{k}={v}" for k, v in config.items()]
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"services.{name}", *words], stderr=subprocess.PIPE, text=True
        )
        self.log: list[dict] = []
        self._lines: Queue[dict | None] = Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            try:
                self._lines.put(json.loads(line))
            except ValueError:
                self._lines.put({"event": line.rstrip()})
        self._lines.put(None)

    def wait_for(self, event: str) -> dict:
        """The next log line of this event; fails when the process ends before it."""
        while True:
            try:
                line = self._lines.get(timeout=DEADLINE_S)
            except Empty:
                raise AssertionError(f"no {event!r} within {DEADLINE_S} s, log: {self.log}") from None
            assert line is not None, f"the process ended before {event!r}, log: {self.log}"
            self.log.append(line)
            if line["event"] == event:
                return line

    def exit_code(self) -> int:
        return self.process.wait(timeout=DEADLINE_S)

    def last_lines(self) -> list[dict]:
        """The rest of the log of a process that has ended."""
        while (line := self._lines.get(timeout=DEADLINE_S)) is not None:
            self.log.append(line)
        return self.log


@contextmanager
def replica(weight_sync: str, **config) -> Iterator[tuple[Service, RolloutEngineStub]]:
    process = Service("rollout", **{"replica": "r0", "weight_sync": weight_sync, **config})
    try:
        address = process.wait_for("ready")["address"]
        with rpc.channel(address) as channel:
            yield process, RolloutEngineStub(channel)
    finally:
        process.process.kill()
        process.process.wait(timeout=DEADLINE_S)


def serve_version(peer: Peer, stub: RolloutEngineStub, manifest: ws.Manifest, tensors) -> pb.CommitWeightsReply:
    """Prepare and Commit, as weight_sync does."""
    peer.versions[manifest.version.digest] = manifest, tensors
    stub.PrepareWeights(pb.PrepareWeightsRequest(manifest=manifest), timeout=DEADLINE_S)
    return stub.CommitWeights(pb.CommitWeightsRequest(manifest_digest=manifest.version.digest), timeout=DEADLINE_S)


def request_of(digest: str, prompt, *, samples=1, number=0, continued=None, **sampling) -> pb.GenerateRequest:
    sampling = {"temperature": 1.0, "max_tokens": 8, **sampling}
    return pb.GenerateRequest(
        run="demo",
        manifest_digest=digest,
        seed=3,
        prompt_number=number,
        prompt_token_ids=int32_bytes(prompt),
        sampling=pb.SamplingParams(**sampling),
        samples=[
            pb.Sample(
                trajectory_id=f"demo.{number}.{i}", sample_index=i, token_ids=int32_bytes((continued or {}).get(i, []))
            )
            for i in range(samples)
        ],
    )


def collect(stream) -> dict[str, dict]:
    """Trajectories of a Generate stream, chunks checked to be contiguous."""
    out: dict[str, dict] = {}
    for reply, chunk in ((r, c) for r in stream for c in r.chunks):
        t = out.setdefault(
            chunk.trajectory_id,
            {"start": chunk.start, "tokens": [], "logprobs": b"", "top1": [], "steps": [], "finish": ""},
        )
        assert chunk.start == t["start"] + len(t["tokens"])
        tokens = int32_array(chunk.token_ids).tolist()
        assert len(tokens) == len(float32_array(chunk.logprobs)) == len(int32_array(chunk.top1))
        t["tokens"] += tokens
        t["logprobs"] += chunk.logprobs
        t["top1"] += int32_array(chunk.top1).tolist()
        t["steps"] += [reply.version.step] * len(tokens)
        t["finish"] = chunk.finish_reason
        assert chunk.kv == "fresh"
        assert reply.fingerprint
    return out


def code_of(call) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as error:
        call()
    return error.value.code(), error.value.details()
