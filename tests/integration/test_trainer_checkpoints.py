"""Checkpoints in the background, onto another number of ranks, and versions as Hugging Face directories."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from services.trainer import checkpoint
from services.trainer.batch import build_batch
from services.trainer.checkpoint import CheckpointError, Saver
from services.trainer.distributed import World
from services.trainer.export import export, export_checkpoint
from services.trainer.learner import Learner
from shared.config import unstructure
from shared.kernels import build_ops
from shared.models import load_model, save_sharded
from shared.wire.archive import read_step, write_step
from shared.wire.ports import HeldPort
from shared.wire.run import OptimizerConfig
from tests.integration.trainer_testing import (
    VOCAB,
    batch_of,
    build_learner,
    engine_of,
    masters,
    publish,
    run_config,
    train_steps,
)

pytest_plugins = ("tests.integration.trainer_fixtures",)
pytestmark = pytest.mark.usefixtures("world")

DEADLINE_S = 600.0
HOT = OptimizerConfig(lr=1e-2)


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n].view(torch.int32), b[n].view(torch.int32)) for n in a)


def test_training_goes_on_while_a_checkpoint_is_written_and_resumes_to_the_same_bits(
    model: Path, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """It does not exist before all of it is on disk, and holds the state of the moment when it was begun."""
    config = run_config(model, lag=2, num_steps=6, optimizer=HOT)
    learner = build_learner(config, world)
    engines = {0: engine_of(learner, publish(learner, 0))}
    train_steps(learner, range(2), engines)
    may_write, write = threading.Event(), checkpoint.dcp.save
    request.addfinalizer(may_write.set)

    def held_back(*args: Any, **options: Any) -> None:
        assert may_write.wait(DEADLINE_S)
        write(*args, **options)

    monkeypatch.setattr(checkpoint.dcp, "save", held_back)
    saver = Saver(tmp_path, world, keep=2, in_background=True)
    saver.begin(learner)
    straight = train_steps(learner, range(2, 4), engines)
    assert saver.settle(wait=False) is None
    assert checkpoint.latest(tmp_path) is None
    may_write.set()
    assert saver.settle(wait=True) == 2
    assert saver.settle(wait=True) is None
    saver.close()

    resumed = build_learner(config, world)
    path = checkpoint.latest(tmp_path)
    assert path is not None
    assert checkpoint.load(path, resumed).step == 2
    again = train_steps(resumed, range(2, 4), engines)
    assert [r.metrics for r in again] == [r.metrics for r in straight]
    assert resumed.copies.current.version == learner.copies.current.version
    assert same_bits(masters(resumed), masters(learner))


def test_a_checkpoint_that_cannot_be_written_is_an_error_and_the_one_before_stays(
    model: Path, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = build_learner(run_config(model), world)
    before = checkpoint.save(tmp_path, learner, keep=1)

    def full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint.dcp, "save", full)
    saver = Saver(tmp_path, world, keep=1, in_background=True)
    publish(learner, 1)
    saver.begin(learner)
    with pytest.raises(CheckpointError, match="1 of 1 ranks could not write"):
        saver.settle(wait=True)
    saver.close()
    assert checkpoint.latest(tmp_path) == before
    checkpoint.load(before, build_learner(run_config(model), world))


def test_transformers_loads_what_shards_and_checkpoints_are_exported_to(
    model: Path, world: World, tmp_path: Path
) -> None:
    learner = build_learner(run_config(model, optimizer=HOT), world)
    train_steps(learner, range(1), {0: engine_of(learner, publish(learner, 0))})
    for _ in range(2):
        export(learner.decoder, learner.copies.current, world, tmp_path / "shards", companions_from=model)
    export_checkpoint(checkpoint.save(tmp_path / "checkpoints", learner, keep=1), tmp_path / "checkpoint")
    expected = {name: weight.bfloat16() for name, weight in masters(learner).items()}
    for directory in (tmp_path / "shards", tmp_path / "checkpoint"):
        found = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).state_dict()
        assert all(torch.equal(found[name].view(torch.int16), w.view(torch.int16)) for name, w in expected.items())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "checkpoints", "shards"]


def test_an_export_has_the_published_dtype_also_on_a_machine_that_would_choose_another(
    model: Path, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = build_learner(run_config(model), world)
    learner.config = replace(learner.config, dtype="auto")
    saved = checkpoint.save(tmp_path / "checkpoints", learner, keep=1)
    monkeypatch.setattr("services.trainer.export.default_dtype", lambda: torch.float32)
    export_checkpoint(saved, tmp_path / "export")
    with safe_open(tmp_path / "export" / "model.safetensors", framework="pt") as tensors:
        assert {tensors.get_tensor(name).dtype for name in tensors.keys()} == {torch.bfloat16}  # noqa: SIM118


def test_files_of_an_export_stay_below_their_bound_and_hold_every_tensor_once(
    model: Path, world: World, tmp_path: Path
) -> None:
    learner = build_learner(run_config(model), world)
    weights = masters(learner)
    bound = 10_000
    save_sharded(
        {name: w.shape for name, w in weights.items()},
        weights.__getitem__,
        learner.decoder.config,
        tmp_path,
        dtype=torch.float32,
        max_file_bytes=bound,
    )
    held = {}
    for file in sorted(tmp_path.glob("model-*-of-*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            held[file.name] = {name: tensors.get_tensor(name).nbytes for name in tensors.keys()}  # noqa: SIM118
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(held) > 2
    assert {n: f for f, names in held.items() for n in names} == index["weight_map"]
    assert sum(map(len, held.values())) == len(weights)
    assert index["metadata"]["total_size"] == sum(sum(sizes.values()) for sizes in held.values())
    assert all(sum(sizes.values()) <= bound or len(sizes) == 1 for sizes in held.values())
    loaded = dict(load_model(tmp_path, build_ops("exact"), torch.float32).named_parameters())
    assert same_bits({n: p.detach() for n, p in loaded.items()}, weights)
    AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)


def go_on(learner: Learner, archive: str, steps: range) -> list[dict[str, Any]]:
    """Trains archived batches; the metrics of each."""
    found = []
    for step in steps:
        batch = build_batch(read_step(archive, step), learner.config, step=step, vocab_size=VOCAB)
        found.append(learner.train(batch, learner.score(batch)).metrics)
        publish(learner, step + 1)
    return found


@pytest.mark.slow
def test_one_rank_goes_on_at_two_and_two_at_one(model: Path, world: World, tmp_path: Path) -> None:
    """From the same checkpoint one and two ranks decide and measure alike; weights agree within the order of a sum."""
    config = run_config(model, lag=1, micro_batch_tokens=40, num_steps=5, optimizer=HOT)
    learner = build_learner(config, world)
    engines = {0: engine_of(learner, publish(learner, 0))}
    train_steps(learner, range(2), engines)
    archive = str(tmp_path / "batches")
    for step in (2, 3):
        write_step(archive, step, batch_of(engines[config.version_for(min(step, 2))], config, step).groups)
    checkpoint.save(tmp_path / "one", learner, keep=1)
    (tmp_path / "config.json").write_text(json.dumps(unstructure(config)))
    held = HeldPort()
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(held.port),
        "WORLD_SIZE": "2",
    }
    command = [sys.executable, "-m", "tests.integration.trainer_resumed", str(tmp_path), archive]
    ranks = [subprocess.Popen(command, env={**environ, "RANK": str(rank)}) for rank in range(2)]
    assert [rank.wait(DEADLINE_S) for rank in ranks] == [0, 0]

    ours = json.loads(json.dumps(go_on(learner, archive, range(2, 3))[0]))
    theirs = json.loads((tmp_path / "metrics.json").read_text())
    assert theirs.pop("grad_norm") == pytest.approx(ours.pop("grad_norm"), rel=1e-4)
    assert theirs == ours

    resumed = build_learner(config, world)
    path = checkpoint.latest(tmp_path / "two")
    assert path is not None
    assert checkpoint.load(path, resumed).step == 3
    for name, weight in masters(learner).items():
        torch.testing.assert_close(masters(resumed)[name], weight, rtol=1e-3, atol=1e-4)
    # What two ranks made is exported from their shards and from their checkpoint to the same bits.
    export_checkpoint(path, tmp_path / "again")
    shards, again = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("shards", "again"))
    assert shards == again
    go_on(resumed, archive, range(3, 4))
