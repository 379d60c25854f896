"""A run with everything on, through the trainer as a process: reference, dynamic sampling, mini-steps, versions on the host."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import httpx

from shared.wire.algorithm import AlgorithmConfig
from shared.wire.archive import read_step
from shared.wire.run import OptimizerConfig, RunState
from tests.deadline import DEADLINE_S
from tests.integration.trainer_service import Stage, steps_of
from tests.integration.trainer_testing import run_config, tiny_model

pytest_plugins = ("tests.integration.trainer_fixtures",)


def test_a_run_with_a_reference_and_dynamic_sampling_ends_whole(services: tuple[str, str], tmp_path: Path) -> None:
    asyncio.run(_run(services, tmp_path))


async def _run(services: tuple[str, str], directory: Path) -> None:
    model, other, wide = (
        tiny_model(directory / name, **changes)
        for name, changes in (("model", {}), ("other", {"seed": 1}), ("wide", {"intermediate_size": 64}))
    )
    algorithm = AlgorithmConfig(
        preset="dapo", dynamic_groups=2, mini_steps=2, kl="k1", kl_coef=0.05, kl_reference=str(other), kl_target=1e-3
    )  # fmt: skip
    config = run_config(model, run="recipe", num_steps=2, algorithm=algorithm, optimizer=OptimizerConfig(lr=5e-3))
    refused = replace(config, run="refused", algorithm=replace(algorithm, preset=None, kl_reference=str(wide)))
    async with Stage(*services) as stage:
        with stage.trainer(directory, "older_versions=host") as trainer:
            port = trainer.wait_for("ready")["metrics_port"]
            await stage.store.create_run(refused)
            stage.wait_state("refused", RunState.FAILED)
            assert "another architecture" in trainer.wait_for("run failed")["reason"]
            await stage.store.create_run(config)
            for batch in range(2):
                await stage.serve_batch(config, batch)
            stage.wait_state("recipe", RunState.COMPLETED)
            async with httpx.AsyncClient() as client:
                metrics = (await client.get(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S)).text
        counts = await stage.store.counts("recipe")
    assert (counts.accepted, counts.trained, counts.live) == (24, 24, 0), "left out is consumed as well"
    first, second = rows = steps_of(directory, "recipe")
    for row in rows:
        assert (row["groups"], row["uniform_groups"] + row["surplus_groups"], row["optimizer_steps"]) == (2, 1, 2)
        assert row["tim"]["equal_fraction"] == 1
        assert row["tim"]["unaudited"] == {"mixed_kv": 0, "version_not_held": 0, "share": 0}
        assert len(read_step(str(directory / "recipe" / "trajectories"), row["step"])) == 3, "and archived"
        assert row["kl"]["k3"] > 0
    assert (second["lag"], second["mini_steps"][0]["ratio_max"]) == (1, 1)
    assert second["kl"]["coef"] > first["kl"]["coef"] == 0.05
    assert 'timzero_untrained_groups_total{reason="surplus",run="recipe"}' in metrics
    assert f'timzero_reference_kl{{run="recipe",statistic="coef"}} {second["kl"]["coef"]}' in metrics
    assert 'timzero_mismatch{run="recipe",series="correction",staleness="1",statistic="k3"}' in metrics
