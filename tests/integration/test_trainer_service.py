"""The trainer as a process, with real Valkey and weight_sync: whole runs, a crash, a fence, a pause, an alarm."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.trainer.config import TrainerConfig
from shared.process import EXIT_REFUSED
from shared.wire import rpc
from shared.wire.archive import read_step
from shared.wire.pb.trainer_pb2 import StatusRequest
from shared.wire.pb.trainer_pb2_grpc import TrainerStub
from shared.wire.ports import HeldPort
from shared.wire.run import OptimizerConfig, RunConfig, RunState
from shared.wire.tensors import RawTensor
from shared.wire.weights import Publisher, fetch
from tests.deadline import DEADLINE_S
from tests.integration.trainer_service import Process, Stage, steps_of
from tests.integration.trainer_testing import Engine, plain_decoder, run_config

pytest_plugins = ("tests.integration.trainer_fixtures",)


def config_of(model: Path, run: str, **changes: Any) -> RunConfig:
    return run_config(model, run=run, optimizer=OptimizerConfig(lr=5e-3), **changes)


def final_digest(rows: list[dict[str, Any]]) -> dict[int, str]:
    return {row["policy_step"]: row["weights_digest"] for row in rows}


def test_whole_runs_and_a_crash_between_step_and_checkpoint(
    model: Path, services: tuple[str, str], tmp_path: Path
) -> None:
    """One run straight through, the same run again with the trainer killed after a step and before its checkpoint."""
    asyncio.run(_whole_runs(model, services, tmp_path))


async def _whole_runs(model: Path, services: tuple[str, str], run_dir: Path) -> None:
    async with Stage(*services) as stage:
        straight, crashed = config_of(model, "straight"), config_of(model, "crashed")
        with stage.trainer(run_dir) as trainer:
            ready = trainer.wait_for("ready")
            await stage.store.create_run(straight)
            for batch in range(straight.num_steps):
                await stage.serve_batch(straight, batch)
            stage.wait_state("straight", RunState.COMPLETED)
            await _check_finished(stage, straight, run_dir, ready)

            # The same process goes on with the next run, until it dies in the middle of one.
            await stage.store.create_run(crashed)
            for batch in range(3):
                await stage.serve_batch(crashed, batch)
            stage.wait_stream("crashed", "steps", b"step", "2")
            trainer.wait_for("step", run="crashed", step=2)
            trainer.kill()
        assert (await stage.store.get_run("crashed")).durable_step == 2
        assert (await stage.store.counts("crashed")).trained == 2 * 12

        with stage.trainer(run_dir, "exit_when_done=true") as trainer:
            assert trainer.wait_for("run loaded")["resumed"] is True
            await stage.serve_batch(crashed, 3)
            stage.wait_state("crashed", RunState.COMPLETED)
            assert trainer.wait() == 0
    rows = steps_of(run_dir, "crashed")
    assert [row["step"] for row in rows] == [0, 1, 2, 2, 3], "step 2 was trained again"
    by_step = final_digest(rows)
    assert rows[2]["weights_digest"] == rows[3]["weights_digest"]
    assert by_step == final_digest(steps_of(run_dir, "straight"))
    assert len(set(by_step.values())) == 4
    assert all(row["lineage"] == 0 for row in rows)
    with Publisher(services[1]) as publisher:
        assert publisher.versions("crashed")[-1].version.digest == by_step[4]


async def _check_finished(stage: Stage, config: RunConfig, run_dir: Path, ready: dict[str, Any]) -> None:
    counts = await stage.store.counts(config.run)
    assert (counts.accepted, counts.trained, counts.live, counts.num_dropped) == (48, 48, 0, 0)
    record = await stage.store.get_run(config.run)
    assert (record.step, record.durable_step) == (4, 4)
    rows = steps_of(run_dir, config.run)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["lag"] for row in rows] == [0, 1, 1, 1]
    stored = [s.metrics for s in await stage.store.steps(config.run)]
    assert stored == rows
    for row in rows:
        assert row["tim"]["differing_tokens"] == 0
        assert row["tim"]["compared_tokens"] == row["tokens"] > 0
        start, end = row["phases"]["train"]
        assert 0 < end - start < DEADLINE_S
        assert [
            t.reward for g in read_step(str(run_dir / config.run / "trajectories"), row["step"]) for t in g.trajectories
        ]
    assert {p.name for p in (run_dir / config.run / "checkpoints").iterdir()} == {"step-00000002", "step-00000004"}
    with rpc.channel(f"127.0.0.1:{ready['port']}") as channel:
        status = TrainerStub(channel).Status(StatusRequest(), timeout=DEADLINE_S)
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    assert (status.step, status.checkpoint_step, status.world_size, status.lineage) == (4, 4, 1, 0)
    assert status.manifest_digest == rows[-1]["weights_digest"]
    assert "attention" in status.kernels
    assert "mode=exact" in status.fingerprint
    async with httpx.AsyncClient() as client:
        metrics = (await client.get(f"http://127.0.0.1:{ready['metrics_port']}/metrics", timeout=DEADLINE_S)).text
    tokens = sum(row["tokens"] for row in rows)
    assert f'timzero_tim_compared_tokens_total{{run="{config.run}"}} {float(tokens)}' in metrics
    assert f'timzero_tim_differing_tokens_total{{run="{config.run}"}} 0.0' in metrics
    assert f'timzero_checkpoint_step{{run="{config.run}"}} 4.0' in metrics


def test_versions_outside_the_window_are_released(model: Path, services: tuple[str, str]) -> None:
    with Publisher(services[1]) as publisher:
        steps = [v.version.step for v in publisher.versions("straight")]
    assert steps[-2:] == [3, 4], "durable step 4, lag 1"
    assert 1 not in steps


def test_one_flipped_bit_pauses_the_run_before_anything_leaves(
    model: Path, services: tuple[str, str], tmp_path: Path
) -> None:
    asyncio.run(_alarm(model, services, tmp_path))


async def _alarm(model: Path, services: tuple[str, str], run_dir: Path) -> None:
    config = config_of(model, "alarm", num_steps=1)
    async with Stage(*services) as stage:
        with stage.trainer(run_dir, "exit_when_done=true") as trainer:
            await stage.store.create_run(config)
            engine = stage.engine("alarm", 0)
            await stage.serve_batch(config, 0, _with_flipped_bit(stage, engine))
            stage.wait_state("alarm", RunState.PAUSED)
            record = await stage.store.get_run("alarm")
            assert record.reason == "mismatch"
            assert "tokens differ" in record.detail
            with Publisher(services[1]) as publisher:
                (initial,) = [v.version for v in publisher.versions("alarm")]
                assert initial.step == 0, "the step has not left the trainer"
                # Someone published other weights as step 1: what comes now can't have that name.
                other = publisher.manifest("alarm", initial.digest)
                tensors = fetch(other, address=services[1], deadline_s=DEADLINE_S)
                other.version.step = 1
                publisher.publish(other, tensors, epoch=record.epoch, deadline_s=DEADLINE_S)
            assert not (run_dir / "alarm" / "steps.jsonl").exists()
            await stage.store.set_run_state("alarm", RunState.RUNNING)
            stage.wait_state("alarm", RunState.COMPLETED)
            assert trainer.wait() == 0
        assert any(line["event"] == "training-inference mismatch" for line in trainer.log)
    (row,) = steps_of(run_dir, "alarm")
    assert (row["policy_step"], row["lineage"]) == (1, 1)
    assert row["tim"]["differing_tokens"] > 0
    assert row["tim"]["abs_max"] > 0


def _with_flipped_bit(stage: Stage, engine: Engine) -> Engine:
    with Publisher(stage.weight_sync) as publisher:
        manifest = publisher.manifest("alarm", engine.version.digest)
    tensors = fetch(manifest, address=stage.weight_sync, deadline_s=DEADLINE_S)
    name = "model.layers.0.self_attn.v_proj.weight"
    data = np.frombuffer(bytes(tensors[name].data), np.uint8).copy()
    data[33] ^= 0x20
    return Engine(
        plain_decoder(
            engine.decoder.config, {**tensors, name: RawTensor(tensors[name].dtype, tensors[name].shape, data)}
        ),
        engine.version,
    )


def test_a_fence_a_stop_a_run_that_cannot_load_and_sigterm(
    model: Path, services: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    asyncio.run(_fence(model, services, tmp_path))


async def _fence(model: Path, services: tuple[str, str], run_dir: Path) -> None:
    config = config_of(model, "fence", num_steps=1)
    async with Stage(*services) as stage:
        with stage.trainer(run_dir) as old:
            await stage.store.create_run(config)
            old.wait_for("run loaded")
            with stage.trainer(run_dir) as new:
                assert old.wait() == EXIT_REFUSED
                assert "another trainer has taken this run over" in old.log[-1]["reason"]
                new.wait_for("run loaded")
                await stage.store.set_run_state("fence", RunState.STOPPED, reason="operator")
                assert new.wait_for("run ended")["state"] == "stopped"
                await _fail_an_unloadable_run(stage, run_dir / "broken")
                assert new.kill(signal.SIGTERM) == 0
                assert new.log[-1]["event"] == "stopped"


async def _fail_an_unloadable_run(stage: Stage, broken: Path) -> None:
    await stage.store.create_run(config_of(broken, "broken"))
    stage.wait_state("broken", RunState.FAILED)
    record = await stage.store.get_run("broken")
    assert record.reason == "model"
    assert "gpt2" in record.detail


def test_a_lost_run_dir_is_refused_and_a_lost_weight_sync_is_filled_again(
    model: Path, services: tuple[str, str], tmp_path: Path
) -> None:
    asyncio.run(_lost(model, services, tmp_path))


async def _lost(model: Path, services: tuple[str, str], run_dir: Path) -> None:
    config = config_of(model, "lost", num_steps=2, checkpoint_interval=1)
    async with Stage(*services) as stage:
        with stage.trainer(run_dir / "a") as trainer:
            await stage.store.create_run(config)
            await stage.serve_batch(config, 0)
            stage.wait_version("lost", 1)
            trainer.wait_for("checkpoint durable")
            trainer.kill()
        with stage.trainer(run_dir / "b") as trainer:
            assert trainer.wait() == EXIT_REFUSED
            assert "Give the run_dir that holds its checkpoints" in trainer.log[-1]["reason"]
        await _restore_a_lost_weight_sync(stage, config, run_dir)
        await stage.store.set_run_state("lost", RunState.STOPPED)


async def _restore_a_lost_weight_sync(stage: Stage, config: RunConfig, run_dir: Path) -> None:
    """A weight_sync without its store gets every version back that a batch may still need, whether the trainer starts or
    waits for a batch; SIGTERM waits for none.
    """
    before = {step: stage.wait_version(config.run, step) for step in (0, 1)}
    held = HeldPort()
    address = f"127.0.0.1:{held.port}"
    weight_sync = (sys.executable, "-m", "services.weight_sync", f"port={held.port}")
    with Process(*weight_sync, f"data_dir={run_dir / 'weights'}") as fresh:
        fresh.wait_for("ready")
        with stage.trainer(run_dir / "a", f"weight_sync={address}", "log_level=debug") as trainer:
            trainer.wait_for("run loaded")
            with Publisher(address) as publisher:
                restored = {v.version.step: v.version.digest for v in publisher.versions(config.run)}
            assert restored == {step: version.digest for step, version in before.items()}
            fresh.kill()
            with Process(*weight_sync, f"data_dir={run_dir / 'empty'}") as empty, Publisher(address) as publisher:
                empty.wait_for("ready")
                for step in before:
                    empty.wait_for("published", version=f"lost/0-{step}-{before[step].digest[:12]}")
                assert {v.version.digest for v in publisher.versions(config.run)} == set(restored.values())
            await stage.serve_batch(config, 1)
            trainer.wait_for("publishing", step=2)
            assert trainer.kill(signal.SIGTERM) == 0


@pytest.mark.slow
def test_a_run_on_two_ranks(model: Path, services: tuple[str, str], tmp_path: Path) -> None:
    asyncio.run(_two_ranks(model, services, tmp_path))


async def _two_ranks(model: Path, services: tuple[str, str], run_dir: Path) -> None:
    config = replace(config_of(model, "two-ranks", num_steps=2), micro_batch_tokens=30)
    async with Stage(*services) as stage:
        extra = ("background_checkpoints=true", f"export_dir={run_dir}/exported", "reshard_after_forward=false")
        with stage.trainer(run_dir, "exit_when_done=true", *extra, ranks=2) as trainer:
            await stage.store.create_run(config)
            for batch in range(2):
                await stage.serve_batch(config, batch)
            stage.wait_state("two-ranks", RunState.COMPLETED)
            assert trainer.wait() == 0
    assert [p.name for p in (run_dir / "exported" / "two-ranks").iterdir()] == ["step-00000002"]
    rows = steps_of(run_dir, "two-ranks")
    assert [row["tim"]["differing_tokens"] for row in rows] == [0, 0]
    assert {row["world_size"] for row in rows} == {2}


def test_configuration_errors_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="directory goes with transport"):
        TrainerConfig(transport="directory")
    with pytest.raises(ValueError, match="maps files, which 's3://bucket' has not; use 'host'"):
        TrainerConfig(transport="directory", directory="s3://bucket", older_versions="directory")
    with pytest.raises(ValueError, match="must exceed publish_deadline_s"):
        TrainerConfig(collective_timeout_s=1.0)
    with pytest.raises(ValueError, match="poll_s must be above 0"):
        TrainerConfig(poll_s=0)


def test_an_address_in_use_is_named() -> None:
    from services.trainer.server import StatusBoard, StatusServer

    first = StatusServer(StatusBoard(world_size=1), host="127.0.0.1", port=0, metrics_port=0)
    with pytest.raises(OSError, match=f"cannot bind 127.0.0.1:{first.port}"):
        StatusServer(StatusBoard(world_size=1), host="127.0.0.1", port=first.port, metrics_port=0)
    first.stop()
    with rpc.channel(f"127.0.0.1:{first.port}") as channel, pytest.raises(grpc.RpcError):
        TrainerStub(channel).Status(StatusRequest(), timeout=1)
