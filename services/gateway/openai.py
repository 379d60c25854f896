"""OpenAI-compatible door: completions and chat completions through the evaluation lane, never trained.

`model` is "{run}" (its newest published version) or "{run}@{version}". Beyond OpenAI's fields an answer says which token
ids were sampled, their logprobs, and by which weights.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from fastapi import APIRouter, Request, Response
from sse_starlette import EventSourceResponse, ServerSentEvent

from services.gateway import completions
from services.gateway import openai_schemas as api
from services.gateway.app import gateway_of, require
from services.gateway.bodies import BodyRoute, reply
from services.gateway.choices import ChatWriter, CompletionWriter, Writer
from services.gateway.problems import Problem, event_stream, responses
from services.gateway.schemas import PromptText
from shared.wire.records import RunRecord

router = APIRouter(prefix="/v1", route_class=BodyRoute, tags=["openai"])
writes, reads = [require("prompts:write")], [require("trajectories:read")]
_ANSWERS = {
    200: {"content": event_stream({"description": "JSON of a chunk; the last is [DONE]"})},
    **responses(
        "version-unknown", "not-ready", "generation-failed", "deadline-exceeded", "idempotency-in-progress", openai=True
    ),
}


@router.post("/completions", response_model=api.Completion, dependencies=writes, responses=_ANSWERS)
async def create_completion(request: Request, body: api.CompletionBody) -> Response:
    """Text completions of one or several prompts, given as text or token ids."""
    items = completions.prompt_items(body.prompt)
    writer = CompletionWriter(with_logprobs=body.logprobs is not None)
    return await _answer(request, body, items, body.max_tokens, writer)


@router.post("/chat/completions", response_model=api.ChatCompletion, dependencies=writes, responses=_ANSWERS)
async def create_chat_completion(request: Request, body: api.ChatBody) -> Response:
    """Completions of a conversation, rendered with the model's chat template."""
    item = PromptText(messages=body.messages, continue_final_message=body.continue_final_message)
    writer = ChatWriter(with_logprobs=body.logprobs)
    return await _answer(request, body, [item], body.max_completion_tokens or body.max_tokens, writer)


@router.get("/models", response_model=api.Models, dependencies=reads, responses=responses(openai=True))
async def list_models(request: Request) -> Response:
    """The runs, newest first; append `@{version}` for a version of one."""
    page = await gateway_of(request).store.list_runs(limit=256)
    return reply(request, api.Models(data=[_model(r) for r in page.items]))


@router.get("/models/{model}", response_model=api.Model, dependencies=reads, responses=responses(openai=True))
async def get_model(request: Request, model: str) -> Response:
    return reply(request, _model(await gateway_of(request).store.get_run(model)))


def _model(record: RunRecord) -> api.Model:
    return api.Model(id=record.run, created=int(record.created), max_model_len=record.config.max_model_len)


async def _answer(
    request: Request, body: api.Generation, items: Sequence[PromptText], max_tokens: int | None, writer: Writer
) -> Response:
    gateway = gateway_of(request)
    if not body.stream:
        generation = await completions.start(gateway, body, items, max_tokens, writer)
        return reply(request, await generation.whole())
    if "idempotency-key" in request.headers:
        raise Problem("malformed-request", "an Idempotency-Key cannot be combined with stream: a stream is not kept")
    generation = await completions.start(gateway, body, items, max_tokens, writer)
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    return EventSourceResponse(
        _events(generation, include_usage), ping=gateway.config.heartbeat_s, sep="\n", send_timeout=30
    )


async def _events(generation: completions.Generation, include_usage: bool) -> AsyncIterator[ServerSentEvent]:
    try:
        async for chunk in generation.chunks(include_usage=include_usage):
            yield ServerSentEvent(data=chunk.model_dump_json(), sep="\n")
    except Problem as problem:
        yield ServerSentEvent(data=problem.openai().model_dump_json(), sep="\n")
    yield ServerSentEvent(data="[DONE]", sep="\n")
