"""Digests, manifests, chunks and the safetensors file."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from shared.wire import tensors as tensors_module
from shared.wire.pb.weight_sync_pb2 import Manifest, TensorChunk
from shared.wire.tensor_file import file_layout, read_file, uri_path, write_file
from shared.wire.tensors import (
    ITEM_BYTES,
    DigestMismatch,
    ManifestError,
    RawTensor,
    build_manifest,
    check_manifest,
    chunks,
    collect,
    manifest_digest,
    tensor_digest,
    tensor_entry,
    verify,
)


@st.composite
def raw_tensors(draw: st.DrawFn) -> RawTensor:
    dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    size = int(np.prod(shape)) * ITEM_BYTES[dtype]
    return RawTensor(dtype, shape, draw(st.binary(min_size=size, max_size=size)))


named = st.dictionaries(
    st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=1), raw_tensors(), min_size=1
)


def manifest_of(tensors: dict[str, RawTensor], **changes: object) -> Manifest:
    values = {
        "run": "demo",
        "lineage": 0,
        "step": 3,
        "tensors": tensors,
        "model_config_json": "{}",
        "run_config_json": "{}",
        "fingerprint": "f",
        "probe_token_ids": [np.arange(3, dtype="<i4").tobytes()],
        "probe_logprobs": [np.zeros(2, dtype="<f4").tobytes()],
    }
    return build_manifest(**(values | changes))


def one(data: bytes = b"\1\2\3\4", dtype: str = "bfloat16", shape: tuple[int, ...] = (2,)) -> dict[str, RawTensor]:
    return {"w": RawTensor(dtype, shape, data)}


def test_tensor_digest_is_xxh3_128_of_the_bytes_whatever_holds_them() -> None:
    array = np.arange(6, dtype="<f4").reshape(2, 3)
    expected = xxhash.xxh3_128_hexdigest(array.tobytes())
    assert {tensor_digest(b) for b in (array, array.tobytes(), bytearray(array), memoryview(array))} == {expected}


def test_a_buffer_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises((TypeError, BufferError, ValueError)):
        tensor_digest(np.arange(6, dtype="<f4").reshape(2, 3).T)


@given(tensors=named)
def test_manifest_digest_does_not_depend_on_the_order_of_entries(tensors: dict[str, RawTensor]) -> None:
    entries = [tensor_entry(n, t) for n, t in tensors.items()]
    assert manifest_digest(entries) == manifest_digest(reversed(entries)) == manifest_of(tensors).version.digest


def test_manifest_digest_changes_with_name_dtype_shape_and_one_bit_of_data_but_with_nothing_else() -> None:
    base = manifest_of(one()).version.digest
    others = [
        manifest_of({"v": RawTensor("bfloat16", (2,), b"\1\2\3\4")}),
        manifest_of(one(dtype="float16")),
        manifest_of(one(shape=(1, 2))),
        manifest_of(one(b"\1\2\3\5")),
    ]
    assert len({base, *(m.version.digest for m in others)}) == 5
    assert manifest_of(one(), run="other", lineage=4, step=9, fingerprint="g").version.digest == base


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (RawTensor("int8", (4,), b"\1\2\3\4"), "dtype must be one of bfloat16"),
        (RawTensor("float32", (2,), b"\1\2\3\4"), "is 8 bytes, got 4"),
    ],
)
def test_a_tensor_that_contradicts_itself_is_refused(tensor: RawTensor, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tensor_entry("w", tensor)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda m: setattr(m, "run", "../etc"), "run must be"),
        (lambda m: m.ClearField("tensors"), "at least one tensor"),
        (lambda m: m.tensors.append(m.tensors[0]), "sorted by name"),
        (lambda m: setattr(m.tensors[0], "nbytes", 5), "is 4 bytes, got 5"),
        (lambda m: setattr(m.tensors[0], "digest", "0" * 32), "manifest digest"),
        (lambda m: m.probe_logprobs.append(b""), "probe"),
        (lambda m: setattr(m.version, "digest", "x"), "manifest digest"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(damage, said: str) -> None:
    manifest = manifest_of(one())
    damage(manifest)
    with pytest.raises(ManifestError, match=said):
        check_manifest(manifest)


def test_verify_names_the_tensor_the_digest_expected_and_the_one_got() -> None:
    manifest = manifest_of(one())
    flipped = one(b"\1\2\3\5")
    with pytest.raises(DigestMismatch) as raised:
        verify(manifest, flipped)
    error = raised.value
    assert (error.name, error.expected, error.got) == ("w", manifest.tensors[0].digest, tensor_digest(b"\1\2\3\5"))


@pytest.mark.parametrize("tensors", [{}, one(shape=(2, 1)), one(dtype="float16"), one() | {"x": one()["w"]}])
def test_verify_refuses_missing_reshaped_retyped_and_unexpected_tensors(tensors: dict[str, RawTensor]) -> None:
    with pytest.raises(DigestMismatch):
        verify(manifest_of(one()), tensors)


@given(tensors=named, chunk_bytes=st.integers(1, 64))
def test_tensors_survive_the_stream_of_chunks(tensors: dict[str, RawTensor], chunk_bytes: int) -> None:
    manifest = manifest_of(tensors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors_module, "CHUNK_BYTES", chunk_bytes)
        stream = list(chunks(manifest, tensors))
    assert all(len(c.data) <= chunk_bytes for c in stream)
    got = collect(manifest.tensors, stream)
    verify(manifest, got)
    assert {n: bytes(t.data) for n, t in got.items()} == {n: bytes(t.data) for n, t in tensors.items()}


@given(data=st.data())
def test_a_stream_with_a_chunk_flipped_lost_repeated_or_swapped_is_refused(data: st.DataObject) -> None:
    tensors = {n: RawTensor("float32", (8,), np.random.default_rng(i).bytes(32)) for i, n in enumerate("abc")}
    manifest = manifest_of(tensors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors_module, "CHUNK_BYTES", 10)
        stream = list(chunks(manifest, tensors))
    i = data.draw(st.integers(0, len(stream) - 1))
    damage = data.draw(st.sampled_from(["flip", "lose", "repeat", "swap", "cut"]))
    if damage == "flip":
        broken = bytearray(stream[i].data)
        broken[data.draw(st.integers(0, len(broken) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        stream[i] = TensorChunk(name=stream[i].name, offset=stream[i].offset, data=bytes(broken))
    elif damage == "lose":
        del stream[i]
    elif damage == "repeat":
        stream.insert(i, stream[i])
    elif damage == "swap":
        j = (i + 1) % len(stream)
        stream[i], stream[j] = stream[j], stream[i]
    else:
        del stream[i:]
    with pytest.raises(DigestMismatch):
        collect(manifest.tensors, stream)


@given(tensors=named)
def test_the_file_is_read_back_and_safetensors_reads_it_too(tmp_path_factory, tensors: dict[str, RawTensor]) -> None:
    path = tmp_path_factory.mktemp("tensors") / "weights.safetensors"
    manifest = manifest_of(tensors)
    write_file(path, manifest, tensors)
    verify(manifest, read_file(path))
    theirs = {
        name: (e["dtype"], tuple(e["shape"]), bytes(e["data"]))
        for name, e in safetensors.deserialize(path.read_bytes())
    }
    short = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
    assert theirs == {n: (short[t.dtype], t.shape, bytes(t.data)) for n, t in tensors.items()}


@given(tensors=named)
def test_every_tensor_in_the_file_is_aligned_to_its_element(tensors: dict[str, RawTensor]) -> None:
    _, begins = file_layout(manifest_of(tensors).tensors)
    assert all(begin % ITEM_BYTES[tensors[name].dtype] == 0 for name, begin in begins.items())


@pytest.mark.parametrize("content", [b"", b"\0" * 4, b"\xff" * 64, b"\2" + b"\0" * 7 + b"[]"])
def test_a_file_that_is_no_safetensors_file_is_refused(tmp_path, content: bytes) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="no safetensors file"):
        read_file(path)


def test_a_file_that_was_cut_short_is_refused(tmp_path) -> None:
    path = tmp_path / "weights.safetensors"
    write_file(path, manifest_of(one()), one())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="4 bytes expected, the file has 3"):
        read_file(path)


def test_only_local_directories_are_taken_from_a_uri(tmp_path) -> None:
    odd = tmp_path / "with space"
    assert uri_path(odd.as_uri()) == odd
    for uri in ("s3://bucket/x", "file://other-host/x", "/plain/path"):
        with pytest.raises(ValueError, match="expected a file:// uri"):
            uri_path(uri)
