"""gRPC stream: chunks go to a file as they come, digested on the way; memory is bounded by one chunk a stream."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from shared.wire.pb.weight_sync_pb2 import Manifest, TensorChunk, TensorEntry
from shared.wire.tensor_file import file_layout, read_file
from shared.wire.tensors import ChunkSink, DigestMismatch, chunks


class Upload:
    """One version on its way into `path`.

    >>> upload = Upload(path, manifest)
    >>> for chunk in stream: upload.add(chunk)
    >>> upload.finish()  # on disk, every digest verified
    >>> upload.close()
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        header, self._begins = file_layout(manifest.tensors)
        self._sink = ChunkSink(manifest.tensors, self._write)
        self._file = path.open("xb", buffering=0)
        # A disk that is too small fails here and not after an hour.
        os.posix_fallocate(self._file.fileno(), 0, len(header) + sum(e.nbytes for e in manifest.tensors))
        os.pwrite(self._file.fileno(), header, 0)

    def add(self, chunk: TensorChunk) -> None:
        """Raises DigestMismatch, OSError."""
        self._sink.add(chunk)

    def finish(self) -> None:
        """Raises DigestMismatch when bytes are missing, OSError."""
        self._sink.close()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _write(self, entry: TensorEntry, offset: int, data: bytes) -> None:
        view, position = memoryview(data), self._begins[entry.name] + offset
        while view:
            written = os.pwrite(self._file.fileno(), view, position)
            view, position = view[written:], position + written


def download(path: Path, manifest: Manifest, names: Sequence[str]) -> Iterator[TensorChunk]:
    """Chunks of a stored version. Raises DigestMismatch when its file is gone or damaged, ValueError for an unknown name."""
    unknown = set(names) - {e.name for e in manifest.tensors}
    if unknown:
        raise ValueError(f"run {manifest.run} step {manifest.version.step} has no tensor {min(unknown)}")
    try:
        tensors = read_file(path)
    except (OSError, ValueError) as error:
        raise DigestMismatch(str(path), "a whole safetensors file", str(error)) from error
    return chunks(manifest, tensors, names=names)
