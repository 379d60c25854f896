"""Runs: creating one, its counts, its steps, and whether the gateway can serve it."""

from __future__ import annotations

import asyncio

import grpc.aio
from redis.exceptions import RedisError

from services.gateway import answers, prompts, views
from services.gateway.context import Gateway
from services.gateway.problems import FieldError, Problem
from shared.wire.pb import weight_sync_pb2 as pb
from shared.wire.records import RunExists, RunRecord
from shared.wire.run import RunConfig
from shared.wire.types import State

PROBE_S = 2.0
"""Deadline of one readiness check."""


async def create(gateway: Gateway, config: RunConfig) -> tuple[RunRecord, bool]:
    """Returns: the run, and whether it is new: an equal configuration posted again gives the run there is.

    Raises: RunExists, RunActive, NotDurable, Problem model-unavailable.
    """
    if config.num_steps * config.prompts_per_step >= 2**31:
        detail = f"num_steps * prompts_per_step must be below 2^31, got {config.num_steps * config.prompts_per_step}"
        raise Problem("invalid-request", detail, errors=[FieldError(pointer="/num_steps", detail=detail)])
    await gateway.tokenizers.get(config.model)
    try:
        return await gateway.store.create_run(config), True
    except RunExists:
        record = await gateway.store.get_run(config.run)
        if record.config != config:
            raise
        return record, False


async def metrics(gateway: Gateway, run: str) -> answers.Metrics:
    """Raises UnknownRun."""
    record = await gateway.store.get_run(run)
    counts = await gateway.store.counts(run)
    limit = prompts.gate_limit(record)
    newest = await gateway.store.newest_step(run)
    return answers.Metrics(
        run=run,
        state=record.state.value,
        step=record.step,
        durable_step=record.durable_step,
        accepted=counts.accepted,
        ingested=counts.ingested,
        replaced=counts.replaced,
        trained=counts.trained,
        dropped=dict(counts.dropped),
        live=counts.live,
        states={s.value: counts.by_state.get(s, 0) for s in State if s is not State.EVALUATED},
        rewards_late=counts.rewards_late,
        queue_depth=counts.queue_depth,
        evaluations={s.value: n for s, n in counts.eval_by_state.items()},
        gate=answers.Gate(limit=limit, in_flight=counts.live),
        replicas=dict(gateway.replicas()),
        latest_step=views.step(newest) if newest else None,
    )


async def steps(gateway: Gateway, run: str, after: str, limit: int) -> answers.Steps:
    """Raises UnknownRun."""
    await gateway.store.get_run(run)
    found = await gateway.store.steps(run, after=after, limit=limit)
    return answers.Steps(
        steps=[views.step(s) for s in found], next_cursor=found[-1].cursor if len(found) == limit else None
    )


async def readiness(gateway: Gateway) -> answers.Readiness:
    """Raises: Problem not-ready naming every check that failed."""
    checks = {"valkey": await _valkey(gateway), "weight_sync": await _weight_sync(gateway), "replicas": "ok"}
    if checks["valkey"] == "ok":
        newest = await gateway.store.newest_run()
        is_served = newest is None or newest.state.is_over or gateway.replicas().get("ready", 0) > 0
        # A run that is fed with groups sampled elsewhere has no replica, and needs none.
        if newest and not is_served and (waiting := (await gateway.store.counts(newest.run)).to_generate):
            checks["replicas"] = (
                f"run {newest.run} is {newest.state}, {waiting} samples wait to be generated and no replica is ready"
            )
    failed = [name for name, state in checks.items() if state != "ok"]
    if failed:
        raise Problem(
            "not-ready", "; ".join(f"{name}: {checks[name]}" for name in failed), retry_after_s=1, checks=checks
        )
    return answers.Readiness(status="ready", checks=checks)


async def _valkey(gateway: Gateway) -> str:
    try:
        async with asyncio.timeout(PROBE_S):
            await gateway.store.ping()
    except (RedisError, TimeoutError) as error:
        return f"does not answer ({type(error).__name__})"
    return "ok"


async def _weight_sync(gateway: Gateway) -> str:
    try:
        await gateway.weight_sync.ListVersions(pb.ListVersionsRequest(run=""), timeout=PROBE_S)
    except grpc.aio.AioRpcError as error:
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            return f"does not answer ({error.code().name})"
    return "ok"
