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
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import grpc
import structlog
import tenacity

from shared.wire import rpc, tensor_file
from shared.wire.pb import weight_sync_pb2 as pb
from shared.wire.pb.weight_sync_pb2_grpc import WeightSyncStub
from shared.wire.tensors import RawTensor, chunks, collect

T = TypeVar("T")
log = structlog.get_logger()

REPLICA_RPC_TIMEOUT_S = 5.0
"""Deadline of one Register, Heartbeat or Deregister."""


class WeightSyncError(RuntimeError):
    """weight_sync refused or did not answer; the text says which, with address and reason."""


class Fenced(WeightSyncError):
    """A trainer with a newer epoch owns the run: this one must stop."""


class VersionConflict(WeightSyncError):
    """The step exists in this lineage with another digest: publish under a new lineage."""


class UnknownVersion(WeightSyncError):
    """weight_sync doesn't hold this version (any more)."""


class RefusedError(WeightSyncError):
    """This replica can't serve the run; the text is weight_sync's reason."""


class Publisher:
    """The trainer's side. Every call goes on while weight_sync is down, up to its deadline, and is idempotent.

    Args:
        address: host:port of weight_sync.
        transport: `directory` writes {directory}/{run}/{lineage}-{step}-{digest[:12]}/weights.safetensors, which
            weight_sync and the replicas must see under the same path; `grpc` streams the bytes to weight_sync.
    """

    def __init__(
        self, address: str, *, transport: Literal["directory", "grpc"] = "grpc", directory: Path | None = None
    ) -> None:
        if (transport == "directory") != (directory is not None):
            raise ValueError(f"a directory goes with transport 'directory', got {transport!r} and {directory}")
        self._address = address
        self._directory = directory.absolute() if directory else None
        self._channel = rpc.channel(address)
        self._stub = WeightSyncStub(self._channel)

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def publish(
        self, manifest: pb.Manifest, tensors: Mapping[str, RawTensor], *, epoch: int, deadline_s: float
    ) -> pb.Version:
        """Returns when weight_sync has the version on disk, verified. Sets `manifest.uri` under the directory transport.

        Raises: Fenced, VersionConflict, WeightSyncError, OSError when the directory can't be written.
        """

        def attempt(timeout_s: float) -> pb.Version:
            if self._directory is not None:
                manifest.uri = tensor_file.write_version(self._directory, manifest, tensors).as_uri()
            return self._stub.Publish(self._messages(manifest, tensors, epoch), **_call(timeout_s)).version

        return _retry(attempt, address=self._address, deadline_s=deadline_s)

    def _messages(
        self, manifest: pb.Manifest, tensors: Mapping[str, RawTensor], epoch: int
    ) -> Iterator[pb.PublishChunk]:
        yield pb.PublishChunk(epoch=epoch, manifest=manifest)
        if not manifest.uri:
            for chunk in chunks(manifest, tensors):
                yield pb.PublishChunk(chunk=chunk)

    def retain(self, run: str, oldest_step: int, *, epoch: int, deadline_s: float) -> int:
        """Versions below `oldest_step` will not be asked for again. Returns how many are gone now. Raises Fenced."""
        request = pb.RetainRequest(run=run, oldest_step=oldest_step, epoch=epoch)
        reply = _retry(lambda t: self._stub.Retain(request, **_call(t)), address=self._address, deadline_s=deadline_s)
        return reply.num_dropped

    def versions(self, run: str, *, deadline_s: float = 30.0) -> list[pb.VersionInfo]:
        """Retained versions of the run, ascending by (lineage, step)."""
        request = pb.ListVersionsRequest(run=run)
        reply = _retry(
            lambda t: self._stub.ListVersions(request, **_call(t)), address=self._address, deadline_s=deadline_s
        )
        return list(reply.versions)

    def manifest(self, run: str, digest: str, *, deadline_s: float = 30.0) -> pb.Manifest:
        """What `fetch` needs to get a published version back. Raises UnknownVersion."""
        request = pb.GetManifestRequest(run=run, digest=digest)
        return _retry(
            lambda t: self._stub.GetManifest(request, **_call(t)), address=self._address, deadline_s=deadline_s
        )


def fetch(manifest: pb.Manifest, *, address: str, deadline_s: float) -> dict[str, RawTensor]:
    """The tensors of a version, every digest verified: mapped from its directory when that is readable here, else over gRPC.

    The data of a mapped tensor is a read-only view of the file: copy what must outlive it. Blocks: call it in a thread.

    Raises: DigestMismatch, UnknownVersion, WeightSyncError.
    """
    if manifest.uri:
        with contextlib.suppress(OSError):
            return tensor_file.read_version(manifest)
    request = pb.FetchRequest(run=manifest.run, digest=manifest.version.digest)
    with rpc.channel(address) as channel:
        stub = WeightSyncStub(channel)
        return _retry(
            lambda t: collect(manifest.tensors, stub.Fetch(request, **_call(t))), address=address, deadline_s=deadline_s
        )


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
        options = _call(REPLICA_RPC_TIMEOUT_S)
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
            if code not in _TRANSIENT and code != grpc.StatusCode.DEADLINE_EXCEEDED:
                raise _translated(error, self._address) from error
            log.warning("weight_sync unreachable", weight_sync=self._address, code=code.name, reason=error.details())
        return True


_TRANSIENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.ABORTED)
_ERRORS = {
    grpc.StatusCode.FAILED_PRECONDITION: Fenced,
    grpc.StatusCode.ALREADY_EXISTS: VersionConflict,
    grpc.StatusCode.NOT_FOUND: UnknownVersion,
}


def _call(timeout_s: float) -> dict[str, Any]:
    """A call to a server that is down waits until it is up again, within the deadline."""
    return {"timeout": timeout_s, "wait_for_ready": True}


def _retry(attempt: Callable[[float], T], *, address: str, deadline_s: float) -> T:
    """Calls `attempt(seconds left)` until it answers something final."""
    end = time.monotonic() + deadline_s
    deadline_has_passed = tenacity.stop_before_delay(deadline_s)
    policy = tenacity.Retrying(
        retry=tenacity.retry_if_exception(_is_transient),
        stop=lambda state: deadline_has_passed(state) or _is_damaged_again(state),
        wait=tenacity.wait_exponential(multiplier=0.1, max=2.0) + tenacity.wait_random(0.0, 0.1),
        before_sleep=lambda state: log.warning(
            "weight_sync call failed, trying again", weight_sync=address, reason=_reason(state)
        ),
        reraise=True,
    )
    try:
        return policy(lambda: attempt(end - time.monotonic()))
    except grpc.RpcError as error:
        raise _translated(error, address) from error


def _is_transient(error: BaseException) -> bool:
    # Bytes that were damaged on their way are sent again.
    return isinstance(error, grpc.RpcError) and error.code() in (*_TRANSIENT, grpc.StatusCode.DATA_LOSS)


def _is_damaged_again(state: tenacity.RetryCallState) -> bool:
    """Three times in a row it is not the way that damages them."""
    error = state.outcome.exception() if state.outcome else None
    is_damaged = isinstance(error, grpc.RpcError) and error.code() == grpc.StatusCode.DATA_LOSS
    return is_damaged and state.attempt_number >= 3


def _reason(state: tenacity.RetryCallState) -> str:
    error = state.outcome.exception() if state.outcome else None
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.RpcError) else str(error)


def _translated(error: Any, address: str) -> WeightSyncError:
    code, details = error.code(), error.details()
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return WeightSyncError(
            f"weight_sync at {address} did not answer in time. Is it running? "
            f"Start it with: python -m services.weight_sync host=... port=... ({details})"
        )
    return _ERRORS.get(code, WeightSyncError)(f"weight_sync at {address}: {code.name}: {details}")
