"""The file of a version in an object store, with fsspec's own store in memory."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.wire import tensor_objects
from shared.wire.tensor_file import WEIGHTS_FILE, is_object
from shared.wire.tensor_objects import has_object, object_chunks, read_object, remove_objects, write_object
from shared.wire.tensors import DigestMismatch, RawTensor, chunks, verify
from tests.deadline import DEADLINE_S
from tests.integration.weight_sync_testing import manifest_of, weights

TENSORS = st.dictionaries(
    st.text("abc.", min_size=1, max_size=5),
    st.tuples(st.sampled_from([("bfloat16", 2), ("float32", 4)]), st.integers(0, 90)),
    min_size=1,
    max_size=6,
)


@pytest.fixture
def root() -> Iterator[str]:
    name = f"memory://{uuid.uuid4().hex}"
    yield name
    store = fsspec.filesystem("memory")
    for path in store.find(name):
        store.rm_file(path)


@settings(deadline=None, max_examples=40)
@given(shapes=TENSORS, data=st.data())
def test_chunks_are_those_of_the_tensors_however_they_are_cut(shapes, data) -> None:
    tensors = {
        n: RawTensor(t, (k,), data.draw(st.binary(min_size=k * b, max_size=k * b))) for n, ((t, b), k) in shapes.items()
    }
    manifest = manifest_of(0, tensors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_objects, "CHUNK_BYTES", data.draw(st.integers(1, 64)))
        patch.setattr(tensor_objects, "AT_ONCE", data.draw(st.integers(1, 5)))
        manifest.uri = write_object(f"memory://{uuid.uuid4().hex}", manifest, tensors)
        verify(manifest, read_object(manifest, deadline_s=DEADLINE_S))
        some = data.draw(st.sets(st.sampled_from(sorted(tensors))))
        got = {c.name: b"" for c in chunks(manifest, tensors, names=some)}
        for name, offset, part in object_chunks(manifest, names=some):
            assert offset == len(got[name])
            got[name] += part
    assert got == {n: bytes(t.data) for n, t in tensors.items() if t.nbytes and (not some or n in some)}


def test_no_more_than_a_few_ranges_are_asked_for_at_once(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = weights(0)
    manifest = manifest_of(0, tensors)
    manifest.uri = write_object(root, manifest, tensors)
    monkeypatch.setattr(tensor_objects, "CHUNK_BYTES", 2**16)
    store, asked = fsspec.filesystem("memory"), []
    cat_ranges = store.cat_ranges

    def watched(paths: list[str], starts: list[int], ends: list[int], **how: object) -> list[bytes]:
        asked.append((len(paths), sum(ends) - sum(starts)))
        return cat_ranges(paths, starts, ends, **how)

    monkeypatch.setattr(type(store), "cat_ranges", staticmethod(watched))
    verify(manifest, read_object(manifest, deadline_s=DEADLINE_S))
    assert len(asked) > 3
    assert max(num for num, _ in asked) == tensor_objects.AT_ONCE
    assert max(nbytes for _, nbytes in asked) == tensor_objects.AT_ONCE * 2**16


@pytest.mark.parametrize("damage", ["a flipped bit", "a byte too few", "another header", "nothing there"])
def test_an_object_that_is_not_the_versions_is_told_from_it(root: str, damage: str) -> None:
    tensors = weights(0)
    manifest = manifest_of(0, tensors)
    manifest.uri = write_object(root, manifest, tensors)
    store, path = fsspec.filesystem("memory"), f"{manifest.uri}/{WEIGHTS_FILE}"
    data = bytearray(store.cat_file(path))
    if damage == "nothing there":
        store.rm_file(path)
        with pytest.raises(FileNotFoundError):
            read_object(manifest, deadline_s=DEADLINE_S)
        return
    if damage == "a byte too few":
        del data[-1]
    else:
        data[{"a flipped bit": -1, "another header": 40}[damage]] ^= 1
    store.pipe_file(path, bytes(data))
    with pytest.raises(DigestMismatch):
        read_object(manifest, deadline_s=DEADLINE_S)


def test_reading_ends_with_its_deadline(root: str) -> None:
    tensors = weights(0)
    manifest = manifest_of(0, tensors)
    manifest.uri = write_object(root, manifest, tensors)
    with pytest.raises(TimeoutError, match="was not read within"):
        read_object(manifest, deadline_s=-1)


def test_old_versions_are_removed_but_not_what_is_kept_or_is_no_version(root: str) -> None:
    uris = {}
    for step in range(4):
        tensors = weights(step, num_tensors=1, elements=8)
        uris[step] = write_object(f"{root}/", manifest_of(step, tensors), tensors)
    other = write_object(root, manifest_of(0, tensors, run="other"), tensors)
    fsspec.filesystem("memory").pipe_file(f"{root}/demo/notes/{WEIGHTS_FILE}", b"not ours")
    assert remove_objects(f"{root}/demo", oldest_step=3, keep=[uris[1]]) == [uris[0], uris[2]]
    assert [step for step, uri in uris.items() if has_object(uri)] == [1, 3]
    assert has_object(other)
    assert has_object(f"{root}/demo/notes")
    assert remove_objects(f"{root}/nothing", oldest_step=3, keep=[]) == []


def test_a_store_that_nobody_here_can_open_is_an_error_that_names_it() -> None:
    tensors = weights(0, num_tensors=1, elements=8)
    with pytest.raises(OSError, match=r"nothing-like-it://bucket/demo/0-0-.* can't be used here"):
        write_object("nothing-like-it://bucket", manifest_of(0, tensors), tensors)


@pytest.mark.parametrize("call", ["open", "size", "cat_ranges", "exists", "ls"])
def test_what_a_stores_package_raises_is_an_error_of_the_system_that_names_the_place(
    root: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OfThePackage(Exception):
        """As botocore raises where it finds no credentials, or no server."""

    def fail(*_: object, **__: object) -> None:
        raise OfThePackage("no way there")

    tensors = weights(0, num_tensors=1, elements=8)
    manifest = manifest_of(0, tensors)
    manifest.uri = write_object(root, manifest, tensors)
    calls = {
        "open": lambda: write_object(root, manifest, tensors),
        "exists": lambda: has_object(manifest.uri),
        "ls": lambda: remove_objects(f"{root}/demo", oldest_step=1, keep=[]),
    }
    monkeypatch.setattr(type(fsspec.filesystem("memory")), call, fail)
    with pytest.raises(OSError, match=r"memory://.*can't be used here: OfThePackage: no way there"):
        calls.get(call, lambda: read_object(manifest, deadline_s=DEADLINE_S))()


def test_a_path_and_a_file_uri_are_directories() -> None:
    assert [u for u in ("/a/b", "a/b", "file:///a", "s3://b/p", "gs://b") if is_object(u)] == ["s3://b/p", "gs://b"]
