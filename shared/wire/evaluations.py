"""The evaluation lane: pinned to one version, counted apart, never numbered and never trained."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shared.wire import stored
from shared.wire.prompts import EvalItem, encode_prompt
from shared.wire.reader import RunReader
from shared.wire.records import EvalRecord, Page, UnknownEvaluation
from shared.wire.valkey import key


class EvaluationReader(RunReader):
    async def get_eval(self, run: str, eval_id: int) -> EvalRecord:
        """With items and samples. Raises UnknownEvaluation."""
        fields = await self.client.hgetall(key(run, f"eval:{eval_id}"))
        if not fields:
            raise UnknownEvaluation(f"run {run} has no evaluation {eval_id}")
        record = stored.eval_record(run, eval_id, fields)
        ids = [i for i, _ in stored.eval_samples(run, eval_id, record.items)]
        return replace(record, trajectories=tuple(await self.trajectories(run, ids, with_tokens=True)))

    async def list_evals(self, run: str, *, cursor: str = "", limit: int = 100) -> Page[EvalRecord]:
        """In the order of acceptance, without items and samples."""
        start = int(cursor or 0)
        ids = [int(i) for i in await self.client.zrange(key(run, "evals"), start, start + limit)]
        hashes = await self.pipelined([("HGETALL", key(run, f"eval:{i}")) for i in ids[:limit]])
        records = [replace(stored.eval_record(run, i, h), items=()) for i, h in zip(ids, hashes, strict=False)]
        return Page(items=tuple(records), next_cursor=str(start + limit) if len(ids) > limit else None)

    async def _create_eval(
        self, run: str, items: Sequence[EvalItem], *, step: int, digest: str, seed: int | None, metadata: Mapping[str, Any]
    ) -> int:  # fmt: skip
        config = (await self.get_run(run)).config
        eval_id = await self.client.hincrby(key(run, "run"), "num_evals", 1) - 1
        if seed is None:
            seed = default_seed(config.seed, eval_id)
        args = [part for item in items for part in (encode_prompt(item), item.n)]
        await self.call("create_eval", run, time.time(), eval_id, step, digest, seed, json.dumps(dict(metadata)), *args)
        return eval_id


def default_seed(run_seed: int, eval_id: int) -> int:
    """Seed of an evaluation that names none: in [0, 2^63), and no training prompt's."""
    digest = hashlib.sha256(f"evaluation {eval_id} of {run_seed}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
