"""The trainer's policy over the CUDA kernels, interpreted: FSDP2, recomputation, the head, clipping and AdamW."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.trainer_cases.ours import Trainer, check
from benchmarks.trainer_cases.shapes import Case, tiny
from services.trainer.distributed import World, join, leave
from services.trainer.policy import local_shards
from tests.kernels.cuda_testing import interpreted_ops
from tests.kernels.kernel_testing import same_bits


@pytest.fixture
def world() -> Iterator[World]:
    yield join("cpu", timeout_s=600)
    leave()


def test_a_step_repeats_to_the_bit(world: World, tmp_path: Path) -> None:
    config = replace(tiny(), num_layers=1, vocab_size=67)
    trainers = [Trainer(config, interpreted_ops(tmp_path), world, torch.float32) for _ in range(2)]
    before = {name: local.clone() for name, local in local_shards(trainers[0].decoder).items()}
    for trainer in trainers:
        trainer.use(trainer.decoder.ops, "mlp")
        trainer.step(trainer.batch(Case(2, 9)))
    first, second = (local_shards(trainer.decoder) for trainer in trainers)
    assert all(same_bits(first[name], second[name]) for name in first)
    assert any(not same_bits(first[name], before[name]) for name in first)


@pytest.mark.slow
def test_the_benchmarks_check_passes(world: World, tmp_path: Path) -> None:
    trainer = Trainer(tiny(), interpreted_ops(tmp_path), world, torch.float32)
    assert {record.value for record in check(trainer, trainer.decoder.ops, scale=1)} == {0}
