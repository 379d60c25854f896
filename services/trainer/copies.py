"""Forward copies of the last versions: what a token sampled by an older version is scored with.

A copy is the sharded cast of the masters to the published dtype, which is exactly what the forward gathers. One copy serves
three ends: it is published, it scores the tokens that this version sampled, and it brings a version back after a restart.
Behind the current version copies lie where the trainer's configuration says:
    device      beside the model; no transfer, one model of memory per version
    host        pinned memory of the host; moved to the device a shard at a time when a batch needs them
    directory   in the shared directory of weight_sync, from which they are read back; the host keeps those that are not there
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from services.trainer.batch import PolicyVersion
from services.trainer.policy import local_shards
from shared.models import Decoder
from shared.wire.pb.weight_sync_pb2 import Manifest, Version
from shared.wire.tensor_file import WEIGHTS_FILE, read_file, version_directory
from shared.wire.tensors import RawTensor


@dataclass(frozen=True)
class ForwardCopy:
    """One version, as every forward sees it."""

    version: PolicyVersion
    """Its digest is empty until it is published."""
    shards: Mapping[str, Tensor]
    """This rank's part of each parameter, in the published dtype."""


class ForwardCopies:
    """The current version and the `lag` before it, by policy step.

    Args:
        decoder: names the layout of the shards.
        dtype: published.
        lag: steps behind the current one that a batch may need.
        behind: where copies lie once they are no longer current.
        run, directory: of the shared directory, for `behind = "directory"`.
    """

    def __init__(
        self,
        decoder: Decoder,
        dtype: torch.dtype,
        *,
        lag: int,
        behind: Literal["device", "host", "directory"] = "device",
        run: str = "",
        directory: Path | None = None,
    ) -> None:
        assert behind != "directory" or directory is not None
        self._decoder, self._dtype, self._lag = decoder, dtype, lag
        self._behind, self._run, self._directory = behind, run, directory
        self._copies: dict[int, ForwardCopy] = {}

    @property
    def held(self) -> tuple[ForwardCopy, ...]:
        """Ascending by step; the last one is current."""
        return tuple(self._copies[step] for step in sorted(self._copies))

    @property
    def current(self) -> ForwardCopy:
        return self.held[-1]

    def take(self, step: int, *, lineage: int) -> ForwardCopy:
        """Copies the masters as they are now, and forgets what no batch can need any more."""
        shards = {name: local.to(self._dtype, copy=True) for name, local in local_shards(self._decoder).items()}
        self.put(ForwardCopy(PolicyVersion(lineage, step, ""), shards))
        return self.current

    def put(self, copy: ForwardCopy) -> None:
        """Adds or renames one version."""
        self._copies[copy.version.step] = copy
        newest = max(self._copies)
        self._copies = {
            step: c if step == newest else self._stow(c)
            for step, c in self._copies.items()
            if step >= newest - self._lag
        }

    def name(self, version: PolicyVersion) -> None:
        """The version's full name, known once it is published."""
        self.put(replace(self._copies[version.step], version=version))

    def find(self, version: PolicyVersion) -> ForwardCopy | None:
        """The copy with the same weights; the digest alone decides."""
        return next((c for c in self.held if version.digest and c.version.digest == version.digest), None)

    def _stow(self, copy: ForwardCopy) -> ForwardCopy:
        if self._behind == "device" or isinstance(copy.shards, HostShards | FileShards):
            return copy
        if self._behind == "directory" and (file := self._file_of(copy.version)) is not None:
            return replace(copy, shards=file)
        return replace(copy, shards=HostShards(copy.shards))

    def _file_of(self, version: PolicyVersion) -> FileShards | None:
        """The version's file in the shared directory; None while it is not there, or not whole."""
        assert self._directory is not None
        manifest = Manifest(
            run=self._run, version=Version(lineage=version.lineage, step=version.step, digest=version.digest)
        )
        try:
            return FileShards(self._decoder, read_file(version_directory(self._directory, manifest) / WEIGHTS_FILE))
        except (OSError, ValueError):
            return None


class HostShards(Mapping[str, Tensor]):
    """Shards in the host's memory, pinned where they came from a GPU."""

    def __init__(self, shards: Mapping[str, Tensor]) -> None:
        self._shards = {name: _on_host(shard) for name, shard in shards.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._shards[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)


class FileShards(Mapping[str, Tensor]):
    """This rank's parts of a whole version on disk: mapped, so memory holds what is being read; survives the file's removal."""

    def __init__(self, decoder: Decoder, tensors: Mapping[str, RawTensor]) -> None:
        self._parameters = dict(decoder.named_parameters())
        self._tensors = tensors
        if missing := self._parameters.keys() - tensors.keys():
            raise ValueError(f"the version lacks {', '.join(sorted(missing)[:3])}")

    def __getitem__(self, name: str) -> Tensor:
        parameter, raw = self._parameters[name], self._tensors[name]
        assert isinstance(parameter, DTensor)
        shape, offset = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        assert not any(offset[1:]), "FSDP2 cuts the first dimension, so a shard is one stretch of bytes"
        dtype = getattr(torch, raw.dtype)
        if not shape[0]:
            return torch.empty(shape, dtype=dtype)
        row_bytes = raw.nbytes // parameter.shape[0]
        # Copied, because torch takes no read-only memory.
        data = bytearray(raw.data[offset[0] * row_bytes : (offset[0] + shape[0]) * row_bytes])
        return torch.frombuffer(data, dtype=dtype).view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def _on_host(shard: Tensor) -> Tensor:
    if shard.device.type == "cpu":
        return shard
    pinned = torch.empty(shard.shape, dtype=shard.dtype, pin_memory=True)
    return pinned.copy_(shard)
