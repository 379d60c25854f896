"""A trainer, weight_sync and replicas as processes: versions from the trainer's memory, and from weight_sync where it is gone."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from shared.wire import rpc
from shared.wire.embedded import EmbeddedValkey
from shared.wire.pb import weight_sync_pb2 as pb
from shared.wire.pb.weight_sync_pb2_grpc import WeightSyncStub
from tests.deadline import DEADLINE_S
from tests.integration.trainer_service import Process, Stage
from tests.integration.trainer_testing import run_config, tiny_model
from tests.integration.weight_sync_testing import watch


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    words = (
        "-m",
        "services.weight_sync",
        "port=0",
        f"data_dir={tmp_path / 'weights'}",
        "heartbeat_s=0.2",
        "lease_s=60",
    )
    with EmbeddedValkey(tmp_path / "valkey") as valkey, Process(sys.executable, *words) as weights:
        yield Stage(valkey.url, f"127.0.0.1:{weights.wait_for('ready')['port']}")


def replica(stage: Stage, name: str) -> Process:
    words = (f"replica={name}", f"weight_sync={stage.weight_sync}", "kv_cache_tokens=512", "device=cpu")
    return Process(sys.executable, "-m", "services.rollout", *words)


async def serves(stage: Stage, step: int, digest: str, names: set[str]) -> None:
    """The dispatcher's part: it needs this version, and waits until the replicas are ready with it."""
    async with rpc.aio_channel(stage.weight_sync) as channel:
        await WeightSyncStub(channel).SetNeeded(pb.SetNeededRequest(run="demo", step=step), timeout=DEADLINE_S)
    await watch(
        stage.weight_sync,
        lambda replicas, _: (
            names == {n for n, r in replicas.items() if r.state == "ready" and r.version.digest == digest}
        ),
    )


def counted(metrics_port: int, name: str, *labels: str) -> float:
    lines = httpx.get(f"http://127.0.0.1:{metrics_port}/metrics", timeout=DEADLINE_S).text.splitlines()
    return sum(float(l.split()[-1]) for l in lines if l.startswith(name) and all(label in l for label in labels))


@pytest.mark.parametrize(("transport", "ranks"), [("shm", 1), pytest.param("broadcast", 2, marks=pytest.mark.slow)])
def test_versions_come_from_the_trainers_memory_and_from_weight_sync_when_it_is_gone(
    stage: Stage, tmp_path: Path, transport: str, ranks: int
) -> None:
    asyncio.run(_serve_two_versions(stage, tmp_path, transport, ranks))


async def _serve_two_versions(stage: Stage, tmp_path: Path, transport: str, ranks: int) -> None:
    config = run_config(tiny_model(tmp_path / "model"), lag=0)
    async with stage:
        trainer = stage.trainer(tmp_path, f"transport={transport}", "broadcast_gather_s=2", "device=cpu", ranks=ranks)
        with trainer, replica(stage, "r0") as first, replica(stage, "r1") as second:
            ports = [p.wait_for("ready")["metrics_port"] for p in (first, second)]
            await stage.store.create_run(config)
            await serves(stage, 0, stage.wait_version("demo", 0).digest, {"r0", "r1"})
            await stage.serve_batch(config, 0)
            newest = stage.wait_version("demo", 1)
            await serves(stage, 1, newest.digest, {"r0", "r1"})
            full = sum(counted(port, "timzero_weight_sync_bytes_total", transport) for port in ports)
            assert full == 2 * 2 * await _nbytes(stage), "both replicas, both versions"
            assert sum(counted(port, "timzero_weight_source_fallbacks_total") for port in ports) == 0
            # torchrun passes a SIGTERM on to its ranks, which a SIGKILL would leave behind.
            trainer.kill(signal.SIGKILL if ranks == 1 else signal.SIGTERM)
        # The trainer is gone; the one who comes now gets the same bytes from weight_sync, which has had them since.
        with replica(stage, "r2") as late:
            port = late.wait_for("ready")["metrics_port"]
            await watch(
                stage.weight_sync,
                lambda replicas, _: "r2" in replicas and replicas["r2"].state == "ready",
            )
            assert counted(port, "timzero_weight_source_fallbacks_total", transport, "unavailable") == 1
            assert counted(port, "timzero_weight_sync_bytes_total", transport) == 0


async def _nbytes(stage: Stage) -> int:
    async with rpc.aio_channel(stage.weight_sync) as channel:
        reply = await WeightSyncStub(channel).ListVersions(pb.ListVersionsRequest(run="demo"), timeout=DEADLINE_S)
        return reply.versions[-1].nbytes
