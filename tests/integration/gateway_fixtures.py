"""Fixtures of the HTTP tests: `pytest_plugins = ("tests.integration.gateway_fixtures",)` in a test module."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before transformers is imported: a test asks no hub for a model of a random name.
os.environ["HF_HUB_OFFLINE"] = "1"

import httpx
import pytest
import redis
import structlog

from shared.wire.embedded import EmbeddedValkey
from tests.deadline import DEADLINE_S
from tests.integration.gateway_harness import HttpGateway, run_config, weight_sync, write_model
from timzero.client import Client

_numbers = itertools.count()


@pytest.fixture(scope="session", autouse=True)
def plain_logs() -> None:
    """As services log. structlog's default renders tracebacks for seconds."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ]
    )


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedValkey(tmp_path_factory.mktemp("valkey")) as server:
        # Durable at once instead of once a second: the same promise, faster tests.
        redis.Redis.from_url(server.url).config_set("appendfsync", "always")
        yield server.url


@pytest.fixture(scope="session")
def weight_sync_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with weight_sync(tmp_path_factory.mktemp("weight_sync")) as address:
        yield address


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def gateway(valkey_url: str, weight_sync_address: str) -> Iterator[HttpGateway]:
    with HttpGateway(
        valkey_url, weight_sync_address, gate_retry_s=1, heartbeat_s=0.2, completion_timeout_s=DEADLINE_S
    ) as server:
        yield server


@pytest.fixture
def http(gateway: HttpGateway) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, timeout=DEADLINE_S) as client:
        yield client


@pytest.fixture
def client(gateway: HttpGateway) -> Iterator[Client]:
    with Client(gateway.url, timeout_s=DEADLINE_S) as client:
        yield client


@pytest.fixture
def config(model: Path) -> dict[str, Any]:
    """Configuration of a run of this test's own."""
    return run_config(f"run{next(_numbers)}", model)


@pytest.fixture
def make_run(client: Client, config: dict[str, Any]) -> Iterator[Callable[..., str]]:
    """Creates the test's run with further fields; it is stopped at the end, since one is active at a time."""

    def make(**fields: Any) -> str:
        return client.create_run({**config, **fields})["run"]

    yield make
    # Only the newest can be active still.
    newest = next(client.runs(), None)
    if newest is not None and newest["state"] in ("running", "paused"):
        client.stop(newest["run"])


@pytest.fixture
def run(make_run: Callable[..., str]) -> str:
    return make_run()
