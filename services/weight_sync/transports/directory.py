"""Shared directory: the trainer has written the file, replicas map it, weight_sync checks it and deletes it in the end."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import structlog

from shared.wire.pb.weight_sync_pb2 import Manifest
from shared.wire.tensor_file import VERSION_NAME, WEIGHTS_FILE, is_object, read_version, uri_path
from shared.wire.tensors import ManifestError

log = structlog.get_logger()


def check(manifest: Manifest) -> None:
    """Reads the whole file. Raises ManifestError when it can't be read here, DigestMismatch when it holds other bytes."""
    try:
        read_version(manifest)
    except OSError as error:
        raise ManifestError(
            f"cannot read {manifest.uri}: {error}. Mount the trainer's directory here under the same path, or publish with grpc"
        ) from error


def sweep(manifests: Collection[Manifest], *, run: str, oldest_step: int, kept: Collection[Manifest]) -> None:
    """Deletes the run's directories of steps below `oldest_step`: dropped versions, and what trainers left that were
    fenced or died before they could publish it.

    Args:
        manifests: where the run's directories lie is taken from these.
        kept: versions that are still in use.
    """
    roots = {uri_path(m.uri).parent for m in manifests if m.run == run and m.uri and not is_object(m.uri)}
    in_use = {uri_path(m.uri) for m in kept if m.uri and not is_object(m.uri)}
    for root in roots:
        for directory in root.glob("*-*-*"):
            match = re.fullmatch(VERSION_NAME, directory.name)
            if root.name == run and match and int(match[1]) < oldest_step and directory not in in_use:
                _remove(directory)


def _remove(directory: Path) -> None:
    """Removes what a publisher writes, and nothing else. A directory that resists costs space, not the service."""
    try:
        for path in (*directory.glob(".*.tmp"), directory / WEIGHTS_FILE):
            path.unlink(missing_ok=True)
        directory.rmdir()
    except OSError as error:
        log.warning("cannot delete a retired version", path=str(directory), reason=str(error))
