"""Brings every replica to the version that is needed.

    registry ──▶ Distributor.run: leases, retention, one task per registration
                     └▶ _serve(replica): next_action ─▶ Prepare | Commit | Abort ─▶ RolloutEngine ─▶ registry

A replica has a task, a channel and deadlines of its own, so one that stalls holds up nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from typing import Any

import grpc
import structlog

from services.weight_sync.changes import Changes
from services.weight_sync.config import WeightSyncConfig
from services.weight_sync.registry import Registry
from services.weight_sync.replica import Action, Phase, Replica, ReplicaState
from services.weight_sync.store import Store
from shared.metrics import names
from shared.metrics.server import metric
from shared.wire import rpc
from shared.wire.pb import rollout_pb2 as pb
from shared.wire.pb.rollout_pb2_grpc import RolloutEngineStub

log = structlog.get_logger()


class Distributor:
    def __init__(self, config: WeightSyncConfig, registry: Registry, store: Store, changes: Changes) -> None:
        self._config = config
        self._registry = registry
        self._store = store
        self._changes = changes
        self.store_lock = asyncio.Lock()
        """Held by whoever adds versions to the store or drops them."""

    async def run(self) -> None:
        """THE loop. Raises, as an exception group, what failed in any task.

        consumes: registry (registrations, versions, needed step)
        produces: one task per registration; expired leases and retired versions are removed
        waits for: a change of the registry, no longer than the next lease lasts
        unblocked by: Changes.fire, Changes.close
        """
        tasks: dict[Replica, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            with self._changes.subscribe() as changed:
                while not self._changes.is_closed:
                    changed.clear()
                    self._expire()
                    for r in [r for r in tasks if not self._registry.is_registered(r)]:
                        tasks.pop(r).cancel()
                    for r in self._registry.replicas.values():
                        if r not in tasks:
                            tasks[r] = group.create_task(self._serve(r), name=f"distribute to {r.name}")
                    await self.collect()
                    self._export()
                    leases = [r.expires_at for r in self._registry.replicas.values()]
                    await _wait(changed, until=min(leases, default=math.inf))
            for task in tasks.values():
                task.cancel()

    async def _serve(self, r: Replica) -> None:
        """Every call to one registration, one after the other.

        consumes: registry.next_action
        produces: PrepareWeights, CommitWeights, AbortWeights at the replica, and their outcome in the registry
        waits for: a change of the registry, the time of a retry, an answer no longer than its phase's timeout
        unblocked by: Changes.fire, the clock, cancellation when the registration ends
        """
        async with rpc.aio_channel(r.address) as channel:
            stub = RolloutEngineStub(channel)
            with self._changes.subscribe() as changed:
                while self._registry.is_registered(r):
                    changed.clear()
                    now = time.monotonic()
                    action = self._registry.next_action(r, now=now)
                    if action is None:
                        await _wait(changed, until=self._registry.wake_at(r, now=now))
                        continue
                    self._registry.begin(r, action)
                    self._changes.fire()
                    await self._call(stub, r, action)
                    self._changes.fire()

    async def _call(self, stub: RolloutEngineStub, r: Replica, action: Action) -> None:
        """Makes one call and tells the registry how it went."""
        started = time.monotonic()
        error = reply = None
        try:
            reply = await self._request(stub, action)
        except grpc.aio.AioRpcError as failure:
            error = failure
        seconds = time.monotonic() - started
        if not self._registry.is_registered(r):
            return
        rejection = self._failed(r, action, error) if error else self._answered(r, action, reply)
        if error is None:
            metric(names.WEIGHT_SYNC_SECONDS).labels(f"{action.phase}_rpc").observe(seconds)
        if error or rejection:
            metric(names.WEIGHT_SYNC_FAILURES).labels(f"{action.phase}_rpc").inc()
        if rejection:
            log.error("replica ejected", replica=r.name, version=str(action.version), reason=rejection)
        elif error is None:
            log.info(action.phase, replica=r.name, version=str(action.version), seconds=round(seconds, 3))

    async def _request(self, stub: RolloutEngineStub, action: Action) -> Any:
        """The replica's reply. A replica that is restarting is waited for. Raises grpc.aio.AioRpcError."""
        config, digest = self._config, action.version.digest
        match action.phase:
            case Phase.PREPARE:
                prepare = pb.PrepareWeightsRequest(manifest=self._store.manifest(action.version))
                return await stub.PrepareWeights(prepare, timeout=config.prepare_timeout_s, wait_for_ready=True)
            case Phase.COMMIT:
                commit = pb.CommitWeightsRequest(manifest_digest=digest, mode=config.commit_mode)
                return await stub.CommitWeights(commit, timeout=config.commit_timeout_s, wait_for_ready=True)
            case Phase.ABORT:
                abort = pb.AbortWeightsRequest(manifest_digest=digest)
                return await stub.AbortWeights(abort, timeout=config.abort_timeout_s, wait_for_ready=True)

    def _answered(self, r: Replica, action: Action, reply: Any) -> str:
        """Why the replica is rejected, or nothing."""
        match action.phase:
            case Phase.PREPARE:
                return self._registry.prepared(r, reply.manifest_digest, reply.fingerprint)
            case Phase.COMMIT:
                return self._registry.committed(
                    r, reply.manifest_digest, probe_tokens=reply.probe_tokens, probe_differing=reply.probe_differing
                )
            case Phase.ABORT:
                self._registry.aborted(r)
                return ""

    def _failed(self, r: Replica, action: Action, error: grpc.aio.AioRpcError) -> str:
        """Why the replica is ejected, or nothing when the call is to be repeated."""
        reason = f"{error.code().name}: {error.details()}"
        log.warning("call failed", replica=r.name, phase=action.phase, version=str(action.version), reason=reason)
        if action.phase is Phase.ABORT:
            self._registry.aborted(r)
            return ""
        is_unstaged = error.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.NOT_FOUND)
        return self._registry.failed(r, reason, now=time.monotonic(), is_unstaged=is_unstaged)

    async def collect(self) -> int:
        """Deletes versions that are retired and that nobody uses any more. Returns how many."""
        async with self.store_lock:
            dropped = self._registry.collect()
            if dropped:
                await asyncio.to_thread(self._store.drop, dropped, dict(self._registry.versions.oldest_steps))
                log.info("versions dropped", versions=[str(v) for v in dropped])
                self._changes.fire()
        return len(dropped)

    def _expire(self) -> None:
        for r in self._registry.expire(now=time.monotonic()):
            log.warning("replica lost: its lease ended", replica=r.name, incarnation=r.incarnation)
            self._changes.fire()

    def _export(self) -> None:
        states = [self._registry.state(r) for r in self._registry.replicas.values()]
        for state in ReplicaState:
            metric(names.REPLICAS).labels(state).set(states.count(state))
        newest = self._registry.versions.newest(self._registry.run)
        for member, version in (("newest", newest), ("needed", self._registry.target())):
            if version:
                metric(names.POLICY_STEP).labels("weight_sync", member).set(version.step)


async def _wait(changed: asyncio.Event, *, until: float) -> None:
    """Until the event is set or the monotonic clock shows `until`."""
    timeout_s = None if until == math.inf else max(0.0, until - time.monotonic())
    # Not asyncio.wait_for: on Python 3.11 it loses a cancellation that arrives while it ends (python/cpython#86296).
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await changed.wait()
