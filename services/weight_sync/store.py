"""Versions on disk: {data_dir}/{run}/{lineage}-{step}-{digest[:12]}/ with the manifest and, where the bytes came over gRPC,
weights.safetensors, and delta.chunks where they came as a delta. A version is there whole or not at all; everything but a
delta, which whoever applies it verifies, is verified when it is read back at start.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import structlog
from google.protobuf.message import DecodeError

from services.weight_sync.transports import directory, objects
from services.weight_sync.versions import Published, Version
from shared.config import ConfigError, structure
from shared.wire.pb.weight_sync_pb2 import Manifest
from shared.wire.run import RunConfig
from shared.wire.tensor_file import WEIGHTS_FILE, fsync_directory, is_object, read_file, uri_path, version_directory
from shared.wire.tensor_objects import has_object
from shared.wire.tensors import ManifestError, RawTensor, check_manifest, verify

MANIFEST_FILE = "manifest.pb"
DELTA_FILE = "delta.chunks"
EPOCH_FILE = "epoch"

log = structlog.get_logger()


class UnknownVersionError(LookupError):
    """No such version, or it was dropped."""


def version_of(manifest: Manifest) -> Version:
    v = manifest.version
    return Version(manifest.run, v.lineage, v.step, v.digest)


def published(manifest: Manifest, *, published_at: float) -> Published:
    """Raises ManifestError when the manifest contradicts itself or its run is not described."""
    check_manifest(manifest)
    try:
        run = structure(RunConfig, json.loads(manifest.run_config_json))
    except (ConfigError, TypeError, ValueError) as error:
        raise ManifestError(f"run_config_json of {manifest.run}: {error}") from error
    return Published(
        version=version_of(manifest),
        fingerprint=manifest.fingerprint,
        is_exact=run.numerics == "exact",
        max_model_len=run.max_model_len,
        num_probe_logprobs=sum(len(l) // 4 for l in manifest.probe_logprobs),
        nbytes=sum(e.nbytes for e in manifest.tensors),
        published_at=published_at,
    )


class Store:
    """Blocking: call it in a thread. One caller at a time changes it.

    Raises: OSError, at construction, when another process owns the directory.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._manifests: dict[Version, Manifest] = {}
        self._announced: set[Version] = set()
        """Versions whose bytes are not here yet."""
        root.mkdir(parents=True, exist_ok=True)
        self._lock = (root / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OSError(f"{root} belongs to another weight_sync that is running: stop it, or set data_dir") from error

    def close(self) -> None:
        self._lock.close()

    def load(self) -> Iterator[Published]:
        """Versions as they were left, verified. What is damaged is removed, and said."""
        for temporary in self._root.glob("*/.*.tmp"):
            shutil.rmtree(temporary)
        for path in sorted(self._root.glob(f"*/*/{MANIFEST_FILE}")):
            try:
                manifest = Manifest.FromString(path.read_bytes())
                version = published(manifest, published_at=path.stat().st_mtime)
                self.check(manifest)
            except (DecodeError, OSError, ValueError) as error:
                log.error("version lost", path=str(path.parent), reason=str(error))
                shutil.rmtree(path.parent)
                continue
            self._manifests[version.version] = manifest
            yield version

    def load_epochs(self) -> dict[str, int]:
        return {path.parent.name: int(path.read_text()) for path in self._root.glob(f"*/{EPOCH_FILE}")}

    def save_epoch(self, run: str, epoch: int) -> None:
        """An old trainer stays fenced over a restart."""
        temporary = self.temporary(run)
        with (temporary / EPOCH_FILE).open("w") as file:
            file.write(str(epoch))
            file.flush()
            os.fsync(file.fileno())
        (temporary / EPOCH_FILE).replace(self._root / run / EPOCH_FILE)
        temporary.rmdir()
        fsync_directory(self._root / run)

    def temporary(self, run: str) -> Path:
        """A new directory that `put` takes over, or `discard` removes, or the next start."""
        path = self._root / run / f".{uuid.uuid4().hex}.tmp"
        path.mkdir(parents=True)
        return path

    def put(self, manifest: Manifest, temporary: Path) -> None:
        """Makes the version durable. Its weights, if they are kept here, lie in `temporary` already, synced and verified."""
        final = version_directory(self._root, manifest)
        with (temporary / MANIFEST_FILE).open("wb") as file:
            file.write(manifest.SerializeToString())
            file.flush()
            os.fsync(file.fileno())
        fsync_directory(temporary)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        fsync_directory(final.parent)
        fsync_directory(self._root)
        self._manifests[version_of(manifest)] = manifest
        self._announced.discard(version_of(manifest))

    def announce(self, manifest: Manifest) -> None:
        """The version exists, its bytes are on their way: nothing of it outlives this process before they are there."""
        version = version_of(manifest)
        if known := self._manifests.get(version):
            # A trainer that restarted offers it from another place.
            known.source.CopyFrom(manifest.source)
        else:
            self._manifests[version] = manifest
            self._announced.add(version)

    def is_awaited(self, version: Version) -> bool:
        """Whether the version's bytes are still on their way. Raises UnknownVersionError."""
        self.manifest(version)
        return version in self._announced

    def discard(self, temporary: Path) -> None:
        shutil.rmtree(temporary, ignore_errors=True)

    def manifest(self, version: Version) -> Manifest:
        """Raises UnknownVersionError."""
        try:
            return self._manifests[version]
        except KeyError:
            raise UnknownVersionError(f"version {version} is not (or no longer) here") from None

    def find(self, run: str, digest: str) -> Version:
        """The newest version of the run with these weights. Raises UnknownVersionError."""
        # A copy: another thread may be dropping versions.
        found = [v for v in list(self._manifests) if v.run == run and v.digest == digest]
        if not found:
            raise UnknownVersionError(f"run {run} has no version with digest {digest} here (any more)")
        return max(found)

    def weights(self, version: Version) -> Path:
        """The file with the version's bytes. Raises UnknownVersionError."""
        manifest = self.manifest(version)
        home = uri_path(manifest.uri) if manifest.uri else version_directory(self._root, manifest)
        return home / WEIGHTS_FILE

    def base(self, manifest: Manifest) -> dict[str, RawTensor]:
        """The tensors that the manifest's chunks are encoded against, mapped; nothing when they are raw.

        Raises UnknownVersionError when they are not here.
        """
        if not manifest.base_digest:
            return {}
        try:
            return read_file(self.weights(self.find(manifest.run, manifest.base_digest)))
        except (OSError, ValueError) as error:
            raise UnknownVersionError(
                f"run {manifest.run}: base {manifest.base_digest} can't be read: {error}"
            ) from error

    def delta(self, version: Version, base_digest: str) -> Path | None:
        """The file with the version's chunks against this base, if it came so. Raises UnknownVersionError."""
        manifest = self.manifest(version)
        path = version_directory(self._root, manifest) / DELTA_FILE
        return path if base_digest and base_digest == manifest.base_digest and path.is_file() else None

    def has_weights(self, version: Version) -> bool:
        """Whether the file is still there; its bytes were verified when it came. Raises OSError."""
        uri = self.manifest(version).uri
        return has_object(uri) if is_object(uri) else self.weights(version).is_file()

    def drop(self, versions: list[Version], oldest_steps: dict[str, int]) -> None:
        """Deletes versions, here and in the trainer's directory or object store."""
        before = list(self._manifests.values())
        for v in versions:
            manifest = self._manifests.pop(v)
            self._announced.discard(v)
            # One that was only announced has none.
            shutil.rmtree(version_directory(self._root, manifest), ignore_errors=True)
        kept = self._manifests.values()
        for run in {v.run for v in versions}:
            for transport in (directory, objects):
                transport.sweep(before, run=run, oldest_step=oldest_steps[run], kept=kept)

    def check(self, manifest: Manifest) -> None:
        """Reads every byte of a version, wherever they are. Raises OSError, ValueError."""
        if manifest.uri:
            (objects if is_object(manifest.uri) else directory).check(manifest)
        else:
            verify(manifest, read_file(version_directory(self._root, manifest) / WEIGHTS_FILE))
