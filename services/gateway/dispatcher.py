"""Prompts to replicas and finished samples back, under the one version that unfinished work needs.

Under max_lag that version is the newest, replicas sample with any that is not too old for the prompt, and a sample goes on
when its replica takes a newer one on.

    R:todo, R:eval_todo ──▶ dispatch ──gRPC Generate──▶ replicas
                              │  ▲ fleet snapshots       │ chunks
         SetNeeded ◀──────────┘  └──── weight_sync       ▼
                                        Lifecycle.store_generated ──▶ RewardJoin ──▶ R:queue

Everything that a restart has to know is in Valkey; what is kept here are the tokens of unfinished samples, which can be
sampled again to the bit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import structlog

from services.gateway import absence, plan
from services.gateway.absence import Absence, Change
from services.gateway.fleet import Fleet
from services.gateway.flights import Decode, Flights
from services.gateway.flow import FlowMetrics
from services.gateway.generation import OnChunk, Work
from services.gateway.rewards import RewardJoin
from shared.wire import valkey
from shared.wire.lifecycle import Lifecycle
from shared.wire.pb import weight_sync_pb2 as ws
from shared.wire.records import EvalRecord, RunRecord
from shared.wire.run import RunState
from shared.wire.store import RunStore
from shared.wire.types import DropReason

log = structlog.get_logger()

MAX_WAIT_S = 10.0
"""Longest time without a look, should a signal get lost."""
SIGNAL_BLOCK_S = 0.25
"""Longest wait for an event, and shortest time between two updates of a run's metrics: events come by the hundred a second."""
_DISPATCHES = (b"trajectory.accepted", b"trajectory.dropped", b"evaluation.accepted", b"run.")
"""Events after which there may be something to dispatch."""
_NO_REWARD = (b"trajectory.accepted", b"trajectory.generating")
"""Events that change nothing for the reward join."""


class Dispatcher:
    """
    Args:
        store: the gateway's own.
        weight_sync_address: host:port.
        max_inflight_samples: of one replica; a larger group goes to an idle one.
        stream_idle_s: silence of a Generate stream after which its replica is asked whether it samples at all.
        max_group_failures: faults of one group before the run is paused with reason infra_error; under max_lag, before its
            unfinished samples are dropped.
        no_replica_s: without a replica that is not ejected before the run is paused with reason no_replica.
        decode: needed once a prompt asks for exact match.
        on_chunk: sees the chunks of evaluation samples, for streamed completions.
    """

    def __init__(
        self, store: RunStore, weight_sync_address: str, *, max_inflight_samples: int = 256,
        stream_idle_s: float = 60.0, max_group_failures: int = 5, no_replica_s: float = 30.0, rpc_timeout_s: float = 10.0,
        decode: Decode | None = None, on_chunk: OnChunk | None = None,
    ) -> None:  # fmt: skip
        self._store = store
        self._lifecycle = Lifecycle(store)
        self._max_inflight_samples = max_inflight_samples
        self._wake = asyncio.Event()
        self._fleet = Fleet(weight_sync_address, on_change=self._wake.set, rpc_timeout_s=rpc_timeout_s)
        self._rewards = RewardJoin(store)
        self._flights = Flights(
            store,
            wake=self._wake,
            idle_s=stream_idle_s,
            max_failures=max_group_failures,
            decode=decode,
            on_chunk=on_chunk,
        )
        self._metrics = FlowMetrics()
        self._absence = Absence(no_replica_s)
        self._run = ""
        """Name of the run that was adopted."""
        self._step: int | None = None
        """The version that everything in flight is sampled by; under max_lag the newest one that anything is."""

    def replicas_by_state(self) -> Mapping[str, int]:
        """As weight_sync last said."""
        return self._fleet.replicas_by_state()

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set; a fault in any loop ends all of them and is raised (as an ExceptionGroup)."""
        try:
            async with asyncio.TaskGroup() as tasks:
                loops = (self._fleet.follow(), self._rewards.follow(), self._signals(), self._dispatch(tasks))
                running = [tasks.create_task(loop) for loop in loops]
                await stop.wait()
                for task in running:
                    task.cancel()
                self._flights.cancel()
        finally:
            await self._fleet.close()
            await self._flights.close()

    async def _dispatch(self, tasks: asyncio.TaskGroup) -> None:
        """consumes: prompts and evaluation items that are to be generated, fleet snapshots
        produces: SetNeeded, Generate streams (one task each)
        waits for: a wake-up, or the end of a replica's penalty, 10 s at most
        unblocked by: accepted prompts and run changes (through the run's events), the fleet, the end of a stream
        """
        while True:
            self._wake.clear()
            run = await self._store.newest_run()
            if run is not None:
                await self._adopt(run)
                horizon = await self._lifecycle.horizon(run.run)
                evals = await self._drop_lost(run.run, horizon.evals)
                await self._flights.review(run, self._fleet.snapshot.replicas)
                await self._look_for_replicas(run, has_work=horizon.is_open)
                version = await self._agree_on_version(run, horizon.first_open, evals)
                if version is not None and run.state is not RunState.PAUSED:
                    await self._send(tasks, run, version, evals)
            await self._rest()

    async def _adopt(self, run: RunRecord) -> None:
        """A run seen for the first time: nobody generates for it, and nobody will for the one before it."""
        if run.run == self._run:
            return
        for older in (await self._store.list_runs(cursor=run.run, limit=1)).items:
            for evaluation in (await self._lifecycle.horizon(older.run)).evals:
                await self._lifecycle.drop_eval(older.run, evaluation.eval, DropReason.CANCELLED)
        num_reset = await self._lifecycle.reset_generating(run.run)
        log.info("dispatching", run=run.run, state=run.state.value, reset=num_reset)
        self._run, self._step = run.run, None

    async def _look_for_replicas(self, run: RunRecord, *, has_work: bool) -> None:
        """Pauses a run that nobody can generate for, so that somebody hears of it, and resumes it."""
        replicas = self._fleet.snapshot.replicas
        change = self._absence.look(
            run, replicas, has_work=has_work, is_known=self._fleet.is_told, now=time.monotonic()
        )
        if change is Change.PAUSE:
            detail = absence.describe(replicas)
            if await self._lifecycle.pause(run.run, reason=absence.NO_REPLICA, detail=detail):
                log.error("paused: no replica", run=run.run, detail=detail)
        elif change is Change.RESUME and await self._lifecycle.resume(run.run, only=absence.NO_REPLICA):
            log.info("resumed: there is a replica", run=run.run)

    async def _drop_lost(self, run: str, evals: Sequence[EvalRecord]) -> list[EvalRecord]:
        """Drops evaluations whose version is gone, and returns the others."""
        kept = []
        for evaluation in evals:
            reason = plan.lost(evaluation, self._fleet.versions(run))
            if reason is None:
                kept.append(evaluation)
            else:
                num = await self._lifecycle.drop_eval(run, evaluation.eval, reason)
                log.warning(
                    "evaluation dropped",
                    run=run,
                    eval=evaluation.eval,
                    step=evaluation.step,
                    reason=reason,
                    samples=num,
                )
        return kept

    async def _agree_on_version(
        self, run: RunRecord, first_open: int, evals: Sequence[EvalRecord]
    ) -> ws.Version | None:
        """The published version to sample with now, once weight_sync was told; None: not yet."""
        versions = {v.step: v for v in self._fleet.versions(run.run)}
        step = plan.needed_step(
            run.config,
            is_over=run.state.is_over,
            first_open=first_open,
            pinned={e.step for e in evals},
            published=versions,
            current=self._step,
            is_moving=plan.is_moving(self._fleet.snapshot.replicas, self._step),
        )
        flights = self._flights
        if step is None or not plan.may_change(
            self._step, step, num_samples=flights.num_samples, num_pinned=flights.num_pinned_samples
        ):
            return None
        self._step = step
        return versions.get(step) if await self._fleet.tell_needed(run.run, step) else None

    async def _send(
        self, tasks: asyncio.TaskGroup, run: RunRecord, version: ws.Version, evals: Sequence[EvalRecord]
    ) -> None:
        """Starts whatever finds room: training groups in number order, then evaluations."""
        pending = [w for w in await self._pending(run, version, evals) if w.group_id not in self._flights]
        replicas = self._fleet.snapshot.replicas
        share = plan.fair_share(replicas, [*self._flights.group_samples(), *(len(w.group.samples) for w in pending)])
        load = self._flights.load()
        for work in pending:
            replica = plan.choose_replica(
                replicas,
                versions=self._usable_versions(run, work),
                states=plan.READY if work.is_pinned else plan.SERVING,
                load=load,
                num_samples=len(work.group.samples),
                max_inflight_samples=min(self._max_inflight_samples, share),
                avoid=self._flights.suspended(),
            )
            if replica is not None:
                self._flights.start(tasks, replace(work, version=replica.version), replica)
                load[plan.replica_key(replica)] += len(work.group.samples)

    def _usable_versions(self, run: RunRecord, work: Work) -> list[ws.Version]:
        if work.is_pinned:
            return [work.version]
        begun_by = self._flights.last_step(work.group_id, work.group.samples)
        versions = self._fleet.versions(run.run)
        return plan.usable_versions(run.config, work.group.number, versions, newest=work.version, begun_by=begun_by)

    async def _pending(self, run: RunRecord, version: ws.Version, evals: Sequence[EvalRecord]) -> list[Work]:
        config, name = run.config, run.run
        groups = []
        if run.state is RunState.RUNNING:
            numbers = plan.prompts_of(config, version.step)
            flying = self._flights.numbers(name)
            found = await self._lifecycle.pending_prompts(name, first=numbers.start, end=numbers.stop, besides=flying)
            groups += [(group, config.seed, False) for group in found]
        for e in evals:
            if e.step == version.step:
                groups += [(group, e.seed, True) for group in await self._lifecycle.pending_items(name, e.eval)]
        return [
            Work(run=name, model=config.model, group=group, version=version, seed=seed, is_evaluation=is_evaluation,
                 is_pinned=is_evaluation or config.max_lag is None)
            for group, seed, is_evaluation in groups
        ]  # fmt: skip

    async def _rest(self) -> None:
        times = (self._flights.next_release_s(), self._absence.left_s(time.monotonic()))
        # One that has passed waits for an event: of the pause that it led to, or of the resumption.
        wait_s = min([MAX_WAIT_S, *(t for t in times if t and t > 0), *([] if self._fleet.is_told else [1.0])])
        try:
            async with asyncio.timeout(wait_s):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _signals(self) -> None:
        """consumes: the newest run's events, new runs
        produces: wake-ups for dispatch and for the reward join; metrics
        waits for: the next event, `SIGNAL_BLOCK_S` at most
        unblocked by: whoever changes the run
        """
        client = self._store.client
        created = (await client.xrevrange(valkey.CREATED, count=1) or [(b"0-0", None)])[0][0]
        newest = await self._store.newest_run()
        run = newest.run if newest is not None else ""
        cursor: bytes | str = await self._store.last_event(run)
        # Whatever came before the cursors is found by looking once.
        self._wake.set()
        self._rewards.wake.set()
        due = 0.0
        while True:
            streams = {valkey.CREATED: created} | ({valkey.key(run, "events"): cursor} if run else {})
            for stream, entries in await client.xread(streams, count=1000, block=int(SIGNAL_BLOCK_S * 1000)):
                if stream == valkey.CREATED.encode():
                    created, run, cursor = entries[-1][0], entries[-1][1][b"run"].decode(), "0-0"
                    self._wake.set()
                elif stream == valkey.key(run, "events").encode():
                    cursor = entries[-1][0]
                    self._signal({fields[b"type"] for _, fields in entries})
            if run and time.monotonic() >= due:
                due = time.monotonic() + SIGNAL_BLOCK_S
                self._metrics.update(await self._store.get_run(run), await self._store.counts(run))

    def _signal(self, types: set[bytes]) -> None:
        if any(t.startswith(_DISPATCHES) for t in types):
            self._wake.set()
        if any(not t.startswith(_NO_REWARD) for t in types):
            self._rewards.wake.set()
