"""Runs over HTTP: created, listed, paused, resumed, stopped, and what is told about them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deadline import DEADLINE_S
from tests.integration.gateway_harness import HttpGateway, publish
from timzero.client import ApiError, Client

pytest_plugins = ("tests.integration.gateway_fixtures",)


def test_run_is_created_and_found(http: httpx.Client, config: dict[str, Any], make_run: Callable[..., str]) -> None:
    created = http.post("/v1/runs", json=config)
    assert created.status_code == 201, created.text
    assert created.headers["location"] == f"/v1/runs/{config['run']}"
    found = http.get(created.headers["location"])
    assert found.json() == created.json()
    assert found.json()["state"] == "running"
    assert found.json()["config"]["max_model_len"] == config["max_model_len"]
    assert http.get("/v1/runs", params={"limit": 1}).json()["runs"][0]["run"] == config["run"]


def test_equal_configuration_again_is_the_same_run(http: httpx.Client, config: dict[str, Any], run: str) -> None:
    again = http.post("/v1/runs", json=config)
    assert (again.status_code, again.json()["run"]) == (200, run)
    assert again.json()["created"] == http.get(f"/v1/runs/{run}").json()["created"]


def test_name_taken_by_another_configuration_is_a_conflict(client: Client, config: dict[str, Any], run: str) -> None:
    with pytest.raises(ApiError) as caught:
        client.create_run({**config, "seed": 7})
    assert (caught.value.status, caught.value.code) == (409, "run-exists")


def test_one_run_is_active_at_a_time(client: Client, config: dict[str, Any], run: str) -> None:
    with pytest.raises(ApiError) as caught:
        client.create_run({**config, "run": f"{run}-other"})
    assert (caught.value.status, caught.value.code) == (409, "run-active")
    client.stop(run)
    assert client.create_run({**config, "run": f"{run}-other"})["state"] == "running"


@pytest.mark.parametrize(
    ("fields", "pointer"),
    [
        ({"num_step": 3}, "/num_step"),
        ({"num_steps": 0}, ""),
        ({"num_steps": "many"}, "/num_steps"),
        ({"seed": -1}, ""),
        ({"algorithm": {"loss": "magic"}}, "/algorithm/loss"),
        ({"num_steps": 2**31}, "/num_steps"),
    ],
)
def test_bad_configuration_names_the_field(
    http: httpx.Client, config: dict[str, Any], fields: dict[str, Any], pointer: str
) -> None:
    answer = http.post("/v1/runs", json={**config, **fields})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid-request")
    assert pointer in [e["pointer"] for e in answer.json()["errors"]], answer.text


def test_model_that_is_not_there_is_refused(http: httpx.Client, config: dict[str, Any], tmp_path: Path) -> None:
    answer = http.post("/v1/runs", json={**config, "model": str(tmp_path)})
    assert (answer.status_code, answer.json()["code"]) == (422, "model-unavailable")
    assert str(tmp_path) in answer.json()["detail"]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_model_with_a_broken_file_is_refused(
    http: httpx.Client, config: dict[str, Any], model: Path, tmp_path: Path, name: str
) -> None:
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text('{"model": 3}')
    answer = http.post("/v1/runs", json={**config, "model": str(tmp_path)})
    assert (answer.status_code, answer.json()["code"]) == (422, "model-unavailable"), answer.text


def test_pause_resume_stop(client: Client, run: str) -> None:
    paused = client.pause(run, "lunch")
    assert (paused["state"], paused["reason"]) == ("paused", "lunch")
    assert client.resume(run)["state"] == "running"
    client.post_prompts(run, [{"number": 0, "prompt": "1"}])
    assert client.stop(run)["state"] == "stopped"
    assert client.stop(run)["state"] == "stopped"
    metrics = client.metrics(run)
    assert (metrics["accepted"], metrics["dropped"], metrics["live"]) == (2, {"cancelled": 2}, 0)
    with pytest.raises(ApiError) as caught:
        client.resume(run)
    assert (caught.value.status, caught.value.code) == (409, "run-state")


@pytest.mark.parametrize("action", ["pause", "resume", "stop"])
def test_actions_need_no_body_and_a_run_that_exists(http: httpx.Client, action: str) -> None:
    answer = http.post(f"/v1/runs/nobody:{action}")
    assert (answer.status_code, answer.json()["code"]) == (404, "not-found")


def test_runs_are_listed_newest_first_in_pages(
    client: Client, config: dict[str, Any], make_run: Callable[..., str]
) -> None:
    names = []
    for i in range(3):
        names.append(client.create_run({**config, "run": f"{config['run']}-{i}"})["run"])
        client.stop(names[-1])
    first = client._transport.json("GET", "/v1/runs", params={"limit": 2}, deadline_s=5)
    assert [r["run"] for r in first["runs"]] == names[:0:-1]
    second = client._transport.json(
        "GET", "/v1/runs", params={"limit": 2, "cursor": first["next_cursor"]}, deadline_s=5
    )
    assert second["runs"][0]["run"] == names[0]
    assert [r["run"] for r in client.runs()][:3] == names[::-1]


def test_metrics_add_up_and_name_the_gate(client: Client, run: str, gateway: HttpGateway) -> None:
    client.post_prompts(run, [{"number": n, "prompt": "1"} for n in range(3)])
    gateway.generate(run, f"{run}.0.0", [5])
    gateway.replicas = {"ready": 2, "ejected": 1}
    metrics = client.metrics(run)
    assert metrics["accepted"] == metrics["trained"] + sum(metrics["dropped"].values()) + metrics["live"] == 6
    assert metrics["states"]["awaiting_reward"] == 1
    assert metrics["states"]["accepted"] == 5
    # checkpoint_interval 1 + lag 1 + 2 batches of two prompts
    assert metrics["gate"] == {"limit": 8, "in_flight": 6}
    assert metrics["replicas"] == {"ready": 2, "ejected": 1}
    assert metrics["latest_step"] is None
    gateway.replicas = {}


def test_steps_come_in_pages(client: Client, run: str, gateway: HttpGateway, http: httpx.Client) -> None:
    for step in range(3):
        gateway.record_step(run, step, {"reward": step / 2})
    steps = list(client.steps(run))
    assert [(s["step"], s["metrics"]["reward"]) for s in steps] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert [s["step"] for s in client.steps(run, after=steps[1]["cursor"])] == [2]
    page = http.get(f"/v1/runs/{run}/steps", params={"limit": 2}).json()
    assert [s["step"] for s in page["steps"]] == [0, 1]
    assert page["next_cursor"] == steps[1]["cursor"]
    assert client.metrics(run)["latest_step"]["step"] == 2


def test_versions_and_their_manifests(
    client: Client, config: dict[str, Any], run: str, weight_sync_address: str
) -> None:
    assert client.versions(run) == []
    digests = [publish(weight_sync_address, config, step) for step in range(2)]
    assert [(v["step"], v["digest"]) for v in client.versions(run)] == list(enumerate(digests))
    version = client.version(run, 1)
    assert version["tensors"][0]["shape"] == [4]
    assert version["fingerprint"] == "f"
    with pytest.raises(ApiError) as caught:
        client.version(run, 5)
    assert (caught.value.status, caught.value.code) == (404, "version-unknown")


def test_ready_needs_a_replica_while_samples_wait_to_be_generated(
    client: Client, run: str, gateway: HttpGateway, http: httpx.Client
) -> None:
    assert http.get("/healthz").json() == {"status": "ok"}
    assert http.get("/readyz").status_code == 200, "prompts would be accepted"
    client.post_prompts(run, [{"number": 0, "prompt": "1"}])
    answer = http.get("/readyz")
    assert (answer.status_code, answer.json()["code"]) == (503, "not-ready")
    assert "2 samples wait to be generated and no replica is ready" in answer.json()["checks"]["replicas"]
    gateway.replicas = {"ready": 1}
    assert http.get("/readyz").status_code == 200
    gateway.replicas = {}
    client.stop(run)
    assert client.ready(deadline_s=DEADLINE_S)


@pytest.mark.parametrize("path", ["", "/trajectories", "/trajectories/x", "/trajectories/stream", "/evals", "/evals/0",
                                  "/versions", "/versions/0", "/metrics", "/steps"])  # fmt: skip
def test_unknown_run_is_not_found_everywhere(http: httpx.Client, path: str) -> None:
    answer = http.get(f"/v1/runs/nobody{path}")
    assert (answer.status_code, answer.json()["code"]) == (404, "not-found")
    assert "nobody" in answer.json()["detail"]
