"""Prompts over HTTP: what is accepted, what is refused and why, item by item."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest

from tests.integration.gateway_harness import HttpGateway
from timzero.client import ApiError, Client
from timzero.model.tiny import WORDS

pytest_plugins = ("tests.integration.gateway_fixtures",)


def ids(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


def prompt_ids(gateway: HttpGateway, run: str, number: int) -> list[int]:
    (group,) = gateway.call(gateway.lifecycle.pending_prompts(run, first=number, end=number + 1))
    return list(group.prompt.token_ids)


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ({"prompt": "sort 2 1 ="}, "sort 2 1 ="),
        ({"prompt_token_ids": [31, 0, 5]}, None),
        ({"messages": [{"role": "user", "content": "sort 1"}]}, "<bos> user : sort 1 <eos> <bos> assistant :"),
        (
            {"messages": [{"role": "user", "content": "sort"}, {"role": "assistant", "content": "1 2"}]},
            "<bos> user : sort <eos> <bos> assistant : 1 2",
        ),
        (
            {
                "messages": [{"role": "user", "content": "sort"}, {"role": "assistant", "content": "1"}],
                "continue_final_message": False,
            },
            "<bos> user : sort <eos> <bos> assistant : 1 <eos> <bos> assistant :",
        ),
    ],
    ids=["text", "ids", "messages", "prefill", "finished assistant message"],
)
def test_prompt_is_tokenised_once_and_exactly(
    client: Client, gateway: HttpGateway, run: str, item: dict[str, Any], expected: str | None
) -> None:
    (result,) = client.post_prompts(run, [{"number": 3, "prompt_id": "mine", "n": 2, **item}])
    assert result["status"] == 202, result
    assert (result["number"], result["prompt_id"], result["group_id"]) == (3, "mine", f"{run}.3")
    assert result["trajectory_ids"] == [f"{run}.3.0", f"{run}.3.1"]
    assert prompt_ids(gateway, run, 3) == (ids(expected) if expected else [31, 0, 5])


def test_equal_item_again_gives_the_same_ids_and_another_one_conflicts(client: Client, run: str) -> None:
    item = {"number": 0, "prompt_id": "a", "prompt": "1 2", "sampling": {"max_tokens": 3}, "metadata": {"x": [1, None]}}
    first = client.post_prompts(run, [item])[0]
    again = client.post_prompts(run, [item])[0]
    assert (again["status"], again["trajectory_ids"]) == (200, first["trajectory_ids"])
    for other in ({**item, "prompt": "1 3"}, {**item, "number": 1}, {**item, "metadata": {}}):
        refused = client.post_prompts(run, [other])[0]
        assert (refused["status"], refused["problem"]["code"]) == (409, "prompt-conflict")
    assert client.metrics(run)["accepted"] == 2


REFUSED: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "too long": ({"sampling": {"max_tokens": 32}}, "prompt-too-long", "/sampling/max_tokens"),
    "top_p": ({"sampling": {"top_p": 0.9}}, "sampling-refused", "/sampling"),
    "top_k": ({"sampling": {"top_k": 5}}, "sampling-refused", "/sampling"),
    "min_p": ({"sampling": {"min_p": 0.1}}, "sampling-refused", "/sampling"),
    "temperature": ({"sampling": {"temperature": 0.7}}, "sampling-refused", "/sampling/temperature"),
    "greedy": ({"sampling": {"temperature": 0}}, "sampling-refused", "/sampling/temperature"),
    "n": ({"n": 3}, "invalid-request", "/n"),
    "no number": ({"number": None}, "prompt-number", "/number"),
    "beyond the run": ({"number": 8}, "prompt-number", "/number"),
    "negative number": ({"number": -1}, "invalid-request", "/number"),
    "empty": ({"prompt": ""}, "prompt-empty", None),
    "out of vocabulary": ({"prompt": None, "prompt_token_ids": [32]}, "token-out-of-range", None),
    "negative id": ({"prompt": None, "prompt_token_ids": [-1]}, "invalid-request", "/prompt_token_ids/0"),
    "stop id": ({"sampling": {"stop_token_ids": [32]}}, "token-out-of-range", "/sampling/stop_token_ids"),
    "two forms": ({"prompt_token_ids": [1]}, "invalid-request", ""),
    "no form": ({"prompt": None}, "invalid-request", ""),
    "misspelt": ({"temprature": 1}, "invalid-request", "/temprature"),
    "max_tokens 0": ({"sampling": {"max_tokens": 0}}, "invalid-request", "/sampling/max_tokens"),
    "no answer": ({"reward": {"mode": "exact_match"}}, "invalid-request", "/reward"),
    "same source twice": ({"reward": {"sources": ["a", "a"]}}, "invalid-request", "/reward"),
    "no assistant": ({"prompt": None, "messages": [{"role": "user", "content": "1"}], "continue_final_message": True},
                     "invalid-request", ""),
    "unknown role": ({"prompt": None, "messages": [{"role": "cat", "content": "1"}]}, "invalid-request", "/messages/0/role"),
    "big metadata": ({"metadata": {"x": "y" * 20_000}}, "invalid-request", "/metadata"),
    "integer beyond 64 bits": ({"metadata": {"x": 2**70}}, "invalid-request", "/metadata"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_item_is_refused_by_itself(http: httpx.Client, run: str, case: str) -> None:
    fields, code, pointer = REFUSED[case]
    good = {"number": 0, "prompt": "1"}
    bad = {key: value for key, value in {"number": 1, "prompt": "1", **fields}.items() if value is not None}
    answer = http.post(f"/v1/runs/{run}/prompts", json={"items": [bad, good]})
    assert answer.status_code == 207, answer.text
    refused, accepted = answer.json()["items"]
    assert accepted["status"] == 202
    problem = refused["problem"]
    assert (refused["status"], problem["code"]) == (422, code)
    assert problem["detail"]
    assert pointer is None or pointer in [e["pointer"] for e in problem["errors"]], problem
    assert http.get(f"/v1/runs/{run}/metrics").json()["accepted"] == 2


def test_closed_gate_is_429_for_a_whole_batch_and_per_item_otherwise(
    http: httpx.Client, client: Client, make_run: Callable[..., str]
) -> None:
    run = make_run(num_steps=20)
    limit = client.metrics(run)["gate"]["limit"]
    open_item, closed_item = {"number": 0, "prompt": "1"}, {"number": limit, "prompt": "1"}
    answer = http.post(f"/v1/runs/{run}/prompts", json={"items": [open_item, closed_item]})
    assert (answer.status_code, answer.headers["retry-after"]) == (207, "1")
    first, second = answer.json()["items"]
    assert (first["status"], second["status"], second["problem"]["code"]) == (202, 429, "capacity-exhausted")
    assert second["problem"]["retryable"]
    answer = http.post(f"/v1/runs/{run}/prompts", json={"items": [closed_item]})
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"
    problem = answer.json()
    assert (problem["code"], problem["limit"], problem["in_flight"]) == ("capacity-exhausted", limit, 2)
    assert client.metrics(run)["accepted"] == 2


def test_prompts_of_a_stopped_run_are_refused(client: Client, run: str) -> None:
    client.stop(run)
    (result,) = client.post_prompts(run, [{"number": 0, "prompt": "1"}])
    assert (result["status"], result["problem"]["code"]) == (409, "run-over")


def test_paused_run_still_accepts(client: Client, run: str) -> None:
    client.pause(run)
    assert client.post_prompts(run, [{"number": 0, "prompt": "1"}])[0]["status"] == 202


def test_too_many_items_are_413(http: httpx.Client, run: str, gateway: HttpGateway) -> None:
    items = [{"number": 0, "prompt": "1"}] * (gateway.config.max_items + 1)
    answer = http.post(f"/v1/runs/{run}/prompts", json={"items": items})
    assert (answer.status_code, answer.json()["code"]) == (413, "too-large")
    assert answer.json()["limit"] == gateway.config.max_items


def test_batch_without_items_or_of_another_shape_is_422(http: httpx.Client, run: str) -> None:
    for body, pointer in [({"items": []}, "/items"), ({}, "/items"), ([], ""), ({"items": 3}, "/items")]:
        answer = http.post(f"/v1/runs/{run}/prompts", json=body)
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid-request"), answer.text
        assert [e["pointer"] for e in answer.json()["errors"]] == [pointer]


def test_prompts_in_msgpack_and_their_answer_too(http: httpx.Client, run: str) -> None:
    body = msgpack.packb({"items": [{"number": 0, "prompt_token_ids": [5, 6]}]})
    headers = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}
    answer = http.post(f"/v1/runs/{run}/prompts", content=body, headers=headers)
    assert (answer.status_code, answer.headers["content-type"]) == (202, "application/msgpack")
    assert msgpack.unpackb(answer.content)["items"][0]["trajectory_ids"] == [f"{run}.0.0", f"{run}.0.1"]


def test_client_waits_for_the_gate_only_as_long_as_it_is_told(client: Client, make_run: Callable[..., str]) -> None:
    run = make_run(num_steps=20)
    items = [{"number": n, "prompt": "1"} for n in (0, 15)]
    results = client.post_prompts(run, items, gate_deadline_s=1.2)
    assert [(r["index"], r["status"]) for r in results] == [(0, 202), (1, 429)]


def test_model_without_a_tokenizer_takes_token_ids_only(
    client: Client, make_run: Callable[..., str], model: Path, tmp_path: Path
) -> None:
    shutil.copy(model / "config.json", tmp_path)
    run = make_run(model=str(tmp_path))
    refused, stopped, accepted = client.post_prompts(
        run,
        [
            {"number": 0, "prompt": "1"},
            {"number": 0, "prompt_token_ids": [5], "sampling": {"stop": ["2"]}},
            {"number": 0, "prompt_token_ids": [5]},
        ],
    )
    assert refused["problem"]["code"] == stopped["problem"]["code"] == "model-unavailable"
    assert accepted["status"] == 202


def test_messages_that_the_template_refuses(
    client: Client, make_run: Callable[..., str], model: Path, tmp_path: Path
) -> None:
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ raise_exception('no system message here') }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    run = make_run(model=str(tmp_path))
    (result,) = client.post_prompts(run, [{"number": 0, "messages": [{"role": "system", "content": "1"}]}])
    assert (result["status"], result["problem"]["code"]) == (422, "chat-template")
    assert "no system message here" in result["problem"]["detail"]


def test_unknown_run_refuses_the_batch(client: Client) -> None:
    with pytest.raises(ApiError) as caught:
        client.post_prompts("nobody", [{"number": 0, "prompt": "1"}])
    assert (caught.value.status, caught.value.code) == (404, "not-found")
