"""The WeightSync service of weight_sync.proto: checks, stores, tells the registry, and answers. Decides nothing itself."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import structlog

from services.weight_sync import store as storage
from services.weight_sync.changes import Changes
from services.weight_sync.config import WeightSyncConfig
from services.weight_sync.distribute import Distributor
from services.weight_sync.registry import RefusedError, Registry, UnknownReplicaError
from services.weight_sync.store import DELTA_FILE, Store, UnknownVersionError
from services.weight_sync.transports import objects
from services.weight_sync.transports.stream import Upload, download, download_delta
from services.weight_sync.versions import ConflictError, FencedError, Published, Version
from shared.metrics import names
from shared.metrics.server import metric
from shared.wire.pb import weight_sync_pb2 as pb
from shared.wire.pb.weight_sync_pb2_grpc import WeightSyncServicer
from shared.wire.tensor_file import WEIGHTS_FILE, is_object
from shared.wire.tensors import DigestMismatch

log = structlog.get_logger()

# In this order: DigestMismatch is a ValueError, too.
_CODES = (
    (FencedError, grpc.StatusCode.FAILED_PRECONDITION),
    (RefusedError, grpc.StatusCode.FAILED_PRECONDITION),
    (ConflictError, grpc.StatusCode.ALREADY_EXISTS),
    (UnknownReplicaError, grpc.StatusCode.NOT_FOUND),
    (UnknownVersionError, grpc.StatusCode.NOT_FOUND),
    (DigestMismatch, grpc.StatusCode.DATA_LOSS),
    (ValueError, grpc.StatusCode.INVALID_ARGUMENT),
    (OSError, grpc.StatusCode.RESOURCE_EXHAUSTED),
)


class Servicer(WeightSyncServicer):
    def __init__(
        self, config: WeightSyncConfig, registry: Registry, store: Store, changes: Changes, distributor: Distributor
    ) -> None:
        self._config = config
        self._registry = registry
        self._store = store
        self._changes = changes
        self._distributor = distributor

    # Trainer

    async def Publish(self, request_iterator: AsyncIterator[pb.PublishChunk], context: Any) -> pb.PublishReply:
        async with _answering(context):
            started = time.monotonic()
            stream = aiter(request_iterator)
            first = await anext(stream, pb.PublishChunk())
            published = storage.published(first.manifest, published_at=time.time())
            await self._fence(published.version.run, first.epoch)
            if first.announce:
                await self._announce(published, first)
            elif not await self._has(published.version):
                await self._receive(published, first, stream)
                metric(names.WEIGHT_SYNC_SECONDS).labels("publish").observe(time.monotonic() - started)
            return pb.PublishReply(version=_version(published.version))

    async def _announce(self, published: Published, first: pb.PublishChunk) -> None:
        """The version can be had from its source: replicas may prepare it while its bytes are on their way here."""
        version = published.version
        async with self._distributor.store_lock:
            self._registry.versions.fence(version.run, first.epoch)
            # Raises ConflictError before anything is changed.
            self._registry.versions.holds(version)
            self._store.announce(first.manifest)
            self._registry.versions.add(published)
        log.info("announced", version=str(version), source=first.manifest.source.transport)
        self._changes.fire()

    async def _receive(self, published: Published, first: pb.PublishChunk, stream: AsyncIterator) -> None:
        """Verified bytes on disk first, then the registry. Nothing is left of a publish that fails."""
        manifest, version = first.manifest, published.version
        temporary = await asyncio.to_thread(self._store.temporary, version.run)
        try:
            if manifest.uri:
                await asyncio.to_thread(self._store.check, manifest)
                num_bytes = published.nbytes
            else:
                num_bytes = await self._upload(manifest, stream, temporary)
            metric(names.WEIGHT_SYNC_BYTES).labels(_transport(manifest)).inc(num_bytes)
            async with self._distributor.store_lock:
                # Another trainer may have taken over, or published the same, while the bytes came.
                self._registry.versions.fence(version.run, first.epoch)
                if not await self._has(version):
                    await asyncio.to_thread(self._store.put, manifest, temporary)
                self._registry.versions.add(published)
            log.info("published", version=str(version), bytes=num_bytes, full_bytes=published.nbytes, uri=manifest.uri)
            self._changes.fire()
        finally:
            await asyncio.to_thread(self._store.discard, temporary)

    async def _upload(self, manifest: pb.Manifest, stream: AsyncIterator, temporary: Path) -> int:
        """Bytes received. Raises UnknownVersionError when the base of a delta is not here, DigestMismatch."""
        base = await asyncio.to_thread(self._store.base, manifest)
        paths = temporary / WEIGHTS_FILE, temporary / DELTA_FILE
        upload = await asyncio.to_thread(lambda: Upload(paths[0], manifest, base=base, delta_path=paths[1]))
        with contextlib.closing(upload):
            async for message in stream:
                await asyncio.to_thread(upload.add, message.chunk)
            await asyncio.to_thread(upload.finish)
        return upload.num_bytes

    async def _has(self, version: Version) -> bool:
        """Whether the version is published and its bytes are still there. Raises ConflictError."""
        return self._registry.versions.holds(version) and await asyncio.to_thread(self._store.has_weights, version)

    async def _fence(self, run: str, epoch: int) -> None:
        """Raises FencedError."""
        async with self._distributor.store_lock:
            if self._registry.versions.fence(run, epoch):
                await asyncio.to_thread(self._store.save_epoch, run, epoch)

    async def Retain(self, request: pb.RetainRequest, context: Any) -> pb.RetainReply:
        async with _answering(context):
            await self._fence(request.run, request.epoch)
            self._registry.versions.retain(request.run, request.oldest_step)
            return pb.RetainReply(num_dropped=await self._distributor.collect())

    async def ListVersions(self, request: pb.ListVersionsRequest, context: Any) -> pb.ListVersionsReply:
        serving = [r.serving for r in self._registry.replicas.values()]
        versions = [
            pb.VersionInfo(
                version=_version(p.version),
                published_at=p.published_at,
                nbytes=p.nbytes,
                replicas_ready=serving.count(p.version),
            )
            for p in self._registry.versions.list(request.run)
        ]
        return pb.ListVersionsReply(versions=versions)

    async def GetManifest(self, request: pb.GetManifestRequest, context: Any) -> pb.Manifest:
        async with _answering(context):
            return self._store.manifest(self._store.find(request.run, request.digest))

    # Replicas

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterReply:
        async with _answering(context):
            if not (request.replica and request.incarnation and request.address):
                raise ValueError(f"replica, incarnation and address are needed, got {request}")
            self._registry.register(
                request.replica,
                request.incarnation,
                request.address,
                request.kv_capacity_tokens,
                now=time.monotonic(),
            )
            log.info("registered", replica=request.replica, incarnation=request.incarnation, address=request.address)
            self._changes.fire()
            return pb.RegisterReply(heartbeat_s=self._config.heartbeat_s, run=self._registry.run)

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatReply:
        async with _answering(context):
            key = request.replica, request.incarnation
            if self._registry.heartbeat(*key, request.manifest_digest, now=time.monotonic()):
                log.warning("replica serves another version", replica=key[0], digest=request.manifest_digest)
                self._changes.fire()
            return pb.HeartbeatReply()

    async def Deregister(self, request: pb.DeregisterRequest, context: Any) -> pb.DeregisterReply:
        self._registry.deregister(request.replica, request.incarnation)
        log.info("deregistered", replica=request.replica, incarnation=request.incarnation)
        self._changes.fire()
        return pb.DeregisterReply()

    async def Fetch(self, request: pb.FetchRequest, context: Any) -> AsyncIterator[pb.TensorChunk]:
        async with _answering(context):
            version = self._store.find(request.run, request.digest)
            await self._until_stored(version)
            delta = None if request.names else self._store.delta(version, request.base_digest)
            if delta:
                stream, transport = download_delta(delta), "grpc-delta"
            else:
                stream, transport = await asyncio.to_thread(self._download, version, request.names), "grpc"
            while chunk := await asyncio.to_thread(next, stream, None):
                metric(names.WEIGHT_SYNC_BYTES).labels(transport).inc(chunk.ByteSize())
                yield chunk

    def _download(self, version: Version, names: Sequence[str]) -> Iterator[pb.TensorChunk]:
        manifest = self._store.manifest(version)
        if is_object(manifest.uri):
            return objects.download(manifest, names)
        return download(self._store.weights(version), manifest, names)

    async def _until_stored(self, version: Version) -> None:
        """Waits for the bytes of a version that was announced, at most until the caller's deadline.

        Raises UnknownVersionError when it was dropped meanwhile.
        """
        with self._changes.subscribe() as changed:
            while self._store.is_awaited(version) and not self._changes.is_closed:
                await changed.wait()
                changed.clear()

    # Dispatcher

    async def SetNeeded(self, request: pb.SetNeededRequest, context: Any) -> pb.SetNeededReply:
        is_published = self._registry.set_needed(request.run, request.step)
        log.info("needed", run=request.run, step=request.step, published=is_published)
        self._changes.fire()
        return pb.SetNeededReply(published=is_published)

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.Fleet]:
        last = None
        with self._changes.subscribe() as changed:
            while not self._changes.is_closed:
                changed.clear()
                fleet = self._fleet()
                if fleet != last:
                    last = fleet
                    yield fleet
                await changed.wait()

    def _fleet(self) -> pb.Fleet:
        registry = self._registry
        replicas = [
            pb.Replica(
                replica=r.name,
                incarnation=r.incarnation,
                address=r.address,
                state=registry.state(r),
                reason=registry.reason(r),
                version=_version(r.serving) if r.serving else None,
            )
            for _, r in sorted(registry.replicas.items())
        ]
        versions = [p.version for p in registry.versions.list(registry.run)]
        return pb.Fleet(
            run=registry.run,
            replicas=replicas,
            versions=[_version(v) for v in versions if registry.versions.resolve(v.run, v.step) == v],
            needed_step=registry.needed[1] if registry.needed else 0,
        )


def _transport(manifest: pb.Manifest) -> str:
    if manifest.uri:
        return "object" if is_object(manifest.uri) else "directory"
    return "grpc-delta" if manifest.base_digest else "grpc"


def _version(v: Version) -> pb.Version:
    return pb.Version(lineage=v.lineage, step=v.step, digest=v.digest)


@contextlib.asynccontextmanager
async def _answering(context: Any) -> AsyncIterator[None]:
    """Turns what the service refuses into a gRPC status whose text is the reason."""
    try:
        yield
    except tuple(kind for kind, _ in _CODES) as error:
        code = next(code for kind, code in _CODES if isinstance(error, kind))
        log.warning("refused", code=code.name, reason=str(error))
        await context.abort(code, str(error))
