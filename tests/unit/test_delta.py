"""Deltas give the bytes back, or say that they can't."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from shared.wire.delta import DeltaError, decode, decoded, delta_chunks, encode
from shared.wire.pb.weight_sync_pb2 import BITMAP, GAPS, RAW, Manifest, TensorChunk
from shared.wire.rpc import CHUNK_BYTES
from shared.wire.tensors import DigestMismatch, RawTensor, build_manifest, collect, verify


def manifest_of(tensors: dict[str, RawTensor]) -> Manifest:
    return build_manifest(
        run="demo",
        lineage=0,
        step=1,
        tensors=tensors,
        model_config_json="{}",
        run_config_json="{}",
        fingerprint="",
        probe_token_ids=[],
        probe_logprobs=[],
    )


def bfloat16(elements: np.ndarray) -> RawTensor:
    return RawTensor("bfloat16", elements.shape, elements.astype("<u2").tobytes())


def versions(share: float, *, elements: int = 3_000_000) -> tuple[dict[str, RawTensor], dict[str, RawTensor]]:
    """(before, after): about this share of elements moved by one; more than one chunk."""
    rng = np.random.default_rng(0)
    before = rng.integers(0, 2**16, elements)
    after = before + (rng.random(elements) < share) * rng.choice([-1, 1], elements)
    return {"w": bfloat16(before)}, {"w": bfloat16(after)}


@given(data=st.data(), item_bytes=st.sampled_from([2, 4]), length=st.integers(1, 300), num_changed=st.integers(0, 300))
def test_decoding_gives_back_what_was_encoded(
    data: st.DataObject, item_bytes: int, length: int, num_changed: int
) -> None:
    base = data.draw(st.binary(min_size=length * item_bytes, max_size=length * item_bytes))
    elements = np.frombuffer(base, f"<u{item_bytes}").copy()
    where = data.draw(st.lists(st.integers(0, length - 1), min_size=num_changed, max_size=num_changed))
    elements[where] += np.array(data.draw(st.lists(st.integers(0, 2 ** (8 * item_bytes) - 1), min_size=num_changed,
                                                   max_size=num_changed)), elements.dtype)  # fmt: skip
    new = elements.tobytes()
    encoding, encoded = encode(memoryview(new), memoryview(base), item_bytes=item_bytes)
    assert len(encoded) <= len(new)
    if encoding == RAW:
        assert encoded == new
    else:
        assert decode(encoding, encoded, memoryview(base), item_bytes=item_bytes) == new


@pytest.mark.parametrize(
    ("share", "encoding", "size"), [(0.0, GAPS, 0.0), (0.02, GAPS, 0.02), (0.1, GAPS, 0.06), (0.5, BITMAP, 0.15)]
)
def test_few_changes_are_gaps_many_are_a_bitmap_and_both_are_small(share: float, encoding: int, size: float) -> None:
    before, after = versions(share)
    manifest = manifest_of(after)
    stream = list(delta_chunks(manifest, after, base=before))
    assert [c.offset for c in stream] == list(range(0, after["w"].nbytes, CHUNK_BYTES))
    assert {c.encoding for c in stream} == {encoding}
    assert sum(len(c.data) for c in stream) <= size * after["w"].nbytes
    verify(manifest, collect(manifest.tensors, decoded(stream, manifest, base=before)))


def test_what_the_base_does_not_have_alike_and_what_does_not_get_smaller_is_sent_as_it_is() -> None:
    rng = np.random.default_rng(0)
    new, other = (RawTensor("bfloat16", (5000,), rng.bytes(10_000)) for _ in range(2))
    after = {"a": new, "b": new, "c": new, "d": new}
    before = {"a": other, "b": RawTensor("bfloat16", (50, 100), new.data), "c": RawTensor("float16", (5000,), new.data)}
    manifest = manifest_of(after)
    stream = list(delta_chunks(manifest, after, base=before))
    assert [c.encoding for c in stream] == [RAW] * 4
    verify(manifest, collect(manifest.tensors, decoded(stream, manifest, base={})))


def test_another_base_is_found_by_the_digest() -> None:
    before, after = versions(0.1, elements=1000)
    wrong = bytearray(before["w"].data)
    wrong[77] ^= 1
    manifest = manifest_of(after)
    stream = delta_chunks(manifest, after, base=before)
    with pytest.raises(DigestMismatch):
        collect(manifest.tensors, decoded(stream, manifest, base={"w": RawTensor("bfloat16", (1000,), wrong)}))


def test_an_encoded_chunk_needs_its_tensor() -> None:
    _, after = versions(0.1, elements=10)
    for name in ("w", "nobody"):
        with pytest.raises(DigestMismatch, match="no such tensor to apply it to"):
            list(decoded([TensorChunk(name=name, encoding=GAPS)], manifest_of(after), base={}))


@given(st.sampled_from([0.02, 0.5]), st.integers(0, 10_000), st.integers(1, 255))
def test_one_damaged_byte_of_a_delta_never_passes(share: float, position: int, flip: int) -> None:
    before, after = versions(share, elements=2000)
    manifest = manifest_of(after)
    (chunk,) = delta_chunks(manifest, after, base=before)
    data = bytearray(chunk.data)
    data[position % len(data)] ^= flip
    chunk.data = bytes(data)
    try:
        got = collect(manifest.tensors, decoded([chunk], manifest, base=before))
    except DigestMismatch:
        return
    verify(manifest, got)


@pytest.mark.parametrize("encoding", [GAPS, BITMAP, 7])
@pytest.mark.parametrize("payload", [b"", b"\1", bytes(7), b"\xff" * 6, b"\xff" * 60, bytes(10**8)])
def test_data_that_describes_no_chunk_is_refused_before_it_fills_the_memory(encoding: int, payload: bytes) -> None:
    base = memoryview(bytes(20))
    with pytest.raises(DeltaError):
        decode(encoding, zstandard.compress(payload), base, item_bytes=2)  # type: ignore[arg-type]
    with pytest.raises(DeltaError):
        decode(encoding, b"no frame", base, item_bytes=2)  # type: ignore[arg-type]
