"""Everything about runs that can be read from Valkey (asyncio). `shared.wire.store.RunStore` adds what changes them."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from redis.exceptions import ResponseError

from shared.wire import archive, stored, valkey
from shared.wire.records import Counts, Event, Page, RunRecord, StepRecord, TrajectoryRecord, UnknownTrajectory
from shared.wire.types import State
from shared.wire.valkey import key, trajectory_key

# What is archived does not change, and neighbours are asked for one after the other.
_read_step = functools.lru_cache(maxsize=4)(archive.read_step)


class RunReader:
    """Errors: everything may raise redis.exceptions.RedisError (503). The rest is named per method."""

    def __init__(self, client: valkey.Client) -> None:
        self.client = client

    async def ping(self) -> None:
        """Raises RedisError when Valkey does not answer (readiness)."""
        await self.client.ping()

    # runs

    async def get_run(self, run: str) -> RunRecord:
        """Raises UnknownRun."""
        return stored.run_record(run, await self.client.hgetall(key(run, "run")))

    async def newest_run(self) -> RunRecord | None:
        names = await self.client.zrange(valkey.RUNS, 0, 0, desc=True)
        return await self.get_run(names[0].decode()) if names else None

    async def list_runs(self, *, cursor: str = "", limit: int = 100) -> Page[RunRecord]:
        """Newest first."""
        rank = await self.client.zrevrank(valkey.RUNS, cursor) if cursor else None
        start = 0 if rank is None else rank + 1
        names = [n.decode() for n in await self.client.zrange(valkey.RUNS, start, start + limit, desc=True)]
        runs = [await self.get_run(name) for name in names[:limit]]
        return Page(items=tuple(runs), next_cursor=names[limit - 1] if len(names) > limit else None)

    # trajectories

    async def get_trajectory(self, run: str, trajectory_id: str) -> TrajectoryRecord:
        """With token ids, from the archive where the trainer moved them. Evaluation samples too.

        Raises UnknownTrajectory; OSError when the archive can't be read.
        """
        found = await self.trajectories(run, [trajectory_id], with_tokens=True)
        if not found:
            raise UnknownTrajectory(f"run {run} has no trajectory {trajectory_id}")
        record = found[0]
        uri = await self.client.hget(trajectory_key(run, trajectory_id), "archive")
        if uri is None:
            return record
        assert record.step is not None
        groups = await asyncio.to_thread(_read_step, uri.decode(), record.step)
        for trajectory in (t for g in groups for t in g.trajectories):
            if trajectory.trajectory_id == trajectory_id:
                return replace(record, trajectory=trajectory)
        raise FileNotFoundError(f"{trajectory_id} is not in {archive.step_path(uri.decode(), record.step)}")

    async def list_trajectories(
        self, run: str, *, cursor: str = "", state: State | None = None, limit: int = 100, with_tokens: bool = False
    ) -> Page[TrajectoryRecord]:
        """In the order of acceptance, evaluations not included. A page may be short or empty and still have a cursor.

        `with_tokens` leaves `trajectory` None for those that are archived: read them one by one.
        """
        start = int(cursor or 0)
        # A filter looks at more than it returns, but at a bounded number, so that one request stays short.
        looked_at = limit if state is None else max(limit, 1000)
        ids = [i.decode() for i in await self.client.zrange(key(run, "trajectories"), start, start + looked_at - 1)]
        end = start + len(ids)
        if state is not None:
            states = await self.pipelined([("HGET", trajectory_key(run, i), "state") for i in ids])
            matches = [n for n, found in enumerate(states) if stored.text(found) == state]
            if len(matches) > limit:
                end = start + matches[limit]
            ids = [ids[n] for n in matches[:limit]]
        records = await self.trajectories(run, ids, with_tokens=with_tokens)
        more = end < await self.client.zcard(key(run, "trajectories"))
        return Page(items=tuple(records), next_cursor=str(end) if more else None)

    async def trajectories(self, run: str, ids: Sequence[str], *, with_tokens: bool) -> list[TrajectoryRecord]:
        """Those that exist, in the order given; training and evaluation samples may be mixed."""
        hashes = dict(zip(ids, await self.pipelined([("HGETALL", trajectory_key(run, i)) for i in ids]), strict=True))
        hashes = {i: fields for i, fields in hashes.items() if fields}
        sources = {stored.text(h[b"group"]): None for h in hashes.values()}
        metadata = dict(zip(sources, await self._metadata(run, list(sources)), strict=True))
        return [
            stored.trajectory_record(i, h, metadata=metadata[stored.text(h[b"group"])], with_tokens=with_tokens)
            for i, h in hashes.items()
        ]

    async def _metadata(self, run: str, groups: Sequence[str]) -> list[Any]:
        commands = []
        for group in groups:
            name = group[len(run) + 1 :]
            if name.startswith("e"):
                eval_id, _, item = name[1:].partition(".")
                commands.append(("HGET", key(run, f"eval:{eval_id}"), f"item:{item}"))
            else:
                commands.append(("HGET", key(run, "prompts"), name))
        return [stored.metadata(data) for data in await self.pipelined(commands)]

    # progress

    async def events(self, run: str, *, after: str = "0-0", block_s: float = 0.0, limit: int = 500) -> list[Event]:
        """Events behind the cursor; waits up to `block_s` (10 s at most) for the first one, then may return none."""
        block = int(min(block_s, valkey.MAX_BLOCK_S) * 1000) or None
        streams = await self.client.xread({key(run, "events"): after}, count=limit, block=block)
        return [
            Event(cursor=entry.decode(), **{name.decode(): value.decode() for name, value in fields.items()})
            for _, entries in streams
            for entry, fields in entries
        ]

    async def last_event(self, run: str) -> str:
        """Cursor of the newest event: `events(after=it)` sees only what comes later."""
        entries = await self.client.xrevrange(key(run, "events"), count=1)
        return entries[0][0].decode() if entries else "0-0"

    async def counts(self, run: str) -> Counts:
        fields, depth = await self.pipelined([("HGETALL", key(run, "counts")), ("XLEN", key(run, "queue"))])
        return stored.counts(fields, depth)

    async def steps(self, run: str, *, after: str = "0-0", limit: int = 1000) -> list[StepRecord]:
        """What the trainer recorded. A step that was trained again after a restart appears again; the last one counts."""
        return [_step(i, f) for i, f in await self.client.xrange(key(run, "steps"), min="(" + after, count=limit)]

    async def newest_step(self, run: str) -> StepRecord | None:
        entries = await self.client.xrevrange(key(run, "steps"), count=1)
        return _step(*entries[0]) if entries else None

    # plumbing

    async def pipelined(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Raw replies, in order."""
        if not commands:
            return []
        pipe = self.client.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        return await pipe.execute()

    async def call(self, name: str, run: str, *args: Any) -> Any:
        """Runs a script. Raises what `shared.wire.stored.refusal` makes of its refusal."""
        try:
            return await valkey.call(self.client, name, run, *args)
        except ResponseError as error:
            raise stored.refusal(error, run) from error


def _step(entry: bytes, fields: Mapping[bytes, bytes]) -> StepRecord:
    return StepRecord(
        cursor=entry.decode(),
        step=int(fields[b"step"]),
        epoch=int(fields[b"epoch"]),
        metrics=json.loads(fields[b"metrics"]),
    )
