"""Trajectories over HTTP: records to the bit, listings in pages, and the event stream."""

from __future__ import annotations

import base64
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import httpx_sse
import msgpack
import numpy as np
import pytest

from tests.deadline import DEADLINE_S
from tests.integration.gateway_harness import HttpGateway
from timzero.client import ApiError, Client

pytest_plugins = ("tests.integration.gateway_fixtures",)

# Neighbours in float32 whose short decimals are easily taken for one another, and a denormal.
LOGPROBS = np.array([-0.1, np.nextafter(np.float32(-0.1), np.float32(0)), -1e-45, -0.0, -123.456], np.float32)


@pytest.fixture
def generated(client: Client, gateway: HttpGateway, run: str) -> str:
    """Id of a sample that awaits its reward; its sibling is only accepted."""
    client.post_prompts(
        run, [{"number": 0, "prompt": "sort 2 1 =", "sampling": {"max_tokens": 5}, "metadata": {"k": "v"}}]
    )
    gateway.generate(run, f"{run}.0.0", [5, 6, 7, 8, 2], logprobs=LOGPROBS)
    return f"{run}.0.0"


def test_logprobs_come_back_to_the_bit_in_json_and_msgpack(
    http: httpx.Client, client: Client, run: str, generated: str
) -> None:
    path = f"/v1/runs/{run}/trajectories/{generated}"
    in_json = http.get(path).json()
    in_msgpack = msgpack.unpackb(http.get(path, headers={"Accept": "application/msgpack"}).content)
    assert base64.b64decode(in_json["logprobs_f32"]) == LOGPROBS.tobytes()
    assert in_msgpack["logprobs_f32"] == LOGPROBS.tobytes()
    assert np.array(in_json["logprobs"]).astype(np.float32).tobytes() == LOGPROBS.tobytes()
    assert client.trajectory(run, generated)["logprobs"].tobytes() == LOGPROBS.tobytes()


def test_record_is_complete(client: Client, run: str, generated: str) -> None:
    t = client.trajectory(run, generated)
    assert t["token_ids"] == [14, 6, 5, 15, 5, 6, 7, 8, 2]
    assert (t["num_prompt_tokens"], t["prompt_text"], t["text"]) == (4, "sort 2 1 =", "1 2 3 4")
    assert t["loss_mask"] == [0] * 4 + [1] * 5
    assert [(s["start"], s["end"], s["kind"], s["kv"]) for s in t["spans"]] == [
        (0, 4, "prompt", "fresh"), (4, 9, "sampled", "fresh")
    ]  # fmt: skip
    assert (t["state"], t["sources"], t["reward"], t["metadata"]) == ("awaiting_reward", ["default"], None, {"k": "v"})
    assert (t["finish_reason"], t["sampling"]["max_tokens"], t["sampling"]["temperature"]) == ("stop", 5, 1.0)
    assert t["deadline"] > t["timestamps"]["awaiting_reward"] >= t["timestamps"]["accepted"]


def test_sample_that_is_not_generated_has_no_tokens_yet(client: Client, run: str, generated: str) -> None:
    t = client.trajectory(run, f"{run}.0.1")
    assert (t["state"], t["token_ids"], t["logprobs"], t["text"]) == ("accepted", None, None, None)


def test_unknown_trajectory_is_not_found(client: Client, run: str) -> None:
    with pytest.raises(ApiError) as caught:
        client.trajectory(run, f"{run}.99.0")
    assert (caught.value.status, caught.value.code) == (404, "not-found")


def test_trajectories_are_listed_once_in_order_of_acceptance(client: Client, gateway: HttpGateway, run: str) -> None:
    client.post_prompts(run, [{"number": n, "prompt": "1"} for n in (2, 0, 1)])
    gateway.generate(run, f"{run}.0.1", [5])
    everything = [t["trajectory_id"] for t in client.trajectories(run, limit=2)]
    assert everything == [f"{run}.{n}.{i}" for n in (2, 0, 1) for i in (0, 1)]
    assert [t["trajectory_id"] for t in client.trajectories(run, state="awaiting_reward", limit=2)] == [f"{run}.0.1"]
    (full,) = client.trajectories(run, state="awaiting_reward", full=True)
    assert (full["text"], full["logprobs"].dtype) == ("1", np.float32)


@pytest.mark.parametrize(
    "params", [{"state": "asleep"}, {"limit": 0}, {"limit": 257}, {"cursor": "abc"}, {"view": "x"}]
)
def test_bad_query_names_the_parameter(http: httpx.Client, run: str, params: dict[str, str]) -> None:
    answer = http.get(f"/v1/runs/{run}/trajectories", params=params)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid-request")
    assert [e["pointer"] for e in answer.json()["errors"]] == list(params)


def test_trajectories_are_read_by_id_in_one_request(client: Client, gateway: HttpGateway, run: str) -> None:
    client.post_prompts(run, [{"number": n, "prompt": "1"} for n in (0, 1)])
    gateway.generate(run, f"{run}.1.0", [5])
    assert list(client.trajectories(run, ids=[])) == []
    named = list(client.trajectories(run, ids=[f"{run}.1.0", f"{run}.7.7", f"{run}.0.1"], full=True))
    assert [(t["trajectory_id"], t["text"]) for t in named] == [(f"{run}.1.0", "1"), (f"{run}.0.1", None)]


# the event stream


def read_events(
    http: httpx.Client, run: str, *, after: str = "0", timeout_s: float = 0.3, **params: str
) -> list[tuple]:
    params = {"timeout_s": str(timeout_s), **params}
    with httpx_sse.connect_sse(
        http, "GET", f"/v1/runs/{run}/trajectories/stream", params=params, headers={"Last-Event-ID": after}
    ) as source:
        return [(e.id, e.event, e.json()["trajectory_id"]) for e in source.iter_sse() if e.data]


def test_stream_tells_every_change_in_order_and_resumes_behind_an_id(
    http: httpx.Client, client: Client, run: str, generated: str
) -> None:
    client.put_reward(run, generated, "default", 1.0)
    events = read_events(http, run)
    assert [(kind, trajectory) for _, kind, trajectory in events] == [
        ("run.running", ""),
        ("trajectory.accepted", f"{run}.0.0"),
        ("trajectory.accepted", f"{run}.0.1"),
        ("trajectory.generating", f"{run}.0.0"),
        ("trajectory.awaiting_reward", f"{run}.0.0"),
        ("trajectory.rewarded", f"{run}.0.0"),
    ]
    for place in range(len(events)):
        assert read_events(http, run, after=events[place][0], timeout_s=0.05) == events[place + 1 :]
    assert read_events(http, run, type="trajectory.rewarded") == events[-1:]


def test_events_arrive_while_the_stream_is_open(client: Client, gateway: HttpGateway, run: str, generated: str) -> None:
    stream = client.stream_events(run, deadline_s=DEADLINE_S, types=["trajectory.dropped", "run.stopped"])
    stopper = threading.Timer(0.3, client.stop, [run])
    stopper.start()
    kinds = [next(stream).type for _ in range(3)]
    assert sorted(kinds) == ["run.stopped", "trajectory.dropped", "trajectory.dropped"]
    stopper.join()


def test_stream_ends_at_the_deadline_that_the_client_names(client: Client, run: str) -> None:
    started_at = time.monotonic()
    assert [e.type for e in client.stream_events(run, deadline_s=0.5)] == ["run.running"]
    assert 0.4 < time.monotonic() - started_at < DEADLINE_S / 2


def test_idle_stream_has_heartbeats(http: httpx.Client, run: str) -> None:
    with http.stream("GET", f"/v1/runs/{run}/trajectories/stream") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        heartbeats = (line for line in response.iter_lines() if line.startswith(":"))
        assert next(heartbeats)
        assert next(heartbeats)


@pytest.mark.parametrize("cursor", ["x", "-1", "1-2-3", "99999999999999999999999", "1;2", ""])
def test_bad_last_event_id_is_refused(http: httpx.Client, run: str, cursor: str) -> None:
    answer = http.get(f"/v1/runs/{run}/trajectories/stream", headers={"Last-Event-ID": cursor})
    assert (answer.status_code, answer.json()["code"]) == (400, "malformed-request")


@contextmanager
def cutting_proxy(port: int) -> Iterator[tuple[int, Callable[[], None]]]:
    """A TCP proxy in front of the gateway. Yields its port and a function that cuts every open connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    open_sockets: list[socket.socket] = []

    def pump(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            pass
        finally:
            source.close()
            sink.close()

    def accept() -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", port))
            open_sockets.extend((near, far))
            for ends in ((near, far), (far, near)):
                threading.Thread(target=pump, args=ends, daemon=True).start()

    def cut() -> None:
        for end in open_sockets:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                end.close()
        open_sockets.clear()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1], cut
    finally:
        listener.close()
        cut()


def test_client_goes_on_where_a_connection_broke(client: Client, gateway: HttpGateway, run: str) -> None:
    """No event is lost, none comes twice, whatever the connection does."""
    with cutting_proxy(gateway.port) as (port, cut), Client(f"http://127.0.0.1:{port}", timeout_s=DEADLINE_S) as other:
        seen = []
        for event in other.stream_events(run, deadline_s=DEADLINE_S):
            seen.append((event.cursor, event.type))
            number = len([t for _, t in seen if t == "trajectory.accepted"]) // 2
            if event.type == "run.running" or (event.type == "trajectory.accepted" and len(seen) % 2):
                if number == 3:
                    break
                cut()
                client.post_prompts(run, [{"number": number, "prompt": "1"}])
    assert seen == [(e.cursor, e.type) for e in gateway.call(gateway.store.events(run))]
    assert len(seen) == 7


def test_streams_are_bounded(valkey_url: str, weight_sync_address: str, run: str) -> None:
    with (
        HttpGateway(valkey_url, weight_sync_address, max_streams=1) as server,
        httpx.Client(base_url=server.url, timeout=DEADLINE_S) as http,
    ):
        path = f"/v1/runs/{run}/trajectories/stream"
        with http.stream("GET", path) as response:
            lines = response.iter_lines()
            next(lines)
            answer = http.get(path)
            assert (answer.status_code, answer.json()["code"]) == (429, "streams-exhausted")
            assert "retry-after" in answer.headers


def test_shutdown_closes_streams(valkey_url: str, weight_sync_address: str, run: str) -> None:
    with (
        HttpGateway(valkey_url, weight_sync_address) as server,
        httpx.Client(base_url=server.url, timeout=DEADLINE_S) as http,
        http.stream("GET", f"/v1/runs/{run}/trajectories/stream") as response,
    ):
        lines = response.iter_lines()
        next(lines)
        server.stop()
        list(lines)
