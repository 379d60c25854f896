"""Rewards over HTTP: idempotent by revision, in batches, refused when late, never lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from shared.wire.lifecycle import Closed
from tests.deadline import DEADLINE_S
from tests.integration.gateway_harness import HttpGateway
from timzero.client import ApiError, Client

pytest_plugins = ("tests.integration.gateway_fixtures",)


@pytest.fixture
def sample(client: Client, gateway: HttpGateway, run: str) -> str:
    client.post_prompts(run, [{"number": 0, "prompt": "1", "reward": {"sources": ["a", "b"]}}])
    gateway.generate(run, f"{run}.0.0", [5])
    return f"{run}.0.0"


def put(http: httpx.Client, run: str, trajectory_id: str, source: str, body: Any) -> httpx.Response:
    return http.put(f"/v1/runs/{run}/trajectories/{trajectory_id}/rewards/{source}", json=body)


def test_reward_is_the_sum_once_every_source_answered(client: Client, run: str, sample: str) -> None:
    assert client.put_reward(run, sample, "a", 0.25)["applied"]
    assert client.trajectory(run, sample)["state"] == "awaiting_reward"
    assert client.trajectory(run, sample)["reward"] is None
    client.put_reward(run, sample, "b", -1.0)
    t = client.trajectory(run, sample)
    assert (t["state"], t["reward"]) == ("rewarded", -0.75)
    assert t["rewards"] == {"a": {"value": 0.25, "revision": 0}, "b": {"value": -1.0, "revision": 0}}


def test_same_revision_again_is_harmless_higher_replaces_lower_conflicts(
    http: httpx.Client, client: Client, run: str, sample: str
) -> None:
    first = put(http, run, sample, "a", {"value": 1.0, "revision": 3})
    assert (first.status_code, first.json()["applied"]) == (200, True)
    again = put(http, run, sample, "a", {"value": 1.0, "revision": 3})
    assert (again.status_code, again.json()["applied"]) == (200, False)
    for body in ({"value": 2.0, "revision": 3}, {"value": 1.0, "revision": 2}):
        refused = put(http, run, sample, "a", body)
        assert (refused.status_code, refused.json()["code"]) == (409, "reward-revision-conflict")
    assert put(http, run, sample, "a", {"value": 0.5, "revision": 4}).json()["applied"]
    assert client.trajectory(run, sample)["rewards"] == {"a": {"value": 0.5, "revision": 4}}


def test_reward_may_come_before_the_sample(client: Client, gateway: HttpGateway, run: str) -> None:
    client.post_prompts(run, [{"number": 0, "prompt": "1"}])
    assert client.put_reward(run, f"{run}.0.1", "default", 1.0)["applied"]
    gateway.generate(run, f"{run}.0.1", [5])
    assert client.trajectory(run, f"{run}.0.1")["state"] == "rewarded"


def test_late_reward_is_refused_and_counted(http: httpx.Client, client: Client, run: str, sample: str) -> None:
    client.stop(run)
    late = put(http, run, sample, "a", {"value": 1.0})
    assert (late.status_code, late.json()["code"]) == (409, "reward-too-late")
    assert client.metrics(run)["rewards_late"] == 1
    assert client.trajectory(run, sample)["rewards"] == {}


def test_under_max_lag_a_reward_after_the_deadline_is_too_late_for_its_sample_alone(
    http: httpx.Client, client: Client, gateway: HttpGateway, make_run: Callable[..., str]
) -> None:
    run = make_run(max_lag=1, samples_per_prompt=3)
    client.post_prompts(run, [{"number": 0, "prompt": "1", "reward": {"deadline_s": 1e-9}}])
    for sample in range(3):
        client.put_reward(run, f"{run}.0.0", "default", 1.0)
        client.put_reward(run, f"{run}.0.2", "default", 0.0)
        gateway.generate(run, f"{run}.0.{sample}", [5])
    assert gateway.call(gateway.lifecycle.expire(run)) == 1
    late = put(http, run, f"{run}.0.1", "default", {"value": 1.0})
    assert (late.status_code, late.json()["code"]) == (409, "reward-too-late")
    status, group = gateway.call(gateway.lifecycle.close_group(run, 0))
    assert status is Closed.QUEUED
    assert [(t.sample_index, t.reward) for t in group.trajectories] == [(0, 1.0), (2, 0.0)]
    m = client.metrics(run)
    assert (m["dropped"], m["rewards_late"], m["replaced"], m["live"]) == ({"reward_timeout": 1}, 1, 0, 2)
    events = client.stream_events(run, deadline_s=DEADLINE_S, types=["trajectory.dropped"])
    dropped = next(events)
    assert (dropped.trajectory_id, dropped.data["reason"]) == (f"{run}.0.1", "reward_timeout")
    lost = client.trajectory(run, f"{run}.0.1")
    assert (lost["state"], lost["reason"], lost["reward"], lost["rewards"]) == ("dropped", "reward_timeout", None, {})


def test_samples_that_take_the_place_of_lost_ones_are_listed_announced_and_rewarded_like_any(
    client: Client, gateway: HttpGateway, make_run: Callable[..., str]
) -> None:
    run = make_run(max_lag=1)
    (posted,) = client.post_prompts(run, [{"number": 0, "prompt": "1", "reward": {"deadline_s": 1e-9}}])
    for sample in range(2):
        gateway.generate(run, f"{run}.0.{sample}", [5])
    assert gateway.call(gateway.lifecycle.expire(run)) == 2
    assert gateway.call(gateway.lifecycle.close_group(run, 0))[0] is Closed.REPLACED
    assert client.metrics(run)["replaced"] == 1
    events = client.stream_events(run, deadline_s=DEADLINE_S, types=["trajectory.accepted"])
    assert [next(events).trajectory_id for _ in range(4)] == [f"{run}.0.{i}" for i in range(4)]
    for sample in (2, 3):
        gateway.generate(run, f"{run}.0.{sample}", [6])
        client.put_reward(run, f"{run}.0.{sample}", "default", 1.0)
    assert gateway.call(gateway.lifecycle.close_group(run, 0))[0] is Closed.QUEUED
    (again,) = client.post_prompts(run, [{"number": 0, "prompt": "1", "reward": {"deadline_s": 1e-9}}])
    assert (again["status"], again["trajectory_ids"]) == (200, posted["trajectory_ids"])


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({}, "/value"),
        ({"value": "good"}, "/value"),
        ({"value": None}, "/value"),
        ({"value": 1, "revision": -1}, "/revision"),
        ({"value": 1, "revision": 1.5}, "/revision"),
        ({"value": 1, "weight": 2}, "/weight"),
    ],
)
def test_bad_reward_names_the_field(http: httpx.Client, run: str, sample: str, body: Any, pointer: str) -> None:
    answer = put(http, run, sample, "a", body)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid-request")
    assert [e["pointer"] for e in answer.json()["errors"]] == [pointer]


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_reward_that_is_not_finite_never_gets_in(
    http: httpx.Client, client: Client, run: str, sample: str, text: str
) -> None:
    answer = http.put(
        f"/v1/runs/{run}/trajectories/{sample}/rewards/a",
        content=f'{{"value": {text}}}',
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code in (400, 422), answer.text
    assert client.trajectory(run, sample)["rewards"] == {}


def test_source_that_the_prompt_does_not_list_is_refused(http: httpx.Client, run: str, sample: str) -> None:
    answer = put(http, run, sample, "c", {"value": 1})
    assert (answer.status_code, answer.json()["code"]) == (422, "reward-source")


def test_unknown_trajectory_and_run_are_not_found(client: Client, run: str, sample: str) -> None:
    for name, trajectory_id in ((run, f"{run}.7.0"), ("nobody", sample)):
        with pytest.raises(ApiError) as caught:
            client.put_reward(name, trajectory_id, "a", 1.0)
        assert (caught.value.status, caught.value.code) == (404, "not-found")


def test_batch_answers_item_by_item(http: httpx.Client, client: Client, run: str, sample: str) -> None:
    items = [
        {"trajectory_id": sample, "source": "a", "value": 1.0},
        {"trajectory_id": sample, "source": "a", "value": 1.0},
        {"trajectory_id": sample, "source": "a", "value": 2.0},
        {"trajectory_id": f"{run}.9.9", "source": "a", "value": 1.0},
        {"trajectory_id": sample, "source": "z", "value": 1.0},
        {"trajectory_id": sample, "source": "b", "value": "x"},
        {"trajectory_id": sample, "source": "b", "value": 0.0},
    ]
    answer = http.post(f"/v1/runs/{run}/rewards:batch", json={"items": items})
    assert answer.status_code == 207
    results = answer.json()["items"]
    assert [r["status"] for r in results] == [200, 200, 409, 404, 422, 422, 200]
    assert [r["applied"] for r in results] == [True, False, False, False, False, False, True]
    codes = [r["problem"]["code"] for r in results if r["problem"]]
    assert codes == ["reward-revision-conflict", "not-found", "reward-source", "invalid-request"]
    assert client.trajectory(run, sample)["reward"] == 1.0
    assert http.post(f"/v1/runs/{run}/rewards:batch", json={"items": items[:2]}).status_code == 200


def test_graded_by_the_gateway_when_the_prompt_says_so(client: Client, gateway: HttpGateway, run: str) -> None:
    client.post_prompts(run, [{"number": 0, "prompt": "1", "reward": {"mode": "exact_match", "answer": "1 2"}}])
    gateway.generate(run, f"{run}.0.0", [5, 6], reward=1.0)
    t = client.trajectory(run, f"{run}.0.0")
    assert (t["state"], t["reward"], list(t["rewards"])) == ("rewarded", 1.0, ["exact_match"])
