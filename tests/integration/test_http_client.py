"""The client's manners: what it tries again, how long it waits, and when it gives up. The server is a script."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from tests.deadline import DEADLINE_S
from timzero.client import ApiError, Client

Answer = tuple[int, dict[str, str], Any]
UNAVAILABLE: Answer = (503, {}, {"code": "valkey-unavailable", "retryable": True, "detail": "away"})
GATE: Answer = (429, {"Retry-After": "0.2"}, {"code": "capacity-exhausted", "retryable": True, "detail": "closed"})


@contextmanager
def scripted(*answers: Answer) -> Iterator[tuple[Client, list[tuple[str, str, dict[str, str]]]]]:
    """A client of a server that gives these answers in turn, and the requests (method, path, headers) that came."""
    requests: list[tuple[str, str, dict[str, str]]] = []
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            requests.append((self.command, self.path, dict(self.headers)))
            status, headers, body = left.pop(0)
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in {
                "Content-Type": "application/json",
                "Content-Length": str(len(content)),
                **headers,
            }.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = answer

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with Client(f"http://127.0.0.1:{server.server_port}", timeout_s=DEADLINE_S) as client:
            yield client, requests
    finally:
        server.shutdown()
        server.server_close()


def test_retryable_answer_is_tried_again_after_the_time_it_names() -> None:
    with scripted((503, {"Retry-After": "0.4"}, UNAVAILABLE[2]), (200, {}, {"run": "r"})) as (client, requests):
        started_at = time.monotonic()
        assert client.get_run("r") == {"run": "r"}
        assert time.monotonic() - started_at >= 0.4
        assert len(requests) == 2


def test_post_is_repeated_under_the_same_key_and_a_new_call_has_a_new_one() -> None:
    done = (202, {}, {"eval_id": 0})
    with scripted(UNAVAILABLE, UNAVAILABLE, done, done) as (client, requests):
        client.create_eval("r", [{"prompt": "1"}])
        client.create_eval("r", [{"prompt": "1"}])
    keys = [headers["Idempotency-Key"] for _, _, headers in requests]
    assert len(keys) == 4
    assert len(set(keys[:3])) == 1
    assert keys[3] != keys[0]


def test_final_answer_is_raised_at_once_with_its_document() -> None:
    document = {
        "code": "run-exists",
        "retryable": False,
        "detail": "taken",
        "errors": [{"pointer": "/run", "detail": "x"}],
    }
    with scripted((409, {}, document)) as (client, requests):
        with pytest.raises(ApiError) as caught:
            client.create_run({"run": "r"})
        assert (caught.value.status, caught.value.code, caught.value.document) == (409, "run-exists", document)
        assert "taken" in str(caught.value)
        assert "/run" in str(caught.value)
        assert len(requests) == 1


def test_deadline_bounds_all_attempts_together() -> None:
    with scripted(*[(503, {"Retry-After": "0.3"}, UNAVAILABLE[2])] * 20) as (client, requests):
        with pytest.raises(ApiError) as caught:
            client.get_run("r", deadline_s=1.0)
        assert caught.value.status == 503
        assert 1 <= len(requests) <= 4, "one at once, and three more pauses of 0.3 s fit"


def test_server_that_is_not_there_is_waited_for_until_the_deadline() -> None:
    with Client("http://127.0.0.1:9", timeout_s=DEADLINE_S) as client:
        started_at = time.monotonic()
        with pytest.raises(httpx.ConnectError):
            client.get_run("r", deadline_s=0.8)
        assert 0.3 < time.monotonic() - started_at < DEADLINE_S / 2
        assert not client.ready()


def test_closed_gate_is_an_answer_per_item_not_an_exception() -> None:
    accepted = (202, {}, {"items": [{"index": 0, "status": 202}, {"index": 1, "status": 202}]})
    items = [{"number": n, "prompt": "1"} for n in (0, 1)]
    with scripted(GATE) as (client, requests):
        assert [r["status"] for r in client.post_prompts("r", items)] == [429, 429]
        assert len(requests) == 1
    with scripted(GATE, accepted) as (client, requests):
        started_at = time.monotonic()
        assert [r["status"] for r in client.post_prompts("r", items, gate_deadline_s=DEADLINE_S)] == [202, 202]
        assert time.monotonic() - started_at >= 0.2


def test_only_items_that_the_gate_refused_are_posted_again() -> None:
    first = (207, {"Retry-After": "0"}, {"items": [{"index": 0, "status": 202}, {"index": 1, "status": 429},
                                                   {"index": 2, "status": 422}]})  # fmt: skip
    second = (202, {}, {"items": [{"index": 0, "status": 202}]})
    with scripted(first, second) as (client, requests):
        results = client.post_prompts("r", [{"number": n} for n in range(3)], gate_deadline_s=DEADLINE_S)
    assert [(r["index"], r["status"]) for r in results] == [(0, 202), (1, 202), (2, 422)]
    assert len(requests) == 2


def test_error_of_a_proxy_is_an_api_error_too() -> None:
    with scripted((400, {"Content-Type": "text/html"}, b"<h1>bad</h1>")) as (client, _):
        with pytest.raises(ApiError) as caught:
            client.get_run("r")
        assert caught.value.status == 400
        assert "bad" in str(caught.value)


def test_stream_comes_back_after_a_503_and_an_early_end() -> None:
    events = {"Content-Type": "text/event-stream"}
    first = b'id: 1-0\nevent: a\ndata: {"trajectory_id": "x"}\n\n: ping\n\n'
    second = b'id: 2-0\nevent: b\ndata: {"trajectory_id": "y"}\n\n'
    with scripted((200, events, first), (503, {"Retry-After": "0"}, UNAVAILABLE[2]), (200, events, second)) as (
        client,
        requests,
    ):
        stream = client.stream_events("r", deadline_s=DEADLINE_S)
        assert [(e.cursor, e.type, e.trajectory_id) for e in (next(stream), next(stream))] == [
            ("1-0", "a", "x"),
            ("2-0", "b", "y"),
        ]
    assert [headers["Last-Event-ID"] for _, _, headers in requests] == ["0", "1-0", "1-0"]


def test_stream_of_an_unknown_run_is_an_error() -> None:
    with scripted((404, {}, {"code": "not-found", "retryable": False, "detail": "no run"})) as (client, _):
        with pytest.raises(ApiError) as caught:
            next(client.stream_events("r", deadline_s=DEADLINE_S))
        assert caught.value.code == "not-found"
