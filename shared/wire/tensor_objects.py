"""Versions in an object store: the file of `tensor_file`, under a URI that fsspec understands (s3://, gs://, abfs://, ...).

An object is there whole or not at all, so it needs no temporary name. Nobody can map it: its bytes are asked for in ranges, some
of them at the same time, and digested as they come, which bounds memory. Which package talks to the store (s3fs, gcsfs, adlfs),
with which credentials and timeouts, is the machine's business.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import fsspec

from shared.wire.pb.weight_sync_pb2 import Manifest
from shared.wire.rpc import CHUNK_BYTES
from shared.wire.tensor_file import VERSION_NAME, WEIGHTS_FILE, file_layout, version_name
from shared.wire.tensors import DigestMismatch, RawChunk, RawTensor, collect, raw_view

AT_ONCE = 16
"""Ranges of up to CHUNK_BYTES that are asked for together."""


def write_object(root: str, manifest: Manifest, tensors: Mapping[str, RawTensor]) -> str:
    """Puts a version's file below a root, in place of one that is there. Returns the version's uri. Raises OSError, and what then
    may be there is short, and replaced by the next attempt.
    """
    uri = f"{root.rstrip('/')}/{manifest.run}/{version_name(manifest.version)}"
    header, begins = file_layout(manifest.tensors)
    with _store(uri) as (store, path), store.open(f"{path}/{WEIGHTS_FILE}", "wb") as file:
        file.write(header)
        for name in begins:
            view = raw_view(tensors[name].data)
            for offset in range(0, len(view), CHUNK_BYTES):
                file.write(view[offset : offset + CHUNK_BYTES])
    return uri


def object_chunks(manifest: Manifest, *, names: Collection[str] = ()) -> Iterator[RawChunk]:
    """As `tensors.chunks`, of the object at `manifest.uri`; AT_ONCE chunks are alive at once.

    Raises: OSError when it can't be read, DigestMismatch when it is not such a file.
    """
    header, begins = file_layout(manifest.tensors)
    nbytes = len(header) + sum(e.nbytes for e in manifest.tensors)
    with _store(manifest.uri) as (store, directory):
        path = f"{directory}/{WEIGHTS_FILE}"
        found = store.size(path), store.cat_file(path, start=0, end=len(header))
    if found != (nbytes, header):
        raise DigestMismatch(f"{manifest.uri}/{WEIGHTS_FILE}", f"{nbytes} bytes behind this header", f"{found[0]}")
    places = [
        (e.name, offset, min(CHUNK_BYTES, e.nbytes - offset))
        for e in manifest.tensors
        if not names or e.name in names
        for offset in range(0, e.nbytes, CHUNK_BYTES)
    ]
    for first in range(0, len(places), AT_ONCE):
        here = places[first : first + AT_ONCE]
        starts = [begins[name] + offset for name, offset, _ in here]
        ends = [start + size for start, (_, _, size) in zip(starts, here, strict=True)]
        with _store(manifest.uri) as (store, _):
            ranges = store.cat_ranges([path] * len(here), starts, ends, on_error="raise")
        yield from (RawChunk(name, offset, data) for (name, offset, _), data in zip(here, ranges, strict=True))


def read_object(manifest: Manifest, *, deadline_s: float) -> dict[str, RawTensor]:
    """Tensors of the version at `manifest.uri`, every digest verified.

    Args:
        deadline_s: looked at between ranges; one request's own time is bounded by the store's package.

    Raises: OSError, DigestMismatch.
    """
    end = time.monotonic() + deadline_s

    def in_time() -> Iterator[RawChunk]:
        for chunk in object_chunks(manifest):
            if time.monotonic() > end:
                raise TimeoutError(f"{manifest.uri} was not read within {deadline_s:.0f} s")
            yield chunk

    return collect(manifest.tensors, in_time())


def has_object(uri: str) -> bool:
    """Whether the version's file is there. Raises OSError when the store's package is not."""
    with _store(uri) as (store, path):
        return bool(store.exists(f"{path}/{WEIGHTS_FILE}"))


def remove_objects(root: str, *, oldest_step: int, keep: Iterable[str]) -> list[str]:
    """Removes the files of versions below `oldest_step` of one run. Returns the uris of the versions that went. Raises OSError.

    Args:
        root: of the run.
        keep: uris of versions that stay.
    """
    kept, removed = set(keep), []
    with _store(root) as (store, path):
        for directory in store.ls(path, detail=False) if store.exists(path) else ():
            name = directory.rstrip("/").rpartition("/")[2]
            uri, match = f"{root}/{name}", re.fullmatch(VERSION_NAME, name)
            if match and int(match[1]) < oldest_step and uri not in kept:
                store.rm_file(f"{path}/{name}/{WEIGHTS_FILE}")
                removed.append(uri)
    return removed


@contextlib.contextmanager
def _store(uri: str) -> Iterator[tuple[Any, str]]:
    """A file system, and the path in it. Within the block every failure is an OSError that names the uri."""
    try:
        store, path = fsspec.core.url_to_fs(uri)
        # Others write to it, too.
        store.invalidate_cache()
        yield store, path.rstrip("/")
    except OSError:
        raise
    except Exception as error:  # each store's package has errors of its own
        raise OSError(f"{uri} can't be used here: {type(error).__name__}: {error}") from error
