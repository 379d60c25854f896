"""What is being generated right now: one flight is one group on one replica. Keeps what was received across failures."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import grpc
import structlog

from services.gateway.generation import OnChunk, StreamBroken, Work, generate
from services.gateway.partial import PartialSample
from services.gateway.plan import ReplicaKey, replica_key
from services.gateway.rewards import exact_match
from shared.metrics import names
from shared.metrics.server import metric
from shared.wire import rpc
from shared.wire.lifecycle import Lifecycle
from shared.wire.pb import weight_sync_pb2 as ws
from shared.wire.prompts import PromptItem
from shared.wire.reader import RunReader
from shared.wire.records import RunRecord
from shared.wire.run import RunState
from shared.wire.types import DropReason

log = structlog.get_logger()

Decode = Callable[[str, Sequence[int]], Awaitable[str]]
"""(model, sampled token ids) -> text without special tokens; for rewards by exact match."""

FIRST_PENALTY_S = 0.1
MAX_PENALTY_S = 5.0
_IN_DOUBT = "data_loss"
"""The replica failed its proof: it is about to be ejected."""
_INNOCENT = ("failed_precondition", "resource_exhausted", _IN_DOUBT)
"""Endings that say nothing about the group: it goes elsewhere, as often as it takes."""


@dataclass(slots=True, kw_only=True, eq=False)
class Flight:
    work: Work
    replica: ws.Replica
    samples: list[PartialSample]
    task: asyncio.Task[None] | None = None
    evicted: str = ""
    """Why it was cancelled, if not by the end of the process."""


@dataclass(slots=True)
class Penalty:
    """A replica that broke a stream is left alone for a while, longer each time; a finished group clears it."""

    num: int = 0
    until: float = 0.0

    def add(self) -> None:
        self.until = time.monotonic() + min(FIRST_PENALTY_S * 2**self.num, MAX_PENALTY_S)
        self.num += 1


@dataclass(slots=True)
class Blame:
    """Faults that a group may have caused itself."""

    num: int = 0
    incarnations: set[ReplicaKey] = field(default_factory=set)
    """Replicas that died under it: one death counts once, however often it was tried again."""


class Flights:
    def __init__(
        self,
        store: RunReader,
        *,
        wake: asyncio.Event,
        idle_s: float,
        max_failures: int,
        decode: Decode | None,
        on_chunk: OnChunk | None = None,
    ) -> None:
        self._lifecycle = Lifecycle(store)
        self._wake = wake
        self._idle_s = idle_s
        self._max_failures = max_failures
        self._decode = decode
        self._on_chunk = on_chunk
        self._flights: dict[str, Flight] = {}
        self._partials: dict[str, PartialSample] = {}
        self._penalties: dict[ReplicaKey, Penalty] = {}
        self._blames: dict[str, Blame] = {}
        self._channels: dict[ReplicaKey, grpc.aio.Channel] = {}

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._flights

    @property
    def num_samples(self) -> int:
        return sum(self.group_samples())

    def group_samples(self) -> list[int]:
        """Samples of each group in flight."""
        return [len(f.samples) for f in self._flights.values()]

    def numbers(self, run: str) -> set[int]:
        """Of the run's prompts in flight."""
        works = (f.work for f in self._flights.values())
        return {work.group.number for work in works if work.run == run and not work.is_evaluation}

    @property
    def num_pinned_samples(self) -> int:
        """Those under whose replica no version may be swapped."""
        return sum(len(f.samples) for f in self._flights.values() if f.work.is_pinned)

    def last_step(self, group_id: str, samples: Sequence[int]) -> int:
        """Policy step of the last token received of any of these samples; -1 when there is none."""
        partials = (self._partials.get(f"{group_id}.{i}") for i in samples)
        return max((p.last_step for p in partials if p is not None), default=-1)

    def load(self) -> Counter[ReplicaKey]:
        """Samples in flight by replica."""
        load: Counter[ReplicaKey] = Counter()
        for flight in self._flights.values():
            load[replica_key(flight.replica)] += len(flight.samples)
        return load

    def suspended(self) -> set[ReplicaKey]:
        now = time.monotonic()
        return {key for key, penalty in self._penalties.items() if penalty.until > now}

    def next_release_s(self) -> float | None:
        """Seconds until the next suspended replica may be tried again."""
        now = time.monotonic()
        return min((p.until - now for p in self._penalties.values() if p.until > now), default=None)

    def start(self, tasks: asyncio.TaskGroup, work: Work, replica: ws.Replica) -> None:
        samples = [self._partial(work, index) for index in work.group.samples]
        flight = Flight(work=work, replica=replica, samples=samples)
        self._flights[work.group_id] = flight
        flight.task = tasks.create_task(self._fly(flight), name=f"generate {work.group_id}")

    async def review(self, run: RunRecord, replicas: Sequence[ws.Replica]) -> None:
        """Ends flights that have become pointless: of a stopped run, of a cancelled group, or on a replica that was ejected."""
        dropped = await self._lifecycle.dropped(run.run, sorted(self.numbers(run.run)))
        by_key = {replica_key(r): r for r in replicas}
        is_cancelled = run.state in (RunState.STOPPED, RunState.FAILED)
        for flight in list(self._flights.values()):
            replica = by_key.get(replica_key(flight.replica))
            work = flight.work
            is_wanted = work.is_evaluation or not (is_cancelled or work.group.number in dropped)
            if work.run != run.run or not is_wanted:
                self._evict(flight, "cancelled")
            elif replica is not None and replica.state == "ejected":
                self._evict(flight, f"ejected: {replica.reason}")
        if run.state is not RunState.RUNNING:
            self._blames.clear()
        if run.state.is_over and not self._flights:
            self._partials.clear()
        busy = {replica_key(f.replica) for f in self._flights.values()}
        for key in [k for k in self._penalties if k not in by_key]:
            del self._penalties[key]
        for key in [k for k in self._channels if k not in by_key and k not in busy]:
            await self._channels.pop(key).close()

    def cancel(self) -> None:
        """The process ends; the next one samples what is open again."""
        for flight in self._flights.values():
            if flight.task is not None:
                flight.task.cancel()

    async def close(self) -> None:
        await self._lifecycle.close()
        for channel in self._channels.values():
            await channel.close()

    async def _fly(self, flight: Flight) -> None:
        """consumes: one group
        produces: its finished samples, in Valkey
        waits for: the replica's chunks
        unblocked by: the stream's end, its idle deadline, or an eviction
        """
        work, key = flight.work, replica_key(flight.replica)
        try:
            live = await self._lifecycle.start_generating(work.run, [s.trajectory_id for s in flight.samples])
            samples = [s for s in flight.samples if s.trajectory_id in live]
            if samples:
                self._count_start(work, samples)
                await generate(
                    self._channel(flight.replica),
                    work,
                    samples,
                    replica=flight.replica.replica,
                    idle_s=self._idle_s,
                    on_finished=lambda sample: self._store(work, sample),
                    on_chunk=self._on_chunk if work.is_evaluation else None,
                )
            self._penalties.pop(key, None)
            self._blames.pop(work.group_id, None)
        except StreamBroken as broken:
            await self._broken(flight, broken)
        except asyncio.CancelledError:
            if not flight.evicted:
                raise
            log.warning("generation ended", group=work.group_id, replica=flight.replica.replica, reason=flight.evicted)
        finally:
            del self._flights[work.group_id]
            self._wake.set()

    def _evict(self, flight: Flight, reason: str) -> None:
        if flight.evicted or flight.task is None:
            return
        flight.evicted = reason
        metric(names.REPLICA_FAILURES).labels(reason=reason.partition(":")[0]).inc()
        self._forget(flight)
        flight.task.cancel()

    def _forget(self, flight: Flight) -> None:
        """An ejected replica is not believed: what it sampled of unfinished samples is sampled again."""
        for sample in flight.samples:
            self._partials.pop(sample.trajectory_id, None)

    async def _broken(self, flight: Flight, broken: StreamBroken) -> None:
        work, key = flight.work, replica_key(flight.replica)
        metric(names.REPLICA_FAILURES).labels(reason=broken.reason).inc()
        log.warning("stream broke", group=work.group_id, replica=key[0], reason=broken.reason, detail=str(broken),
                    received=sum(len(s.token_ids) for s in flight.samples))  # fmt: skip
        if broken.reason != "invalid_argument":
            self._penalties.setdefault(key, Penalty()).add()
        if broken.reason == _IN_DOUBT:
            self._forget(flight)
        if broken.reason in _INNOCENT:
            return
        blame = self._blames.setdefault(work.group_id, Blame())
        if broken.reason == "unavailable" and key in blame.incarnations:
            return
        blame.incarnations.add(key)
        blame.num += 1
        if blame.num >= self._max_failures:
            del self._blames[work.group_id]
            await self._give_up(work, f"{work.group_id} failed {blame.num} times, the last on {key[0]}: {broken}")

    async def _give_up(self, work: Work, detail: str) -> None:
        """A fault never becomes an empty sample: under a fixed lag training waits for an operator, under max_lag it goes on
        with what is finished of the group, an evaluation item is dropped."""
        log.error("giving up", detail=detail)
        if work.is_evaluation:
            await self._lifecycle.drop_items(work.run, [work.group_id], DropReason.INFRA_ERROR)
        elif not work.is_pinned:
            await self._lifecycle.drop_unfinished(work.run, work.group_id, work.group.samples, DropReason.INFRA_ERROR)
            for index in work.group.samples:
                self._partials.pop(f"{work.group_id}.{index}", None)
        else:
            await self._lifecycle.pause(work.run, reason="infra_error", detail=detail)

    async def _store(self, work: Work, sample: PartialSample) -> None:
        trajectory = sample.trajectory(work.group, run=work.run, seed=work.seed)
        grade = await self._grade(work, sample)
        await self._lifecycle.store_generated(work.run, trajectory, reward=grade)
        self._partials.pop(sample.trajectory_id, None)

    async def _grade(self, work: Work, sample: PartialSample) -> float | None:
        prompt = work.group.prompt
        answer = prompt.reward.answer if isinstance(prompt, PromptItem) else prompt.answer
        if answer is None:
            return None
        if self._decode is None:
            raise RuntimeError(f"{work.group_id} is graded by exact match, but this dispatcher was given no `decode`")
        return exact_match(await self._decode(work.model, sample.token_ids), answer)

    def _partial(self, work: Work, index: int) -> PartialSample:
        trajectory_id = f"{work.group_id}.{index}"
        partial = self._partials.get(trajectory_id)
        # One that is finished was not stored, and one of another version is of weights that were replaced.
        if partial is None or partial.finish_reason or not partial.can_go_on(work.version, is_pinned=work.is_pinned):
            partial = PartialSample(
                trajectory_id=trajectory_id, sample_index=index, max_tokens=work.group.prompt.sampling.max_tokens
            )
            self._partials[trajectory_id] = partial
        return partial

    def _count_start(self, work: Work, samples: Sequence[PartialSample]) -> None:
        num_continued = sum(bool(s.token_ids) for s in samples)
        metric(names.DISPATCHED_GROUPS).labels(run=work.run).inc()
        metric(names.CONTINUED_TRAJECTORIES).labels(run=work.run).inc(num_continued)
        if num_continued:
            log.info("continuing", group=work.group_id, samples=num_continued)

    def _channel(self, replica: ws.Replica) -> grpc.aio.Channel:
        key = replica_key(replica)
        if key not in self._channels:
            self._channels[key] = rpc.aio_channel(replica.address)
        return self._channels[key]
