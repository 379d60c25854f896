"""Evaluations over HTTP: pinned to a version, in a lane of their own."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from tests.deadline import DEADLINE_S
from tests.integration.gateway_harness import HttpGateway, publish
from timzero.client import ApiError, Client, DeadlineError

pytest_plugins = ("tests.integration.gateway_fixtures",)

GREEDY = {"max_tokens": 3}


@pytest.fixture
def digests(config: dict[str, Any], run: str, weight_sync_address: str) -> list[str]:
    """Of the two versions that are published."""
    return [publish(weight_sync_address, config, step) for step in range(2)]


def test_evaluation_is_greedy_and_pinned_to_the_newest_version(
    client: Client, gateway: HttpGateway, run: str, digests: list[str]
) -> None:
    created = client.create_eval(run, [{"prompt": "sort 2 1 ="}, {"prompt_token_ids": [5]}], sampling=GREEDY)
    assert (created["state"], created["num_samples"]) == ("running", 2)
    assert created["version"] == {"step": 1, "digest": digests[1]}
    (first, second) = gateway.call(gateway.store.get_eval(run, created["eval_id"])).items
    assert (first.sampling.temperature, first.n, list(second.token_ids)) == (0.0, 1, [5])
    assert client.metrics(run)["accepted"] == 0, "evaluations are counted apart"


def test_version_may_be_named(client: Client, run: str, digests: list[str]) -> None:
    created = client.create_eval(
        run, [{"prompt": "1"}], sampling={**GREEDY, "temperature": 0.8, "top_p": 0.9}, version=0, seed=5
    )
    assert (created["version"], created["seed"]) == ({"step": 0, "digest": digests[0]}, 5)
    with pytest.raises(ApiError) as caught:
        client.create_eval(run, [{"prompt": "1"}], version=7)
    assert (caught.value.status, caught.value.code) == (404, "version-unknown")


def test_before_the_first_version_a_client_may_wait(http: httpx.Client, run: str) -> None:
    answer = http.post(f"/v1/runs/{run}/evals", json={"items": [{"prompt": "1"}]})
    assert (answer.status_code, answer.json()["code"]) == (503, "not-ready")
    assert answer.json()["retryable"]


def test_wait_returns_with_the_last_sample(client: Client, gateway: HttpGateway, run: str, digests: list[str]) -> None:
    items = [{"prompt": "1", "metadata": {"task": 9}, "answer": "1 2"}, {"prompt": "2"}]
    created = client.create_eval(run, items, n=2, sampling=GREEDY, metadata={"name": "before"})
    eval_id = created["eval_id"]
    gateway.generate(run, f"{run}.e{eval_id}.0.0", [5, 6], reward=1.0)
    partly = client.get_eval(run, eval_id)
    assert (partly["state"], partly["num_finished"], partly["items"][1]["samples"][0]["text"]) == ("running", 1, None)

    def rest() -> None:
        for item, sample in ((0, 1), (1, 0), (1, 1)):
            gateway.generate(run, f"{run}.e{eval_id}.{item}.{sample}", [7])

    timer = threading.Timer(0.5, rest)
    timer.start()
    done = client.wait_eval(run, eval_id, deadline_s=DEADLINE_S)
    timer.join()
    assert (done["state"], done["num_finished"], done["metadata"]) == ("completed", 4, {"name": "before"})
    first = done["items"][0]
    assert (first["prompt_token_ids"], first["metadata"]) == ([5], {"task": 9})
    assert [s["text"] for i in done["items"] for s in i["samples"]] == ["1 2", "3", "3", "3"]
    assert first["samples"][0]["rewards"] == {"exact_match": {"value": 1.0, "revision": 0}}
    assert [e["metadata"] for e in client.evals(run)] == [{"name": "before"}]


def test_wait_has_a_deadline(client: Client, run: str, digests: list[str]) -> None:
    eval_id = client.create_eval(run, [{"prompt": "1"}], sampling=GREEDY)["eval_id"]
    with pytest.raises(DeadlineError):
        client.wait_eval(run, eval_id, deadline_s=0.5)


def test_evaluation_samples_are_trajectories_too(
    client: Client, gateway: HttpGateway, run: str, digests: list[str]
) -> None:
    eval_id = client.create_eval(run, [{"prompt": "1"}], sampling=GREEDY)["eval_id"]
    gateway.generate(run, f"{run}.e{eval_id}.0.0", [5, 2])
    t = client.trajectory(run, f"{run}.e{eval_id}.0.0")
    assert (t["state"], t["text"], len(t["logprobs"])) == ("evaluated", "1", 2)
    assert client.put_reward(run, f"{run}.e{eval_id}.0.0", "judge", 0.5)["applied"]
    assert client.get_eval(run, eval_id)["items"][0]["samples"][0]["rewards"]["judge"]["value"] == 0.5
    assert list(client.trajectories(run)) == []


@pytest.mark.parametrize(
    ("body", "code", "pointer"),
    [
        ({"items": []}, "invalid-request", "/items"),
        ({"items": [{"prompt": "1"}, {"prompt": ""}]}, "prompt-empty", "/items/1"),
        (
            {"items": [{"prompt": "1"}], "sampling": {"max_tokens": 99}},
            "prompt-too-long",
            "/items/0/sampling/max_tokens",
        ),
        ({"items": [{"prompt": "1"}], "n": 0}, "invalid-request", "/n"),
        ({"items": [{"prompt": "1", "number": 3}]}, "invalid-request", "/items/0/number"),
    ],
)
def test_one_bad_item_refuses_the_evaluation(
    http: httpx.Client, client: Client, run: str, digests: list[str], body: Any, code: str, pointer: str
) -> None:
    answer = http.post(f"/v1/runs/{run}/evals", json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, code), answer.text
    assert [e["pointer"] for e in answer.json()["errors"]] == [pointer]
    assert list(client.evals(run)) == []


def test_unknown_evaluation_is_not_found(client: Client, run: str) -> None:
    with pytest.raises(ApiError) as caught:
        client.get_eval(run, 3)
    assert (caught.value.status, caught.value.code) == (404, "not-found")


def test_evaluation_after_the_run_is_over(client: Client, run: str, digests: list[str]) -> None:
    client.stop(run)
    assert client.create_eval(run, [{"prompt": "1"}], sampling=GREEDY)["state"] == "running"
