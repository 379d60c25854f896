"""What clients send: request bodies of the HTTP API, checked as far as that needs no run, no tokenizer and no store."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

from services.gateway.problems import FieldError, field_errors
from shared.wire.types import SamplingParams

MAX_METADATA_BYTES = 16 * 1024
MAX_TOKENS_LIMIT = 2**31 - 1
"""Largest token id, token count and number of a prompt; what int32 on the wire holds."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
"""Ids that become part of keys and URLs."""


class Body(BaseModel):
    """Unknown fields are refused, so that a misspelt one can't be lost; NaN and infinities are refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)


def _check_metadata(value: Any, handler: Any) -> dict[str, Any]:
    checked = handler(value)
    try:
        # Also refuses integers that msgpack can't hold and text that UTF-8 can't.
        size = len(json.dumps(checked, ensure_ascii=False).encode())
        _check_integers(checked)
    except (ValueError, OverflowError) as error:
        raise PydanticCustomError("metadata", "metadata cannot be stored: {reason}", {"reason": str(error)}) from None
    if size > MAX_METADATA_BYTES:
        raise PydanticCustomError(
            "metadata", "metadata has {size} bytes, at most {limit}", {"size": size, "limit": MAX_METADATA_BYTES}
        )
    return checked


def _check_integers(value: Any) -> None:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise OverflowError("an integer beyond 64 bits")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_integers(inner)


Metadata = Annotated[dict[str, JsonValue], WrapValidator(_check_metadata)]


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str


class Sampling(Body):
    """Sampling parameters of prompts and evaluations."""

    temperature: float | None = Field(default=None, ge=0, le=100, description="None: the run's; evaluations: 0, greedy")
    max_tokens: int = Field(default=16, ge=1, le=MAX_TOKENS_LIMIT)
    stop: list[Annotated[str, Field(min_length=1, max_length=256)]] = Field(default=[], max_length=16)
    stop_token_ids: list[Annotated[int, Field(ge=0, le=MAX_TOKENS_LIMIT)]] = Field(default=[], max_length=64)
    top_p: float = Field(default=1.0, ge=0, le=1, description="0 or 1: off. Refused for training")
    top_k: int = Field(default=0, ge=0, le=MAX_TOKENS_LIMIT, description="0: off. Refused for training")
    min_p: float = Field(default=0.0, ge=0, le=1, description="0: off. Refused for training")

    def params(self, default_temperature: float) -> SamplingParams:
        return SamplingParams(
            temperature=default_temperature if self.temperature is None else self.temperature,
            max_tokens=self.max_tokens,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
        )


def check_prefill(messages: list[Message] | None, continue_final_message: bool | None) -> None:
    if continue_final_message is not None and messages is None:
        raise PydanticCustomError("prefill", "continue_final_message needs messages")
    if continue_final_message and messages and messages[-1].role != "assistant":
        raise PydanticCustomError("prefill", "continue_final_message needs a last message of role assistant")


class PromptText(Body):
    """Exactly one of `prompt`, `messages`, `prompt_token_ids`."""

    prompt: str | None = Field(default=None, description="Text, tokenised with the model's special tokens")
    messages: list[Message] | None = Field(
        default=None, min_length=1, max_length=1024, description="Rendered with the chat template"
    )
    prompt_token_ids: list[Annotated[int, Field(ge=0, le=MAX_TOKENS_LIMIT)]] | None = Field(
        default=None, description="As they are"
    )
    continue_final_message: bool | None = Field(
        default=None,
        description="Sample behind a last assistant message (prefill). Default: true where the last message is one",
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> PromptText:
        given = [n for n in ("prompt", "messages", "prompt_token_ids") if getattr(self, n) is not None]
        if len(given) != 1:
            raise PydanticCustomError(
                "one_prompt",
                "give exactly one of prompt, messages, prompt_token_ids; got {given}",
                {"given": ", ".join(given) or "none"},
            )
        check_prefill(self.messages, self.continue_final_message)
        return self


class RewardSource(Body):
    """Where the rewards of a prompt's samples come from. The reward is the sum over the sources."""

    mode: Literal["external", "exact_match"] = Field(
        default="external",
        description="external: clients PUT them. exact_match: the gateway compares the text with `answer`",
    )
    deadline_s: float | None = Field(
        default=None, gt=0, description="From generated until every source must have answered. Default: the run's"
    )
    sources: list[Name] | None = Field(default=None, min_length=1, max_length=32, description='Default: ["default"]')
    answer: str | None = Field(default=None, max_length=65_536)


class PromptItem(PromptText):
    number: int | None = Field(
        default=None, ge=0, le=MAX_TOKENS_LIMIT, description="Place in the run; its batch follows from it"
    )
    prompt_id: Name | None = Field(default=None, description="The client's own id; unique in the run")
    n: int | None = Field(default=None, ge=1, le=1024, description="Samples; must be the run's samples_per_prompt")
    sampling: Sampling = Sampling()
    reward: RewardSource = RewardSource()
    metadata: Metadata = {}


class Refused(BaseModel):
    """An item that is not valid. It is answered by itself; the others go on."""

    errors: list[FieldError]


def or_refused(value: Any, handler: Any) -> Any:
    """Wraps the validator of an item: one that is not valid becomes `Refused`."""
    try:
        return handler(value)
    except ValidationError as error:
        return Refused(errors=field_errors(error.errors(include_input=False)))


class PromptBatch(Body):
    items: list[Annotated[PromptItem, WrapValidator(or_refused)]] = Field(min_length=1)


class RewardBody(Body):
    value: float
    revision: int = Field(
        default=0, ge=0, le=2**53, description="A higher one replaces; an equal one must carry the same value"
    )


class RewardItem(RewardBody):
    trajectory_id: str = Field(min_length=1, max_length=256)
    source: Name = "default"


class RewardBatch(Body):
    items: list[Annotated[RewardItem, WrapValidator(or_refused)]] = Field(min_length=1)


class Reason(Body):
    reason: Annotated[str, Field(min_length=1, max_length=200)] = "operator"


OPERATOR = Reason()


class EvalItem(PromptText):
    answer: str | None = Field(
        default=None, max_length=65_536, description="Given: graded by exact match, source `exact_match`"
    )
    metadata: Metadata = {}


class EvalBody(Body):
    items: list[EvalItem] = Field(min_length=1)
    n: int = Field(default=1, ge=1, le=1024)
    sampling: Sampling = Sampling()
    version: int | None = Field(
        default=None, ge=0, le=2**53, description="Policy step to pin. Default: the newest published one"
    )
    seed: int | None = Field(
        default=None, ge=0, lt=2**63, description="Of the sampler. Default: derived from the run's seed"
    )
    metadata: Metadata = {}
