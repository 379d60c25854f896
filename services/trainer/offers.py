"""Versions as they lie in rank 0's memory, handed to replicas that copy them: shared memory, CUDA IPC, broadcast.

    gather ─▶ Slot ─▶ offer ─▶ Acquire (one open call per reader) ─▶ shm, ipc: the reader copies
                        │                                        └─▶ broadcast.py: rounds
                        └▶ the bytes go on to weight_sync in the background (shared.wire.weights.Publisher)

A slot is written to again only when nobody reads it. Nothing here ever waits for a replica: a reader has a deadline, and
where every slot is being read the version goes through weight_sync alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field

import grpc
import structlog
import torch
from torch import Tensor

from services.trainer.broadcast import Rounds
from services.trainer.config import TrainerConfig
from shared.metrics import names
from shared.metrics.server import metric
from shared.transfer.arena import ArenaLayout
from shared.transfer.memory import NUM_BUFFERS, DeviceExport, SharedArena
from shared.wire import rpc
from shared.wire.pb import trainer_pb2 as pb
from shared.wire.pb.trainer_pb2_grpc import WeightSourceServicer, add_WeightSourceServicer_to_server
from shared.wire.pb.weight_sync_pb2 import Manifest, Source
from shared.wire.tensors import RawTensor

log = structlog.get_logger()

MAX_READERS = 64
"""Calls open at the same time; one more is refused, and fetches from weight_sync."""


@dataclass(eq=False)
class Slot:
    """One version's bytes: on the CPU, where they are digested and uploaded from, and on the GPU where replicas read there."""

    layout: ArenaLayout
    host: SharedArena
    device: Tensor | None
    exported: DeviceExport | None = None
    """How other processes map `device`."""
    digest: str = ""
    """Of the version offered from here; empty while it is being filled."""
    readers: set[threading.Event] = field(default_factory=set)

    def tensors(self) -> dict[str, RawTensor]:
        return self.layout.raw(self.host.flat)

    def fill(self, name: str, full: Tensor) -> None:
        """Copies one gathered tensor to its place, on the GPU alone where the slot has memory there; then `finish`."""
        place = next(p for p in self.layout.places if p.name == name)
        data = full.detach().contiguous().view(-1).view(torch.uint8)
        here = slice(place.offset, place.offset + place.nbytes)
        if self.device is not None:
            self.device[here].copy_(data)
            return
        # A GPU's copies follow one another on its stream, while the next tensor is gathered.
        self.host.flat[here].copy_(data, non_blocking=data.is_cuda)

    def finish(self) -> None:
        """Completes the host's copy and waits for this thread's stream; before anybody reads it."""
        if self.device is not None:
            # At once: where a replica computes on the same GPU the two processes take turns, and each launch waits for one.
            self.host.flat.copy_(self.device, non_blocking=self.device.is_cuda)
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Nobody reads it and nobody will; the memory goes with the last view of it."""
        self.host.close()
        if self.exported is not None:
            self.exported.close()


class Offers(WeightSourceServicer):
    """Built on rank 0, with a server of its own until `close`. Raises OSError when its address is taken.

    >>> slot = offers.room(layout)  # None: every slot is being read
    >>> slot.fill(name, full_tensor); slot.finish()
    >>> offers.offer(manifest, slot)  # sets manifest.source
    """

    def __init__(self, config: TrainerConfig, device: torch.device) -> None:
        self._transport, self._lease_s, self._device = config.transport, config.source_lease_s, device
        self._lock = threading.Lock()
        self._slots: list[Slot] = []
        """The one that was filled first, first."""
        self._server = grpc.server(
            futures.ThreadPoolExecutor(MAX_READERS, thread_name_prefix="weight source"),
            options=rpc.OPTIONS,
            maximum_concurrent_rpcs=MAX_READERS,
        )
        add_WeightSourceServicer_to_server(self, self._server)
        port = rpc.bind(self._server, f"{config.source_host}:{config.source_port}")
        host = config.source_advertised or config.source_host
        self._source = Source(transport=self._transport, address=f"{host}:{port}")
        self._rounds = Rounds(config, host, device) if self._transport == "broadcast" else None
        self._server.start()

    def close(self) -> None:
        """Takes back every offer; readers hear of it."""
        if self._rounds:
            self._rounds.close()
        with self._lock:
            for slot in self._slots:
                self._withdraw(slot)
        self._server.stop(grace=0.5).wait(1.0)
        # The server and this refer to each other: what is still held here would wait for a collection.
        with self._lock:
            slots, self._slots = self._slots, []
        for slot in slots:
            slot.close()

    def room(self, layout: ArenaLayout) -> Slot | None:
        """A slot to fill, whose offer is over; None when all are being read."""
        with self._lock:
            for slot in [s for s in self._slots if s.layout != layout and not s.readers]:
                self._slots.remove(slot)
                slot.close()
            free = [s for s in self._slots if s.layout == layout and not s.readers]
            if len(self._slots) < NUM_BUFFERS:
                self._slots.append(self._new_slot(layout))
                return self._slots[-1]
            if not free:
                metric(names.SOURCE_FALLBACKS).labels(self._transport, "no_room").inc()
                log.warning("every slot is being read, this version goes through weight_sync alone")
                return None
            free[0].digest = ""
            self._slots.remove(free[0])
            self._slots.append(free[0])
            return free[0]

    def offer(self, manifest: Manifest, slot: Slot) -> None:
        """The slot holds this version; also said in `manifest.source`."""
        manifest.source.CopyFrom(self._source)
        with self._lock:
            slot.digest = manifest.version.digest

    def Acquire(self, request: pb.AcquireRequest, context: grpc.ServicerContext) -> Iterator[pb.Grant]:
        """One reader: its call's end is the end of its lease, and so is its deadline or `source_lease_s`."""
        ended = threading.Event()
        slot = self._enter(request.manifest_digest, ended)
        if slot is None:
            text = f"version {request.manifest_digest} is not in the trainer's memory (any more)"
            context.abort(grpc.StatusCode.NOT_FOUND, text)
            return
        try:
            if not context.add_callback(ended.set):
                return
            if self._rounds is not None:
                yield from self._rounds.take_part(request, slot, ended, context)
                return
            yield self._grant(slot)
            if not ended.wait(self._lease_s):
                log.warning("a reader's time is over", replica=request.replica, digest=request.manifest_digest)
        finally:
            with self._lock:
                slot.readers.discard(ended)

    def _enter(self, digest: str, reader: threading.Event) -> Slot | None:
        with self._lock:
            slot = next((s for s in self._slots if s.digest and s.digest == digest), None)
            if slot is not None:
                slot.readers.add(reader)
            return slot

    def _grant(self, slot: Slot) -> pb.Grant:
        if slot.exported is not None:
            return pb.Grant(ipc=slot.exported.message)
        return pb.Grant(shm=slot.host.message())

    def _new_slot(self, layout: ArenaLayout) -> Slot:
        slot = Slot(layout, SharedArena(layout.nbytes), None)
        if self._device.type == "cuda":
            slot.host.pin()
            if self._transport != "shm":
                slot.device = torch.empty(layout.nbytes, dtype=torch.uint8, device=self._device)
        if slot.device is not None and self._transport == "ipc":
            slot.exported = DeviceExport(slot.device)
        return slot

    def _withdraw(self, slot: Slot) -> None:
        slot.digest = ""
        for ended in slot.readers:
            ended.set()
