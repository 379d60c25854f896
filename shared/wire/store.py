"""What clients of a run change, on Valkey: runs, prompts, rewards, evaluations. Used by the gateway (asyncio).

What can be read is in `shared.wire.reader` and `shared.wire.evaluations`, what the dispatcher does to a trajectory in
`shared.wire.lifecycle`, what the trainer does in `shared.wire.queue`. The keys are in docs/architecture.md. Every change of a
state is one Lua script (`lua/`) that checks the old state, writes the new one, moves the counts and emits the event:
accepted = trained + dropped + live after any crash.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from shared.config import unstructure
from shared.wire import valkey
from shared.wire.codec import encode_trajectory
from shared.wire.durability import GroupCommit
from shared.wire.evaluations import EvaluationReader
from shared.wire.ingest import IngestedGroup
from shared.wire.prompts import EvalItem, PromptItem, encode_prompt, fingerprint
from shared.wire.records import (
    AcceptResult,
    AcceptStatus,
    EvalRecord,
    GroupSealed,
    IdempotencyRecord,
    IllegalTransition,
    RewardItem,
    RewardResult,
    RewardStatus,
    RunActive,
    RunExists,
    RunOver,
    RunRecord,
    UnknownRun,
    UnknownTrajectory,
)
from shared.wire.run import RunConfig, RunState
from shared.wire.stored import reward_json
from shared.wire.valkey import key

IDEMPOTENCY_TTL_S = 24 * 3600
IN_PROGRESS_TTL_S = 60


class RunStore(EvaluationReader):
    """Reads come from RunReader and EvaluationReader: get_run, newest_run, list_runs, get_trajectory, list_trajectories,
    events, last_event, counts, steps, get_eval, list_evals, ping.

    Errors: everything may raise redis.exceptions.RedisError (503). The rest is named per method.
    """

    def __init__(self, client: valkey.Client, commit: GroupCommit) -> None:
        super().__init__(client)
        self._commit = commit

    @classmethod
    async def connect(cls, url: str, *, durable_timeout_s: float = 5.0, retries: int = valkey.RETRIES) -> RunStore:
        """Connects and checks the server (version, append-only file, noeviction). Raises ValkeyRefused with what to do.

        `retries` of one command bound how long a caller waits for a server that is gone.
        """
        client = valkey.connect_async(url, retries=retries)
        valkey.check(await client.info())
        commit = GroupCommit(valkey.connect_async(url, retries=3), timeout_s=durable_timeout_s)
        await commit.start()
        return cls(client, commit)

    async def close(self) -> None:
        await self._commit.close()
        await self.client.aclose()

    def durable(self) -> AbstractAsyncContextManager[None]:
        """Around writes: on exit they are on disk, or NotDurable is raised. One WAITAOF serves all who wait at once."""
        return self._commit.durable()

    # runs

    async def create_run(self, config: RunConfig) -> RunRecord:
        """On disk when it returns. Raises RunExists, RunActive, NotDurable."""
        async with self.durable():
            answer = await self.call(
                "create_run", config.run, time.time(), uuid.uuid4().hex, json.dumps(unstructure(config)),
                config.prompts_per_step, config.num_steps, config.queue_bound_batches,
                0 if config.max_lag is None else config.least_survivors,
            )  # fmt: skip
        if answer[0] == b"exists":
            raise RunExists(f"run {config.run} exists; choose another name")
        if answer[0] == b"active":
            raise RunActive(f"run {answer[1].decode()} is not over; stop it or wait for its end")
        return await self.get_run(config.run)

    async def set_run_state(self, run: str, state: RunState, *, reason: str = "", detail: str = "") -> RunRecord:
        """Pause, resume, stop. A stopped or failed run's live trajectories are DROPPED(cancelled) in the same script.

        Idempotent on an equal state. On disk when it returns.
        Raises UnknownRun, IllegalTransition (a run that is over stays over), NotDurable.
        """
        async with self.durable():
            try:
                await self.call("set_run_state", run, time.time(), state.value, reason, detail, "")
            except RunOver as error:
                raise IllegalTransition(f"run {run} is {error.state} and can't become {state}") from error
        return await self.get_run(run)

    # prompts

    async def accept_prompts(self, run: str, items: Sequence[PromptItem]) -> list[AcceptResult]:
        """One result per item, in order; every accepted one is on disk when it returns.

        Raises UnknownRun, NotDurable (repeat the same post: it answers `duplicate`).
        """
        return await self._accept(run, items, [_accept_args(run, item, fingerprint(item)) for item in items])

    async def accept_groups(self, run: str, groups: Sequence[tuple[str, IngestedGroup]]) -> list[AcceptResult]:
        """Takes groups that were sampled elsewhere, as `accept_prompts` takes prompts; they are AWAITING_REWARD or REWARDED.

        Args:
            groups: fingerprint of the body, and the group with its version.
        """
        calls = []
        for body, group in groups:
            samples = []
            for trajectory, rewards in zip(group.trajectories, group.rewards, strict=True):
                known = {source: reward_json(value, 0) for source, value in rewards.items()}
                samples += [encode_trajectory(trajectory), json.dumps(known)]
            calls.append([*_accept_args(run, group.prompt, body), group.sampler, *samples])
        return await self._accept(run, [group.prompt for _, group in groups], calls)

    async def _accept(self, run: str, items: Sequence[PromptItem], calls: list[list[Any]]) -> list[AcceptResult]:
        async with self.durable():
            answers = await valkey.call_many(self.client, "accept", run, calls)
        if any(answer[0] == b"unknown_run" for answer in answers):
            raise UnknownRun(f"no run {run}")
        return [_accept_result(run, item, answer) for item, answer in zip(items, answers, strict=True)]

    async def cancel_group(self, run: str, number: int) -> int:
        """An operator drops the group of a prompt for good: its batch is trained without it. On disk when it returns.

        Idempotent. Returns how many samples were dropped now.
        Raises UnknownRun, UnknownTrajectory (the number was never posted), IllegalTransition (the run is over), GroupSealed (it
        is being trained, or is trained), NotDurable.
        """
        async with self.durable():
            answer, *rest = await self.call("cancel_group", run, time.time(), number)
        match answer.decode():
            case "unknown":
                raise UnknownTrajectory(f"run {run} has no group {number}")
            case "run_over":
                raise IllegalTransition(f"run {run} is {rest[0].decode()}: what was live is dropped already")
            case "sealed":
                raise GroupSealed(
                    f"group {run}.{number} is {rest[0].decode()}: it is part of the weights, or about to be"
                )
        return int(rest[0])

    async def fingerprints(self, run: str, numbers: Sequence[int]) -> list[str | None]:
        """Of the bodies that were accepted under these numbers; None where there is none."""
        found = await self.client.hmget(key(run, "fingerprints"), numbers) if numbers else []
        return [None if f is None else f.decode() for f in found]

    # rewards

    async def put_reward(
        self, run: str, trajectory_id: str, source: str, value: float, *, revision: int = 0
    ) -> RewardResult:
        """`put_rewards` of one."""
        item = RewardItem(trajectory_id=trajectory_id, source=source, value=value, revision=revision)
        return (await self.put_rewards(run, [item]))[0]

    async def put_rewards(self, run: str, items: Sequence[RewardItem]) -> list[RewardResult]:
        """One result per item, in order; on disk when it returns. May come before the sample is generated.

        Idempotent by (trajectory, source, revision); a higher revision replaces until the group is queued.
        Evaluation samples take rewards of any source at any time; they are kept beside the sample.
        Raises ValueError (a value that is not finite), UnknownRun, NotDurable.
        """
        for item in items:
            if not math.isfinite(item.value):
                raise ValueError(f"reward of {item.trajectory_id} must be finite, got {item.value}")
        calls = [[time.time(), i.trajectory_id, i.source, i.revision, reward_json(i.value, i.revision)] for i in items]
        async with self.durable():
            answers = await valkey.call_many(self.client, "reward", run, calls)
        if any(answer[0] == b"unknown" for answer in answers):
            await self.get_run(run)
        return [_reward_result(item, answer) for item, answer in zip(items, answers, strict=True)]

    # evaluations

    async def create_eval(
        self, run: str, items: Sequence[EvalItem], *, step: int, digest: str = "", seed: int | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> EvalRecord:  # fmt: skip
        """Accepts an evaluation pinned to one version. Allowed after the run is over too. On disk when it returns.

        Args:
            step, digest: the version; the caller resolves "newest" before. Empty digest: whatever is published as `step`.
            seed: of its samples; by default a function of the run's seed and the evaluation's number.

        Raises ValueError (no items), UnknownRun, IllegalTransition (another run came after it), NotDurable.
        """
        if not items:
            raise ValueError("an evaluation needs at least one item")
        async with self.durable():
            eval_id = await self._create_eval(run, items, step=step, digest=digest, seed=seed, metadata=metadata or {})
        return await self.get_eval(run, eval_id)

    # Idempotency-Key

    async def begin_request(self, idempotency_key: str, request_fingerprint: str) -> IdempotencyRecord | None:
        """None: the key is new and now in progress, go on. Otherwise what the first request left (see IdempotencyRecord).

        Scope the key by caller and route. In-progress marks end after 60 s, so a crash does not lock a key for a day.
        """
        mark = request_fingerprint.encode() + b"\n"
        stored = await self.client.set(_idem(idempotency_key), mark, nx=True, get=True, ex=IN_PROGRESS_TTL_S)
        if stored is None:
            return None
        first, _, response = stored.partition(b"\n")
        return IdempotencyRecord(fingerprint=first.decode(), response=response or None)

    async def finish_request(self, idempotency_key: str, request_fingerprint: str, response: bytes) -> None:
        """Keeps the response for 24 h."""
        value = request_fingerprint.encode() + b"\n" + response
        await self.client.set(_idem(idempotency_key), value, ex=IDEMPOTENCY_TTL_S)

    async def abandon_request(self, idempotency_key: str) -> None:
        """The request failed in a way that a repeat may mend: forget the key."""
        await self.client.delete(_idem(idempotency_key))


def _idem(idempotency_key: str) -> str:
    return f"tz:idem:{idempotency_key}"


def _accept_args(run: str, item: PromptItem, body: str) -> list[Any]:
    """Arguments of accept.lua that prompts and ingested groups share."""
    prompt_id, spec = item.prompt_id or f"{run}.{item.number}", item.reward
    return [time.time(), item.number, prompt_id, body, encode_prompt(item), item.n, json.dumps(spec.sources),
            spec.deadline_s]  # fmt: skip


def _accept_result(run: str, item: PromptItem, answer: list[Any]) -> AcceptResult:
    status, value = AcceptStatus(answer[0].decode()), answer[1]
    group = f"{run}.{item.number}"
    known = status in (AcceptStatus.ACCEPTED, AcceptStatus.DUPLICATE)
    value = value.decode() if isinstance(value, bytes) else value
    detail = {
        AcceptStatus.CONFLICT: f"number {item.number} or prompt_id {item.prompt_id!r} is taken by prompt {value}, "
        "whose body differs",
        AcceptStatus.GATE_CLOSED: f"number {item.number} is not below {value}; the gate opens with the next checkpoint",
        AcceptStatus.OUT_OF_RANGE: f"the run has {value} prompts, number {item.number} is beyond them",
        AcceptStatus.RUN_OVER: f"run {run} is {value}",
    }.get(status, "")
    return AcceptResult(
        status=status,
        number=item.number,
        prompt_id=item.prompt_id or group,
        group_id=group,
        trajectory_ids=tuple(f"{group}.{i}" for i in range(item.n)) if known else (),
        detail=detail,
    )


def _reward_result(item: RewardItem, answer: list[bytes]) -> RewardResult:
    status, value = RewardStatus(answer[0].decode()), answer[1].decode()
    detail = {
        RewardStatus.CONFLICT: f"stored is {value}, got revision {item.revision} with value {item.value}",
        RewardStatus.LATE: f"the trajectory is {value}",
        RewardStatus.UNKNOWN: f"no trajectory {item.trajectory_id}",
        RewardStatus.UNEXPECTED_SOURCE: f"source {item.source!r} is not one of {value}",
    }.get(status, "")
    return RewardResult(status=status, trajectory_id=item.trajectory_id, source=item.source, detail=detail)
