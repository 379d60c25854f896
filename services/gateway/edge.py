"""What surrounds every request: its id, its caller, its body within bounds, its metrics and log line, its faults.

Pure ASGI, outside of the routes: a caller without a key is turned away before its body is read, and the byte limit counts
what arrives, not what Content-Length promises.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from typing import Any

import grpc.aio
import structlog
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.auth import LOCAL, Keyring, check_local_caller
from services.gateway.problems import MEDIA_TYPE, Problem, request_errors
from shared.metrics import names
from shared.metrics.server import metric
from shared.wire import records

log = structlog.get_logger()

OPENAI_PATHS = ("/v1/completions", "/v1/chat/", "/v1/models")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_STORE_CODES: dict[type[records.StoreError], str] = {
    records.UnknownRun: "not-found",
    records.UnknownTrajectory: "not-found",
    records.UnknownEvaluation: "not-found",
    records.RunExists: "run-exists",
    records.RunActive: "run-active",
    records.IllegalTransition: "run-state",
    records.GroupSealed: "group-sealed",
    records.RunOver: "run-over",
    records.NotDurable: "valkey-unavailable",
}


class Disconnected(Exception):
    """The client went away before its body was complete."""


class Edge:
    """Args:
    app: what is inside.
    max_body_bytes, body_timeout_s: bounds of a request's body.
    """

    def __init__(self, app: ASGIApp, *, keyring: Keyring, max_body_bytes: int, body_timeout_s: float) -> None:
        self._app = app
        self._keyring = keyring
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        given = request.headers.get("x-request-id", "")
        request.state.request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        with structlog.contextvars.bound_contextvars(request_id=request.state.request_id):
            await self._answer(request, send)

    async def _answer(self, request: Request, send: Send) -> None:
        started_at = time.monotonic()
        status = 0

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request.state.request_id.encode())]
            await send(message)

        try:
            await self._admit_and_run(request, counted)
        except Disconnected:
            status = 499
        except Exception as error:
            # The edge of the request loop: whatever got here is our fault, and the client is told so, without its text.
            log.error("request failed", method=request.method, path=request.url.path, exc_info=error)
            if status:
                raise
            await problem_response(request, Problem("internal", "see the server's log for this request_id"))(
                request.scope, request.receive, counted
            )
        finally:
            self._record(request, status, time.monotonic() - started_at)

    async def _admit_and_run(self, request: Request, send: Send) -> None:
        try:
            self._authenticate(request)
            receive = await self._read_body(request)
        except Problem as problem:
            response = problem_response(request, problem)
            # The rest of the body is not read, so the connection can't be used again.
            response.headers["Connection"] = "close"
            await response(request.scope, request.receive, send)
            return
        await self._app(request.scope, receive, send)

    def _authenticate(self, request: Request) -> None:
        if not request.url.path.startswith("/v1"):
            request.state.caller = LOCAL
            return
        request.state.caller = self._keyring.authenticate(request.headers.get("authorization"))
        if request.state.caller is LOCAL:
            check_local_caller(request.headers.get("host", ""), request.headers.get("origin"))

    async def _read_body(self, request: Request) -> Receive:
        """The whole body, at most `max_body_bytes` of it. Returns a `receive` that gives it once and then waits."""
        if request.method in ("GET", "HEAD", "OPTIONS"):
            return request.receive
        declared = request.headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > self._max_body_bytes:
            raise self._too_large()
        chunks, size, more = [], 0, True
        try:
            async with asyncio.timeout(self._body_timeout_s):
                while more:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise Disconnected
                    chunks.append(message.get("body", b""))
                    size += len(chunks[-1])
                    more = message.get("more_body", False)
                    if size > self._max_body_bytes:
                        raise self._too_large()
        except TimeoutError:
            raise Problem("body-timeout", f"{size} bytes in {self._body_timeout_s:g} s; send faster or less") from None
        pending: list[Message] = [{"type": "http.request", "body": b"".join(chunks), "more_body": False}]

        async def receive() -> Message:
            return pending.pop() if pending else await request.receive()

        return receive

    def _too_large(self) -> Problem:
        return Problem(
            "too-large", f"the body exceeds {self._max_body_bytes} bytes; split it", limit=self._max_body_bytes
        )

    def _record(self, request: Request, status: int, seconds: float) -> None:
        route = getattr(request.scope.get("route"), "path", "unmatched")
        metric(names.HTTP_REQUESTS).labels(route=route, method=request.method, status=str(status)).inc()
        metric(names.HTTP_SECONDS).labels(route=route).observe(seconds)
        caller = getattr(request.state, "caller", None)
        log.info(
            "request",
            method=request.method,
            path=request.url.path,
            status=status,
            seconds=round(seconds, 6),
            caller=caller.name if caller else None,
        )


def problem_response(request: Request, problem: Problem) -> JSONResponse:
    """The problem document, or OpenAI's error shape on OpenAI's routes (with 400 for what is 422 elsewhere)."""
    path = request.url.path
    if path.startswith(OPENAI_PATHS):
        status = 400 if problem.status == 422 else problem.status
        return JSONResponse(problem.openai().model_dump(), status, problem.headers)
    document = problem.document(instance=path, request_id=request.state.request_id)
    return JSONResponse(document.model_dump(), problem.status, problem.headers, MEDIA_TYPE)


def as_problem(error: Exception) -> Problem:
    """Every exception that a route may raise on purpose, as the problem it stands for."""
    match error:
        case Problem():
            return error
        case RequestValidationError():
            errors = request_errors(error.errors())
            return Problem("invalid-request", f"{len(errors)} field(s) are not valid", errors=errors)
        case records.StoreError():
            return Problem(_STORE_CODES.get(type(error), "run-state"), str(error))
        case RedisError():
            log.warning("valkey unavailable", error=str(error))
            return Problem("valkey-unavailable", "Valkey does not answer; try again", retry_after_s=1)
        case grpc.aio.AioRpcError():
            return rpc_problem(error)
        case HTTPException():
            codes = {404: "not-found", 405: "method-not-allowed", 413: "too-large"}
            code = codes.get(error.status_code, "malformed-request")
            return Problem(code, str(error.detail), headers=error.headers)
    raise error


def rpc_problem(error: grpc.aio.AioRpcError) -> Problem:
    if error.code() is grpc.StatusCode.NOT_FOUND:
        return Problem("version-unknown", error.details() or "no such version")
    log.warning("weight_sync failed", code=error.code().name, details=error.details())
    return Problem("weight-sync-unavailable", f"weight_sync answered {error.code().name}; try again", retry_after_s=1)


async def answer_error(request: Request, error: Any) -> JSONResponse:
    problem = as_problem(error)
    if problem.code == "method-not-allowed":
        # Starlette names the methods of the first route of this path only.
        routes = request.app.state.routes
        problem.headers["Allow"] = ", ".join(
            sorted(m for r in routes if r.path_regex.match(request.url.path) for m in r.methods)
        )
    return problem_response(request, problem)


HANDLED = (Problem, RequestValidationError, records.StoreError, RedisError, grpc.aio.AioRpcError, HTTPException)
"""What the application registers `answer_error` for."""
