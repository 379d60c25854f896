"""The one file that a version is on disk: safetensors, written at once or chunk by chunk, read by mapping it.

The header is written here because the weights arrive in pieces; the `safetensors` package reads the file like any other.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from shared.wire.pb.weight_sync_pb2 import Manifest, TensorEntry, Version
from shared.wire.tensors import ITEM_BYTES, DigestMismatch, RawTensor, raw_view, verify

WEIGHTS_FILE = "weights.safetensors"
VERSION_NAME = r"\d+-(\d+)-[0-9a-f]{12}"
"""Of a version's directory; the group is its step."""

_SAFETENSORS_NAME = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_DTYPE = {short: name for name, short in _SAFETENSORS_NAME.items()}


def version_name(version: Version) -> str:
    """{lineage}-{step}-{digest[:12]}, a VERSION_NAME."""
    return f"{version.lineage}-{version.step}-{version.digest[:12]}"


def version_directory(root: Path, manifest: Manifest) -> Path:
    """Where a version lies below a root: {run}/{lineage}-{step}-{digest[:12]}."""
    return root / manifest.run / version_name(manifest.version)


def is_object(uri: str) -> bool:
    """Whether this names a place in an object store (`tensor_objects`), and not a directory."""
    return "://" in uri and not uri.startswith("file://")


def uri_path(uri: str) -> Path:
    """Local path of a file:// uri. Raises ValueError for any other."""
    parts = urlsplit(uri)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise ValueError(f"expected a file:// uri of a directory, got {uri!r}")
    return Path(url2pathname(parts.path))


def file_layout(entries: Iterable[TensorEntry]) -> tuple[bytes, dict[str, int]]:
    """Header of a safetensors file, and where in the file each tensor begins.

    Wider dtypes come first, so that every tensor is aligned to its element.
    """
    header: dict[str, Any] = {}
    end = 0
    for e in sorted(entries, key=lambda e: (-ITEM_BYTES[e.dtype], e.name)):
        header[e.name] = {
            "dtype": _SAFETENSORS_NAME[e.dtype],
            "shape": list(e.shape),
            "data_offsets": [end, end + e.nbytes],
        }
        end += e.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {n: start + v["data_offsets"][0] for n, v in header.items()}


def write_file(path: Path, manifest: Manifest, tensors: Mapping[str, RawTensor]) -> None:
    """Writes a safetensors file and syncs it to disk."""
    header, begins = file_layout(manifest.tensors)
    with path.open("xb") as file:
        file.write(header)
        for name in sorted(begins, key=begins.__getitem__):
            file.write(raw_view(tensors[name].data))
        file.flush()
        os.fsync(file.fileno())


def read_file(path: Path) -> dict[str, RawTensor]:
    """Tensors of a safetensors file, mapped and read-only. Raises OSError, ValueError when it is no such file."""
    with path.open("rb") as file:
        try:
            view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            start = 8 + int.from_bytes(view[:8], "little")
            header = json.loads(bytes(view[8:start]))
            tensors = {}
            for name, e in header.items():
                if name == "__metadata__":
                    continue
                begin, end = e["data_offsets"]
                tensor = RawTensor(_DTYPE[e["dtype"]], tuple(e["shape"]), view[start + begin : start + end])
                if len(tensor.data) != tensor.nbytes:
                    raise ValueError(f"tensor {name}: {tensor.nbytes} bytes expected, the file has {len(tensor.data)}")
                tensors[name] = tensor
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no safetensors file: {error}") from error
    return tensors


def read_version(manifest: Manifest) -> dict[str, RawTensor]:
    """Tensors of a version in a shared directory, every digest verified.

    Raises: OSError when the file is not there, DigestMismatch when it holds something else.
    """
    path = uri_path(manifest.uri) / WEIGHTS_FILE
    try:
        tensors = read_file(path)
    except ValueError as error:
        raise DigestMismatch(str(path), "a whole safetensors file", str(error)) from error
    verify(manifest, tensors)
    return tensors


def write_version(root: Path, manifest: Manifest, tensors: Mapping[str, RawTensor]) -> Path:
    """Puts a version's file below a shared root unless it is there already, whole. Returns its directory."""
    directory = version_directory(root, manifest)
    path = directory / WEIGHTS_FILE
    with contextlib.suppress(OSError, ValueError):
        verify(manifest, read_file(path))
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / f".{uuid.uuid4().hex}.tmp"
    try:
        write_file(temporary, manifest, tensors)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    for parent in (directory, directory.parent, root):
        fsync_directory(parent)
    return directory


def move_into_place(temporary: Path, final: Path) -> None:
    """Gives a whole directory its name, to survive a power cut; one that has the name already is removed behind it."""
    fsync_directory(temporary)
    replaced = final.with_name(f".{final.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)
    temporary.rename(final)
    fsync_directory(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def fsync_directory(path: Path) -> None:
    """Makes renames inside `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
