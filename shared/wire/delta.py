"""Lossless deltas: the chunks of a version, each encoded against the same bytes of a base version.

After one optimizer step at a usual learning rate most bfloat16 weights keep their bits, and those that change move to a
neighbour. So a chunk is where its elements changed and by how much: the difference of the elements as integers, modulo
2^bits, zigzagged so that small steps of either sign are small numbers. Positions are gaps where few changed and a bitmap
where many did. All of it is cut into planes of equal significance and compressed with zstd; a chunk that does not get
smaller stays raw. Which versions fit together is not decided here: the digest of every tensor is verified behind it.

>>> stream = delta_chunks(manifest, tensors, base=tensors_before)
>>> tensors = collect(manifest.tensors, decoded(stream, manifest, base=tensors_before))
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import zstandard

from shared.wire.pb.weight_sync_pb2 import BITMAP, GAPS, RAW, Encoding, Manifest, TensorChunk
from shared.wire.rpc import CHUNK_BYTES
from shared.wire.tensors import ITEM_BYTES, DigestMismatch, RawChunk, RawTensor, chunks, raw_view

ZSTD_LEVEL = 1
"""Higher levels were a few percent smaller and many times slower."""
BITMAP_SHARE = 0.2
"""Share of changed elements from which on a bitmap was not larger than gaps."""

_GAP = np.dtype("<u4")


class DeltaError(ValueError):
    """The data is no encoding of such a chunk."""


def encode(new: memoryview, base: memoryview, *, item_bytes: int) -> tuple[Encoding, bytes]:
    """What `decode` makes `new` of, given `base`. Empty data: they are equal.

    Args:
        new, base: equally many bytes, whole elements of `item_bytes` (2 or 4).
    """
    dtype = _item(item_bytes)
    difference = np.frombuffer(new, dtype) - np.frombuffer(base, dtype)
    is_changed = difference != 0
    # Taking by positions: by the mask it is several times slower.
    positions = np.flatnonzero(is_changed)
    if not len(positions):
        return GAPS, b""
    if len(positions) < BITMAP_SHARE * len(difference):
        encoding, where = GAPS, _split(np.diff(positions, prepend=0).astype(_GAP))
    else:
        encoding, where = BITMAP, np.packbits(is_changed).tobytes()
    data = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(where + _split(_zigzag(difference[positions])))
    return (encoding, data) if len(data) < len(new) else (RAW, bytes(new))


def decode(encoding: Encoding, data: bytes, base: memoryview, *, item_bytes: int) -> memoryview:
    """The chunk that `encode` was given with this base; with another, some other bytes. Raises DeltaError."""
    if not data:
        return base
    elements = np.frombuffer(base, _item(item_bytes)).copy()
    num_bitmap = -(-len(elements) // 8)
    payload = _decompress(data, limit=num_bitmap + len(elements) * (_GAP.itemsize + item_bytes))
    if encoding == GAPS:
        num_changed, rest = divmod(len(payload), _GAP.itemsize + item_bytes)
        num_where = num_changed * _GAP.itemsize
        where = np.cumsum(_join(payload[:num_where], _GAP), dtype=np.int64)
    elif encoding == BITMAP:
        num_where = num_bitmap
        where = np.flatnonzero(np.unpackbits(np.frombuffer(payload[:num_where], np.uint8)).view(bool))
        rest = len(payload) - num_where - len(where) * item_bytes
    else:
        raise DeltaError(f"unknown encoding {encoding}")
    if rest or not len(where) or where[-1] >= len(elements):
        raise DeltaError(f"{len(payload)} bytes do not describe changes of {len(elements)} elements")
    elements[where] += _unzigzag(_join(payload[num_where:], elements.dtype))
    return raw_view(elements)


def delta_chunks(
    manifest: Manifest, tensors: Mapping[str, RawTensor], *, base: Mapping[str, RawTensor]
) -> Iterator[TensorChunk]:
    """As `tensors.chunks`, each encoded against `base`; a tensor that the base does not have alike stays raw."""
    for e in manifest.tensors:
        before = base.get(e.name)
        if before is None or (before.dtype, tuple(before.shape)) != (e.dtype, tuple(e.shape)):
            yield from chunks(manifest, tensors, names=[e.name])
            continue
        new, old = raw_view(tensors[e.name].data), raw_view(before.data)
        for offset in range(0, len(new), CHUNK_BYTES):
            here = slice(offset, offset + CHUNK_BYTES)
            encoding, data = encode(new[here], old[here], item_bytes=ITEM_BYTES[e.dtype])
            yield TensorChunk(name=e.name, offset=offset, data=data, encoding=encoding)


def decoded(
    stream: Iterable[TensorChunk], manifest: Manifest, *, base: Mapping[str, RawTensor]
) -> Iterator[TensorChunk | RawChunk]:
    """Raw chunks of a stream whose chunks may be encoded. Raises DigestMismatch when one can't be decoded with this base."""
    item_bytes = {e.name: ITEM_BYTES[e.dtype] for e in manifest.tensors}
    for chunk in stream:
        if chunk.encoding == RAW:
            yield chunk
            continue
        if chunk.name not in base or chunk.name not in item_bytes:
            raise DigestMismatch(chunk.name, "a raw chunk, as there is no such tensor to apply it to", "an encoded one")
        old = raw_view(base[chunk.name].data)[chunk.offset : chunk.offset + CHUNK_BYTES]
        try:
            data = decode(chunk.encoding, chunk.data, old, item_bytes=item_bytes[chunk.name])
        except ValueError as error:
            raise DigestMismatch(chunk.name, "an encoded chunk", str(error)) from error
        yield RawChunk(chunk.name, chunk.offset, data)


def _item(num_bytes: int) -> np.dtype:
    return np.dtype(f"<u{num_bytes}")


def _zigzag(differences: np.ndarray) -> np.ndarray:
    """0, -1, 1, -2 ... as 0, 1, 2, 3 ..., in the unsigned type of the input."""
    bits = 8 * differences.itemsize
    signed = differences.view(f"<i{differences.itemsize}")
    return ((signed << 1) ^ (signed >> (bits - 1))).view(differences.dtype)


def _unzigzag(numbers: np.ndarray) -> np.ndarray:
    return (numbers >> 1) ^ -(numbers & 1)


def _split(numbers: np.ndarray) -> bytes:
    """Planes of bytes, the least significant first."""
    return numbers.view(np.uint8).reshape(len(numbers), numbers.itemsize).T.tobytes()


def _join(planes: bytes, dtype: np.dtype) -> np.ndarray:
    return np.ascontiguousarray(np.frombuffer(planes, np.uint8).reshape(dtype.itemsize, -1).T).view(dtype).reshape(-1)


def _decompress(data: bytes, *, limit: int) -> bytes:
    """Raises DeltaError when the frame is damaged or announces more than `limit` bytes."""
    try:
        size = zstandard.frame_content_size(data)
        if not 0 < size <= limit:
            raise DeltaError(f"a frame of {size} bytes, at most {limit} are possible")
        return zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise DeltaError(f"no zstd frame: {error}") from error
