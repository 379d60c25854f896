"""What holds for every route: problem documents, limits, media types, keys and scopes, Idempotency-Key."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import msgpack
import pytest

from services.gateway.problems import CODES
from tests.deadline import DEADLINE_S
from tests.integration.gateway_harness import HttpGateway
from timzero.client import Client

pytest_plugins = ("tests.integration.gateway_fixtures",)

JSON = {"Content-Type": "application/json"}


def check_problem(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The document is RFC 9457's with our members, and says the same as the response around it."""
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    document = answer.json()
    assert (answer.status_code, document["code"]) == (status, code), answer.text
    assert document["status"] == status
    assert document["type"] == f"urn:timzero:problem:{code}"
    assert document["title"] == CODES[code].title
    assert document["retryable"] == CODES[code].retryable
    assert document["instance"] == answer.request.url.path
    assert document["request_id"] == answer.headers["x-request-id"]
    assert document["detail"]
    return document


def test_every_kind_of_error_is_a_problem_document(http: httpx.Client, run: str) -> None:
    check_problem(http.get("/nowhere"), 404, "not-found")
    check_problem(http.get("/v1/nowhere"), 404, "not-found")
    answer = http.delete("/v1/runs")
    check_problem(answer, 405, "method-not-allowed")
    assert answer.headers["allow"] == "GET, POST"
    check_problem(http.post("/v1/runs", content=b"{", headers=JSON), 400, "malformed-body")
    check_problem(
        http.post("/v1/runs", content=b"run=a", headers={"Content-Type": "text/plain"}), 415, "unsupported-media-type"
    )
    check_problem(http.post("/v1/runs", content=b"{}"), 415, "unsupported-media-type")
    check_problem(http.post("/v1/runs", json={}), 422, "invalid-request")
    check_problem(http.post("/v1/runs"), 422, "invalid-request")


@pytest.mark.parametrize(
    "body",
    [b"\xff\xfe", b'{"items": [', b"[" * 100_000, b'{"a": "\xed\xa0\x80"}', b'{"items": [NaN]}', b'"\\ud800"'],
    ids=["not UTF-8", "cut off", "deep", "surrogate bytes", "NaN", "lone surrogate"],
)
def test_malformed_json_is_400(http: httpx.Client, run: str, body: bytes) -> None:
    check_problem(http.post(f"/v1/runs/{run}/prompts", content=body, headers=JSON), 400, "malformed-body")


@pytest.mark.parametrize(
    "body", [b"\xc1", b"\x91" * 5000, b"\x81\x01\x01", msgpack.packb({}) + b"\x00", b"\xdd\xff\xff\xff\xff"]
)
def test_malformed_msgpack_is_400(http: httpx.Client, run: str, body: bytes) -> None:
    headers = {"Content-Type": "application/msgpack"}
    check_problem(http.post(f"/v1/runs/{run}/prompts", content=body, headers=headers), 400, "malformed-body")


def test_request_id_of_the_client_is_kept_when_it_is_one(http: httpx.Client) -> None:
    assert http.get("/healthz", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert http.get("/healthz", headers={"X-Request-Id": "a b\tc"}).headers["x-request-id"] != "a b\tc"


def test_answers_are_not_held_back_by_the_network_stack(http: httpx.Client, gateway: HttpGateway) -> None:
    """With Nagle's algorithm on, every answer on a kept connection takes 40 ms."""
    http.get("/healthz")

    async def without_nagle() -> list[int]:
        connections = [c.transport.get_extra_info("socket") for c in gateway.server.server_state.connections]
        return [c.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for c in connections]

    found = gateway.call(without_nagle())
    assert found
    assert all(found)


# limits


@pytest.fixture(scope="module")
def small(valkey_url: str, weight_sync_address: str) -> Iterator[HttpGateway]:
    with HttpGateway(valkey_url, weight_sync_address, max_body_bytes=10_000, body_timeout_s=0.5) as server:
        yield server


def test_body_over_the_limit_is_413_declared_or_not(small: HttpGateway) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(30):
            yield b" " * 1000

    with httpx.Client(base_url=small.url, timeout=DEADLINE_S) as http:
        declared = http.post("/v1/runs", content=b" " * 10_001, headers=JSON)
        assert check_problem(declared, 413, "too-large")["limit"] == 10_000
        check_problem(http.post("/v1/runs", content=chunks(), headers=JSON), 413, "too-large")
        check_problem(http.post("/v1/runs", content=b" " * 10_000, headers=JSON), 400, "malformed-body")


def test_body_that_lies_about_its_length_is_cut_at_the_limit(small: HttpGateway) -> None:
    """Chunked bodies have no Content-Length; what counts is what arrives."""
    with socket.create_connection(("127.0.0.1", small.port), timeout=DEADLINE_S) as connection:
        connection.sendall(b"POST /v1/runs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                           b"Transfer-Encoding: chunked\r\n\r\n")  # fmt: skip
        for _ in range(11):
            connection.sendall(b"3e8\r\n" + b" " * 1000 + b"\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_body_that_does_not_arrive_is_408(small: HttpGateway) -> None:
    with socket.create_connection(("127.0.0.1", small.port), timeout=DEADLINE_S) as connection:
        connection.sendall(b"POST /v1/runs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                           b"Content-Length: 100\r\n\r\n{")  # fmt: skip
        assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_client_that_leaves_in_mid_body_does_no_harm(small: HttpGateway) -> None:
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", small.port), timeout=DEADLINE_S) as connection:
            connection.sendall(b"POST /v1/runs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
    assert httpx.get(f"{small.url}/healthz", timeout=DEADLINE_S).status_code == 200


# keys


KEYS = {"writer": "prompts:write", "grader": "rewards:write", "reader": "trajectories:read",
        "sampler": "trajectories:write", "root": "admin"}  # fmt: skip


@pytest.fixture(scope="module")
def keyed(valkey_url: str, weight_sync_address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpGateway]:
    entries = [
        f"{name}:{hashlib.sha256(f'secret-{name}'.encode()).hexdigest()}:{scope}" for name, scope in KEYS.items()
    ]
    keys_file = tmp_path_factory.mktemp("keys") / "keys"
    keys_file.write_text("# one a line\n" + "\n".join(entries[1:]) + "\n")
    with HttpGateway(valkey_url, weight_sync_address, keys=tuple(entries[:1]), keys_file=str(keys_file)) as server:
        yield server


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", "Basic secret-root", "secret-root"])
def test_without_a_known_key_nothing_is_served(keyed: HttpGateway, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    for method, path in (
        ("GET", "/v1/runs"),
        ("POST", "/v1/runs"),
        ("GET", "/v1/runs/x/trajectories/stream"),
        ("GET", "/v1/no"),
    ):
        answer = httpx.request(method, keyed.url + path, headers=headers, timeout=DEADLINE_S)
        check_problem(answer, 401, "unauthenticated")
        assert answer.headers["www-authenticate"].startswith("Bearer")
    assert httpx.get(f"{keyed.url}/healthz", headers=headers, timeout=DEADLINE_S).status_code == 200


SCOPED = [
    ("POST", "/v1/runs", "admin"),
    ("POST", "/v1/runs/x:pause", "admin"),
    ("POST", "/v1/runs/x:resume", "admin"),
    ("POST", "/v1/runs/x:stop", "admin"),
    ("POST", "/v1/runs/x/groups/0:cancel", "admin"),
    ("POST", "/v1/runs/x/prompts", "prompts:write"),
    ("POST", "/v1/runs/x/evals", "prompts:write"),
    ("POST", "/v1/completions", "prompts:write"),
    ("POST", "/v1/chat/completions", "prompts:write"),
    ("PUT", "/v1/runs/x/trajectories/y/rewards/z", "rewards:write"),
    ("POST", "/v1/runs/x/rewards:batch", "rewards:write"),
    ("POST", "/v1/runs/x/trajectories", "trajectories:write"),
    ("GET", "/v1/runs", "trajectories:read"),
    ("GET", "/v1/runs/x/trajectories/stream", "trajectories:read"),
    ("GET", "/v1/models", "trajectories:read"),
]


@pytest.mark.parametrize(("method", "path", "scope"), SCOPED)
def test_a_key_opens_what_its_scope_says(keyed: HttpGateway, method: str, path: str, scope: str) -> None:
    for name, held in KEYS.items():
        answer = httpx.request(
            method, keyed.url + path, headers={"Authorization": f"Bearer secret-{name}"}, timeout=DEADLINE_S
        )
        assert (answer.status_code == 403) == (held not in (scope, "admin")), (name, answer.text)


def test_every_route_under_v1_has_a_scope(keyed: HttpGateway) -> None:
    paths = httpx.get(f"{keyed.url}/openapi.json", timeout=DEADLINE_S).json()["paths"]
    for path, operations in paths.items():
        for method in operations:
            answer = httpx.request(
                method, keyed.url + path, headers={"Authorization": "Bearer secret-nobody"}, timeout=DEADLINE_S
            )
            assert (answer.status_code == 401) == path.startswith("/v1/"), path


def test_keys_are_neither_logged_nor_echoed(keyed: HttpGateway, capfd: pytest.CaptureFixture[str]) -> None:
    with Client(keyed.url, api_key="secret-root") as client:
        list(client.runs())
    refused = httpx.get(f"{keyed.url}/v1/runs", headers={"Authorization": "Bearer secret-typo"}, timeout=DEADLINE_S)
    out, err = capfd.readouterr()
    assert "/v1/runs" in out + err, "requests are logged"
    assert "secret-" not in out + err + refused.text


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"Origin": "null"}])
def test_without_keys_a_web_page_cannot_use_the_loopback(http: httpx.Client, headers: dict[str, str]) -> None:
    check_problem(http.post("/v1/runs/x:stop", headers=headers), 403, "foreign-origin")


# Idempotency-Key


def test_same_key_and_body_replays_the_first_response(http: httpx.Client, client: Client, run: str) -> None:
    body = {"items": [{"number": 0, "prompt": "1"}]}
    headers = {"Idempotency-Key": f"key-{run}"}
    first = http.post(f"/v1/runs/{run}/prompts", json=body, headers=headers)
    again = http.post(f"/v1/runs/{run}/prompts", json=body, headers=headers)
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert (again.status_code, again.content) == (202, first.content)
    assert again.headers["content-type"] == first.headers["content-type"]
    assert client.metrics(run)["accepted"] == 2


def test_replayed_creation_keeps_status_and_location(http: httpx.Client, config: dict[str, Any], make_run: Any) -> None:
    headers = {"Idempotency-Key": f"create-{config['run']}"}
    answers = [http.post("/v1/runs", json=config, headers=headers) for _ in range(2)]
    assert [a.status_code for a in answers] == [201, 201]
    assert answers[1].headers["location"] == f"/v1/runs/{config['run']}"


def test_same_key_with_another_body_is_422(http: httpx.Client, client: Client, run: str) -> None:
    headers = {"Idempotency-Key": f"key-{run}"}
    path = f"/v1/runs/{run}/prompts"
    http.post(path, json={"items": [{"number": 0, "prompt": "1"}]}, headers=headers)
    answer = http.post(path, json={"items": [{"number": 1, "prompt": "1"}]}, headers=headers)
    check_problem(answer, 422, "idempotency-key-reused")
    assert client.metrics(run)["accepted"] == 2


def test_key_belongs_to_its_route(http: httpx.Client, run: str) -> None:
    headers = {"Idempotency-Key": f"key-{run}"}
    assert http.post(f"/v1/runs/{run}:pause", headers=headers).json()["state"] == "paused"
    assert http.post(f"/v1/runs/{run}:resume", headers=headers).json()["state"] == "running"


def test_key_in_progress_is_409_with_retry_after(http: httpx.Client, gateway: HttpGateway, run: str) -> None:
    """The second request comes while the first one is inside its handler."""
    entered, go_on = threading.Event(), threading.Event()
    accept = gateway.store.accept_prompts

    async def slow(*args: Any) -> Any:
        entered.set()
        await asyncio.to_thread(go_on.wait, DEADLINE_S)
        return await accept(*args)

    gateway.store.accept_prompts = slow  # type: ignore[method-assign]
    request = {"json": {"items": [{"number": 0, "prompt": "1"}]}, "headers": {"Idempotency-Key": f"key-{run}"}}
    answers = []
    first = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{gateway.url}/v1/runs/{run}/prompts", timeout=DEADLINE_S, **request))
    )
    try:
        first.start()
        assert entered.wait(DEADLINE_S)
        answer = http.post(f"/v1/runs/{run}/prompts", **request)
        check_problem(answer, 409, "idempotency-in-progress")
        assert answer.headers["retry-after"] == "1"
    finally:
        go_on.set()
        first.join()
        gateway.store.accept_prompts = accept  # type: ignore[method-assign]
    assert answers[0].status_code == 202
    assert http.post(f"/v1/runs/{run}/prompts", **request).headers["idempotent-replayed"] == "true"


def test_error_is_not_kept_so_that_a_repeat_may_succeed(
    http: httpx.Client, client: Client, config: dict[str, Any], run: str
) -> None:
    other = {**config, "run": f"{run}-next"}
    headers = {"Idempotency-Key": f"key-{run}"}
    check_problem(http.post("/v1/runs", json=other, headers=headers), 409, "run-active")
    client.stop(run)
    assert http.post("/v1/runs", json=other, headers=headers).status_code == 201


@pytest.mark.parametrize("key", ["", "with space", "x" * 256, "\u00e9".encode("latin-1")])
def test_bad_key_is_400(http: httpx.Client, run: str, key: Any) -> None:
    check_problem(http.post(f"/v1/runs/{run}:pause", headers={"Idempotency-Key": key}), 400, "malformed-request")


def test_fault_of_the_server_is_500_without_its_text(http: httpx.Client, gateway: HttpGateway, run: str) -> None:
    async def broken(*_: Any) -> Any:
        raise RuntimeError("the secret inside")

    counts = gateway.store.counts
    gateway.store.counts = broken  # type: ignore[method-assign]
    try:
        answer = http.get(f"/v1/runs/{run}/metrics")
    finally:
        gateway.store.counts = counts  # type: ignore[method-assign]
    check_problem(answer, 500, "internal")
    assert "secret" not in answer.text
