"""Whatever the OpenAPI document allows, and what it does not: no 500, and every answer is one that it describes."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import checks

from services.gateway import app, openai
from services.gateway.problems import CODES
from tests.deadline import DEADLINE_S
from tests.integration.gateway_harness import HttpGateway, publish, run_config
from timzero.client import Client

pytest_plugins = ("tests.integration.gateway_fixtures",)

CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
DOCS = Path(__file__).parents[2] / "docs" / "http.md"


@schemathesis.serializer("application/msgpack")
def pack(_: schemathesis.SerializationContext, value: Any) -> bytes:
    try:
        return msgpack.packb(value)
    except (OverflowError, ValueError):
        # JSON knows integers and text that msgpack does not.
        return msgpack.packb(None)


@pytest.fixture(scope="module")
def busy(valkey_url: str, weight_sync_address: str, model: Path) -> Iterator[tuple[HttpGateway, str]]:
    """A gateway with a run, some samples in various states, a version, and something that serves evaluations at once."""
    config = run_config("busy", model, num_steps=1000)
    with HttpGateway(valkey_url, weight_sync_address) as gateway, Client(gateway.url) as client:
        gateway.replicas = {"ready": 1}
        run = client.create_run(config)["run"]
        publish(weight_sync_address, config, 0)
        client.post_prompts(run, [{"number": n, "prompt": "1"} for n in range(3)])
        gateway.generate(run, f"{run}.0.0", [5])
        gateway.record_step(run, 0, {"reward": 0.5})
        server = threading.Thread(target=serve_evaluations, args=(gateway, run), daemon=True)
        server.start()
        yield gateway, run
        client.stop(run)


def serve_evaluations(gateway: HttpGateway, run: str) -> None:
    """Samples one token for every evaluation sample until the run is stopped."""
    with Client(gateway.url) as client:
        for event in client.stream_events(run, deadline_s=3600, types=["evaluation.accepted", "run.stopped"]):
            if event.type == "run.stopped":
                return
            record = gateway.call(gateway.store.get_eval(run, int(event.group_id.rpartition(".e")[2])))
            for t in record.trajectories:
                gateway.generate(run, t.trajectory_id, [5])


@pytest.fixture(scope="module")
def api(busy: tuple[HttpGateway, str]) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{busy[0].url}/openapi.json")


_turn = itertools.count()
OPERATIONS = [(m, r.path) for router in (*app.ROUTERS, openai.router) for r in router.routes for m in sorted(r.methods)]


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_no_answer_is_a_fault_or_undocumented(
    method: str, path: str, api: schemathesis.BaseSchema, busy: tuple[HttpGateway, str]
) -> None:
    @given(case=api[path][method].as_strategy())
    @settings(
        max_examples=15,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def check(case: schemathesis.Case) -> None:
        aim(case, busy[1])
        case.call_and_validate(checks=CHECKS, timeout=DEADLINE_S)

    check()


def aim(case: schemathesis.Case, run: str) -> None:
    """Lets most requests reach what exists, and none wait for long or end the run."""
    query, path = dict(case.query or {}), dict(case.path_parameters or {})
    if "run" in path and not case.path.endswith((":stop", ":pause")) and next(_turn) % 4:
        path["run"] = run
        if "trajectory_id" in path:
            path["trajectory_id"] = f"{run}.0.0"
        if "eval_id" in path or "step" in path:
            path.update({k: 0 for k in ("eval_id", "step") if k in path})
    if case.path.endswith("/stream"):
        query["timeout_s"] = 0.05
    query.pop("wait_s", None)
    if isinstance(case.body, dict) and "model" in case.body and "run" not in case.body:
        case.body["model"] = run
    case.query, case.path_parameters = query, path


def test_document_describes_every_route_and_problem(busy: tuple[HttpGateway, str]) -> None:
    document = httpx.get(f"{busy[0].url}/openapi.json", timeout=DEADLINE_S).json()
    assert document["openapi"].startswith("3.1")
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            where = f"{method} {path}"
            if not path.startswith("/v1"):
                continue
            shape = (
                "OpenAIError" if path.startswith(("/v1/completions", "/v1/chat", "/v1/models")) else "ProblemDocument"
            )
            for status in ("401", "403", "404", "422" if shape == "ProblemDocument" else "400", "500", "503"):
                content = next(iter(operation["responses"][status]["content"].values()))
                assert content["schema"]["$ref"].endswith(shape), (where, status)
            assert operation["security"] == [{"HTTPBearer": []}], where
            if path.startswith("/v1/runs") and "requestBody" in operation:
                assert set(operation["requestBody"]["content"]) == {"application/json", "application/msgpack"}, where
            if method == "post":
                assert "Idempotency-Key" in {p["name"] for p in operation["parameters"]}, where
    assert not {"ValidationError", "HTTPValidationError"} & set(document["components"]["schemas"])


def test_documentation_names_every_route_and_code(busy: tuple[HttpGateway, str]) -> None:
    text = DOCS.read_text()
    document = httpx.get(f"{busy[0].url}/openapi.json", timeout=DEADLINE_S).json()
    for path in document["paths"]:
        assert f"`{path}`" in text, path
    for code, (status, *_) in CODES.items():
        assert re.search(rf"\| `{code}` \| {status} \|", text), code
