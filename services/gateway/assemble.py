"""The application from its parts, and its OpenAPI document."""

from __future__ import annotations

import copy
from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from services.gateway import answers, app, edge, openai
from services.gateway.bodies import JSON, MSGPACK
from services.gateway.context import Gateway
from services.gateway.problems import OpenAIError, ProblemDocument

DESCRIPTION = """Prompts, rewards, trajectories and evaluations of asynchronous RL runs.

Errors are RFC 9457 problem documents (`application/problem+json`) with a stable `code`, on the OpenAI-compatible routes
OpenAI's error object. Bodies of /v1/runs are JSON or `application/msgpack`, both ways. A POST may carry an
`Idempotency-Key`: the same key and body get the first response again, with `Idempotent-Replayed: true`.
Every response has an `X-Request-Id`."""


def create_app(gateway: Gateway) -> FastAPI:
    application = FastAPI(title="timzero gateway", version="1", description=DESCRIPTION, docs_url=None, redoc_url=None)
    application.state.gateway = gateway
    routers = (*app.ROUTERS, openai.router)
    for router in routers:
        application.include_router(router)
    application.state.routes = [route for router in routers for route in router.routes]
    for kind in edge.HANDLED:
        application.add_exception_handler(kind, edge.answer_error)
    application.add_middleware(
        edge.Edge,
        keyring=gateway.keyring,
        max_body_bytes=gateway.config.max_body_bytes,
        body_timeout_s=gateway.config.body_timeout_s,
    )
    generated = application.openapi

    def openapi() -> dict[str, Any]:
        if application.openapi_schema is None:
            application.openapi_schema = _completed(generated())
        return application.openapi_schema

    application.openapi = openapi  # type: ignore[method-assign]
    return application


def _completed(schema: dict[str, Any]) -> dict[str, Any]:
    """Adds what FastAPI can't know: the error models, msgpack beside JSON, Idempotency-Key and Last-Event-ID."""
    models = [(m, "serialization") for m in (ProblemDocument, OpenAIError, answers.StreamEvent)]
    _, extra = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    schema["components"]["schemas"].update(extra["$defs"])
    for unused in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(unused, None)
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            if path.startswith("/v1/runs"):
                for content in _contents(operation):
                    if JSON in content:
                        content[MSGPACK] = copy.deepcopy(content[JSON])
            if method == "post":
                _header(
                    operation, "Idempotency-Key", "1 to 255 visible ASCII characters; kept for 24 h", r"^[!-~]{1,255}$"
                )
            if path.endswith("/stream"):
                _header(operation, "Last-Event-ID", "Id of the last event seen, or 0", r"^[0-9]{1,19}(-[0-9]{1,19})?$")
    return schema


def _contents(operation: dict[str, Any]) -> list[dict[str, Any]]:
    bodies = [operation.get("requestBody", {})] + [r for s, r in operation["responses"].items() if s < "300"]
    return [b["content"] for b in bodies if "content" in b]


def _header(operation: dict[str, Any], name: str, description: str, pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    operation.setdefault("parameters", []).append(
        {"name": name, "in": "header", "required": False, "description": description, "schema": schema}
    )
