"""Every service as a process: it says `ready`, is healthy, exports metrics, and SIGTERM ends it with code 0 in bounded time.

The gateway and weight_sync run here as on a machine where torch is not installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shared.wire.embedded import EmbeddedValkey
from shared.wire.probe import is_serving
from tests.deadline import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def running(
    service: str, *words: str, environ: dict[str, str], cwd: Path
) -> Iterator[tuple[subprocess.Popen[str], dict]]:
    """The process and its `ready` line. Killed when the block ends, or when nothing was said for DEADLINE_S."""
    environ = environ | {"PYTHONPATH": environ.get("PYTHONPATH", str(ROOT))}
    command = [sys.executable, "-m", f"services.{service}", "metrics_port=0", *words]
    process = subprocess.Popen(command, env=environ, cwd=cwd, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    watchdog = threading.Timer(DEADLINE_S, process.kill)
    watchdog.start()
    try:
        said = []
        for line in process.stderr:
            said.append(line)
            record = json.loads(line) if line.startswith("{") else {}
            if record.get("event") == "ready":
                break
        else:
            raise AssertionError(f"{service} ended with {process.wait(DEADLINE_S)}:\n{''.join(said)}")
        assert all(line.startswith("{") for line in said), f"a line that is not JSON:\n{''.join(said)}"
        watchdog.cancel()
        # Somebody has to read what it goes on saying, or it blocks on a full pipe.
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield process, record
    finally:
        watchdog.cancel()
        process.kill()
        process.wait(DEADLINE_S)


def check_life(process: subprocess.Popen[str], health_port: int, metrics_port: int) -> None:
    """Healthy, with metrics, and gone after SIGTERM."""
    assert is_serving(f"127.0.0.1:{health_port}", timeout_s=DEADLINE_S) == (True, "SERVING")
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=DEADLINE_S) as answer:
        assert b"process_cpu_seconds_total" in answer.read()
    process.terminate()
    assert process.wait(DEADLINE_S) == 0
    assert is_serving(f"127.0.0.1:{health_port}", timeout_s=5)[0] is False


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="module")
def weight_sync(tmp_path_factory: pytest.TempPathFactory, torch_free_environ: dict[str, str]) -> Iterator[str]:
    """Address of a weight_sync."""
    folder = tmp_path_factory.mktemp("weight_sync")
    with running("weight_sync", "port=0", f"data_dir={folder}", environ=torch_free_environ, cwd=folder) as (_, ready):
        yield f"127.0.0.1:{ready['port']}"


def test_weight_sync_lives_and_dies_without_torch(tmp_path: Path, torch_free_environ: dict[str, str]) -> None:
    with running("weight_sync", "port=0", f"data_dir={tmp_path}", environ=torch_free_environ, cwd=tmp_path) as (
        p,
        ready,
    ):
        check_life(p, ready["port"], ready["metrics_port"])


def test_the_gateway_lives_and_dies_without_torch(
    tmp_path: Path, valkey: EmbeddedValkey, weight_sync: str, torch_free_environ: dict[str, str]
) -> None:
    words = ("port=0", f"valkey={valkey.url}", f"weight_sync={weight_sync}")
    with running("gateway", *words, environ=torch_free_environ, cwd=tmp_path) as (process, ready):
        for path in ("healthz", "readyz", "openapi.json"):
            with urllib.request.urlopen(f"http://127.0.0.1:{ready['port']}/{path}", timeout=DEADLINE_S) as answer:
                assert answer.status == 200
        check_life(process, ready["health_port"], ready["metrics_port"])


def test_a_rollout_replica_lives_and_dies(tmp_path: Path, weight_sync: str) -> None:
    words = ("port=0", f"weight_sync={weight_sync}", "replica=lives-and-dies")
    with running("rollout", *words, environ=dict(os.environ), cwd=tmp_path) as (process, ready):
        check_life(process, ready["port"], ready["metrics_port"])


def test_a_trainer_lives_and_dies(tmp_path: Path, valkey: EmbeddedValkey, weight_sync: str) -> None:
    words = ("port=0", f"redis_url={valkey.url}", f"weight_sync={weight_sync}", f"run_dir={tmp_path}")
    with running("trainer", *words, environ=dict(os.environ), cwd=tmp_path) as (process, ready):
        check_life(process, ready["port"], ready["metrics_port"])
