"""What the gateway's dispatcher does to trajectories: generation, groups into the training queue, reward deadlines."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any

from shared.wire import stored, valkey
from shared.wire.codec import encode_group, encode_trajectory
from shared.wire.gathered import Gathered
from shared.wire.prompts import EXACT_MATCH, EvalItem, PromptItem, decode_eval_item, decode_prompt
from shared.wire.reader import RunReader
from shared.wire.records import EvalRecord, TrajectoryRecord
from shared.wire.run import RunState
from shared.wire.types import DropReason, Group, State, Trajectory
from shared.wire.valkey import key, trajectory_key

EXPIRED_AT_ONCE = 256
"""Samples that one script drops; others wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingGroup:
    """One prompt or evaluation item of which some samples are still to be generated."""

    group_id: str
    number: int
    """Prompt number; of an evaluation the item's place."""
    prompt: PromptItem | EvalItem
    samples: tuple[int, ...]
    """Sample indices still to be generated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Horizon:
    """How far a run is generated."""

    first_open: int
    """Smallest prompt number beyond the checkpoint that is not entirely generated; one that was not posted yet is not."""
    is_open: bool
    """Whether a prompt that was posted is not entirely generated."""
    evals: tuple[EvalRecord, ...]
    """Unfinished evaluations, oldest first, without items and samples."""


class Closed(StrEnum):
    """What became of closing a group."""

    QUEUED = "queued"
    DUPLICATE = "duplicate"
    REPLACED = "replaced"
    """max_lag: too few members are left, so other samples take their place."""
    DROPPED = "dropped"
    """max_lag: the same, and the batch does without the group."""
    NOT_READY = "not_ready"
    """A member is neither REWARDED nor, under max_lag, DROPPED."""
    FULL = "full"
    """Try again when a checkpoint is durable."""
    CHANGED = "changed"
    """A reward was replaced meanwhile, or a member dropped: try again."""


class Lifecycle:
    """Every method is idempotent: a repeat after a lost reply changes nothing."""

    def __init__(self, store: RunReader) -> None:
        self._store = store
        self._client = store.client
        # Groups start, and samples end, by the hundred at once.
        self._start = Gathered(partial(self._call_many, "generating"))
        self._generated = Gathered(partial(self._call_many, "generated"))

    async def close(self) -> None:
        """Once nobody calls any more; what is not stored yet is sampled again."""
        await self._start.close()
        await self._generated.close()

    async def _call_many(self, name: str, calls: Sequence[tuple[str, list[Any]]]) -> list[Any]:
        """Runs a script on behalf of several callers. Args: calls: run, arguments."""
        answers: list[Any] = []
        for run, same in groupby(calls, key=itemgetter(0)):
            answers += await valkey.call_many(self._client, name, run, [args for _, args in same])
        return answers

    async def horizon(self, run: str) -> Horizon:
        # A prompt that is accepted in between is seen in `todo`, or not counted in `next_number`.
        (next_number, durable_step, size), todo, groups = await self._store.pipelined([
            ("HMGET", key(run, "run"), "next_number", "durable_step", "prompts_per_step"),
            ("ZRANGE", key(run, "todo"), 0, 0),
            ("ZRANGE", key(run, "eval_todo"), 0, -1),
        ])  # fmt: skip
        eval_ids = sorted({int(g[1:].partition(b".")[0]) for g in groups})
        hashes = await self._store.pipelined([("HGETALL", key(run, f"eval:{i}")) for i in eval_ids])
        evals = tuple(replace(stored.eval_record(run, i, h), items=()) for i, h in zip(eval_ids, hashes, strict=True))
        first_open = min([int(next_number), *map(int, todo)])
        return Horizon(first_open=max(first_open, int(durable_step) * int(size)), is_open=bool(todo), evals=evals)

    async def pending_prompts(
        self, run: str, *, first: int, end: int, besides: Collection[int] = ()
    ) -> list[PendingGroup]:
        """Prompts numbered first <= number < end with something to generate, in number order.

        Args:
            besides: numbers that need not be looked at.
        """
        todo = await self._client.zrangebyscore(key(run, "todo"), first, f"({end}")
        names = [name for name in todo if int(name) not in besides]
        if not names:
            return []
        records, draws = await self._store.pipelined(
            [("HMGET", key(run, "prompts"), *names), ("HMGET", key(run, "draws"), *names)]
        )
        prompts = [(decode_prompt(r), int(draw or 0)) for r, draw in zip(records, draws, strict=True) if r is not None]
        return await self._pending(run, [(f"{run}.{p.number}", p.number, draw, p) for p, draw in prompts])

    async def pending_items(self, run: str, eval_id: int) -> list[PendingGroup]:
        """Items of one evaluation with something to generate, in item order."""
        names = await self._client.zrangebyscore(key(run, "eval_todo"), eval_id, eval_id)
        items = sorted(int(name.decode().partition(".")[2]) for name in names)
        records = await self._store.pipelined([("HGET", key(run, f"eval:{eval_id}"), f"item:{i}") for i in items])
        return await self._pending(
            run, [(f"{run}.e{eval_id}.{i}", i, 0, decode_eval_item(r)) for i, r in zip(items, records, strict=True)]
        )

    async def _pending(
        self, run: str, groups: Sequence[tuple[str, int, int, PromptItem | EvalItem]]
    ) -> list[PendingGroup]:
        ids = [(g, s) for g, _, draw, prompt in groups for s in _samples(prompt.n, draw)]
        states = await self._store.pipelined([("HGET", trajectory_key(run, f"{g}.{s}"), "state") for g, s in ids])
        todo: dict[str, list[int]] = {}
        for (group_id, sample), state in zip(ids, states, strict=True):
            if stored.text(state) in (State.ACCEPTED, State.GENERATING):
                todo.setdefault(group_id, []).append(sample)
        return [
            PendingGroup(group_id=g, number=number, prompt=prompt, samples=tuple(todo[g]))
            for g, number, _, prompt in groups
            if g in todo
        ]

    # generation

    async def start_generating(self, run: str, trajectory_ids: Sequence[str]) -> set[str]:
        """Returns those that are GENERATING now; the others were dropped or generated meanwhile. None while the run is paused."""
        started = await self._start((run, [time.time(), *trajectory_ids]))
        return {i.decode() for i in started}

    async def reset_generating(self, run: str) -> int:
        """After a restart of the dispatcher: GENERATING goes back to ACCEPTED. Returns how many did."""
        todo, evals = await self._store.pipelined(
            [("ZRANGE", key(run, "todo"), 0, -1), ("ZRANGE", key(run, "eval_todo"), 0, -1)]
        )
        groups = [f"{run}.{name.decode()}" for name in (*todo, *evals)]
        return await self._store.call("ungenerate", run, time.time(), *groups) if groups else 0

    async def store_generated(self, run: str, trajectory: Trajectory, *, reward: float | None = None) -> State | None:
        """Keeps a finished sample and joins rewards that came before it. Returns its state; None: it does not exist.

        Args:
            reward: the gateway's own grade (exact match), if the prompt asks for one.
        """
        grade = ("", "") if reward is None else (EXACT_MATCH, stored.reward_json(reward, 0))
        record = encode_trajectory(trajectory)
        state = (await self._generated((run, [time.time(), trajectory.trajectory_id, record, *grade]))).decode()
        return None if state == "unknown" else State(state)

    async def drop_unfinished(self, run: str, group_id: str, samples: Sequence[int], reason: DropReason) -> int:
        """Under max_lag: drops those samples of a group that are still to be generated; the others go on. Returns how many."""
        ids = [f"{group_id}.{i}" for i in samples]
        return await self._store.call("drop_unfinished", run, time.time(), group_id, reason.value, *ids)

    async def drop_items(self, run: str, groups: Sequence[str], reason: DropReason) -> int:
        """Drops what is unfinished of evaluation items. Returns how many samples."""
        return await self._store.call("drop_items", run, time.time(), reason.value, *groups) if groups else 0

    async def drop_eval(self, run: str, eval_id: int, reason: DropReason) -> int:
        """Drops what is unfinished of an evaluation. Returns how many samples."""
        names = await self._client.zrangebyscore(key(run, "eval_todo"), eval_id, eval_id)
        return await self.drop_items(run, [f"{run}.{name.decode()}" for name in names], reason)

    async def dropped(self, run: str, numbers: Sequence[int]) -> set[int]:
        """Those of these groups that were dropped, and that their batches do without."""
        found = await self._client.smismember(key(run, "dropped"), list(map(str, numbers))) if numbers else []
        return {number for number, is_dropped in zip(numbers, found, strict=True) if is_dropped}

    async def pause(self, run: str, *, reason: str, detail: str) -> bool:
        """Pauses the run if it is running. Returns whether it was."""
        answer = await self._store.call(
            "set_run_state", run, time.time(), RunState.PAUSED.value, reason, detail, "", RunState.RUNNING.value
        )
        return answer == b"ok"

    async def resume(self, run: str, *, only: str) -> bool:
        """Lets the run go on if it is paused for this reason. Returns whether it was."""
        answer = await self._store.call(
            "set_run_state", run, time.time(), RunState.RUNNING.value, "", "", "", RunState.PAUSED.value, only
        )
        return answer == b"ok"

    # rewards and the queue

    async def closable(self, run: str) -> list[int]:
        """Numbers of the groups whose samples are all REWARDED, or under max_lag DROPPED, and not queued yet, ascending."""
        return [int(n) for n in await self._client.zrange(key(run, "closable"), 0, -1)]

    async def close_group(self, run: str, number: int) -> tuple[Closed, Group | None]:
        """`close_groups` of one."""
        return (await self.close_groups(run, [number]))[0]

    async def close_groups(self, run: str, numbers: Sequence[int]) -> list[tuple[Closed, Group | None]]:
        """Puts groups into the training queue, under max_lag what is left of them: states become QUEUED, rewards are sealed.

        Each by itself, in the order given. All of them are in memory at once.
        """
        prompts, draws = await self._store.pipelined(
            [("HMGET", key(run, name), *numbers) for name in ("prompts", "draws")]
        )
        members = {
            number: [f"{run}.{number}.{i}" for i in _samples(decode_prompt(data).n, int(draw or 0))]
            for number, data, draw in zip(numbers, prompts, draws, strict=True)
            if data is not None
        }
        ids = [i for ids in members.values() for i in ids]
        # Revisions are read first: a reward that comes in between makes the script answer `changed`.
        revisions = await self._store.pipelined([("HGET", trajectory_key(run, i), "rewards_revision") for i in ids])
        records = await self._store.trajectories(run, ids, with_tokens=True)
        found = {r.trajectory_id: (r, revision) for r, revision in zip(records, revisions, strict=True)}
        calls, groups = [], {}
        for number, ids in members.items():
            if any(found[i][0].state not in (State.REWARDED, State.DROPPED) for i in ids):
                continue
            given = [found[i] for i in ids if found[i][0].state is State.REWARDED]
            trajectories = tuple(_rewarded(record) for record, _ in given)
            groups[number] = Group(run=run, group_id=f"{run}.{number}", prompt_number=number, trajectories=trajectories)
            args = [arg for record, revision in given for arg in (record.trajectory_id, revision)]
            calls.append([time.time(), number, encode_group(groups[number]), *args])
        answers = await valkey.call_many(self._client, "enqueue", run, calls)
        closed = {n: (Closed(answer.decode()), groups[n]) for n, answer in zip(groups, answers, strict=True)}
        return [closed.get(number, (Closed.NOT_READY, None)) for number in numbers]

    async def first_deadline(self, run: str) -> tuple[float, str] | None:
        """(unix time, trajectory id) of the earliest missing reward."""
        found = await self._client.zrange(key(run, "deadlines"), 0, 0, withscores=True)
        return (found[0][1], found[0][0].decode()) if found else None

    async def expire(self, run: str) -> int:
        """Under max_lag: drops samples of a running run whose reward is overdue. Returns how many."""
        return await self._store.call("expire", run, time.time(), EXPIRED_AT_ONCE)

    async def num_overdue(self, run: str, now: float) -> int:
        return await self._client.zcount(key(run, "deadlines"), "-inf", now)


def _samples(n: int, draw: int) -> range:
    """Sample indices of a group; each draw has its own, and so its own tokens."""
    return range(n * draw, n * (draw + 1))


def _rewarded(record: TrajectoryRecord) -> Trajectory:
    assert record.trajectory is not None
    return replace(
        record.trajectory,
        reward=record.reward,
        rewards={source: record.rewards[source].value for source in record.sources},
        timestamps=dict(record.timestamps),
    )
