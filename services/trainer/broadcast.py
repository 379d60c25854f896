"""Rounds of broadcast: replicas that ask for a version at about the same time get it together.

    Acquire ─▶ take_part ─▶ pending ─▶ Rounds.run (a thread) ─▶ Grant: epoch, rank ─▶ BroadcastGroup ─▶ buckets
                                                          └▶ the outcome, to every call of the round

Membership is who asks. A round waits, for a moment, for those that took part before and have not got this version yet. While the
same replicas come back their group is kept; when one joins, leaves, dies or is late the group is given up and the next round
makes another, under a new epoch. The trainer's own thread is never in here.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import grpc
import structlog
import torch
import torch.distributed as dist

from services.trainer.config import TrainerConfig
from shared.metrics import names
from shared.metrics.server import metric
from shared.transfer.group import BroadcastGroup, GroupFailed
from shared.wire.pb import trainer_pb2 as pb

if TYPE_CHECKING:
    from services.trainer.offers import Slot

log = structlog.get_logger()

BUCKET_BYTES = 64 * 2**20
CLOSE_S = 2.0


@dataclass(eq=False)
class Member:
    """One replica that asked for a version."""

    name: str
    key: str
    """Of its process."""
    epoch: int
    """Of the group that it still is in; 0: none."""
    digest: str
    """Of the version asked for."""
    slot: Slot
    left: threading.Event
    """Its call is over."""
    changed: threading.Event = field(default_factory=threading.Event)
    """The round begins, or is over."""
    round: pb.Round | None = None
    is_over: bool = False
    failure: str = ""


class Rounds:
    """One sender thread, until `close`."""

    def __init__(self, config: TrainerConfig, host: str, device: torch.device) -> None:
        self._device, self._timeout_s = device, config.broadcast_timeout_s
        self._gather_s = config.broadcast_gather_s
        # A round may take its deadline twice, for its group and for its bytes, and one may be under way.
        self._patience_s = 4 * self._timeout_s + self._gather_s
        self._wake = threading.Condition()
        self._pending: list[Member] = []
        self._is_closed = False
        self._group: BroadcastGroup | None = None
        self._members: list[str] = []
        """Keys by rank - 1 in the group."""
        self._epoch = 0
        self._known: set[str] = set()
        """Keys of those that took part before and were not missed since."""
        self._served: tuple[str, set[str]] = "", set()
        """The last version sent, and the keys of those that were in a round of it."""
        # The store's own socket would listen on every interface.
        listening = socket.create_server((config.source_host, 0))
        port = listening.getsockname()[1]
        self._store = dist.TCPStore(
            config.source_host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=self._timeout_s),
            master_listen_fd=listening.detach(),
        )
        self._store_host, self._store_address = host, f"{host}:{port}"
        self._thread = threading.Thread(target=self.run, name="broadcast", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the round under way, if there is one, and waits for that a little while."""
        with self._wake:
            self._is_closed = True
            self._wake.notify_all()
        if (group := self._group) is not None:
            group.close()
        self._thread.join(CLOSE_S)

    def take_part(
        self, request: pb.AcquireRequest, slot: Slot, left: threading.Event, context: grpc.ServicerContext
    ) -> Iterator[pb.Grant]:
        """One replica's call: its place in the next round, then the call stays open until the round is over."""
        member = Member(request.replica, request.member, request.epoch, request.manifest_digest, slot, left)
        if not context.add_callback(member.changed.set):
            return
        with self._wake:
            self._pending.append(member)
            self._wake.notify_all()
        member.changed.wait(self._patience_s)
        with self._wake:
            self._pending = [m for m in self._pending if m is not member]
        if member.round is None:
            context.abort(grpc.StatusCode.ABORTED, member.failure or "no round began in time")
        member.changed.clear()
        yield pb.Grant(broadcast=member.round)
        if not (member.is_over or left.is_set()):
            member.changed.wait(self._patience_s)
        if member.failure or not member.is_over:
            context.abort(grpc.StatusCode.ABORTED, member.failure or "the round did not end in time")

    def run(self) -> None:
        """Round after round.

        consumes: pending members
        produces: rounds, and their outcome at each member
        waits for: a member; the others of the group, no longer than `broadcast_gather_s`; a round, no longer than
            `broadcast_timeout_s` for its group and as long again for its bytes
        unblocked by: `take_part`, the clock, `close`
        """
        while members := self._next_members():
            started = time.monotonic()
            failure = ""
            try:
                self._send(members)
            except GroupFailed as error:
                failure = str(error)
                self._give_up()
                # Whoever lives comes back; nobody is waited for on account of this round.
                with self._wake:
                    self._known -= {m.key for m in members}
                metric(names.SOURCE_FALLBACKS).labels("broadcast", "round_failed").inc()
                log.warning("broadcast failed", replicas=[m.name for m in members], reason=failure)
            else:
                seconds = round(time.monotonic() - started, 3)
                metric(names.WEIGHT_SYNC_BYTES).labels("broadcast").inc(members[0].slot.layout.nbytes)
                log.info("broadcast", replicas=[m.name for m in members], epoch=self._epoch, seconds=seconds)
            self._end(members, failure)
            # They hold a version's memory.
            members.clear()
        self._give_up()

    def _next_members(self) -> list[Member]:
        """Who takes part in the next round; nobody once it is closed."""
        with self._wake:
            while not self._is_closed:
                self._wake.wait_for(lambda: self._here() or self._is_closed)
                # A replica that was in the group and has not asked yet may be about to.
                self._wake.wait_for(lambda: self._is_closed or self._is_complete(), timeout=self._gather_s)
                here = self._here()
                if here and not self._is_closed:
                    members = [m for m in here if m.digest == here[0].digest]
                    self._pending = [m for m in self._pending if m not in members]
                    self._count(members)
                    return members
            self._end(self._pending, "the trainer is going down")
            return []

    def _here(self) -> list[Member]:
        return [m for m in self._pending if not m.left.is_set()]

    def _is_complete(self) -> bool:
        here = self._here()
        return bool(here) and self._missing(here) <= {m.key for m in here if m.digest == here[0].digest}

    def _missing(self, here: list[Member]) -> set[str]:
        """Keys of those that should be in the round of the first one's version."""
        digest, served = self._served
        return self._known - served if digest == here[0].digest else self._known

    def _count(self, members: list[Member]) -> None:
        """Who is in this round, and who was waited for in vain."""
        keys = {m.key for m in members}
        self._known = self._known - (self._missing(members) - keys) | keys
        digest, served = self._served
        self._served = members[0].digest, keys | (served if digest == members[0].digest else set())

    def _send(self, members: list[Member]) -> None:
        """Raises GroupFailed."""
        slot = members[0].slot
        by_key = {m.key: m for m in members}
        if (
            self._group is None
            or set(by_key) != set(self._members)
            or len(by_key) != len(members)
            or any(m.epoch != self._epoch for m in members)
        ):
            self._give_up()
            self._epoch += 1
            self._members = list(by_key)
        for rank, key in enumerate(self._members, start=1):
            by_key[key].round = pb.Round(
                store=self._store_address,
                epoch=self._epoch,
                rank=rank,
                size=1 + len(self._members),
                nbytes=slot.layout.nbytes,
                bucket_bytes=BUCKET_BYTES,
                timeout_s=self._timeout_s,
            )
        for member in members:
            member.changed.set()
        if self._group is None:
            self._group = BroadcastGroup(
                self._store,
                store_host=self._store_host,
                epoch=self._epoch,
                rank=0,
                size=1 + len(self._members),
                device=self._device,
                timeout_s=self._timeout_s,
            )
        flat = slot.host.flat if slot.device is None else slot.device
        self._group.broadcast(slot.layout.buckets(flat, BUCKET_BYTES), timeout_s=self._timeout_s)

    def _give_up(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group, self._members = None, []

    def _end(self, members: list[Member], failure: str) -> None:
        for member in members:
            member.is_over, member.failure = True, failure
            member.changed.set()
