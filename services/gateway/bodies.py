"""Bodies in JSON or msgpack, both ways, and Idempotency-Key: what every route has around its handler."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgpack
import pydantic_core
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel

from services.gateway.problems import Problem

JSON = "application/json"
MSGPACK = "application/msgpack"
_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_KEPT_HEADERS = ("content-type", "location")


def wants_msgpack(request: Request) -> bool:
    return MSGPACK in request.headers.get("accept", "")


def reply(request: Request, answer: BaseModel, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """The answer in the media type that the client accepts: msgpack where it asks for it, else JSON."""
    if wants_msgpack(request):
        content = msgpack.packb(answer.model_dump(exclude_none=False), use_bin_type=True)
        return Response(content, status, headers, MSGPACK)
    return Response(answer.model_dump_json(), status, headers, JSON)


class DecodedRequest(Request):
    """The request as FastAPI sees it: JSON, read already."""

    def __init__(self, request: Request, body: bytes, value: Any) -> None:
        headers = [(k, v) for k, v in request.scope["headers"] if k != b"content-type"]
        super().__init__({**request.scope, "headers": [*headers, (b"content-type", JSON.encode())]}, request.receive)
        self._body = body
        self._value = value

    async def json(self) -> Any:
        return self._value


class BodyRoute(APIRoute):
    """A route whose body may be JSON or msgpack and whose POST may carry an Idempotency-Key."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def decoded(request: Request) -> Response:
            body = await request.body()
            if self.body_field is None or not body:
                return await handle(request)
            return await handle(DecodedRequest(request, body, decode(request.headers.get("content-type", ""), body)))

        async def once(request: Request) -> Response:
            key = request.headers.get("idempotency-key")
            if key is None or request.method != "POST":
                return await decoded(request)
            return await idempotent(request, key, decoded)

        return once


def decode(content_type: str, body: bytes) -> Any:
    """Plain values of a JSON or msgpack body. JSON is read strictly: UTF-8, no NaN, no infinities.

    Raises: Problem unsupported-media-type, malformed-body.
    """
    media_type = content_type.partition(";")[0].strip().lower()
    try:
        if media_type == MSGPACK:
            return msgpack.unpackb(body, raw=False, strict_map_key=True)
        if media_type == JSON:
            return pydantic_core.from_json(body, allow_inf_nan=False)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise Problem("malformed-body", f"{media_type}: {error or type(error).__name__}") from error
    raise Problem("unsupported-media-type", f"got {content_type!r}; send {JSON} or {MSGPACK}")


async def idempotent(
    request: Request, key: str, handle: Callable[[Request], Coroutine[Any, Any, Response]]
) -> Response:
    """Answers a repeated POST with the first one's response. Responses that are errors are not kept: a repeat may succeed.

    Raises: Problem idempotency-key-reused, idempotency-in-progress, malformed-request.
    """
    if not _KEY.fullmatch(key):
        raise Problem("malformed-request", "Idempotency-Key must be 1 to 255 printable ASCII characters without spaces")
    store = request.app.state.gateway.store
    # A caller can't see another one's responses, nor another route's.
    scoped = hashlib.sha256(f"{request.state.caller.name}\n{request.url.path}\n{key}".encode()).hexdigest()
    content_type = request.headers.get("content-type", "")
    fingerprint = hashlib.sha256(content_type.encode() + b"\n" + await request.body()).hexdigest()
    before = await store.begin_request(scoped, fingerprint)
    if before is not None:
        if before.fingerprint != fingerprint:
            raise Problem(
                "idempotency-key-reused", "the key was used with another body; use a new key for a new request"
            )
        if before.response is None:
            raise Problem("idempotency-in-progress", "the first request is still being answered", retry_after_s=1)
        status, headers, content = msgpack.unpackb(before.response)
        return Response(content, status, {**headers, "Idempotent-Replayed": "true"})
    kept = False
    try:
        response = await handle(request)
        if response.status_code < 300 and isinstance(content := getattr(response, "body", None), bytes):
            headers = {k: response.headers[k] for k in _KEPT_HEADERS if k in response.headers}
            await store.finish_request(scoped, fingerprint, msgpack.packb([response.status_code, headers, content]))
            kept = True
        return response
    finally:
        if not kept:
            await store.abandon_request(scoped)
