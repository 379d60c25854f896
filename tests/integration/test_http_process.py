"""The gateway as a process, from a posted prompt to the training queue, and how it starts, stops and dies.

Everything is real but the model: the replica samples digits in turn.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import redis
from tenacity import Retrying, stop_after_delay, wait_fixed

from shared.wire.pb import rollout_pb2 as pb
from shared.wire.probe import is_serving
from shared.wire.queue import TrainQueue
from shared.wire.types import float32_bytes, int32_bytes
from tests.deadline import DEADLINE_S
from tests.integration.gateway_harness import publish, ready_line, run_config
from tests.integration.weight_sync_testing import Peer
from timzero.client import Client

pytest_plugins = ("tests.integration.gateway_fixtures",)

ROOT = Path(__file__).resolve().parents[2]
FIRST_DIGIT = 4
"""Token id of "0" in tiny-sort's vocabulary."""


class Sampler(Peer):
    """A replica whose sample `s` is the digits from `s` on, one per chunk; it stands still while `go_on_sampling` is clear."""

    def __init__(self, weight_sync: str) -> None:
        super().__init__(weight_sync, "sampler")
        self.fingerprint = "f"
        self.go_on_sampling = asyncio.Event()
        self.go_on_sampling.set()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateReply]:
        version = self.held[0].version
        assert request.manifest_digest == version.digest
        for sample in request.samples:
            begin = len(sample.token_ids) // 4
            for i in range(begin, request.sampling.max_tokens):
                await self.go_on_sampling.wait()
                token = FIRST_DIGIT + (sample.sample_index + i) % 10
                chunk = pb.GenerateChunk(
                    trajectory_id=sample.trajectory_id,
                    start=i,
                    token_ids=int32_bytes([token]),
                    logprobs=float32_bytes(np.array([-0.5], np.float32)),
                    top1=int32_bytes([token]),
                    kv="fresh",
                    finish_reason="length" if i == request.sampling.max_tokens - 1 else "",
                )
                yield pb.GenerateReply(version=version, fingerprint="f", chunks=[chunk])


@contextmanager
def replica(weight_sync: str) -> Iterator[Sampler]:
    """A replica in a thread of its own."""
    loop, serving, made = asyncio.new_event_loop(), threading.Event(), []

    async def serve() -> None:
        sampler, stop = Sampler(weight_sync), asyncio.Event()
        async with sampler.serving():
            made.extend((sampler, stop))
            serving.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert serving.wait(DEADLINE_S)
    try:
        yield made[0]
    finally:
        loop.call_soon_threadsafe(made[1].set)
        thread.join(DEADLINE_S)


@contextmanager
def gateway(*words: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """The process and its `ready` line; killed at the end if it is still there."""
    process = subprocess.Popen([sys.executable, "-m", "services.gateway", *words], stderr=subprocess.PIPE, text=True)
    try:
        yield process, ready_line(process)
    finally:
        process.kill()
        process.wait(DEADLINE_S)


@pytest.fixture(autouse=True)
def ended_run(config: dict[str, Any], valkey_url: str) -> Iterator[None]:
    """However a test ends, the next one may have a run."""
    yield
    name = f"tz:{{{config['run']}}}:run"
    with redis.Redis.from_url(valkey_url) as valkey:
        if valkey.exists(name):
            valkey.hset(name, "state", "failed")


def url_of(ready: dict[str, Any]) -> str:
    return f"http://127.0.0.1:{ready['port']}"


def wait_for(client: Client, run: str, event_type: str, count: int) -> None:
    seen = 0
    for event in client.stream_events(run, deadline_s=DEADLINE_S):
        seen += event.type == event_type
        if seen == count:
            return
    raise AssertionError(f"{seen} of {count} {event_type} events: {client.metrics(run)}")


def test_from_a_prompt_to_the_training_queue_and_out(
    valkey_url: str, weight_sync_address: str, config: dict[str, Any]
) -> None:
    run = config["run"]
    with (
        replica(weight_sync_address),
        gateway("port=0", f"valkey={valkey_url}", f"weight_sync={weight_sync_address}", "drain_s=2") as (
            _,
            ready,
        ),
        Client(url_of(ready)) as client,
    ):
        assert is_serving(f"127.0.0.1:{ready['health_port']}")
        client.create_run(config)
        publish(weight_sync_address, config, 0)
        assert all(r["status"] == 202 for r in client.post_prompts(run, [
            {"number": 0, "prompt": "sort", "sampling": {"max_tokens": 3}},
            {"number": 1, "prompt": "sort", "sampling": {"max_tokens": 2},
             "reward": {"mode": "exact_match", "answer": "0 1"}},
        ]))  # fmt: skip
        wait_for(client, run, "trajectory.awaiting_reward", 4)
        assert client.ready(deadline_s=DEADLINE_S)
        assert client.trajectory(run, f"{run}.0.1")["text"] == "1 2 3"
        assert [client.trajectory(run, f"{run}.1.{i}")["reward"] for i in (0, 1)] == [1.0, 0.0]
        client.put_rewards(run, [{"trajectory_id": f"{run}.0.{i}", "value": i} for i in (0, 1)])
        wait_for(client, run, "trajectory.queued", 4)

        queue = TrainQueue.connect(valkey_url)
        epoch = queue.take_over(run, next_step=0)
        groups = queue.lease(run, 0, epoch=epoch, deadline_s=DEADLINE_S)
        assert groups is not None
        assert [[t.reward for t in g.trajectories] for g in groups] == [[0.0, 1.0], [1.0, 0.0]]
        queue.record_step(run, 0, {"reward": 0.5}, epoch=epoch)
        queue.commit_trained(run, durable_step=1, epoch=epoch)
        queue.close()
        wait_for(client, run, "trajectory.trained", 4)
        metrics = client.metrics(run)
        assert (metrics["accepted"], metrics["trained"], metrics["live"], metrics["durable_step"]) == (4, 4, 0, 1)
        assert next(client.trajectories(run, full=True))["text"] == "0 1 2"

        evaluation = client.create_eval(run, [{"prompt": "sort"}], sampling={"max_tokens": 2}, version=0)
        done = client.wait_eval(run, evaluation["eval_id"], deadline_s=DEADLINE_S)
        assert done["items"][0]["samples"][0]["text"] == "0 1"
        # Updated now and then, not with every event.
        for attempt in Retrying(stop=stop_after_delay(DEADLINE_S), wait=wait_fixed(0.1), reraise=True):
            with attempt:
                exported = httpx.get(f"http://127.0.0.1:{ready['metrics_port']}/metrics", timeout=DEADLINE_S).text
                assert f'timzero_trajectories_accepted_total{{run="{run}"}} 4.0' in exported
        assert 'timzero_http_requests_total{method="POST",route="/v1/runs/{run}/prompts",status="202"}' in exported
        client.stop(run)


def test_streamed_completion_follows_the_replica(
    valkey_url: str, weight_sync_address: str, config: dict[str, Any]
) -> None:
    run = config["run"]
    with (
        replica(weight_sync_address),
        gateway("port=0", f"valkey={valkey_url}", f"weight_sync={weight_sync_address}") as (_, ready),
        Client(url_of(ready)) as client,
    ):
        client.create_run(config)
        publish(weight_sync_address, config, 0)
        body = {"model": run, "prompt": "sort", "max_tokens": 8, "stream": True}
        with httpx.stream("POST", f"{url_of(ready)}/v1/completions", json=body, timeout=DEADLINE_S) as response:
            data = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
        assert data[-1] == "[DONE]"
        choices = [json.loads(d)["choices"][0] for d in data[:-1]]
        assert "".join(c["text"] for c in choices) == "0 1 2 3 4 5 6 7"
        assert choices[-1]["finish_reason"] == "length"
        client.stop(run)


def test_killed_gateway_takes_up_what_it_had_accepted(
    valkey_url: str, weight_sync_address: str, config: dict[str, Any]
) -> None:
    run = config["run"]
    words = ("port=0", f"valkey={valkey_url}", f"weight_sync={weight_sync_address}")
    with replica(weight_sync_address) as sampler:
        with gateway(*words) as (process, ready), Client(url_of(ready)) as client:
            client.create_run(config)
            publish(weight_sync_address, config, 0)
            sampler.go_on_sampling.clear()
            client.post_prompts(run, [{"number": 0, "prompt": "sort", "sampling": {"max_tokens": 3}}])
            wait_for(client, run, "trajectory.generating", 2)
            process.send_signal(signal.SIGKILL)
            process.wait(DEADLINE_S)
        sampler.go_on_sampling.set()
        with gateway(*words) as (_, ready), Client(url_of(ready)) as client:
            wait_for(client, run, "trajectory.awaiting_reward", 2)
            assert client.trajectory(run, f"{run}.0.0")["text"] == "0 1 2"
            assert client.metrics(run)["accepted"] == 2
            client.stop(run)


def test_sigterm_closes_open_streams_and_exits_with_0(valkey_url: str, weight_sync_address: str, run: str) -> None:
    words = ("port=0", f"valkey={valkey_url}", f"weight_sync={weight_sync_address}", "drain_s=3")
    with gateway(*words) as (process, ready), httpx.Client(base_url=url_of(ready), timeout=DEADLINE_S) as http:
        with http.stream("GET", f"/v1/runs/{run}/trajectories/stream") as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            list(lines)
        assert process.wait(DEADLINE_S) == 0
        with pytest.raises(httpx.ConnectError):
            http.get("/healthz")


def test_fault_of_the_dispatcher_ends_the_process(
    valkey_url: str, weight_sync_address: str, config: dict[str, Any]
) -> None:
    run = config["run"]
    with (
        replica(weight_sync_address),
        gateway("port=0", f"valkey={valkey_url}", f"weight_sync={weight_sync_address}") as (process, ready),
        Client(url_of(ready)) as client,
    ):
        client.create_run(config)
        publish(weight_sync_address, config, 0)
        valkey = redis.Redis.from_url(valkey_url)
        valkey.hset(f"tz:{{{run}}}:prompts", "0", b"\xc1 no prompt")
        valkey.zadd(f"tz:{{{run}}}:todo", {"0": 0})
        client.post_prompts(run, [{"number": 1, "prompt": "sort"}])
        assert process.wait(DEADLINE_S) == 70


def test_shell_examples_of_the_documentation_work(valkey_url: str, weight_sync_address: str, model: Path) -> None:
    section = (ROOT / "docs" / "http.md").read_text().split("## A run from the shell")[1]
    script = section.split("```sh")[1].split("```")[0]
    script = script.replace("/models/SmolLM2-135M-Instruct", str(model)).replace("timeout_s=30", "timeout_s=3")
    assert script.count("curl ") > 8
    publish(weight_sync_address, run_config("demo", model), 0)
    with (
        replica(weight_sync_address),
        gateway("port=0", f"valkey={valkey_url}", f"weight_sync={weight_sync_address}") as (_, ready),
    ):
        prelude = f"set -e; URL={url_of(ready)}; AUTH='Authorization: Bearer '\n"
        prelude += 'curl() { command curl --fail-with-body "$@"; echo; }'
        done = subprocess.run(
            ["bash", "-c", prelude + script], capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
    assert done.returncode == 0, done.stdout + done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert "event: trajectory.awaiting_reward" in done.stdout
    assert [r["status"] for a in answers for r in a.get("items", []) if "trajectory_ids" in r] == [202]
    assert [a["choices"][0]["message"]["role"] for a in answers if "choices" in a] == ["assistant"]
    assert answers[-1]["state"] == "stopped"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["host=0.0.0.0"], "no API key is configured"),
        (["host=::"], "no API key is configured"),
        (["keys=['me:secret:admin']"], "an API key is name:sha256-hex:scope,scope"),
        ([f"keys=['me:{'0' * 64}:everything']"], "scopes must be some of"),
        (["keys_file=/nowhere/keys"], "cannot read keys_file"),
        (["prot=1"], "the nearest key is port"),
        (["max_items=0"], "max_items must be >= 1"),
    ],
)
def test_unsafe_or_wrong_configuration_exits_with_2(words: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "services.gateway", *words],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "secret" not in done.stderr


def test_made_key_opens_a_gateway_on_every_interface(tmp_path: Path, valkey_url: str, weight_sync_address: str) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "services.gateway.auth", "ops", "trajectories:read"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    key, entry = (line.rsplit(": ", 1)[1] for line in made.splitlines())
    (tmp_path / "keys").write_text(entry)
    words = (
        "port=0",
        "host=0.0.0.0",
        f"keys_file={tmp_path / 'keys'}",
        f"valkey={valkey_url}",
        f"weight_sync={weight_sync_address}",
    )
    with gateway(*words) as (_, ready):
        assert httpx.get(f"{url_of(ready)}/v1/runs", timeout=DEADLINE_S).status_code == 401
        assert (
            httpx.get(
                f"{url_of(ready)}/v1/runs", headers={"Authorization": f"Bearer {key}"}, timeout=DEADLINE_S
            ).status_code
            == 200
        )
        with Client(url_of(ready), api_key=key) as client:
            list(client.runs())
