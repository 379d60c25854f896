"""`pytest -m gpu` on a CUDA machine: the learner there repeats, resumes, and does not care where its model lies or how it is cut.

`TRITON_INTERPRET=1 pytest -m gpu` tries these tests out on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.trainer import checkpoint
from services.trainer.batch import Batch
from services.trainer.checkpoint import Saver
from services.trainer.distributed import World, join, leave
from services.trainer.export import export
from services.trainer.learner import Learner, StepResult
from services.trainer.policy import Placement, load_policy, score_batch
from shared.kernels.cuda.ops import CudaOps
from shared.models import Rope, load_model
from shared.wire.run import OptimizerConfig, RunConfig
from tests.integration.trainer_testing import batch_of, engine_of, masters, publish, run_config, tiny_model
from tests.kernels.cuda_testing import DEVICE, IS_INTERPRETED, ReferenceTable

pytestmark = pytest.mark.gpu
SHARDED = Placement()
SAMPLES = {"prompts_per_step": 2, "samples_per_prompt": 2} if IS_INTERPRETED else {}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(
        tmp_path_factory.mktemp("model"),
        family="qwen3",
        qk_norm=True,
        hidden_size=64,
        intermediate_size=96,
        head_dim=16,
        rope=Rope(head_dim=16),
        num_layers=1 if IS_INTERPRETED else 2,
    )


@pytest.fixture(scope="module")
def config(model: Path) -> RunConfig:
    """The smallest micro-batches, so that gradients are accumulated."""
    dtype = "float32" if IS_INTERPRETED else "bfloat16"
    return run_config(
        model, dtype=dtype, lag=1, num_steps=6, micro_batch_tokens=30, optimizer=OptimizerConfig(lr=1e-2), **SAMPLES
    )


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield join("cpu" if IS_INTERPRETED else "cuda", timeout_s=600)
    leave()


@pytest.fixture(autouse=True)
def deterministic_or_an_error(uninitialised_memory_is_nan: None) -> None:
    torch.use_deterministic_algorithms(True)


@pytest.fixture(scope="module")
def ops(tmp_path_factory: pytest.TempPathFactory) -> CudaOps:
    """The reference of the class: certifying for a model of this size costs more than it computes."""
    return CudaOps(DEVICE, ReferenceTable(tmp_path_factory.mktemp("table")))


def learner_at(config: RunConfig, ops: CudaOps, world: World, placement: Placement = SHARDED) -> Learner:
    dtype = getattr(torch, config.dtype)
    decoder = load_policy(
        Path(config.model),
        ops,
        dtype,
        world,
        activation_checkpointing=config.activation_checkpointing,
        placement=placement,
    )
    learner = Learner(decoder, config, dtype, world)
    publish(learner, 0)
    return learner


def first_batch(config: RunConfig, ops: CudaOps, world: World) -> Batch:
    """Sampled by an engine on the CPU: the device's logprobs are close to these, not equal."""
    learner = learner_at(config, ops, world)
    return batch_of(engine_of(learner, publish(learner, 0)), config, 0)


def train(learner: Learner, batch: Batch, steps: range) -> list[StepResult]:
    """The same samples, step after step."""
    results = []
    for step in steps:
        here = replace(batch, step=step)
        results.append(learner.train(here, learner.score(here)))
        publish(learner, step + 1)
    return results


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n].view(torch.int32), b[n].view(torch.int32)) for n in a)


def test_it_repeats_and_resumes_to_the_bit(config: RunConfig, ops: CudaOps, world: World, tmp_path: Path) -> None:
    batch = first_batch(config, ops, world)
    learner = learner_at(config, ops, world)
    train(learner, batch, range(2))
    saver = Saver(tmp_path, world, keep=1, in_background=True)
    saver.begin(learner)
    straight = [result.metrics for result in train(learner, batch, range(2, 4))]
    assert saver.settle(wait=True) == 2
    saver.close()
    again = learner_at(config, ops, world)
    train(again, batch, range(4))
    resumed = learner_at(config, ops, world)
    assert checkpoint.load(tmp_path / "step-00000002", resumed).step == 2
    assert [result.metrics for result in train(resumed, batch, range(2, 4))] == straight
    for other in (again, resumed):
        assert same_bits(masters(other), masters(learner))
    assert straight[-1]["grad_norm"] > 0
    export(learner.decoder, learner.copies.current, world, tmp_path / "hf", companions_from=Path(config.model))
    loaded = dict(load_model(tmp_path / "hf", ops, torch.float32).named_parameters())
    cast = {name: w.to(getattr(torch, config.dtype)).float() for name, w in masters(learner).items()}
    assert same_bits({name: p.detach() for name, p in loaded.items()}, cast)


@pytest.mark.parametrize("recompute", ["none", "elementwise", "mlp", "layer"])
def test_cuts_and_recomputation_change_no_logprob(
    config: RunConfig, ops: CudaOps, world: World, recompute: str
) -> None:
    whole = first_batch(replace(config, micro_batch_tokens=4096), ops, world)
    learner = learner_at(replace(config, activation_checkpointing=recompute), ops, world)
    parts = first_batch(config, ops, world)
    assert len(parts.mini_steps[0].micro_batches) > 1
    expected = score_batch(learner.decoder, whole, world)
    assert torch.equal(score_batch(learner.decoder, parts, world).bits, expected.bits)
    assert learner.train(parts, learner.score(parts)).metrics["grad_norm"] > 0


@pytest.mark.parametrize(
    "placement", [Placement(reshard_after_forward=False), Placement(offload=True)], ids=["gathered", "offloaded"]
)
def test_where_the_model_lies_changes_no_logprob(
    config: RunConfig, ops: CudaOps, world: World, placement: Placement, tmp_path: Path
) -> None:
    batch = first_batch(config, ops, world)
    plain, other = learner_at(config, ops, world), learner_at(config, ops, world, placement)
    ours, theirs = train(plain, batch, range(1))[0], train(other, batch, range(1))[0]
    assert theirs.metrics["loss"] == ours.metrics["loss"]
    if placement.offload:
        # The host's AdamW rounds otherwise.
        for name, weight in masters(plain).items():
            torch.testing.assert_close(masters(other)[name].cpu(), weight.cpu(), rtol=1e-4, atol=1e-6)
    else:
        assert same_bits(masters(other), masters(plain))
    resumed = learner_at(config, ops, world, placement)
    checkpoint.load(checkpoint.save(tmp_path, other, keep=1), resumed)
    for saved, loaded in zip(other.copies.held, resumed.copies.held, strict=True):
        assert loaded.version == saved.version
        assert all(torch.equal(loaded.shards[n].cpu(), shard.cpu()) for n, shard in saved.shards.items())


def test_older_versions_and_the_reference_have_their_bits_on_the_host_too(
    config: RunConfig, ops: CudaOps, world: World
) -> None:
    """Pinned, and copied into one gradient-free model when a batch needs them."""
    batch = first_batch(config, ops, world)
    config = replace(config, algorithm=replace(config.algorithm, kl="k2", kl_coef=0.1))
    metrics = []
    for behind in ("device", "host"):
        plain = learner_at(config, ops, world)
        learner = Learner(plain.decoder, config, plain.dtype, world, behind=behind)
        publish(learner, 0)
        metrics.append([result.metrics for result in train(learner, batch, range(2))])
        older = learner.copies.held[0].shards
        assert all(shard.is_pinned() or IS_INTERPRETED for shard in older.values()) == (
            behind == "host" or IS_INTERPRETED
        )
    assert metrics[0] == metrics[1]
    first, second = metrics[0]
    assert first["kl"]["k3"] == 0 < second["kl"]["k3"], "version 0 is its own reference, version 1 is not"
    assert second["tim"]["compared_tokens"] == first["tim"]["compared_tokens"] == batch.num_tokens
    assert second["tim"]["abs_max"] == first["tim"]["abs_max"], "scored under version 0 in both steps"
