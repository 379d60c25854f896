"""Reading trajectories and recording rewards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from services.gateway import answers, schemas, views
from services.gateway.context import Gateway
from services.gateway.problems import Problem
from services.gateway.prompts import Document
from shared.wire.records import Page, RewardItem, RewardResult, RewardStatus, TrajectoryRecord
from shared.wire.types import State

_REFUSALS = {
    RewardStatus.CONFLICT: "reward-revision-conflict",
    RewardStatus.LATE: "reward-too-late",
    RewardStatus.UNKNOWN: "not-found",
    RewardStatus.UNEXPECTED_SOURCE: "reward-source",
}


async def get(gateway: Gateway, run: str, trajectory_id: str) -> TrajectoryRecord:
    """With token ids once generated. Raises UnknownRun, UnknownTrajectory, Problem archive-unavailable."""
    try:
        return await gateway.store.get_trajectory(run, trajectory_id)
    except OSError as error:
        raise Problem("archive-unavailable", f"{trajectory_id}: {error}", retry_after_s=2) from error


async def page(
    gateway: Gateway,
    run: str,
    *,
    ids: Sequence[str],
    cursor: str,
    state: State | None,
    limit: int,
    full: bool,
    decimals: bool,
) -> answers.TrajectoryPage:
    """Args: ids: where there are any, only these and in this order. Raises UnknownRun, Problem archive-unavailable."""
    _, tokenizer = await gateway.run(run)
    if ids:
        named = await gateway.store.trajectories(run, ids, with_tokens=full)
        found = Page(items=tuple(named), next_cursor=None)
    else:
        found = await gateway.store.list_trajectories(run, cursor=cursor, state=state, limit=limit, with_tokens=full)
    if not full:
        return answers.TrajectoryPage(
            trajectories=[views.summary(t) for t in found.items], next_cursor=found.next_cursor
        )
    # A page leaves the tokens out of what is archived.
    records = [
        await get(gateway, run, t.trajectory_id) if t.trajectory is None and t.state is State.TRAINED else t
        for t in found.items
    ]
    return answers.TrajectoryPage(
        trajectories=[views.trajectory(t, tokenizer, decimals=decimals) for t in records], next_cursor=found.next_cursor
    )


async def put_reward(
    gateway: Gateway, run: str, trajectory_id: str, source: str, body: schemas.RewardBody
) -> answers.RewardAnswer:
    """On disk when it returns. Raises UnknownRun, NotDurable, Problem."""
    result = await gateway.store.put_reward(run, trajectory_id, source, body.value, revision=body.revision)
    if (problem := _refusal(result)) is not None:
        raise problem
    return answers.RewardAnswer(
        trajectory_id=trajectory_id,
        source=source,
        value=body.value,
        revision=body.revision,
        applied=result.status is RewardStatus.APPLIED,
    )


async def put_rewards(
    gateway: Gateway, run: str, items: Sequence[schemas.RewardItem | schemas.Refused], document: Document
) -> list[answers.RewardResult]:
    """One result per item, in order; what is recorded is on disk. Raises UnknownRun, NotDurable, Problem too-large."""
    gateway.check_items(len(items))
    valid = [
        RewardItem(trajectory_id=i.trajectory_id, value=i.value, source=i.source, revision=i.revision)
        for i in items
        if isinstance(i, schemas.RewardItem)
    ]
    await gateway.store.get_run(run)
    results = iter(await gateway.store.put_rewards(run, valid) if valid else [])
    return [_batch_result(i, item, results, document) for i, item in enumerate(items)]


def _batch_result(
    index: int, item: schemas.RewardItem | schemas.Refused, results: Iterator[RewardResult], document: Document
) -> answers.RewardResult:
    if isinstance(item, schemas.Refused):
        refused = Problem("invalid-request", f"{len(item.errors)} field(s) are not valid", errors=item.errors)
        return answers.RewardResult(index=index, status=refused.status, problem=document(refused))
    result = next(results)
    problem = _refusal(result)
    return answers.RewardResult(
        index=index,
        status=problem.status if problem else 200,
        trajectory_id=result.trajectory_id,
        source=result.source,
        applied=result.status is RewardStatus.APPLIED,
        problem=document(problem) if problem else None,
    )


def _refusal(result: RewardResult) -> Problem | None:
    code = _REFUSALS.get(result.status)
    if code is None:
        return None
    where = f"trajectory {result.trajectory_id}, source {result.source}"
    return Problem(code, f"{where}: {result.detail}" if result.detail else where)
