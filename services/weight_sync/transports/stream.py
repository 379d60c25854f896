"""gRPC stream: chunks go to a file as they come, digested on the way; memory is bounded by one chunk a stream.

Of a version that came as a delta both are kept: all its bytes, and the chunks as they came, for replicas that hold the base.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from google.protobuf.message import DecodeError

from shared.wire.delta import decoded
from shared.wire.pb.weight_sync_pb2 import Manifest, TensorChunk, TensorEntry
from shared.wire.tensor_file import file_layout, read_file
from shared.wire.tensors import Buffer, ChunkSink, DigestMismatch, RawTensor, chunks

_LENGTH_BYTES = 4


class Upload:
    """One version on its way into `path`.

    Args:
        base: tensors that its chunks are encoded against; empty when they are raw.
        delta_path: where the chunks of a delta are kept as they come.

    >>> upload = Upload(path, manifest)
    >>> for chunk in stream: upload.add(chunk)
    >>> upload.finish()  # on disk, every digest verified
    >>> upload.close()
    """

    def __init__(self, path: Path, manifest: Manifest, *, base: Mapping[str, RawTensor], delta_path: Path) -> None:
        self._manifest, self._base = manifest, base
        header, self._begins = file_layout(manifest.tensors)
        self._sink = ChunkSink(manifest.tensors, self._write)
        self._file = path.open("xb", buffering=0)
        # A disk that is too small fails here and not after an hour.
        os.posix_fallocate(self._file.fileno(), 0, len(header) + sum(e.nbytes for e in manifest.tensors))
        os.pwrite(self._file.fileno(), header, 0)
        self._delta = delta_path.open("xb") if manifest.base_digest else None
        self.num_bytes = 0
        """Received so far."""

    def add(self, chunk: TensorChunk) -> None:
        """Raises DigestMismatch, OSError."""
        for raw in decoded([chunk], self._manifest, base=self._base):
            self._sink.add(raw)
        self.num_bytes += chunk.ByteSize()
        if self._delta:
            message = chunk.SerializeToString()
            self._delta.write(len(message).to_bytes(_LENGTH_BYTES, "little") + message)

    def finish(self) -> None:
        """Raises DigestMismatch when bytes are missing, OSError."""
        self._sink.close()
        os.fsync(self._file.fileno())
        if self._delta:
            self._delta.flush()
            os.fsync(self._delta.fileno())

    def close(self) -> None:
        self._file.close()
        if self._delta:
            self._delta.close()

    def _write(self, entry: TensorEntry, offset: int, data: Buffer) -> None:
        view, position = memoryview(data), self._begins[entry.name] + offset
        while view:
            written = os.pwrite(self._file.fileno(), view, position)
            view, position = view[written:], position + written


def require_known(manifest: Manifest, names: Sequence[str]) -> None:
    """Raises ValueError for a name that the version does not have."""
    unknown = set(names) - {e.name for e in manifest.tensors}
    if unknown:
        raise ValueError(f"run {manifest.run} step {manifest.version.step} has no tensor {min(unknown)}")


def download(path: Path, manifest: Manifest, names: Sequence[str]) -> Iterator[TensorChunk]:
    """Chunks of a stored version. Raises DigestMismatch when its file is gone or damaged, ValueError for an unknown name."""
    require_known(manifest, names)
    try:
        tensors = read_file(path)
    except (OSError, ValueError) as error:
        raise DigestMismatch(str(path), "a whole safetensors file", str(error)) from error
    return chunks(manifest, tensors, names=names)


def download_delta(path: Path) -> Iterator[TensorChunk]:
    """Chunks of a stored delta. Raises DigestMismatch when its file is damaged; bytes are verified by whoever applies them."""
    try:
        with path.open("rb") as file:
            while length := file.read(_LENGTH_BYTES):
                yield TensorChunk.FromString(file.read(int.from_bytes(length, "little")))
    except (OSError, DecodeError) as error:
        raise DigestMismatch(str(path), "a whole delta", str(error)) from error
