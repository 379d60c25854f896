"""Trained groups outside Valkey: one file per step under a URI that fsspec understands (a directory, s3://, ...)."""

from __future__ import annotations

from collections.abc import Sequence

import fsspec
import msgpack

from shared.wire.codec import CodecError, decode_group, encode_group
from shared.wire.types import Group


def step_path(uri: str, step: int) -> str:
    return f"{uri.rstrip('/')}/step-{step:08d}.msgpack"


def write_step(uri: str, step: int, groups: Sequence[Group]) -> None:
    """Writes the batch of one step; a second write replaces the first. Raises OSError."""
    path = step_path(uri, step)
    fs, local = fsspec.core.url_to_fs(path)
    fs.makedirs(local.rsplit("/", 1)[0], exist_ok=True)
    with fs.transaction, fs.open(local, "wb") as file:
        file.write(msgpack.packb([encode_group(group) for group in groups], use_bin_type=True))


def read_step(uri: str, step: int) -> list[Group]:
    """Raises OSError when the file is missing or unreadable, CodecError when it is no archive."""
    with fsspec.open(step_path(uri, step), "rb") as file:
        data = file.read()
    try:
        entries = msgpack.unpackb(data, raw=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise CodecError(f"{step_path(uri, step)} is no archive of a step: {error}") from error
    return [decode_group(entry) for entry in entries]
