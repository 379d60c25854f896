"""Bodies of the OpenAI-compatible routes: OpenAI's fields, and beyond them token ids and the weights that sampled them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from services.gateway.answers import Answer, RawBytes, VersionName
from services.gateway.schemas import MAX_TOKENS_LIMIT, Body, Message, check_prefill
from shared.wire.types import SamplingParams

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKENS_LIMIT)]
StopText = Annotated[str, Field(min_length=1, max_length=256)]


class StreamOptions(Body):
    include_usage: bool = False


class Generation(Body):
    """What completions and chat completions have in common."""

    model: str = Field(max_length=128, description='"{run}" (newest published version) or "{run}@{version}"')
    n: int = Field(default=1, ge=1, le=128)
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_p: float = Field(default=1.0, ge=0, le=1)
    top_k: int = Field(default=0, ge=0, le=MAX_TOKENS_LIMIT, description="0: off")
    min_p: float = Field(default=0.0, ge=0, le=1)
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    stop_token_ids: list[TokenId] = Field(default=[], max_length=64)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(default=None, max_length=512, description="Accepted, not used")

    def params(self, max_tokens: int) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            max_tokens=max_tokens,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids),
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
        )


class CompletionBody(Generation):
    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    max_tokens: int = Field(default=16, ge=1, le=MAX_TOKENS_LIMIT)
    logprobs: Literal[0] | None = Field(
        default=None, description="0: logprobs of the sampled tokens; alternatives are not recorded"
    )

    @model_validator(mode="after")
    def _not_empty(self) -> CompletionBody:
        if not self.prompt:
            raise PydanticCustomError("prompt", "the prompt is empty")
        return self


class ChatBody(Generation):
    messages: list[Message] = Field(min_length=1, max_length=1024)
    max_tokens: int | None = Field(
        default=None, ge=1, le=MAX_TOKENS_LIMIT, description="Default: what max_model_len leaves"
    )
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS_LIMIT)
    logprobs: bool = False
    top_logprobs: Literal[0] | None = Field(default=None, description="Alternatives are not recorded")
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _prefill(self) -> ChatBody:
        check_prefill(self.messages, self.continue_final_message)
        return self


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Sampled(Answer):
    """What every choice says beyond OpenAI's fields; in a stream `token_ids` are those of the chunk."""

    index: int
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int]
    logprobs_f32: RawBytes = Field(description="Raw little-endian float32, base64")
    trajectory_id: str


class CompletionLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: None = None
    text_offset: list[int]


class CompletionChoice(Sampled):
    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_token_ids: list[int] | None = Field(default=None, description="Null in a stream's later chunks")


class TokenLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[None] = Field(default=[])


class ChatLogprobs(Answer):
    content: list[TokenLogprob]


class ChatMessage(Answer):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChoice(Sampled):
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class ChatChunkChoice(Sampled):
    delta: ChatMessage
    logprobs: ChatLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class Envelope(Answer):
    id: str
    created: int
    model: str
    weight_version: VersionName = Field(description="Every token was sampled by this version")
    usage: Usage | None = None


class Completion(Envelope):
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class ChatCompletion(Envelope):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class ChatCompletionChunk(Envelope):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]


class Model(Answer):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "timzero"
    max_model_len: int


class Models(Answer):
    object: Literal["list"] = "list"
    data: list[Model]
