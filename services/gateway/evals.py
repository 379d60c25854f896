"""The evaluation lane: pinned to one version, sampled or greedy, never numbered, never trained."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from services.gateway import prompts, schemas
from services.gateway.context import Gateway
from services.gateway.problems import Problem
from services.gateway.tokenizer import Tokenizer
from shared.wire.prompts import EvalItem
from shared.wire.records import EvalRecord
from shared.wire.run import RunConfig


async def create(gateway: Gateway, run: str, body: schemas.EvalBody) -> EvalRecord:
    """Accepts an evaluation as a whole: one bad item refuses it. On disk when it returns.

    Raises: UnknownRun, NotDurable, AioRpcError, Problem.
    """
    gateway.check_items(len(body.items))
    record, tokenizer = await gateway.run(run)
    items = await asyncio.to_thread(_tokenised, tokenizer, record.config, body)
    return await pin(gateway, run, items, step=body.version, seed=body.seed, metadata=body.metadata)


async def pin(
    gateway: Gateway,
    run: str,
    items: Sequence[EvalItem],
    *,
    step: int | None,
    seed: int | None,
    metadata: dict[str, Any],
) -> EvalRecord:
    """Accepts items under the version of `step`, or under the newest one."""
    version = (await gateway.version(run, step)).version
    return await gateway.store.create_eval(
        run, items, step=version.step, digest=version.digest, seed=seed, metadata=metadata
    )


def _tokenised(tokenizer: Tokenizer, config: RunConfig, body: schemas.EvalBody) -> list[EvalItem]:
    sampling = body.sampling.params(default_temperature=0.0)
    items = []
    for index, item in enumerate(body.items):
        try:
            items.append(prompts.eval_item(tokenizer, config, item, sampling, body.n))
        except Problem as problem:
            raise problem.at(f"/items/{index}") from problem
    return items
