"""Samples of another engine over HTTP: what is accepted, what is refused and why, group by group; nothing is lost."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest

from shared.wire.lifecycle import Closed
from shared.wire.queue import TrainQueue
from shared.wire.tensors import RawTensor, build_manifest
from shared.wire.types import Kv, SpanKind
from shared.wire.weights import Publisher
from tests.deadline import DEADLINE_S
from tests.integration.gateway_harness import HttpGateway, publish
from timzero.client import ApiError, Client
from timzero.submit import read_items, submit

pytest_plugins = ("tests.integration.gateway_fixtures",)

LOGPROBS = np.array([-0.1, -(2.0**-40), -30.5], np.float32)
MSGPACK = {"Content-Type": "application/msgpack"}


def sample(**fields: Any) -> dict[str, Any]:
    values = {"token_ids": [5, 6, 2], "logprobs": LOGPROBS.astype(float).tolist(), "finish_reason": "stop", **fields}
    return {name: value for name, value in values.items() if value is not None}


def group(number: int = 0, **fields: Any) -> dict[str, Any]:
    values = {
        "number": number,
        "prompt_token_ids": [14, 7, 15],
        "version": {"step": 0},
        "sampling": {"temperature": 1.0},
        "samples": [sample(), sample()],
        **fields,
    }
    return {name: value for name, value in values.items() if value is not None}


@pytest.fixture
def digest(config: dict[str, Any], run: str, weight_sync_address: str) -> str:
    """Of version 0 of the test's run, published."""
    return publish(weight_sync_address, config, 0)


def post(http: httpx.Client, run: str, *items: dict[str, Any], **headers: str) -> httpx.Response:
    return http.post(f"/v1/runs/{run}/trajectories", json={"items": items}, headers=headers)


def states(client: Client, run: str) -> dict[str, str]:
    return {t["trajectory_id"]: t["state"] for t in client.trajectories(run)}


def test_ingested_group_goes_the_way_of_a_generated_one(
    client: Client, gateway: HttpGateway, run: str, digest: str
) -> None:
    """Accepted, rewarded, queued, leased, trained; listed, counted and told by events on the way."""
    rewarded = [sample(logprobs=LOGPROBS, rewards={"default": r}, top1=[5, 1, 2]) for r in (1.0, -0.5)]
    own = {"prompt_id": "mine", "sampler": "vllm-0.11", "metadata": {"a": [1]}, "version": {"digest": digest}}
    (result,) = client.post_trajectories(run, [group(samples=rewarded, **own)])
    assert result == {
        "index": 0, "status": 202, "number": 0, "prompt_id": "mine", "group_id": f"{run}.0",
        "trajectory_ids": [f"{run}.0.0", f"{run}.0.1"], "problem": None,
    }  # fmt: skip
    t = client.trajectory(run, f"{run}.0.1")
    assert (t["state"], t["reward"], t["sampler"], t["prompt_id"]) == ("rewarded", -0.5, "vllm-0.11", "mine")
    assert (t["metadata"], t["seed"], t["replicas"], t["finish_reason"]) == ({"a": [1]}, None, [], "stop")
    assert (t["token_ids"], t["num_prompt_tokens"], t["top1"]) == ([14, 7, 15, 5, 6, 2], 3, [5, 1, 2])
    assert t["loss_mask"] == [0, 0, 0, 1, 1, 1]
    assert t["logprobs"].tobytes() == LOGPROBS.tobytes()
    assert t["spans"][1] == {
        "start": 3, "end": 6, "kind": "sampled", "lineage": 0, "policy_step": 0, "manifest_digest": digest, "kv": "fresh",
    }  # fmt: skip
    assert client.metrics(run)["ingested"] == client.metrics(run)["accepted"] == 2

    # A prompt of the same batch is generated here.
    client.post_prompts(run, [{"number": 1, "prompt": "1"}])
    for index in range(2):
        gateway.generate(run, f"{run}.1.{index}", [5])
        client.put_reward(run, f"{run}.1.{index}", "default", 0.0)
    assert gateway.call(gateway.lifecycle.closable(run)) == [0, 1]
    for number in (0, 1):
        assert gateway.call(gateway.lifecycle.close_group(run, number))[0] is Closed.QUEUED
    queue = TrainQueue.connect(gateway.config.valkey)
    epoch = queue.take_over(run, next_step=0)
    groups = queue.lease(run, 0, epoch=epoch, deadline_s=DEADLINE_S)
    assert groups is not None
    ingested, generated = groups
    assert [[t.sampler for t in g.trajectories] for g in groups] == [["vllm-0.11"] * 2, [""] * 2]
    assert [t.reward for t in ingested.trajectories] == [1.0, -0.5]
    assert ingested.trajectories[0].spans[1].kind is SpanKind.SAMPLED
    assert ingested.trajectories[0].spans[1].kv is generated.trajectories[0].spans[1].kv is Kv.FRESH
    queue.commit_trained(run, durable_step=1, epoch=epoch)
    queue.close()
    assert set(states(client, run).values()) == {"trained"}
    m = client.metrics(run)
    assert (m["accepted"], m["ingested"], m["trained"], m["live"], m["dropped"]) == (4, 2, 4, 0, {})


def test_a_run_that_is_fed_from_outside_alone_is_ready_without_a_replica(
    client: Client, http: httpx.Client, run: str, digest: str
) -> None:
    for number in range(2):
        assert client.ready(deadline_s=DEADLINE_S)
        client.post_trajectories(run, [group(number=number)])
    assert http.get("/readyz").json()["checks"]["replicas"] == "ok"
    client.create_eval(run, [{"prompt": "1"}])
    checks = http.get("/readyz").json()["checks"]
    assert "1 samples wait" in checks["replicas"], "an evaluation is generated here, and by nobody else"


def test_example_of_the_openapi_document_is_accepted(http: httpx.Client, client: Client, run: str, digest: str) -> None:
    (example,) = http.get("/openapi.json").json()["components"]["schemas"]["SampledGroup"]["examples"]
    assert post(http, run, example).status_code == 202
    assert set(states(client, run).values()) == {"rewarded"}


def test_events_of_an_ingested_group(client: Client, run: str, digest: str) -> None:
    client.post_trajectories(run, [group(samples=[sample(rewards={"default": 1.0}), sample()])])
    client.stop(run)
    seen = []
    for event in client.stream_events(run, deadline_s=DEADLINE_S):
        seen.append((event.type, event.trajectory_id))
        if event.type == "run.stopped" or len(seen) > 20:
            break
    first, second = f"{run}.0.0", f"{run}.0.1"
    assert seen[1:6] == [
        ("trajectory.accepted", first), ("trajectory.accepted", second),
        ("trajectory.awaiting_reward", first), ("trajectory.rewarded", first), ("trajectory.awaiting_reward", second),
    ]  # fmt: skip


def test_missing_reward_is_awaited_and_never_a_zero(
    client: Client, gateway: HttpGateway, run: str, digest: str
) -> None:
    samples = [sample(rewards={"a": 1.0}), sample(rewards={"a": 1.0, "b": 0.5})]
    client.post_trajectories(run, [group(samples=samples, reward={"sources": ["a", "b"], "deadline_s": 0.001})])
    assert states(client, run) == {f"{run}.0.0": "awaiting_reward", f"{run}.0.1": "rewarded"}
    assert client.trajectory(run, f"{run}.0.0")["reward"] is None
    assert gateway.call(gateway.lifecycle.first_deadline(run))[1] == f"{run}.0.0"
    client.put_reward(run, f"{run}.0.0", "b", -1.0)
    assert client.trajectory(run, f"{run}.0.0")["reward"] == 0.0
    assert gateway.call(gateway.lifecycle.closable(run)) == [0]
    assert gateway.call(gateway.lifecycle.first_deadline(run)) is None


def test_gateway_grades_exact_match_itself(client: Client, run: str, digest: str) -> None:
    samples = [sample(token_ids=[5, 6, 2]), sample(token_ids=[6, 5, 2])]
    client.post_trajectories(run, [group(samples=samples, reward={"mode": "exact_match", "answer": "1 2"})])
    assert [client.trajectory(run, f"{run}.0.{i}")["rewards"]["exact_match"]["value"] for i in range(2)] == [1.0, 0.0]


def test_logprobs_keep_their_bits_on_every_way_in(http: httpx.Client, client: Client, run: str, digest: str) -> None:
    raw = LOGPROBS.tobytes()
    in_json = [sample(), sample(logprobs=None, logprobs_f32=base64.b64encode(raw).decode())]
    in_msgpack = [sample(), sample(logprobs=None, logprobs_f32=raw)]
    assert post(http, run, group(0, samples=in_json)).status_code == 202
    body = msgpack.packb({"items": [group(1, samples=in_msgpack)]})
    assert http.post(f"/v1/runs/{run}/trajectories", content=body, headers=MSGPACK).status_code == 202
    for number in range(2):
        for index in range(2):
            t = client.trajectory(run, f"{run}.{number}.{index}")
            assert t["logprobs"].tobytes() == raw
            assert t["top1"] is None


def test_equal_group_again_gives_the_same_ids_and_another_one_conflicts(
    client: Client, config: dict[str, Any], run: str, digest: str
) -> None:
    first = client.post_trajectories(run, [group(prompt_id="a")])[0]
    again = client.post_trajectories(run, [group(prompt_id="a"), group(prompt_id="a")])
    assert [(r["status"], r["trajectory_ids"]) for r in again] == [(200, first["trajectory_ids"])] * 2
    others = [
        group(prompt_id="a", samples=[sample(), sample(token_ids=[5, 6, 3])]),
        group(prompt_id="a", samples=[sample(), sample(logprobs=[-0.1, -0.1, -0.1])]),
        group(prompt_id="a", samples=[sample(), sample(rewards={"default": 1.0})]),
        group(1, prompt_id="a"),
    ]
    for refused in client.post_trajectories(run, others):
        assert (refused["status"], refused["problem"]["code"]) == (409, "prompt-conflict")
    (refused,) = client.post_prompts(run, [{"number": 0, "prompt": "1"}])
    assert (refused["status"], refused["problem"]["code"]) == (409, "prompt-conflict"), "late: the place is taken"
    assert client.metrics(run)["accepted"] == 2


def test_repost_needs_no_version_that_is_still_there(
    client: Client, gateway: HttpGateway, run: str, digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.post_trajectories(run, [group()])

    async def gone(_run: str) -> list[Any]:
        return []

    monkeypatch.setattr(type(gateway.gateway), "versions", lambda _self, run: gone(run))
    results = client.post_trajectories(run, [group(), group(1)])
    assert [r["status"] for r in results] == [200, 404]
    assert results[1]["problem"]["code"] == "version-unknown"


SHORT = LOGPROBS[:2].astype(float).tolist()
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "text alone": ({"samples": [{"text": "1 2", "finish_reason": "stop"}, sample()]}, "invalid-request", "/samples/0"),
    "text and ids": ({"samples": [sample(text="1 2"), sample()]}, "invalid-request", "/samples/0/text"),
    "text of the prompt": ({"prompt_token_ids": None, "prompt": "sort"}, "invalid-request", ""),
    "messages": ({"messages": [{"role": "user", "content": "1"}]}, "invalid-request", "/messages"),
    "no logprobs": ({"samples": [sample(logprobs=None), sample()]}, "invalid-request", "/samples/0"),
    "logprobs twice": ({"samples": [sample(logprobs_f32=""), sample()]}, "invalid-request", "/samples/0"),
    "logprobs short": ({"samples": [sample(), sample(logprobs=SHORT)]}, "logprob-invalid", "/samples/1/logprobs"),
    "logprob above 0": ({"samples": [sample(), sample(logprobs=[*SHORT, 1e-3])]}, "logprob-invalid", "/samples/1/logprobs"),
    "logprob beyond float32": ({"samples": [sample(), sample(logprobs=[*SHORT, -1e300])]}, "logprob-invalid",
                               "/samples/1/logprobs"),
    "bytes cut": ({"samples": [sample(logprobs=None, logprobs_f32="AAAA"), sample()]}, "logprob-invalid",
                  "/samples/0/logprobs_f32"),
    "not base64": ({"samples": [sample(logprobs=None, logprobs_f32="?"), sample()]}, "invalid-request",
                   "/samples/0/logprobs_f32"),
    "logprob is text": ({"samples": [sample(logprobs=["x"] * 3), sample()]}, "invalid-request", "/samples/0/logprobs/0"),
    "no version": ({"version": None}, "invalid-request", "/version"),
    "empty version": ({"version": {}}, "invalid-request", "/version"),
    "name of a policy": ({"version": {"policy": "mistral"}}, "invalid-request", "/version/policy"),
    "another step": ({"version": {"step": 1}}, "version-mismatch", "/version/step"),
    "another digest": ({"version": {"digest": "f" * 64}}, "version-mismatch", "/version"),
    "another lineage": ({"version": {"step": 0, "lineage": 1}}, "version-mismatch", "/version"),
    "not published": ({"number": 4, "version": {"step": 1}}, "version-unknown", "/version"),
    "one sample": ({"samples": [sample()]}, "invalid-request", "/samples"),
    "no sample": ({"samples": []}, "invalid-request", "/samples"),
    "no tokens": ({"samples": [sample(token_ids=[], logprobs=[]), sample()]}, "invalid-request", "/samples/0/token_ids"),
    "no prompt": ({"prompt_token_ids": []}, "invalid-request", "/prompt_token_ids"),
    "prompt id": ({"prompt_token_ids": [32]}, "token-out-of-range", "/prompt_token_ids"),
    "token id": ({"samples": [sample(), sample(token_ids=[5, 6, 32])]}, "token-out-of-range", "/samples/1/token_ids"),
    "negative id": ({"samples": [sample(token_ids=[5, 6, -1]), sample()]}, "invalid-request", "/samples/0/token_ids/2"),
    "top1 id": ({"samples": [sample(top1=[5, 6, 32]), sample()]}, "token-out-of-range", "/samples/0/top1"),
    "top1 short": ({"samples": [sample(top1=[5]), sample()]}, "invalid-request", "/samples/0/top1"),
    "too long": ({"prompt_token_ids": [4] * 30}, "prompt-too-long", "/samples/0/token_ids"),
    "beyond max_tokens": ({"sampling": {"temperature": 1.0, "max_tokens": 2}}, "prompt-too-long", "/samples/0/token_ids"),
    "no temperature": ({"sampling": {}}, "invalid-request", "/sampling/temperature"),
    "temperature": ({"sampling": {"temperature": 0.7}}, "sampling-refused", "/sampling/temperature"),
    "greedy": ({"sampling": {"temperature": 0}}, "sampling-refused", "/sampling/temperature"),
    "top_p": ({"sampling": {"temperature": 1.0, "top_p": 0.9}}, "sampling-refused", "/sampling"),
    "aborted": ({"samples": [sample(finish_reason="aborted"), sample()]}, "invalid-request", "/samples/0/finish_reason"),
    "reward source": ({"samples": [sample(rewards={"x": 1.0}), sample()]}, "reward-source", "/samples/0/rewards"),
    "graded here": ({"samples": [sample(rewards={"exact_match": 1.0}), sample()],
                     "reward": {"mode": "exact_match", "answer": "1"}}, "reward-source", "/samples/0/rewards"),
    "no number": ({"number": None}, "prompt-number", "/number"),
    "beyond the run": ({"number": 8}, "prompt-number", "/number"),
    "misspelt": ({"sampels": []}, "invalid-request", "/sampels"),
    "big metadata": ({"metadata": {"x": "y" * 20_000}}, "invalid-request", "/metadata"),
}  # fmt: skip


def test_bad_group_is_refused_by_itself(http: httpx.Client, run: str, digest: str) -> None:
    bad = [group(**{"number": 1, **fields}) for fields, _, _ in REFUSED.values()]
    answer = post(http, run, *bad, group(0))
    assert answer.status_code == 207, answer.text
    *refused, accepted = answer.json()["items"]
    assert accepted["status"] == 202
    for item, (case, (_, code, pointer)) in zip(refused, REFUSED.items(), strict=True):
        problem = item["problem"]
        assert problem["code"] == code, (case, problem)
        assert item["status"] == problem["status"] == (404 if code == "version-unknown" else 422), case
        assert pointer in [e["pointer"] for e in problem["errors"]], (case, problem)
        assert problem["detail"], case
    m = http.get(f"/v1/runs/{run}/metrics").json()
    assert (m["accepted"], m["ingested"], m["live"]) == (2, 2, 2), (
        "nothing of the good group is lost, nothing of a bad one kept"
    )


def test_a_refusal_says_what_was_expected(http: httpx.Client, make_run: Callable[..., str]) -> None:
    run = make_run(lag=1)
    problem = post(http, run, group(4, version={"step": 0}), group(0)).json()["items"][0]["problem"]
    assert "got 0; group 4 belongs to batch 2, whose tokens are of version 1 (lag 1)" in problem["detail"]
    problem = post(http, run, group(samples=[{"text": "1", "finish_reason": "stop"}] * 2)).json()["items"][0]["problem"]
    assert "text can't be turned back into the ids" in problem["errors"][0]["detail"]


def test_version_that_was_replaced_by_a_fork_is_refused(
    client: Client, config: dict[str, Any], run: str, digest: str, weight_sync_address: str
) -> None:
    newer = publish_fork(weight_sync_address, config)
    assert newer != digest
    refused, accepted = client.post_trajectories(
        run, [group(0, version={"digest": digest}), group(1, version={"digest": newer, "step": 0, "lineage": 1})]
    )
    assert (refused["problem"]["code"], accepted["status"]) == ("version-mismatch", 202)
    assert newer in refused["problem"]["detail"]
    assert client.trajectory(run, f"{run}.1.0")["spans"][1]["lineage"] == 1


def test_under_max_lag_any_version_from_the_oldest_allowed_to_the_batchs_own_will_do(
    http: httpx.Client, client: Client, make_run: Callable[..., str], weight_sync_address: str, config: dict[str, Any]
) -> None:
    run = make_run(max_lag=1)
    digests = [publish(weight_sync_address, config | {"max_lag": 1}, step) for step in range(3)]
    groups = [
        group(2, version={"step": 0}), group(3, version={"digest": digests[1]}),
        group(4, version={"step": 0}), group(4, version={"step": 3}), group(4, version={"digest": digests[0]}),
        group(6, version={"step": 3}),
    ]  # fmt: skip
    items = post(http, run, *groups).json()["items"]
    codes = [item["problem"] and item["problem"]["code"] for item in items]
    assert codes == [None, None, "version-mismatch", "version-mismatch", "version-mismatch", "version-unknown"]
    assert "batch 2, whose tokens are of version 1 to 2 (max_lag 1)" in items[2]["problem"]["detail"]
    assert [client.trajectory(run, f"{run}.{n}.0")["spans"][1]["policy_step"] for n in (2, 3)] == [0, 1]
    (again, other) = post(http, run, group(2, version={"step": 0}), group(2, version={"step": 1})).json()["items"]
    assert (again["status"], other["status"]) == (200, 409), "of another version it is another body"


def publish_fork(address: str, config: dict[str, Any]) -> str:
    """Other weights as version 0 of a new lineage. Returns their digest."""
    tensor = RawTensor("float32", (4,), np.full(4, 7, "<f4").tobytes())
    manifest = build_manifest(
        run=config["run"], lineage=1, step=0, tensors={"w": tensor}, model_config_json="{}",
        run_config_json=json.dumps(config), fingerprint="f", probe_token_ids=[], probe_logprobs=[],
    )  # fmt: skip
    with Publisher(address) as publisher:
        return publisher.publish(manifest, {"w": tensor}, epoch=2, deadline_s=DEADLINE_S).digest


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logprob_that_is_no_number_rejects_its_group_and_is_counted(
    http: httpx.Client, run: str, digest: str, value: float
) -> None:
    """msgpack knows such numbers, JSON does not."""
    before = counted(http)
    as_list = group(0, samples=[sample(), sample(logprobs=[-1.0, value, -1.0])])
    as_bytes = group(
        1, samples=[sample(logprobs=None, logprobs_f32=np.float32([value, -1, value]).tobytes()), sample()]
    )
    body = msgpack.packb({"items": [as_list, as_bytes]})
    answer = http.post(f"/v1/runs/{run}/trajectories", content=body, headers=MSGPACK)
    assert answer.status_code == 207
    problems = [item["problem"] for item in answer.json()["items"]]
    assert [p["code"] for p in problems] == ["logprob-invalid"] * 2
    assert [p["nonfinite"] for p in problems] == [1, 2]
    assert counted(http) - before == 3
    assert http.get(f"/v1/runs/{run}/metrics").json()["accepted"] == 0
    as_reward = msgpack.packb({"items": [group(samples=[sample(rewards={"default": value}), sample()])]})
    (item,) = http.post(f"/v1/runs/{run}/trajectories", content=as_reward, headers=MSGPACK).json()["items"]
    assert item["problem"]["errors"][0]["pointer"] == "/samples/0/rewards/default"
    as_json = json.dumps({"items": [group(samples=[sample(logprobs=[value] * 3), sample()])]})
    answer = http.post(f"/v1/runs/{run}/trajectories", content=as_json, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["code"]) == (400, "malformed-body")


def counted(http: httpx.Client) -> float:
    """Non-finite numbers refused by this process so far."""
    from prometheus_client import REGISTRY

    return sum(s.value for m in REGISTRY.collect() for s in m.samples if s.name == "timzero_nonfinite_total")


def test_closed_gate_is_429_for_a_whole_batch_and_per_item_otherwise(
    http: httpx.Client, client: Client, make_run: Callable[..., str], weight_sync_address: str, config: dict[str, Any]
) -> None:
    run = make_run(num_steps=20)
    limit = client.metrics(run)["gate"]["limit"]
    step = limit // config["prompts_per_step"] - config["lag"]
    for published in (0, step):
        publish(weight_sync_address, config, published)
    closed = group(limit, version={"step": step})
    answer = post(http, run, closed)
    assert (answer.status_code, answer.json().get("code"), answer.headers.get("retry-after")) == (
        429, "capacity-exhausted", "1"
    )  # fmt: skip
    answer = post(http, run, group(0), closed)
    assert (answer.status_code, answer.headers.get("retry-after")) == (207, "1")
    assert [item["status"] for item in answer.json()["items"]] == [202, 429]
    assert client.metrics(run)["accepted"] == 2


def test_group_of_a_run_that_is_over_or_unknown(http: httpx.Client, client: Client, run: str, digest: str) -> None:
    client.stop(run)
    (item,) = post(http, run, group()).json()["items"]
    assert (item["status"], item["problem"]["code"]) == (409, "run-over")
    with pytest.raises(ApiError) as caught:
        client.post_trajectories("nobody", [group()])
    assert (caught.value.status, caught.value.code) == (404, "not-found")


def test_late_reward_of_an_ingested_sample_is_refused_and_counted(
    http: httpx.Client, client: Client, gateway: HttpGateway, run: str, digest: str
) -> None:
    client.post_trajectories(run, [group(samples=[sample(rewards={"default": 1.0})] * 2)])
    gateway.call(gateway.lifecycle.close_group(run, 0))
    late = http.put(f"/v1/runs/{run}/trajectories/{run}.0.0/rewards/default", json={"value": 0.0, "revision": 1})
    assert (late.status_code, late.json()["code"]) == (409, "reward-too-late")
    assert client.metrics(run)["rewards_late"] == 1


def test_batches_of_another_shape(http: httpx.Client, run: str, gateway: HttpGateway) -> None:
    for body, pointer in [({"items": []}, "/items"), ({}, "/items"), ([], ""), ({"items": 3}, "/items")]:
        answer = http.post(f"/v1/runs/{run}/trajectories", json=body)
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid-request"), answer.text
        assert [e["pointer"] for e in answer.json()["errors"]] == [pointer]
    answer = post(http, run, *[{}] * (gateway.config.max_items + 1))
    assert (answer.status_code, answer.json()["code"], answer.json()["limit"]) == (
        413,
        "too-large",
        gateway.config.max_items,
    )
    (item,) = post(http, run, 3).json()["items"]  # type: ignore[arg-type]
    assert item["problem"]["code"] == "invalid-request"


def test_same_key_replays_and_another_body_under_it_is_refused(
    http: httpx.Client, client: Client, run: str, digest: str
) -> None:
    key = {"Idempotency-Key": f"key-{run}"}
    first, again = post(http, run, group(), **key), post(http, run, group(), **key)
    assert (first.status_code, again.status_code, again.headers["idempotent-replayed"]) == (202, 202, "true")
    assert again.content == first.content
    other = post(http, run, group(1), **key)
    assert (other.status_code, other.json()["code"]) == (422, "idempotency-key-reused")
    assert client.metrics(run)["accepted"] == 2


def test_what_the_gateway_gave_out_can_be_given_in(
    client: Client, gateway: HttpGateway, run: str, digest: str, tmp_path: Path
) -> None:
    """A trajectory of one run, posted to it from a file under another number."""
    client.post_prompts(run, [{"number": 0, "prompt": "sort 2 1 ="}])
    for index in range(2):
        gateway.generate(run, f"{run}.0.{index}", [5, 6, 2], logprobs=LOGPROBS.tolist())
    samples = []
    for t in client.trajectories(run, full=True):
        begin = t["num_prompt_tokens"]
        samples.append({"token_ids": t["token_ids"][begin:], "logprobs": t["logprobs"].astype(float).tolist(),
                        "top1": t["top1"], "finish_reason": t["finish_reason"], "rewards": {"default": 1.0}})  # fmt: skip
    lines = [group(1, prompt_token_ids=t["token_ids"][:begin], samples=samples), {"number": 2, "prompt": "1"}]
    (tmp_path / "groups.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    told: list[str] = []
    total = submit(client, run, read_items(tmp_path / "groups.jsonl"), gate_deadline_s=0, tell=told.append)
    assert (total.accepted, total.refused, told) == (2, 0, [])
    copy, original = client.trajectory(run, f"{run}.1.0"), client.trajectory(run, f"{run}.0.0")
    assert all(copy[k] == original[k] for k in ("token_ids", "top1", "text", "finish_reason"))
    assert copy["logprobs"].tobytes() == original["logprobs"].tobytes()
    assert (copy["sampler"], original["sampler"]) == ("external", None)
    assert states(client, run)[f"{run}.2.0"] == "accepted"
