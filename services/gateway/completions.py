"""One OpenAI-compatible generation: an evaluation of its own, awaited or followed token by token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.gateway import evals, prompts, views
from services.gateway import openai_schemas as api
from services.gateway.answers import VersionName
from services.gateway.choices import Piece, TextCutter, Writer
from services.gateway.context import Gateway
from services.gateway.events import wait_for_eval
from services.gateway.problems import FieldError, Problem
from services.gateway.schemas import PromptText
from services.gateway.tokenizer import Tokenizer
from shared.wire.prompts import EvalItem
from shared.wire.records import EvalRecord, TrajectoryRecord
from shared.wire.types import State

METADATA = {"source": "openai"}


def prompt_items(prompt: str | list[int] | list[str] | list[list[int]]) -> list[PromptText]:
    """OpenAI's four ways to say what is to be completed."""
    if isinstance(prompt, str):
        return [PromptText(prompt=prompt)]
    if isinstance(prompt[0], int):
        return [PromptText(prompt_token_ids=prompt)]
    return [PromptText(prompt=p) if isinstance(p, str) else PromptText(prompt_token_ids=p) for p in prompt]


async def start(
    gateway: Gateway, body: api.Generation, items: Sequence[PromptText], max_tokens: int | None, writer: Writer
) -> Generation:
    """Accepts the evaluation. Raises UnknownRun, NotDurable, AioRpcError, Problem."""
    gateway.check_items(len(items))
    name, sign, version = body.model.partition("@")
    if sign and not (version.isascii() and version.isdigit() and len(version) < 16):
        raise _field("version-unknown", "model", f"got {body.model!r}; a version is a number, as in {name}@3")
    run, tokenizer = await gateway.run(name)

    def tokenised() -> list[EvalItem]:
        return [prompts.eval_item(tokenizer, run.config, i, body.params(_max_tokens(i)), body.n) for i in items]

    def _max_tokens(item: PromptText) -> int:
        return max_tokens or max(1, run.config.max_model_len - len(tokenizer.encode(item)))

    eval_items = await asyncio.to_thread(tokenised)
    step = int(version) if sign else None
    record = await evals.pin(gateway, name, eval_items, step=step, seed=body.seed, metadata=METADATA)
    return Generation(gateway=gateway, tokenizer=tokenizer, record=record, writer=writer, model=body.model)


@dataclass(slots=True, kw_only=True)
class Generation:
    gateway: Gateway
    tokenizer: Tokenizer
    record: EvalRecord
    writer: Writer
    model: str
    deadline: float = field(init=False)

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.gateway.config.completion_timeout_s

    async def whole(self) -> api.Envelope:
        """Raises: RedisError, Problem deadline-exceeded, generation-failed."""
        record, left_s = self.record, self.deadline - time.monotonic()
        done = await wait_for_eval(self.gateway.store, self.gateway.feeds, record.run, record.eval, left_s)
        if not done.is_finished:
            raise self._late()
        pieces = [self._whole_piece(i, t) for i, t in enumerate(done.trajectories)]
        envelope = self._envelope(sum(len(p.token_ids) for p in pieces))
        return self.writer.answer(envelope, pieces, self.tokenizer)

    async def chunks(self, *, include_usage: bool) -> AsyncIterator[api.Envelope]:
        """Raises: RedisError, Problem deadline-exceeded, generation-failed."""
        progress = self.gateway.progress
        cutters = [TextCutter(self.tokenizer) for _ in self.record.trajectories]
        open_choices = {i: t.trajectory_id for i, t in enumerate(self.record.trajectories)}
        seen_events = -1
        async with self.gateway.feeds.follow(self.record.run) as feed:
            while open_choices:
                seen, finished = progress.generation, {}
                if feed.generation != seen_events:
                    seen_events = feed.generation
                    finished = await self._finished(list(open_choices.values()))
                for index, trajectory_id in list(open_choices.items()):
                    piece = self._next_piece(index, trajectory_id, finished.get(trajectory_id), cutters[index])
                    if piece is not None:
                        yield self.writer.chunk(self._envelope(), [piece], self.tokenizer)
                    if trajectory_id in finished:
                        del open_choices[index]
                left_s = self.deadline - time.monotonic()
                if open_choices and (left_s <= 0 or feed.closed):
                    raise self._late()
                if open_choices:
                    await _first(progress.wait_beyond(seen), feed.wait_beyond(seen_events, left_s))
        if include_usage:
            yield self.writer.chunk(self._envelope(sum(len(c.token_ids) for c in cutters)), [], self.tokenizer)

    async def _finished(self, trajectory_ids: list[str]) -> dict[str, TrajectoryRecord]:
        records = await self.gateway.store.trajectories(self.record.run, trajectory_ids, with_tokens=True)
        return {r.trajectory_id: r for r in records if r.state.is_final}

    def _next_piece(
        self, index: int, trajectory_id: str, finished: TrajectoryRecord | None, cutter: TextCutter
    ) -> Piece | None:
        """What this choice has beyond what was sent; None when that is nothing."""
        num_sent = len(cutter.token_ids)
        if finished is not None:
            whole = self._whole_piece(index, finished)
            token_ids, logprobs, finish_reason = (
                whole.token_ids[num_sent:],
                whole.logprobs[num_sent:],
                whole.finish_reason,
            )
        else:
            token_ids, logprobs = self.gateway.progress.after(trajectory_id, num_sent)
            finish_reason = None
        if not token_ids and finish_reason is None:
            return None
        offset = cutter.num_characters
        return Piece(
            index=index,
            trajectory_id=trajectory_id,
            token_ids=token_ids,
            logprobs=logprobs,
            text=cutter.add(token_ids, last=finish_reason is not None),
            text_offset=offset,
            finish_reason=finish_reason,
            prompt_token_ids=self._prompt_of(index) if num_sent == 0 else None,
        )

    def _whole_piece(self, index: int, record: TrajectoryRecord) -> Piece:
        t = record.trajectory
        if record.state is not State.EVALUATED or t is None:
            raise Problem("generation-failed", f"{record.trajectory_id} was dropped: {record.reason}", retry_after_s=1)
        token_ids = views.sampled_ids(t)
        return Piece(
            index=index,
            trajectory_id=record.trajectory_id,
            token_ids=token_ids,
            logprobs=t.logprobs,
            text=self.tokenizer.decode(token_ids) or "",
            finish_reason=t.finish_reason.value,
            prompt_token_ids=self._prompt_of(index),
        )

    def _prompt_of(self, index: int) -> Sequence[int]:
        return self.record.items[self.record.trajectories[index].number].token_ids

    def _envelope(self, num_sampled: int | None = None) -> dict[str, Any]:
        """Args: num_sampled: tokens to report as usage, if it is to be reported."""
        num_prompt = sum(len(i.token_ids) for i in self.record.items)
        usage = None
        if num_sampled is not None:
            usage = api.Usage(
                prompt_tokens=num_prompt, completion_tokens=num_sampled, total_tokens=num_prompt + num_sampled
            )
        return {
            "id": f"{self.writer.id_prefix}-{self.record.run}.e{self.record.eval}",
            "created": int(self.record.created),
            "model": self.model,
            "weight_version": VersionName(step=self.record.step, digest=self.record.digest),
            "usage": usage,
        }

    def _late(self) -> Problem:
        seconds = self.gateway.config.completion_timeout_s
        return Problem("deadline-exceeded", f"not generated within {seconds:g} s; try again", retry_after_s=1)


async def _first(*waits: Coroutine[Any, Any, Any]) -> None:
    """Returns when the first of them has; the others are cancelled. Raises what that one raises."""
    tasks = [asyncio.create_task(w) for w in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()


def _field(code: str, pointer: str, detail: str) -> Problem:
    return Problem(code, detail, errors=[FieldError(pointer=f"/{pointer}", detail=detail)])
