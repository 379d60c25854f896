"""How trainer and replicas talk to weight_sync: publish and retain, fetch, stay registered. No torch.

Trainer, rank 0:
>>> with Publisher("127.0.0.1:7301", transport="directory", directory=Path("weights")) as publisher:
...     publisher.publish(manifest, tensors, epoch=epoch, deadline_s=300)

Replica:
>>> link = ReplicaLink(address, replica="rollout-0", incarnation=uuid4().hex, engine_address=..., kv_capacity_tokens=...)
>>> await link.run(stop)  # raises RefusedError: exit with EXIT_REFUSED
>>> tensors = await asyncio.to_thread(fetch, manifest, address=address, deadline_s=60)
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import grpc
import structlog

from shared.metrics import names
from shared.metrics.server import metric
from shared.wire import rpc, tensor_file
from shared.wire.delta import decoded, delta_chunks
from shared.wire.pb import weight_sync_pb2 as pb
from shared.wire.pb.weight_sync_pb2_grpc import WeightSyncStub
from shared.wire.tensor_file import is_object
from shared.wire.tensor_objects import read_object, write_object
from shared.wire.tensors import RawTensor, chunks, collect
from shared.wire.weight_calls import (
    TRANSIENT,
    Fenced,
    RefusedError,
    UnknownVersion,
    VersionConflict,
    WeightSyncError,
    call,
    delta_or_full,
    retry,
    translated,
)

__all__ = [
    "Fenced",
    "Publisher",
    "RefusedError",
    "ReplicaLink",
    "Sent",
    "UnknownVersion",
    "VersionConflict",
    "WeightSyncError",
    "fetch",
]

log = structlog.get_logger()

REPLICA_RPC_TIMEOUT_S = 5.0
"""Deadline of one Register, Heartbeat or Deregister."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What one publish took: bytes on the wire (framing of the chunks included) or in the directory, and those of the version."""

    num_bytes: int
    full_bytes: int


@dataclass(frozen=True, slots=True)
class _Base:
    """The version that was published before."""

    run: str
    digest: str
    tensors: Mapping[str, RawTensor]


class Publisher:
    """The trainer's side. Every call goes on while weight_sync is down, up to its deadline, and is idempotent.

    Args:
        address: host:port of weight_sync.
        transport: `directory` writes {directory}/{run}/{lineage}-{step}-{digest[:12]}/weights.safetensors, which
            weight_sync and the replicas must see under the same path; `grpc` streams the bytes to weight_sync.
        directory: a path, or a uri in an object store.
        delta: over `grpc` send what changed since the version published before, and keep that version's tensors for it.
            In a directory every version is whole, since that is what its readers map.
    """

    def __init__(
        self,
        address: str,
        *,
        transport: Literal["directory", "grpc"] = "grpc",
        directory: Path | str | None = None,
        delta: bool = False,
    ) -> None:
        if (transport == "directory") != (directory is not None):
            raise ValueError(f"a directory goes with transport 'directory', got {transport!r} and {directory}")
        self._address = address
        self._directory = directory
        self._channel = rpc.channel(address)
        self._stub = WeightSyncStub(self._channel)
        self._is_delta = delta and directory is None
        self._base: _Base | None = None
        self._num_sent = 0
        self._upload: Future[pb.Version] | None = None
        """Of a version that was announced, until `settle`."""
        self.sent = Sent(0, 0)
        """Of the last publish; of one whose bytes are still on their way, all of them."""

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def publish(
        self, manifest: pb.Manifest, tensors: Mapping[str, RawTensor], *, epoch: int, deadline_s: float
    ) -> pb.Version:
        """Returns when weight_sync has the version on disk, verified; where the manifest names a source of its bytes, when
        weight_sync knows of it: then the bytes follow in the background, and the next publish waits for them.

        Sets `manifest.uri` under the directory transport, `manifest.base_digest` where a delta is sent. The tensors must not
        be written to until the next publish.

        Raises: Fenced, VersionConflict, WeightSyncError, OSError when the directory can't be written.
        """
        end = time.monotonic() + deadline_s
        self.settle(deadline_s)
        if not manifest.HasField("source"):
            return self._send(manifest, tensors, epoch=epoch, deadline_s=end - time.monotonic())
        announcement = pb.PublishChunk(epoch=epoch, manifest=manifest, announce=True)
        version = retry(
            lambda t: self._stub.Publish(iter([announcement]), **call(t)).version,
            address=self._address,
            deadline_s=end - time.monotonic(),
        )
        full_bytes = sum(e.nbytes for e in manifest.tensors)
        self.sent = Sent(full_bytes, full_bytes)
        upload = self._upload = Future()

        def send() -> None:
            try:
                upload.set_result(self._send(manifest, tensors, epoch=epoch, deadline_s=deadline_s))
            except BaseException as error:  # handed to whoever settles
                upload.set_exception(error)

        threading.Thread(target=send, name="upload", daemon=True).start()
        return version

    def settle(self, deadline_s: float) -> None:
        """Waits until the bytes of the version announced last are at weight_sync. Raises what `publish` raises."""
        upload, self._upload = self._upload, None
        if upload is None:
            return
        try:
            upload.result(deadline_s)
        except TimeoutError:
            self._upload = upload
            raise WeightSyncError(
                f"weight_sync at {self._address} did not take the bytes of the last version within {deadline_s} s"
            ) from None

    def _send(
        self, manifest: pb.Manifest, tensors: Mapping[str, RawTensor], *, epoch: int, deadline_s: float
    ) -> pb.Version:
        """Returns when the bytes are at weight_sync."""
        base = self._base if self._base and self._base.run == manifest.run else None

        def attempt(timeout_s: float, *, against: _Base | None) -> pb.Version:
            manifest.base_digest = against.digest if against else ""
            if self._directory is not None:
                manifest.uri = _write(self._directory, manifest, tensors)
            return self._stub.Publish(self._messages(manifest, tensors, epoch, against), **call(timeout_s)).version

        self._num_sent = 0
        version = delta_or_full(attempt, base, phase="publish", address=self._address, deadline_s=deadline_s)
        full_bytes = sum(e.nbytes for e in manifest.tensors)
        self.sent = Sent(full_bytes if manifest.uri else self._num_sent, full_bytes)
        if self._is_delta:
            self._base = _Base(manifest.run, manifest.version.digest, tensors)
        return version

    def _messages(
        self, manifest: pb.Manifest, tensors: Mapping[str, RawTensor], epoch: int, base: _Base | None
    ) -> Iterator[pb.PublishChunk]:
        yield pb.PublishChunk(epoch=epoch, manifest=manifest)
        if not manifest.uri:
            stream = delta_chunks(manifest, tensors, base=base.tensors) if base else chunks(manifest, tensors)
            for chunk in stream:
                self._num_sent += chunk.ByteSize()
                yield pb.PublishChunk(chunk=chunk)

    def retain(self, run: str, oldest_step: int, *, epoch: int, deadline_s: float) -> int:
        """Versions below `oldest_step` will not be asked for again. Returns how many are gone now. Raises Fenced."""
        request = pb.RetainRequest(run=run, oldest_step=oldest_step, epoch=epoch)
        reply = retry(lambda t: self._stub.Retain(request, **call(t)), address=self._address, deadline_s=deadline_s)
        return reply.num_dropped

    def versions(self, run: str, *, deadline_s: float = 30.0) -> list[pb.VersionInfo]:
        """Retained versions of the run, ascending by (lineage, step)."""
        request = pb.ListVersionsRequest(run=run)
        reply = retry(
            lambda t: self._stub.ListVersions(request, **call(t)), address=self._address, deadline_s=deadline_s
        )
        return list(reply.versions)

    def manifest(self, run: str, digest: str, *, deadline_s: float = 30.0) -> pb.Manifest:
        """What `fetch` needs to get a published version back. Raises UnknownVersion."""
        request = pb.GetManifestRequest(run=run, digest=digest)
        return retry(lambda t: self._stub.GetManifest(request, **call(t)), address=self._address, deadline_s=deadline_s)


def fetch(
    manifest: pb.Manifest, *, address: str, deadline_s: float, base: Mapping[str, RawTensor] | None = None
) -> dict[str, RawTensor]:
    """The tensors of a version, every digest verified: mapped from its directory or read from its object store when that is
    possible here, else over gRPC.

    Args:
        base: tensors of the version `manifest.base_digest`, where the caller holds it: then only what changed is fetched, and
            all of it when that does not give the right bytes.

    The data of a mapped tensor is a read-only view of the file: copy what must outlive it. Blocks: call it in a thread.

    Raises: DigestMismatch, UnknownVersion, WeightSyncError.
    """
    end = time.monotonic() + deadline_s
    if manifest.uri:
        try:
            if is_object(manifest.uri):
                # Time must be left for weight_sync when this does not work out.
                return read_object(manifest, deadline_s=deadline_s / 2)
            return tensor_file.read_version(manifest)
        except OSError as error:
            log.warning("fetching from weight_sync", uri=manifest.uri, reason=str(error))
    if manifest.base_digest and base is None:
        metric(names.DELTA_FALLBACKS).labels("fetch", "no_base").inc()
    with rpc.channel(address) as channel:
        stub = WeightSyncStub(channel)

        def attempt(timeout_s: float, *, against: Mapping[str, RawTensor] | None) -> dict[str, RawTensor]:
            request = pb.FetchRequest(
                run=manifest.run,
                digest=manifest.version.digest,
                base_digest=manifest.base_digest if against is not None else "",
            )
            stream = stub.Fetch(request, **call(timeout_s))
            return collect(manifest.tensors, decoded(stream, manifest, base=against or {}))

        return delta_or_full(attempt, base, phase="fetch", address=address, deadline_s=end - time.monotonic())


def _write(directory: Path | str, manifest: pb.Manifest, tensors: Mapping[str, RawTensor]) -> str:
    """Uri of the version, its file written."""
    if is_object(str(directory)):
        return write_object(str(directory), manifest, tensors)
    return tensor_file.write_version(Path(directory).absolute(), manifest, tensors).as_uri()


class ReplicaLink:
    """A replica's registration with weight_sync.

    Args:
        address: host:port of weight_sync.
        replica: stable name.
        incarnation: new at every start of the process.
        engine_address: host:port where weight_sync and the dispatcher reach this replica's RolloutEngine.
        kv_capacity_tokens: longest sequence that the KV cache can hold.
    """

    def __init__(
        self, address: str, *, replica: str, incarnation: str, engine_address: str, kv_capacity_tokens: int
    ) -> None:
        self._address = address
        self._key = {"replica": replica, "incarnation": incarnation}
        self._engine_address = engine_address
        self._kv_capacity_tokens = kv_capacity_tokens
        self._interval_s = 1.0
        self.manifest_digest = ""
        """What the replica serves: set it at every swap, before Commit is answered."""
        self.registered = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Keeps the registration alive until `stop`, then takes it back. Raises RefusedError, WeightSyncError.

        consumes: `manifest_digest`
        produces: Register, Heartbeat, Deregister at weight_sync
        waits for: the heartbeat interval, or a reply, no longer than REPLICA_RPC_TIMEOUT_S
        unblocked by: the clock, `stop`
        """
        async with rpc.aio_channel(self._address) as channel:
            stub = WeightSyncStub(channel)
            stopping = asyncio.create_task(stop.wait())
            try:
                while not stop.is_set():
                    beat = asyncio.create_task(self._beat(stub))
                    await asyncio.wait((beat, stopping), return_when=asyncio.FIRST_COMPLETED)
                    if not beat.done():
                        beat.cancel()
                    elif beat.result():
                        await asyncio.wait((stopping,), timeout=self._interval_s)
            finally:
                stopping.cancel()
            if self.registered.is_set():
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await stub.Deregister(pb.DeregisterRequest(**self._key), timeout=REPLICA_RPC_TIMEOUT_S)

    async def _beat(self, stub: WeightSyncStub) -> bool:
        """One Register or Heartbeat. False: register again, at once."""
        options = call(REPLICA_RPC_TIMEOUT_S)
        try:
            if self.registered.is_set():
                digest = self.manifest_digest
                await stub.Heartbeat(pb.HeartbeatRequest(**self._key, manifest_digest=digest), **options)
            else:
                request = pb.RegisterRequest(
                    **self._key, address=self._engine_address, kv_capacity_tokens=self._kv_capacity_tokens
                )
                self._interval_s = (await stub.Register(request, **options)).heartbeat_s
                self.registered.set()
                log.info("registered", weight_sync=self._address, **self._key)
        except grpc.aio.AioRpcError as error:
            code = error.code()
            if code == grpc.StatusCode.NOT_FOUND and self.registered.is_set():
                self.registered.clear()
                return False
            if code == grpc.StatusCode.FAILED_PRECONDITION:
                raise RefusedError(error.details()) from error
            if code not in TRANSIENT and code != grpc.StatusCode.DEADLINE_EXCEEDED:
                raise translated(error, self._address) from error
            log.warning("weight_sync unreachable", weight_sync=self._address, code=code.name, reason=error.details())
        return True
