"""Valkey or weight_sync away: 503 at once, nothing acknowledged that is not on disk, and back by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from services.gateway.ingest_schemas import EXAMPLE
from shared.wire.embedded import EmbeddedValkey
from tests.deadline import DEADLINE_S
from tests.integration.gateway_harness import HttpGateway, publish, run_config, weight_sync
from timzero.client import ApiError, Client

pytest_plugins = ("tests.integration.gateway_fixtures",)

SAMPLED_GROUP = EXAMPLE | {"number": 2}


def test_valkey_down_is_503_and_a_client_that_waits_gets_through(
    tmp_path: Path, weight_sync_address: str, model: Path
) -> None:
    with (
        EmbeddedValkey(tmp_path / "valkey") as valkey,
        HttpGateway(valkey.url, weight_sync_address) as gateway,
        Client(gateway.url, timeout_s=DEADLINE_S) as client,
        httpx.Client(base_url=gateway.url, timeout=DEADLINE_S) as http,
    ):
        run = client.create_run(run_config("faulty", model))["run"]
        client.post_prompts(run, [{"number": 0, "prompt": "1"}])
        publish(weight_sync_address, run_config("faulty", model), 0)
        assert client.post_trajectories(run, [SAMPLED_GROUP])[0]["status"] == 202
        valkey.process.kill()
        valkey.process.wait()

        answer = http.post(f"/v1/runs/{run}/prompts", json={"items": [{"number": 1, "prompt": "1"}]})
        assert (answer.status_code, answer.json()["code"]) == (503, "valkey-unavailable"), answer.text
        assert answer.json()["retryable"]
        assert "retry-after" in answer.headers
        assert http.get("/readyz").json()["checks"]["valkey"] != "ok"
        assert http.get("/healthz").status_code == 200
        with pytest.raises((ApiError, httpx.TransportError)):
            client.post_prompts(run, [{"number": 1, "prompt": "1"}], deadline_s=0.5)

        valkey.start()
        assert client.post_prompts(run, [{"number": 1, "prompt": "1"}])[0]["status"] in (200, 202)
        assert client.metrics(run)["accepted"] == 6
        # What nobody could sample again is on disk as it was.
        kept = client.trajectory(run, f"{run}.2.1")
        assert (kept["state"], kept["token_ids"], kept["reward"]) == ("rewarded", [14, 6, 5, 15, 6, 2], 0.0)
        assert kept["logprobs"].tobytes() == np.float32([-2.5, -0.5]).tobytes()
        assert client.post_trajectories(run, [SAMPLED_GROUP])[0]["status"] == 200


def test_stream_ends_when_valkey_goes_and_is_resumed_by_the_client(
    tmp_path: Path, weight_sync_address: str, model: Path
) -> None:
    with (
        EmbeddedValkey(tmp_path / "valkey") as valkey,
        HttpGateway(valkey.url, weight_sync_address) as gateway,
        Client(gateway.url, timeout_s=DEADLINE_S) as client,
    ):
        run = client.create_run(run_config("streamed", model))["run"]
        stream = client.stream_events(run, deadline_s=DEADLINE_S)
        assert next(stream).type == "run.running"
        valkey.process.kill()
        valkey.process.wait()
        valkey.start()
        client.post_prompts(run, [{"number": 0, "prompt": "1"}])
        assert [next(stream).trajectory_id for _ in range(2)] == [f"{run}.0.0", f"{run}.0.1"]


def test_weight_sync_down_is_503(tmp_path: Path, valkey_url: str, run: str) -> None:
    with weight_sync(tmp_path / "weight_sync") as address:
        pass
    with HttpGateway(valkey_url, address, rpc_timeout_s=2.0) as gateway, httpx.Client(base_url=gateway.url) as http:
        for method, path, body in (
            ("GET", f"/v1/runs/{run}/versions", None),
            ("GET", f"/v1/runs/{run}/versions/0", None),
            ("POST", f"/v1/runs/{run}/evals", {"items": [{"prompt": "1"}]}),
            ("POST", f"/v1/runs/{run}/trajectories", {"items": [SAMPLED_GROUP]}),
        ):
            answer = http.request(method, path, json=body, timeout=DEADLINE_S)
            assert (answer.status_code, answer.json()["code"]) == (503, "weight-sync-unavailable")
            assert answer.json()["retryable"]
        assert http.get("/readyz", timeout=DEADLINE_S).json()["checks"]["weight_sync"] != "ok"


def test_training_prompts_need_no_weight_sync(tmp_path: Path, valkey_url: str, run: str) -> None:
    with HttpGateway(valkey_url, "127.0.0.1:9") as gateway, Client(gateway.url) as client:
        item: dict[str, Any] = {"number": 0, "prompt": "1"}
        assert client.post_prompts(run, [item])[0]["status"] == 202
