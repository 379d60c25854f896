"""Object store: the trainer has put the file there, replicas read it in ranges, weight_sync checks it and deletes it at last."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import structlog

from services.weight_sync.transports.stream import require_known
from shared.wire.pb.weight_sync_pb2 import Manifest, TensorChunk
from shared.wire.tensor_file import is_object
from shared.wire.tensor_objects import object_chunks, remove_objects
from shared.wire.tensors import ChunkSink, DigestMismatch, ManifestError

log = structlog.get_logger()


def check(manifest: Manifest) -> None:
    """Reads the whole object. Raises ManifestError when it can't be read here, DigestMismatch when it holds other bytes."""
    sink = ChunkSink(manifest.tensors, lambda *_: None)
    try:
        for chunk in object_chunks(manifest):
            sink.add(chunk)
    except OSError as error:
        raise ManifestError(
            f"cannot read {manifest.uri}: {error}. weight_sync and the replicas need fsspec's package for the store (s3fs for "
            "s3://) and the right to read from it; or publish with grpc"
        ) from error
    sink.close()


def download(manifest: Manifest, names: Sequence[str]) -> Iterator[TensorChunk]:
    """Chunks for a replica that can't read from the store. Raises DigestMismatch when the object is gone or damaged, ValueError
    for an unknown name."""
    require_known(manifest, names)
    try:
        for name, offset, data in object_chunks(manifest, names=names):
            yield TensorChunk(name=name, offset=offset, data=data)
    except OSError as error:
        raise DigestMismatch(manifest.uri, "a whole object", str(error)) from error


def sweep(manifests: Collection[Manifest], *, run: str, oldest_step: int, kept: Collection[Manifest]) -> None:
    """As `directory.sweep`. A store that resists costs space, not the service."""
    for root in {m.uri.rpartition("/")[0] for m in manifests if m.run == run and is_object(m.uri)}:
        try:
            remove_objects(root, oldest_step=oldest_step, keep=[m.uri for m in kept])
        except OSError as error:
            log.warning("cannot delete retired versions", root=root, reason=str(error))
