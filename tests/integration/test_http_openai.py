"""The OpenAI-compatible routes: shapes, errors and streams as OpenAI's clients expect them, with our token ids."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
import pytest

from shared.wire.pb import rollout_pb2 as pb
from shared.wire.types import FinishReason, float32_bytes, int32_bytes
from tests.deadline import DEADLINE_S
from tests.integration.gateway_harness import HttpGateway, publish
from timzero.client import Client

pytest_plugins = ("tests.integration.gateway_fixtures",)


@pytest.fixture
def digests(config: dict[str, Any], run: str, weight_sync_address: str) -> list[str]:
    return [publish(weight_sync_address, config, step) for step in range(2)]


class Engine:
    """Samples what the test says for every evaluation sample of the run, as soon as it is accepted.

    With `pieces` token by token, and the last one not before `seen` is set.
    """

    def __init__(
        self, gateway: HttpGateway, client: Client, run: str, answers: Sequence[Sequence[int]], pieces: bool = False
    ):
        self._gateway, self._client, self._run = gateway, client, run
        self._answers, self._pieces = answers, pieces
        self.seen = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> Engine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    def _sample(self) -> None:
        for event in self._client.stream_events(self._run, deadline_s=DEADLINE_S, types=["evaluation.accepted"]):
            record = self._gateway.call(
                self._gateway.store.get_eval(self._run, int(event.group_id.rpartition(".e")[2]))
            )
            for t, token_ids in zip(record.trajectories, self._answers, strict=True):
                if self._pieces:
                    self._show(t.trajectory_id, token_ids)
                    assert self.seen.wait(DEADLINE_S)
                self._gateway.generate(self._run, t.trajectory_id, token_ids, finish=FinishReason.LENGTH)
            return

    def _show(self, trajectory_id: str, token_ids: Sequence[int]) -> None:
        for start, token_id in enumerate(token_ids[:-1]):
            chunk = pb.GenerateChunk(
                trajectory_id=trajectory_id,
                start=start,
                token_ids=int32_bytes([token_id]),
                logprobs=float32_bytes(np.array([-0.1], np.float32)),
            )

            async def observe(chunk: pb.GenerateChunk = chunk) -> None:
                self._gateway.gateway.progress.observe(chunk)

            self._gateway.call(observe())


def test_completion(http: httpx.Client, client: Client, gateway: HttpGateway, run: str, digests: list[str]) -> None:
    body = {
        "model": run,
        "prompt": "sort 2 1 =",
        "max_tokens": 3,
        "n": 2,
        "logprobs": 0,
        "stop": "9",
        "temperature": 0.5,
    }
    with Engine(gateway, client, run, [[5, 6, 2], [7]]):
        answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    completion = answer.json()
    assert (completion["object"], completion["model"]) == ("text_completion", run)
    assert completion["weight_version"] == {"step": 1, "digest": digests[1]}
    assert completion["usage"] == {"prompt_tokens": 4, "completion_tokens": 4, "total_tokens": 8}
    first, second = completion["choices"]
    assert (first["index"], first["text"], first["finish_reason"]) == (0, "1 2", "length")
    assert (first["token_ids"], first["prompt_token_ids"], second["token_ids"]) == ([5, 6, 2], [14, 6, 5, 15], [7])
    assert first["logprobs"]["tokens"] == ["1", "2", "<eos>"]
    assert np.frombuffer(base64.b64decode(first["logprobs_f32"]), "<f4").tolist() == first["logprobs"]["token_logprobs"]
    item = gateway.call(gateway.store.get_eval(run, 0)).items[0]
    assert (item.sampling.temperature, item.sampling.stop, item.n) == (0.5, ("9",), 2)
    assert client.metrics(run)["accepted"] == 0, "never trained"


def test_completion_of_several_prompts_and_a_named_version(
    http: httpx.Client, client: Client, gateway: HttpGateway, run: str, digests: list[str]
) -> None:
    with Engine(gateway, client, run, [[5], [6]]):
        answer = http.post(
            "/v1/completions", json={"model": f"{run}@0", "prompt": [[5, 6], [7]], "max_tokens": 2, "seed": 3}
        )
    completion = answer.json()
    assert completion["weight_version"]["step"] == 0
    assert [(c["index"], c["prompt_token_ids"], c["text"]) for c in completion["choices"]] == [
        (0, [5, 6], "1"),
        (1, [7], "2"),
    ]


def test_chat_completion(
    http: httpx.Client, client: Client, gateway: HttpGateway, run: str, digests: list[str]
) -> None:
    body = {
        "model": run,
        "messages": [{"role": "user", "content": "sort 2 1"}],
        "logprobs": True,
        "max_completion_tokens": 4,
    }
    with Engine(gateway, client, run, [[5, 6]]):
        completion = http.post("/v1/chat/completions", json=body).json()
    assert completion["object"] == "chat.completion"
    (choice,) = completion["choices"]
    assert choice["message"] == {"role": "assistant", "content": "1 2"}
    assert [c["token"] for c in choice["logprobs"]["content"]] == ["1", "2"]
    assert choice["prompt_token_ids"][:2] == [1, 17]


def stream_chunks(
    http: httpx.Client, path: str, body: dict[str, Any], seen: threading.Event | None = None
) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end with [DONE]; `seen` is set when the first has come."""
    data = []
    with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line.startswith("data: "):
                data.append(line.removeprefix("data: "))
                if seen is not None:
                    seen.set()
    assert data[-1] == "[DONE]"
    return [json.loads(d) for d in data[:-1]]


def test_chat_stream_comes_token_by_token(
    http: httpx.Client, client: Client, gateway: HttpGateway, run: str, digests: list[str]
) -> None:
    body = {"model": run, "messages": [{"role": "user", "content": "sort"}], "max_tokens": 8, "logprobs": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    with Engine(gateway, client, run, [[5, 6, 7, 8]], pieces=True) as engine:
        chunks = stream_chunks(http, "/v1/chat/completions", body, engine.seen)
    *pieces, last = chunks
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 4)
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    choices = [c["choices"][0] for c in pieces]
    assert len(choices) > 1, "the tokens came all at once"
    assert "".join(c["delta"]["content"] for c in choices) == "1 2 3 4"
    assert [t for c in choices for t in c["token_ids"]] == [5, 6, 7, 8]
    assert [t["token"] for c in choices for t in c["logprobs"]["content"]] == ["1", "2", "3", "4"]
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["length"]
    assert [c["delta"]["role"] for c in choices] == ["assistant"] + [None] * (len(choices) - 1)


def test_completion_stream_of_two_choices(
    http: httpx.Client, client: Client, gateway: HttpGateway, run: str, digests: list[str]
) -> None:
    with Engine(gateway, client, run, [[5, 6], [7, 8, 9]]):
        chunks = stream_chunks(http, "/v1/completions", {"model": run, "prompt": "1", "n": 2})
    for index, token_ids in enumerate([[5, 6], [7, 8, 9]]):
        choices = [x for c in chunks for x in c["choices"] if x["index"] == index]
        assert [t for c in choices for t in c["token_ids"]] == token_ids
        assert choices[-1]["finish_reason"] == "length"


def test_models_are_runs(http: httpx.Client, run: str) -> None:
    models = http.get("/v1/models").json()
    assert models["object"] == "list"
    assert models["data"][0]["id"] == run
    assert http.get(f"/v1/models/{run}").json()["max_model_len"] == 32


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("/v1/completions", {"prompt": "1"}, 400, "invalid-request", "model"),
        ("/v1/completions", {"model": "nobody", "prompt": "1"}, 404, "not-found", None),
        ("/v1/completions", {"model": "RUN@9", "prompt": "1"}, 404, "version-unknown", None),
        ("/v1/completions", {"model": "RUN@x", "prompt": "1"}, 404, "version-unknown", "model"),
        (
            "/v1/completions",
            {"model": "RUN", "prompt": "1", "max_tokens": 99},
            400,
            "prompt-too-long",
            "sampling/max_tokens",
        ),
        ("/v1/completions", {"model": "RUN", "prompt": "1", "echo": True}, 400, "invalid-request", "echo"),
        ("/v1/completions", {"model": "RUN", "prompt": []}, 400, "invalid-request", None),
        ("/v1/chat/completions", {"model": "RUN", "messages": []}, 400, "invalid-request", "messages"),
    ],
)
def test_errors_have_the_shape_of_openai(
    http: httpx.Client, run: str, digests: list[str], path: str, body: Any, status: int, code: str, param: str | None
) -> None:
    body = {k: v.replace("RUN", run) if isinstance(v, str) else v for k, v in body.items()}
    answer = http.post(path, json=body)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json"), answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"] or None) == (code, param)
    assert error["message"]
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


def test_completion_that_takes_too_long_says_so(
    valkey_url: str, weight_sync_address: str, run: str, digests: list[str]
) -> None:
    with (
        HttpGateway(valkey_url, weight_sync_address, completion_timeout_s=0.3) as gateway,
        httpx.Client(base_url=gateway.url, timeout=DEADLINE_S) as http,
    ):
        answer = http.post("/v1/completions", json={"model": run, "prompt": "1"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline-exceeded")
        (chunk,) = stream_chunks(http, "/v1/completions", {"model": run, "prompt": "1"})
        assert chunk["error"]["code"] == "deadline-exceeded"


def test_stream_with_an_idempotency_key_is_refused(http: httpx.Client, run: str, digests: list[str]) -> None:
    body = {"model": run, "prompt": "1", "stream": True}
    answer = http.post("/v1/completions", json=body, headers={"Idempotency-Key": "k"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "malformed-request")
