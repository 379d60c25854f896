"""Raw tensors, their digests, manifests and chunks.

Nothing here knows torch: a tensor is a dtype name, a shape and its C-contiguous little-endian bytes (bfloat16 is two raw
bytes an element). Digests: xxh3-128 of each tensor's bytes; the manifest's is sha256 over the list of them, so it is a
function of the weights alone.

>>> manifest = build_manifest(run="demo", lineage=0, step=3, tensors=tensors, ...)
>>> verify(manifest, tensors)  # raises DigestMismatch
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import xxhash

from shared.wire.pb.weight_sync_pb2 import Manifest, TensorChunk, TensorEntry, Version
from shared.wire.rpc import CHUNK_BYTES

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

Buffer = Any
"""Whatever gives a C-contiguous view of its bytes: bytes, bytearray, memoryview, a numpy array."""


class ManifestError(ValueError):
    """The manifest contradicts itself; the text names the field and the value got."""


class DigestMismatch(ValueError):
    """The bytes of one tensor are not those that the manifest names."""

    def __init__(self, name: str, expected: str, got: str) -> None:
        super().__init__(f"tensor {name}: expected {expected}, got {got}")
        self.name, self.expected, self.got = name, expected, got


@dataclass(frozen=True, slots=True)
class RawTensor:
    dtype: str
    """bfloat16 | float16 | float32"""
    shape: tuple[int, ...]
    data: Buffer
    """C-contiguous, little-endian, prod(shape) elements."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def raw_view(data: Buffer) -> memoryview:
    """The bytes of a buffer, flat, without a copy. Raises TypeError when they are not contiguous."""
    view = memoryview(data)
    # An empty view can't be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")


def tensor_digest(buffer: Buffer) -> str:
    """xxh3-128 of the raw bytes, hex."""
    return xxhash.xxh3_128_hexdigest(raw_view(buffer))


def manifest_digest(entries: Iterable[TensorEntry]) -> str:
    """sha256 over (name, dtype, shape, tensor digest) in name order, hex."""
    digest = hashlib.sha256()
    for e in sorted(entries, key=lambda e: e.name):
        digest.update(json.dumps([e.name, e.dtype, list(e.shape), e.digest], separators=(",", ":")).encode() + b"\n")
    return digest.hexdigest()


def tensor_entry(name: str, tensor: RawTensor) -> TensorEntry:
    """Raises ValueError when the dtype is unknown or the bytes don't fill the shape."""
    if tensor.dtype not in ITEM_BYTES:
        raise ValueError(f"tensor {name}: dtype must be one of {', '.join(ITEM_BYTES)}, got {tensor.dtype!r}")
    view = raw_view(tensor.data)
    if view.nbytes != tensor.nbytes:
        raise ValueError(
            f"tensor {name}: {tensor.dtype} {list(tensor.shape)} is {tensor.nbytes} bytes, got {view.nbytes}"
        )
    return TensorEntry(
        name=name, dtype=tensor.dtype, shape=tensor.shape, nbytes=tensor.nbytes, digest=tensor_digest(view)
    )


def build_manifest(
    *,
    run: str,
    lineage: int,
    step: int,
    tensors: Mapping[str, RawTensor],
    model_config_json: str,
    run_config_json: str,
    fingerprint: str,
    probe_token_ids: Sequence[bytes],
    probe_logprobs: Sequence[bytes],
    num_threads: int = 1,
) -> Manifest:
    """The manifest of one version, checked.

    Args:
        tensors: by Hugging Face parameter name, in the dtype that every forward uses; a tied head is not listed twice.
        probe_token_ids: int32 sequences.
        probe_logprobs: float32, the trainer's, one per token from the second on.
        num_threads: that digest; hashing releases the interpreter's lock.

    Raises: ManifestError, ValueError.
    """
    with ThreadPoolExecutor(num_threads) as pool:
        entries = list(pool.map(lambda name: tensor_entry(name, tensors[name]), sorted(tensors)))
    manifest = Manifest(
        run=run,
        version=Version(lineage=lineage, step=step, digest=manifest_digest(entries)),
        tensors=entries,
        model_config_json=model_config_json,
        run_config_json=run_config_json,
        fingerprint=fingerprint,
        probe_token_ids=probe_token_ids,
        probe_logprobs=probe_logprobs,
    )
    check_manifest(manifest)
    return manifest


def check_manifest(manifest: Manifest) -> None:
    """Raises ManifestError unless names, sizes, probe and digest agree with each other."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", manifest.run):
        raise ManifestError(f"run must be 1 to 64 letters, digits, '-' or '_', got {manifest.run!r}")
    if not manifest.tensors:
        raise ManifestError("a version has at least one tensor, got none")
    names = [e.name for e in manifest.tensors]
    if names != sorted(set(names)):
        raise ManifestError("tensors must be sorted by name, each name once")
    for e in manifest.tensors:
        size = math.prod(e.shape) * ITEM_BYTES.get(e.dtype, 0)
        if e.dtype not in ITEM_BYTES or e.nbytes != size:
            raise ManifestError(f"tensor {e.name}: {e.dtype} {list(e.shape)} is {size} bytes, got {e.nbytes}")
        if not e.nbytes and e.digest != tensor_digest(b""):
            raise ManifestError(f"tensor {e.name}: it has no bytes, but digest {e.digest}")
    probe = [(len(ids) // 4 - 1) * 4 for ids in manifest.probe_token_ids]
    if probe != [len(l) for l in manifest.probe_logprobs]:
        raise ManifestError(
            f"probe: expected {probe} bytes of logprobs, got {[len(l) for l in manifest.probe_logprobs]}"
        )
    digest = manifest_digest(manifest.tensors)
    if digest != manifest.version.digest:
        raise ManifestError(f"manifest digest: its tensors give {digest}, got {manifest.version.digest}")


def verify(manifest: Manifest, tensors: Mapping[str, RawTensor]) -> None:
    """Raises DigestMismatch for the first tensor that is missing, unexpected, or not the one that the manifest names."""
    for e in manifest.tensors:
        tensor = tensors.get(e.name)
        if tensor is None:
            raise DigestMismatch(e.name, e.digest, "no such tensor")
        expected, got = (e.dtype, tuple(e.shape)), (tensor.dtype, tuple(tensor.shape))
        if expected != got:
            raise DigestMismatch(e.name, f"{expected}", f"{got}")
        digest = tensor_digest(tensor.data)
        if digest != e.digest:
            raise DigestMismatch(e.name, e.digest, digest)
    extra = tensors.keys() - {e.name for e in manifest.tensors}
    if extra:
        raise DigestMismatch(min(extra), "no such tensor", f"{len(extra)} tensors that the manifest doesn't name")


def chunks(manifest: Manifest, tensors: Mapping[str, RawTensor], *, names: Iterable[str] = ()) -> Iterator[TensorChunk]:
    """The bytes in manifest order, CHUNK_BYTES at a time; one copy of one chunk is alive at once.

    Args:
        names: only these tensors; none means all.
    """
    wanted = set(names)
    for e in manifest.tensors:
        if wanted and e.name not in wanted:
            continue
        view = raw_view(tensors[e.name].data)
        for offset in range(0, len(view), CHUNK_BYTES):
            yield TensorChunk(name=e.name, offset=offset, data=bytes(view[offset : offset + CHUNK_BYTES]))


class RawChunk(NamedTuple):
    """A TensorChunk that needs no decoding, without the copies that a message makes of its data."""

    name: str
    offset: int
    data: Buffer


class ChunkSink:
    """Takes chunks in the order that `chunks` gives them and digests as they come.

    Args:
        write: called with (tensor entry, offset in bytes, data).

    >>> sink = ChunkSink(manifest.tensors, write)
    >>> for chunk in stream: sink.add(chunk)
    >>> sink.close()  # raises DigestMismatch when bytes are missing
    """

    def __init__(self, entries: Iterable[TensorEntry], write: Callable[[TensorEntry, int, Buffer], None]) -> None:
        self._entries = iter([e for e in entries if e.nbytes])
        self._write = write
        self._digest = xxhash.xxh3_128()
        self._offset = 0
        self._entry = next(self._entries, None)
        self.num_bytes = 0

    def add(self, chunk: TensorChunk | RawChunk) -> None:
        """Raises DigestMismatch when the chunk is out of place or completes a tensor of other bytes."""
        data = chunk.data  # Of a message this is a copy: take it once.
        e, end = self._entry, chunk.offset + len(data)
        if e is None or chunk.name != e.name or chunk.offset != self._offset or end > e.nbytes or not len(data):
            expected = f"offset {self._offset} of {e.name}" if e else "the end"
            raise DigestMismatch(chunk.name, expected, f"bytes {chunk.offset}:{end} of {chunk.name}")
        self._write(e, chunk.offset, data)
        self._digest.update(data)
        self._offset = end
        self.num_bytes += len(data)
        if end == e.nbytes:
            if self._digest.hexdigest() != e.digest:
                raise DigestMismatch(e.name, e.digest, self._digest.hexdigest())
            self._digest, self._offset, self._entry = xxhash.xxh3_128(), 0, next(self._entries, None)

    def close(self) -> None:
        if self._entry is not None:
            e = self._entry
            raise DigestMismatch(e.name, f"{e.nbytes} bytes", f"{self._offset} bytes when the stream ended")


def collect(entries: Sequence[TensorEntry], stream: Iterable[TensorChunk | RawChunk]) -> dict[str, RawTensor]:
    """Tensors of a stream of chunks, every digest verified. Raises DigestMismatch."""
    tensors = {e.name: RawTensor(e.dtype, tuple(e.shape), bytearray(e.nbytes)) for e in entries}

    def write(e: TensorEntry, offset: int, data: Buffer) -> None:
        tensors[e.name].data[offset : offset + len(data)] = data

    sink = ChunkSink(entries, write)
    for chunk in stream:
        sink.add(chunk)
    sink.close()
    return tensors
