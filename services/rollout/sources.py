"""Weights copied from the trainer's own memory, into a buffer of this replica, and verified there.

manifest.source ─▶ Acquire (the call stays open: the lease) ─▶ shm | ipc: copy   ─▶ every digest ─▶ tensors
                                                           └▶ broadcast: receive ─┘
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import grpc
import structlog
import torch
import torch.distributed as dist
from torch import Tensor

from shared.transfer.arena import ArenaLayout
from shared.transfer.digests import verify_flat
from shared.transfer.group import BroadcastGroup, GroupFailed
from shared.transfer.memory import NUM_BUFFERS, Unreachable, map_device, map_shared
from shared.wire import rpc
from shared.wire.pb import trainer_pb2 as pb
from shared.wire.pb.trainer_pb2_grpc import WeightSourceStub
from shared.wire.pb.weight_sync_pb2 import Manifest
from shared.wire.tensors import DigestMismatch

log = structlog.get_logger()

COPY_BYTES = 64 * 2**20
"""Copied at once; between two such pieces the copy can be given up."""


class SourceUnavailable(Exception):
    """The bytes could not be had from the trainer's memory; weight_sync has them. `reason` is one word, for the counter."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Sources:
    """What this replica has mapped, and the group it is in."""

    def __init__(self, replica: str, device: torch.device) -> None:
        self._replica, self._device = replica, device
        # Beside the engine's own, so that neither waits for the other.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._member = uuid.uuid4().hex
        self._mapped: dict[bytes, Tensor] = {}
        """Of one trainer's memory of one layout, by its serialized description."""
        self._mapped_of: tuple[str, ArenaLayout] | None = None
        self._group: BroadcastGroup | None = None
        self._group_of = ""
        self._lock = threading.Lock()

    def copy(self, manifest: Manifest, *, deadline_s: float) -> dict[str, Tensor]:
        """The version's tensors in memory of their own on the device, every digest verified. Blocks.

        Raises SourceUnavailable, and then nothing of it is left.
        """
        end = time.monotonic() + deadline_s
        # A Prepare that was aborted may still be at it.
        if not self._lock.acquire(timeout=max(0.0, deadline_s)):
            raise SourceUnavailable("busy", f"another version was still being copied after {deadline_s} s")
        try:
            return self._copy(manifest, end)
        finally:
            self._lock.release()

    def _copy(self, manifest: Manifest, end: float) -> dict[str, Tensor]:
        source = manifest.source
        layout = ArenaLayout.of_manifest(manifest)
        with torch.cuda.stream(self._stream):
            flat = torch.empty(layout.nbytes, dtype=torch.uint8, device=self._device)
        request = pb.AcquireRequest(
            run=manifest.run,
            manifest_digest=manifest.version.digest,
            replica=self._replica,
            member=self._member,
            epoch=self._group.epoch if self._group is not None and self._group_of == source.address else 0,
        )
        try:
            with rpc.channel(source.address) as channel:
                # A trainer that is gone is not waited for: its bytes are at weight_sync.
                call = WeightSourceStub(channel).Acquire(request, timeout=max(0.0, end - time.monotonic()))
                with contextlib.closing(_Lease(call)) as lease:
                    self._fill(flat, next(lease), layout, lease, source.address, end)
            with torch.cuda.stream(self._stream):
                verify_flat(manifest, layout, flat, num_threads=_num_threads(self._device))
        except grpc.RpcError as error:
            raise SourceUnavailable(error.code().name.lower(), f"{error.code().name}: {error.details()}") from error
        except (Unreachable, GroupFailed, DigestMismatch) as error:
            raise SourceUnavailable(_REASONS[type(error)], str(error)) from error
        return layout.views(flat)

    def _fill(
        self, flat: Tensor, grant: pb.Grant, layout: ArenaLayout, lease: _Lease, address: str, end: float
    ) -> None:
        if grant.HasField("broadcast"):
            if grant.broadcast.nbytes != layout.nbytes:
                raise Unreachable(f"a round of {grant.broadcast.nbytes} bytes, the version has {layout.nbytes}")
            self._receive(flat, grant.broadcast, layout, lease, address)
            return
        theirs = self._map(grant, (address, layout))
        if theirs.numel() < layout.nbytes:
            raise Unreachable(f"the trainer's buffer has {theirs.numel()} bytes, the version {layout.nbytes}")
        with torch.cuda.stream(self._stream):
            for begin in range(0, layout.nbytes, COPY_BYTES):
                if time.monotonic() > end or lease.is_over:
                    raise Unreachable("the time to read the trainer's memory was over before the copy was")
                here = slice(begin, min(layout.nbytes, begin + COPY_BYTES))
                flat[here].copy_(theirs[here])
        if self._stream is not None:
            self._stream.synchronize()

    def _map(self, grant: pb.Grant, mapped_of: tuple[str, ArenaLayout]) -> Tensor:
        """Maps a buffer once: the trainer writes version after version into it. Raises Unreachable.

        Args:
            mapped_of: address of the trainer and layout: of others it has no buffers any more.
        """
        key = (grant.shm if grant.HasField("shm") else grant.ipc).SerializeToString(deterministic=True)
        # One more than it has: those were closed for another layout, of which nothing was read here.
        if mapped_of != self._mapped_of or (key not in self._mapped and len(self._mapped) == NUM_BUFFERS):
            self._mapped, self._mapped_of = {}, mapped_of
        if key not in self._mapped:
            self._mapped[key] = map_shared(grant.shm) if grant.HasField("shm") else map_device(grant.ipc)
        return self._mapped[key]

    def _receive(self, flat: Tensor, round_: pb.Round, layout: ArenaLayout, lease: _Lease, address: str) -> None:
        """Raises GroupFailed."""
        try:
            if self._group is None or (self._group_of, self._group.epoch) != (address, round_.epoch):
                self.leave()
                host, port = round_.store.rsplit(":", 1)
                timeout = timedelta(seconds=round_.timeout_s)
                store = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)
                self._group = BroadcastGroup(
                    store,
                    store_host=host,
                    epoch=round_.epoch,
                    rank=round_.rank,
                    size=round_.size,
                    device=self._device,
                    timeout_s=round_.timeout_s,
                )
                self._group_of = address
            # The trainer hears first of a member that died, and says so by ending the call.
            with lease.ending(self._group.close):
                self._group.broadcast(layout.buckets(flat, round_.bucket_bytes), timeout_s=round_.timeout_s)
        except (GroupFailed, dist.DistError) as error:
            self._group = None
            raise GroupFailed(str(error)) from error

    def leave(self) -> None:
        """Gives up the group."""
        if self._group is not None:
            self._group.close()
            self._group = None


class _Lease:
    """An open Acquire call."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.is_over = False
        self._on_failure: Callable[[], None] | None = None
        # False: it is over already, and `next` will say how.
        self.is_over = not call.add_callback(self._end)

    def __next__(self) -> pb.Grant:
        return next(self._call)

    @contextlib.contextmanager
    def ending(self, on_failure: Callable[[], None]) -> Iterator[None]:
        """Within the block, `on_failure` is called when the trainer ends the call with an error."""
        self._on_failure = on_failure
        try:
            yield
        finally:
            self._on_failure = None

    def close(self) -> None:
        self._call.cancel()

    def _end(self) -> None:
        self.is_over = True
        on_failure = self._on_failure
        if on_failure is not None and self._call.code() is not grpc.StatusCode.OK:
            on_failure()


_REASONS = {Unreachable: "unreachable", GroupFailed: "round_failed", DigestMismatch: "mismatch"}


def _num_threads(device: torch.device) -> int:
    """On a CPU the engine needs the other cores."""
    return min(8, os.cpu_count() or 1) if device.type == "cuda" else 1
