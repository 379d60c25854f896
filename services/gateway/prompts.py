"""From posted items to accepted prompts: tokenised, checked against the run, stored, and answered one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from services.gateway import answers, schemas
from services.gateway.context import Gateway
from services.gateway.ingest_schemas import SampledGroup
from services.gateway.problems import FieldError, Problem, ProblemDocument
from services.gateway.tokenizer import Tokenizer
from shared.metrics import names
from shared.metrics.server import metric
from shared.wire.prompts import EvalItem, PromptItem, RewardSpec
from shared.wire.records import AcceptResult, AcceptStatus, RunRecord
from shared.wire.run import RunConfig
from shared.wire.types import SamplingParams

Body = TypeVar("Body")
Prepared = TypeVar("Prepared")
Document = Callable[[Problem], ProblemDocument]
"""A problem as this request's document."""

_REFUSALS = {
    AcceptStatus.CONFLICT: "prompt-conflict",
    AcceptStatus.OUT_OF_RANGE: "prompt-number",
    AcceptStatus.RUN_OVER: "run-over",
}


async def post(
    gateway: Gateway, run: str, items: Sequence[schemas.PromptItem | schemas.Refused], document: Document
) -> list[answers.PromptResult]:
    """One result per item, in order; what is accepted is on disk.

    Raises: UnknownRun, NotDurable, Problem too-large; capacity-exhausted where the closed gate refuses every item.
    """
    gateway.check_items(len(items))
    record, tokenizer = await gateway.run(run)

    def prepare(item: schemas.PromptItem) -> PromptItem:
        return training_prompt(tokenizer, record.config, item)

    prepared = await asyncio.to_thread(lambda: [attempt(prepare, item) for item in items])
    return await accept(gateway, run, items, prepared, gateway.store.accept_prompts, document)


def attempt(prepare: Callable[[Body], Prepared], item: Body | schemas.Refused) -> Prepared | Problem:
    """What the item becomes, or why it is refused."""
    try:
        if isinstance(item, schemas.Refused):
            raise Problem("invalid-request", f"{len(item.errors)} field(s) are not valid", errors=item.errors)
        return prepare(item)
    except Problem as problem:
        return problem


async def accept(
    gateway: Gateway,
    run: str,
    items: Sequence[schemas.PromptItem | SampledGroup | schemas.Refused],
    prepared: Sequence[Prepared | Problem],
    store: Callable[[str, list[Prepared]], Awaitable[list[AcceptResult]]],
    document: Document,
) -> list[answers.PromptResult]:
    """Stores what is valid and answers every item, in order.

    Raises: what `store` does; Problem capacity-exhausted where the closed gate refuses every item.
    """
    valid = [p for p in prepared if not isinstance(p, Problem)]
    accepted = await store(run, valid) if valid else []
    num_refused = sum(a.status is AcceptStatus.GATE_CLOSED for a in accepted)
    closed = await _gate_closed(gateway, run) if num_refused else None
    metric(names.GATE_CLOSED).labels(run=run).inc(num_refused)
    if closed is not None and num_refused == len(items):
        raise closed
    results = iter(accepted)
    return [
        _refused(i, item, p, document) if isinstance(p, Problem) else _result(i, next(results), closed, document)
        for i, (item, p) in enumerate(zip(items, prepared, strict=True))
    ]


async def _gate_closed(gateway: Gateway, run: str) -> Problem:
    record, counts = await gateway.store.get_run(run), await gateway.store.counts(run)
    limit = gate_limit(record)
    return Problem(
        "capacity-exhausted",
        f"prompt numbers from {limit} on are admitted once a later checkpoint is durable; post them again",
        retry_after_s=gateway.config.gate_retry_s,
        limit=limit,
        in_flight=counts.live,
    )


def gate_limit(record: RunRecord) -> int:
    """Prompt numbers below it are admitted."""
    return record.gate_step * record.config.prompts_per_step


def training_prompt(tokenizer: Tokenizer, config: RunConfig, item: schemas.PromptItem) -> PromptItem:
    """Raises: Problem with what the run does not allow."""
    number = checked_number(config, item.number)
    if item.n is not None and item.n != config.samples_per_prompt:
        raise field_problem(
            "invalid-request", "n", f"got {item.n}; the run's samples_per_prompt is {config.samples_per_prompt}"
        )
    sampling = item.sampling.params(config.temperature)
    check_distribution(config, sampling)
    token_ids = tokenizer.encode(item)
    check_sampling(tokenizer, config, len(token_ids), sampling)
    return PromptItem(
        number=number,
        token_ids=tuple(token_ids),
        n=config.samples_per_prompt,
        sampling=sampling,
        reward=reward_spec(config, item.reward),
        prompt_id=item.prompt_id or "",
        metadata=item.metadata,
    )


def checked_number(config: RunConfig, number: int | None) -> int:
    """Raises: Problem prompt-number."""
    last = config.num_steps * config.prompts_per_step - 1
    if number is None or number > last:
        raise field_problem(
            "prompt-number", "number", f"got {number}; under a fixed lag a number from 0 to {last} is needed"
        )
    return number


def check_distribution(config: RunConfig, sampling: SamplingParams) -> None:
    """Raises: Problem sampling-refused where the trainer does not compute the probabilities of this distribution."""
    if sampling.temperature != config.temperature:
        raise field_problem(
            "sampling-refused",
            "sampling/temperature",
            f"got {sampling.temperature}; every training rollout has the run's temperature {config.temperature}",
        )
    if sampling.is_truncated:
        raise field_problem(
            "sampling-refused",
            "sampling",
            "top_p, top_k and min_p must be off: the trainer could not reproduce a truncated distribution",
        )


def eval_item(
    tokenizer: Tokenizer, config: RunConfig, item: schemas.PromptText, sampling: SamplingParams, n: int
) -> EvalItem:
    """Raises: Problem."""
    token_ids = tokenizer.encode(item)
    check_sampling(tokenizer, config, len(token_ids), sampling)
    answer, metadata = (item.answer, item.metadata) if isinstance(item, schemas.EvalItem) else (None, {})
    return EvalItem(token_ids=tuple(token_ids), n=n, sampling=sampling, answer=answer, metadata=metadata)


def check_sampling(tokenizer: Tokenizer, config: RunConfig, num_prompt_tokens: int, sampling: SamplingParams) -> None:
    """Raises: Problem prompt-too-long, token-out-of-range, model-unavailable."""
    if num_prompt_tokens + sampling.max_tokens > config.max_model_len:
        raise field_problem(
            "prompt-too-long",
            "sampling/max_tokens",
            f"{num_prompt_tokens} prompt tokens and max_tokens {sampling.max_tokens} exceed the run's max_model_len "
            f"{config.max_model_len}",
        )
    if any(t >= tokenizer.vocab_size for t in sampling.stop_token_ids):
        raise field_problem(
            "token-out-of-range", "sampling/stop_token_ids", f"{tokenizer.model} has {tokenizer.vocab_size} token ids"
        )
    if sampling.stop and not tokenizer.has_text:
        raise field_problem(
            "model-unavailable", "sampling/stop", f"{tokenizer.model} has no tokenizer; use stop_token_ids"
        )


def reward_spec(config: RunConfig, reward: schemas.RewardSource) -> RewardSpec:
    try:
        return RewardSpec(
            mode=reward.mode,
            deadline_s=config.reward_deadline_s if reward.deadline_s is None else reward.deadline_s,
            sources=tuple(reward.sources or ["default"]),
            answer=reward.answer,
        )
    except ValueError as error:
        raise field_problem("invalid-request", "reward", str(error)) from error


def field_problem(code: str, pointer: str, detail: str) -> Problem:
    return Problem(code, detail, errors=[FieldError(pointer=f"/{pointer}", detail=detail)])


def _refused(
    index: int, item: schemas.PromptItem | SampledGroup | schemas.Refused, problem: Problem, document: Document
) -> answers.PromptResult:
    number, prompt_id = (None, None) if isinstance(item, schemas.Refused) else (item.number, item.prompt_id)
    return answers.PromptResult(
        index=index, status=problem.status, number=number, prompt_id=prompt_id, problem=document(problem)
    )


def _result(index: int, result: AcceptResult, closed: Problem | None, document: Document) -> answers.PromptResult:
    status, problem = {AcceptStatus.ACCEPTED: 202, AcceptStatus.DUPLICATE: 200}.get(result.status), None
    if status is None:
        refusal = Problem(_REFUSALS[result.status], result.detail) if result.status in _REFUSALS else closed
        assert refusal is not None
        status, problem = refusal.status, document(refusal)
    return answers.PromptResult(
        index=index,
        status=status,
        number=result.number,
        prompt_id=result.prompt_id,
        group_id=result.group_id,
        trajectory_ids=list(result.trajectory_ids),
        problem=problem,
    )
