"""Every error of the HTTP API: RFC 9457 problem documents with a stable code, and OpenAI's error shape on OpenAI's routes.

`CODES` is the whole vocabulary: a handler raises `Problem(code, detail)` and nothing else. `type` is a URN made from the
code; each is explained in docs/http.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "urn:timzero:problem:"


class Code(NamedTuple):
    status: int
    title: str
    retryable: bool = False


CODES: Mapping[str, Code] = {
    # the request itself
    "malformed-body": Code(400, "The body is not valid JSON or msgpack"),
    "malformed-request": Code(400, "The request cannot be read"),
    "unauthenticated": Code(401, "A valid bearer token is required"),
    "forbidden": Code(403, "The token lacks the scope that this route needs"),
    "foreign-origin": Code(403, "Without API keys only local callers are served"),
    "not-found": Code(404, "No such resource"),
    "method-not-allowed": Code(405, "The route does not have this method"),
    "body-timeout": Code(408, "The body did not arrive in time", retryable=True),
    "too-large": Code(413, "The request exceeds a limit"),
    "unsupported-media-type": Code(415, "The body's media type is not accepted here"),
    "invalid-request": Code(422, "The request is well-formed but not valid"),
    # idempotency
    "idempotency-key-reused": Code(422, "This Idempotency-Key was used with another request"),
    "idempotency-in-progress": Code(409, "A request with this Idempotency-Key is in progress", retryable=True),
    # runs
    "run-exists": Code(409, "The run exists with another configuration"),
    "run-active": Code(409, "Another run is active"),
    "run-over": Code(409, "The run is over"),
    "run-state": Code(409, "The run is not in a state that allows this"),
    "model-unavailable": Code(422, "The run's tokenizer cannot be loaded"),
    # prompts
    "prompt-conflict": Code(409, "The prompt's number or id is taken by another prompt"),
    "prompt-too-long": Code(422, "The prompt and its tokens to sample exceed the run's max_model_len"),
    "prompt-number": Code(422, "The prompt's number is missing or outside the run"),
    "prompt-empty": Code(422, "The prompt has no token"),
    "token-out-of-range": Code(422, "A token id is outside the model's vocabulary"),
    "sampling-refused": Code(422, "Training rollouts do not allow these sampling parameters"),
    "chat-template": Code(422, "The messages cannot be rendered with the model's chat template"),
    "capacity-exhausted": Code(429, "The admission gate is closed", retryable=True),
    "streams-exhausted": Code(429, "Too many event streams are open", retryable=True),
    "group-sealed": Code(409, "The group is being trained, or is trained"),
    # trajectories from elsewhere
    "logprob-invalid": Code(422, "A logprob is not one"),
    "version-mismatch": Code(422, "The samples are not of their batch's version"),
    # rewards
    "reward-revision-conflict": Code(409, "A newer or different reward of this source is recorded"),
    "reward-too-late": Code(409, "The trajectory is sealed; the reward is not applied"),
    "reward-source": Code(422, "The prompt does not expect a reward of this source"),
    # versions
    "version-unknown": Code(404, "The version is not published or no longer retained"),
    # this side
    "internal": Code(500, "A fault of the server"),
    "shutting-down": Code(503, "The gateway is shutting down", retryable=True),
    "valkey-unavailable": Code(503, "Valkey cannot be reached", retryable=True),
    "archive-unavailable": Code(503, "The archive of trained trajectories cannot be read", retryable=True),
    "weight-sync-unavailable": Code(503, "weight_sync cannot be reached", retryable=True),
    "not-ready": Code(503, "The gateway cannot serve yet", retryable=True),
    "generation-failed": Code(503, "The sample could not be generated", retryable=True),
    "deadline-exceeded": Code(504, "The work did not finish within the request's deadline", retryable=True),
}


class FieldError(BaseModel):
    pointer: str = Field(description="JSON pointer into the body, or the name of a parameter")
    detail: str


class ProblemDocument(BaseModel):
    """RFC 9457 document; a problem may carry further members (for example `limit` and `in_flight`)."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str
    instance: str
    code: str
    request_id: str
    retryable: bool
    errors: list[FieldError] = []


class OpenAIErrorBody(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class OpenAIError(BaseModel):
    error: OpenAIErrorBody


class Problem(Exception):
    """An answer that is an error.

    Args:
        code: a key of `CODES`.
        detail: what is wrong, the value got, and what to do.
        errors: one entry per bad field.
        retry_after_s: sent as Retry-After.
        extra: further members of the document.
    """

    def __init__(
        self,
        code: str,
        detail: str,
        *,
        errors: Iterable[FieldError] = (),
        retry_after_s: int | None = None,
        headers: Mapping[str, str] | None = None,
        **extra: Any,
    ) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.status, self.title, self.retryable = CODES[code]
        self.detail = detail
        self.errors = list(errors)
        self.extra = extra
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(retry_after_s)

    def at(self, pointer: str) -> Problem:
        """The same problem with `pointer` in front of its fields'."""
        self.errors = [FieldError(pointer=pointer + e.pointer, detail=e.detail) for e in self.errors] or [
            FieldError(pointer=pointer, detail=self.detail)
        ]
        return self

    def document(self, *, instance: str, request_id: str) -> ProblemDocument:
        return ProblemDocument(
            type=TYPE_PREFIX + self.code,
            title=self.title,
            status=self.status,
            detail=self.detail,
            instance=instance,
            code=self.code,
            request_id=request_id,
            retryable=self.retryable,
            errors=self.errors,
            **self.extra,
        )

    def openai(self) -> OpenAIError:
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        param = self.errors[0].pointer.lstrip("/") if self.errors else None
        message = self.detail + "".join(f"; {e.pointer}: {e.detail}" for e in self.errors if e.detail != self.detail)
        return OpenAIError(error=OpenAIErrorBody(message=message, type=kind, param=param, code=self.code))


def field_errors(errors: Iterable[Mapping[str, Any]]) -> list[FieldError]:
    """pydantic's errors with `loc` as a JSON pointer. The input is not echoed."""
    return [FieldError(pointer=_pointer(e["loc"]), detail=e["msg"]) for e in errors]


def request_errors(errors: Iterable[Mapping[str, Any]]) -> list[FieldError]:
    """FastAPI's errors: pointers into the body, or names of query, path and header parameters."""
    return [
        FieldError(pointer=_pointer(e["loc"][1:]) if e["loc"][0] == "body" else str(e["loc"][-1]), detail=e["msg"])
        for e in errors
    ]


def _pointer(loc: Iterable[Any]) -> str:
    return "".join(f"/{part}" for part in loc)


def event_stream(data: dict[str, Any]) -> dict[str, Any]:
    """OpenAPI content of a stream of server-sent events. Args: data: what its `data`, a text, is further."""
    fields = {"id": {"type": "string"}, "event": {"type": "string"}, "data": {"type": "string", **data}}
    return {"text/event-stream": {"schema": {"type": "object", "properties": fields, "required": ["data"]}}}


def responses(*codes: str, openai: bool = False) -> dict[int | str, dict[str, Any]]:
    """OpenAPI `responses` for these codes and for those that every route may answer."""
    everywhere = ("malformed-request", "unauthenticated", "forbidden", "not-found", "method-not-allowed", "body-timeout",
                  "too-large", "unsupported-media-type", "invalid-request", "internal", "valkey-unavailable")  # fmt: skip
    by_status: dict[int, list[str]] = {}
    for code in (*everywhere, *codes):
        by_status.setdefault(CODES[code].status, []).append(code)
    model, media_type = (OpenAIError, "application/json") if openai else (ProblemDocument, MEDIA_TYPE)
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {
        status: {
            "description": "; ".join(f"`{c}`: {CODES[c].title}" for c in dict.fromkeys(names)),
            "content": {media_type: {"schema": schema}},
        }
        for status, names in sorted(by_status.items())
    }
