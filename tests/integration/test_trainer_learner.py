"""The learner under FSDP2: bits of the forward, what shows in the TIM, cuts, mini-steps, rejection, checkpoints, ranks."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer import checkpoint
from services.trainer.batch import Batch
from services.trainer.distributed import World
from services.trainer.learner import Learner
from services.trainer.policy import score_batch
from services.trainer.weights import probe_token_ids, score_probe
from shared.config import structure, unstructure
from shared.models import packed_layout
from shared.wire.algorithm import Filter
from shared.wire.archive import write_step
from shared.wire.run import AlgorithmConfig, OptimizerConfig, RunConfig
from shared.wire.tensors import RawTensor
from tests.integration.trainer_testing import (
    Engine,
    batch_of,
    build_learner,
    digest_of,
    engine_of,
    masters,
    plain_decoder,
    publish,
    run_config,
    train_steps,
)
from tests.kernels.kernel_testing import same_bits

pytest_plugins = ("tests.integration.trainer_fixtures",)
pytestmark = pytest.mark.usefixtures("world")

ALGORITHM = AlgorithmConfig()
HOT = OptimizerConfig(lr=1e-2)


def first_batch(learner: Learner, **kwargs: object) -> Batch:
    return batch_of(engine_of(learner, publish(learner, 0)), learner.config, 0, **kwargs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("checkpointing", ["none", "layer"])
def test_forward_has_the_bits_of_the_published_bytes(model: Path, world: World, dtype: str, checkpointing: str) -> None:
    """Before and after a step, with and without gradients: the trainer computes with exactly what it published."""
    config = run_config(model, dtype=dtype, activation_checkpointing=checkpointing, lag=0, optimizer=HOT)
    learner = build_learner(config, world)
    tensors = publish(learner, 0)
    for step in range(2):
        engine = engine_of(learner, tensors)
        assert {t.dtype for t in tensors.values()} == {dtype}
        batch = batch_of(engine, config, step)
        assert same_bits(score_batch(learner.decoder, batch, world).logprob_T, batch.rollout_T)
        scores = learner.score(batch)
        assert scores.sampled is None, "the training forward is at the sampling version: no second forward is needed"
        result = learner.train(batch, scores)
        assert result.mismatch.is_exact
        assert result.mismatch.compared_tokens == batch.num_tokens > 0
        assert result.mismatch.top1_flips == 0
        changed = publish(learner, step + 1)
        assert digest_of(changed) != digest_of(tensors)
        tensors = changed


def test_probe_equals_a_reloaded_decoders(model: Path, world: World) -> None:
    config = run_config(model)
    learner = build_learner(config, world)
    replica = plain_decoder(learner.decoder.config, publish(learner, 0))
    sequences = probe_token_ids(config, learner.decoder.config.vocab_size)
    assert [len(s) for s in sequences] == [5, 17, 33]
    for ids, ours in zip(sequences, score_probe(learner.decoder, sequences, world.device), strict=True):
        layout = packed_layout([len(ids)])
        tokens = torch.from_numpy(ids.astype(np.int64))
        rows = torch.arange(len(ids) - 1)
        theirs = replica.score(tokens, layout.positions, layout, rows, tokens[1:], torch.ones(len(rows)))
        assert same_bits(torch.from_numpy(ours), theirs.logprob)
    assert any((a != b).any() for a, b in zip(sequences, probe_token_ids(replace(config, seed=1), 61), strict=True))


def test_with_lag_every_token_is_scored_under_the_version_that_sampled_it(model: Path, world: World) -> None:
    config = run_config(model, lag=2, optimizer=HOT)
    learner = build_learner(config, world)
    engines = {0: engine_of(learner, publish(learner, 0))}
    results = train_steps(learner, range(4), engines)
    assert [r.metrics["lag"] for r in results] == [0, 1, 2, 2]
    assert all(r.mismatch.is_exact for r in results)
    assert [c.version.step for c in learner.copies.held] == [2, 3, 4]
    # The same tokens under the current version do differ: the exactness is not an accident of frozen weights.
    assert [r.metrics["staleness"]["abs_max"] > 0 for r in results] == [False, True, True, True]
    assert len({c.version.digest for c in learner.copies.held}) == 3


def test_one_flipped_bit_in_one_weight_shows(model: Path, world: World) -> None:
    config = run_config(model, lag=0)
    learner = build_learner(config, world)
    tensors = publish(learner, 0)
    name = "model.layers.1.mlp.up_proj.weight"
    data = np.frombuffer(bytes(tensors[name].data), np.uint8).copy()
    data[101] ^= 0x10
    flipped = {**tensors, name: RawTensor(tensors[name].dtype, tensors[name].shape, data)}
    engine = Engine(plain_decoder(learner.decoder.config, flipped), learner.copies.current.version)
    batch = batch_of(engine, config, 0)
    mismatch = learner.train(batch, learner.score(batch)).mismatch
    assert not mismatch.is_exact
    assert mismatch.differing_tokens > 0
    assert mismatch.delta.abs_max > 0


def test_fast_numerics_differ(model: Path, world: World) -> None:
    """The comparison itself can fail: plain kernels on the trainer's side do not reproduce the engine's bits."""
    config = run_config(model, lag=0)
    learner = build_learner(config, world, numerics="fast")
    batch = first_batch(learner)
    assert learner.train(batch, learner.score(batch)).mismatch.differing_tokens > 0


def test_a_version_that_is_not_held_is_not_compared(model: Path, world: World) -> None:
    learner = build_learner(run_config(model, lag=0), world)
    engine = engine_of(learner, publish(learner, 0))
    engine.version = replace(engine.version, digest="ff")
    batch = batch_of(engine, learner.config, 0)
    mismatch = learner.train(batch, learner.score(batch)).mismatch
    assert (mismatch.compared_tokens, mismatch.uncompared_tokens) == (0, batch.num_tokens)
    assert not mismatch.is_exact


@pytest.mark.parametrize("advantage", ["grpo", "reinforce_whitened"])
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_cutting_micro_batches_otherwise_changes_no_logprob_and_hardly_a_gradient(
    model: Path, world: World, advantage: str, aggregation: str
) -> None:
    algorithm = replace(ALGORITHM, advantage=advantage, aggregation=aggregation)
    config = run_config(model, dtype="float32", lag=0, algorithm=algorithm)
    batch = first_batch(build_learner(config, world), lengths=[7, 2, 5, 1])
    results, cuts = [], []
    for limit in (1, 70, 4096):
        learner = build_learner(replace(config, micro_batch_tokens=limit), world)
        cut = batch_of(engine_of(learner, publish(learner, 0)), learner.config, 0, lengths=[7, 2, 5, 1])
        assert torch.equal(cut.rollout_T, batch.rollout_T)
        cuts.append(len(cut.mini_steps[0].micro_batches))
        results.append((learner.train(cut, learner.score(cut)), masters(learner)))
    assert cuts == [12, 2, 1]
    (one, one_weights), *others = results
    for other, weights in others:
        assert other.metrics["loss"] == one.metrics["loss"]
        assert other.metrics["entropy"] == one.metrics["entropy"]
        assert other.metrics["grad_norm"] == pytest.approx(one.metrics["grad_norm"], rel=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, one_weights[name], rtol=1e-4, atol=1e-6)


def test_gradient_of_the_step_equals_a_plain_models(model: Path, world: World) -> None:
    """FSDP2, packing, prefix sharing and the head on chosen rows against autograd on one padded sequence at a time."""
    config = run_config(model, dtype="float32", lag=0, algorithm=replace(ALGORITHM, loss="reinforce", tis_cap=None))
    learner = build_learner(config, world)
    tensors = publish(learner, 0)
    batch = batch_of(engine_of(learner, tensors), config, 0)
    plain = plain_decoder(learner.decoder.config, tensors).requires_grad_(True)
    reward = batch.reward_N.view(3, 4)
    advantage = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-6)).flatten()
    loss = torch.zeros(())
    for t, a in zip([t for g in batch.groups for t in g.trajectories], advantage, strict=True):
        tokens = torch.from_numpy(t.token_ids.astype(np.int64))
        layout = packed_layout([len(tokens)])
        z = plain(tokens, layout.positions, layout) @ plain.head_weight.T / config.temperature
        picked = torch.log_softmax(z[:-1], -1).gather(1, tokens[1:, None])[t.num_prompt_tokens - 1 :]
        loss = loss - (a.float() * picked).sum() / batch.num_tokens
    loss.backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    result = learner.train(batch, learner.score(batch))
    assert result.metrics["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected.values() if g is not None))
    assert result.metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    # After one AdamW step from zero moments, m / (1 - beta1) is the clipped gradient.
    scale = min(1.0, config.optimizer.max_grad_norm / (norm + 1e-6)) * (1 - config.optimizer.betas[0])
    for name, parameter in learner.decoder.named_parameters():
        moment = learner.optimizer.state[parameter]["exp_avg"].full_tensor()
        torch.testing.assert_close(moment, expected[name] * scale, rtol=1e-3, atol=1e-6)


def test_several_mini_steps_keep_the_proximal_policy_frozen(model: Path, world: World) -> None:
    config = run_config(model, lag=1, optimizer=HOT, algorithm=replace(ALGORITHM, mini_steps=3))
    learner = build_learner(config, world)
    engines = {0: engine_of(learner, publish(learner, 0))}
    results = train_steps(learner, range(2), engines)
    for result in results:
        assert result.metrics["optimizer_steps"] == 3
        assert result.mismatch.is_exact, "TIM is measured before the first optimizer step"
        assert result.metrics["drift"]["abs_max"] > 0, "later mini-steps see weights that have moved"
    batch = batch_of(engines[1], config, 2)
    scores = learner.score(batch)
    assert scores.proximal_T is not None
    assert same_bits(scores.proximal_T, score_batch(learner.decoder, batch, world).logprob_T)


def test_one_mini_step_does_not_drift(model: Path, world: World) -> None:
    learner = build_learner(run_config(model, lag=0, optimizer=HOT), world)
    batch = first_batch(learner)
    metrics = learner.train(batch, learner.score(batch)).metrics
    assert metrics["drift"]["abs_max"] == 0
    assert (metrics["weight_mean"], metrics["weight_max"], metrics["weight_ess"]) == (1, 1, 1)
    assert metrics["clip_fraction"] == 0


ARMED = (Filter(on="veto", low=0.999, high=1.001), Filter(on="token_k3", high=0.0), Filter(on="kpop", high=0.0))


@pytest.mark.parametrize(
    "armed",
    [
        {"filters": ARMED},
        {"weight": "sequence", "batch_normalize": True, "filters": ARMED},
        {"weight": "segment", "tis_floor": 0.999, "tis_cap": 1.001, "outside": "mask"},
    ],
    ids=["filters", "normalized", "segment"],
)
def test_without_mismatch_an_armed_correction_trains_the_weights_of_none(
    model: Path, world: World, armed: dict[str, Any]
) -> None:
    digests, metrics = [], {}
    for algorithm in (AlgorithmConfig(tis_cap=None), AlgorithmConfig(**armed)):
        learner = build_learner(run_config(model, lag=0, optimizer=HOT, algorithm=algorithm), world)
        engines = {0: engine_of(learner, publish(learner, 0))}
        metrics = train_steps(learner, range(2), engines, lengths=[6] * 4, tool_tokens=2)[-1].metrics
        digests.append(learner.copies.current.version.digest)
    assert digests[0] == digests[1]
    assert metrics["rejected_tokens"] == 0
    assert metrics["mismatch"]["same_version"]["ess_applied"] == 1
    assert list(metrics["mismatch"]["correction_by_staleness"]) == ["0"]


@pytest.mark.parametrize(
    "algorithm",
    [
        AlgorithmConfig(preset="gspo"),
        AlgorithmConfig(preset="prime_rl", entropy_coef=0.01),
        AlgorithmConfig(preset="bypass_pg_is"),
        AlgorithmConfig(preset="dr_grpo", aggregation_length=16),
        AlgorithmConfig(loss="topr", mode="bypass", tis_cap=None, advantage="rloo"),
        AlgorithmConfig(loss="cispo", mini_steps=2, weight="geometric", filters=(Filter(on="m2po", high=0.04),)),
        AlgorithmConfig(weight="segment", overlong_buffer=2, overlong_limit=8, advantage="reinforce_baseline"),
    ],
    ids=lambda a: a.preset or f"{a.loss}-{a.weight}",
)
def test_stale_batches_train_under_every_kind_of_algorithm(
    model: Path, world: World, algorithm: AlgorithmConfig
) -> None:
    learner = build_learner(run_config(model, lag=1, optimizer=HOT, algorithm=algorithm), world)
    engines = {0: engine_of(learner, publish(learner, 0))}
    results = train_steps(learner, range(3), engines, lengths=[6] * 4, tool_tokens=2)
    last = results[-1].metrics
    assert json.loads(json.dumps(last)) == last
    assert math.isfinite(last["loss"])
    assert last["grad_norm"] > 0 or last["rejected_tokens"] == last["tokens"]
    assert last["mismatch"]["same_version"]["abs_max"] == 0, "the mismatch alone"
    assert last["mismatch"]["correction"]["abs_max"] > 0, "with the staleness"
    assert list(last["mismatch"]["correction_by_staleness"]) == ["1"]


def test_when_every_sequence_is_rejected_nothing_moves(model: Path, world: World) -> None:
    algorithm = replace(ALGORITHM, rejection="seq_mean_k1", rejection_bounds=(1.0, 1.0))
    config = run_config(model, lag=1, optimizer=replace(HOT, weight_decay=0.1), algorithm=algorithm)
    learner = build_learner(config, world)
    engines = {0: engine_of(learner, publish(learner, 0))}
    (kept,) = train_steps(learner, range(1), engines)
    assert kept.metrics["rejected_trajectories"] == 0, "equal bits lie within any bounds"
    before = masters(learner)
    (result,) = train_steps(learner, range(1, 2), engines)
    assert result.metrics["rejected_trajectories"] == 12
    assert result.metrics["optimizer_steps"] == 0
    assert (result.metrics["loss"], result.metrics["grad_norm"]) == (0, 0)
    assert result.mismatch.is_exact, "metrics are taken before rejection"
    seen = result.metrics["mismatch"]["correction"]
    assert (seen["tokens"], seen["abs_max"] > 0) == (result.metrics["tokens"], True)
    after = masters(learner)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_poisoned_forward_skips_the_step_and_is_counted(model: Path, world: World) -> None:
    learner = build_learner(run_config(model, lag=0), world)
    batch = first_batch(learner)
    with torch.no_grad():
        learner.decoder.model.norm.weight.to_local()[0] = math.nan
    before = masters(learner)
    result = learner.train(batch, learner.score(batch))
    assert result.metrics["optimizer_steps"] == 0
    assert result.metrics["nonfinite_tokens"] == batch.num_tokens == result.mismatch.nonfinite
    after = masters(learner)
    assert all(same_bits(before[name], after[name]) for name in before)


def test_an_empty_batch_changes_nothing(model: Path, world: World) -> None:
    learner = build_learner(run_config(model), world)
    batch = first_batch(learner)
    empty = type(batch)(
        step=0,
        groups=(),
        mini_steps=(),
        versions=(),
        **{
            name: getattr(batch, name)[:0]
            for name in (
                "is_ingested_T",
                "reward_N",
                "group_N",
                "num_tokens_N",
                "sequence_T",
                "segment_T",
                "rollout_T",
                "top1_T",
                "version_T",
            )
        },
    )
    before = masters(learner)
    result = learner.train(empty, learner.score(empty))
    assert result.metrics["tokens"] == 0
    assert all(torch.equal(before[n], w) for n, w in masters(learner).items())


def test_it_learns(model: Path, world: World) -> None:
    config = run_config(
        model, lag=0, prompts_per_step=4, samples_per_prompt=8, num_steps=8, optimizer=replace(HOT, lr=2e-2)
    )
    learner = build_learner(config, world)
    engines = {0: engine_of(learner, publish(learner, 0))}
    rewards = [r.metrics["reward_mean"] for r in train_steps(learner, range(8), engines, lengths=[3] * 8)]
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.1


def test_resume_gives_the_same_weights_after_the_next_steps(model: Path, world: World, tmp_path: Path) -> None:
    schedule = replace(HOT, schedule="cosine", warmup_steps=1, weight_decay=0.01)
    config = run_config(model, lag=2, num_steps=6, optimizer=schedule)
    learner = build_learner(config, world)
    engines = {0: engine_of(learner, publish(learner, 0))}
    train_steps(learner, range(3), engines)
    torch.manual_seed(7)
    path = checkpoint.save(tmp_path, learner, keep=2)
    rng = torch.get_rng_state()
    straight = [r.metrics for r in train_steps(learner, range(3, 5), dict(engines))]

    torch.manual_seed(8)
    resumed = build_learner(config, world)
    ledger = checkpoint.load(path, resumed)
    assert ledger.step == 3
    assert torch.equal(torch.get_rng_state(), rng)
    assert [c.version.step for c in resumed.copies.held] == [1, 2, 3]
    assert resumed.copies.current.version == engines[3].version
    again = [r.metrics for r in train_steps(resumed, range(3, 5), dict(engines))]
    assert again == straight
    assert resumed.copies.current.version == learner.copies.current.version
    for name, weight in masters(learner).items():
        assert same_bits(weight, masters(resumed)[name]), name


def test_checkpoints_appear_whole_and_old_ones_go(model: Path, world: World, tmp_path: Path) -> None:
    learner = build_learner(run_config(model, lag=0), world)
    (tmp_path / ".step-00000001.tmp").mkdir()
    (tmp_path / ".step-00000001.tmp" / "half").write_text("left by a crash")
    engines = {0: engine_of(learner, publish(learner, 0))}
    for step in range(4):
        train_steps(learner, range(step, step + 1), engines)
        checkpoint.save(tmp_path, learner, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000004"
    assert checkpoint.latest(tmp_path / "none") is None
    checkpoint.save(tmp_path, learner, keep=2)
    assert checkpoint.read_ledger(tmp_path / "step-00000004").optimizer_steps == 4


def test_a_trainer_that_was_taken_over_in_mid_checkpoint_leaves_no_broken_one(
    model: Path, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wakes up while its successor writes the same step, and the successor is killed then."""
    learner = build_learner(run_config(model), world)
    write = checkpoint.dcp.save

    class Killed(Exception):
        pass

    def killed(*_: object, **__: object) -> None:
        raise Killed

    def overtaken(*args: Any, **options: Any) -> None:
        write(*args, **options)
        monkeypatch.setattr(checkpoint.dcp, "save", killed)
        with pytest.raises(Killed):
            checkpoint.save(tmp_path, learner, keep=1)

    monkeypatch.setattr(checkpoint.dcp, "save", overtaken)
    with contextlib.suppress(OSError):
        checkpoint.save(tmp_path, learner, keep=1)
    for path in tmp_path.glob("step-*"):
        checkpoint.load(path, build_learner(run_config(model), world))


def test_a_checkpoint_of_another_configuration_is_refused(model: Path, world: World, tmp_path: Path) -> None:
    learner = build_learner(run_config(model), world)
    path = checkpoint.save(tmp_path, learner, keep=1)
    with pytest.raises(checkpoint.CheckpointError, match="another configuration"):
        checkpoint.load(path, build_learner(run_config(model, seed=1), world))
    (path / "ledger.json").write_text("{")
    with pytest.raises(checkpoint.CheckpointError, match="no checkpoint of this build"):
        checkpoint.read_ledger(path)


def without_norms(metrics: dict[str, Any]) -> dict[str, Any]:
    steps = [{k: v for k, v in m.items() if k != "grad_norm"} for m in metrics["mini_steps"]]
    return {k: v for k, v in metrics.items() if k != "grad_norm"} | {"mini_steps": steps}


def test_two_ranks_agree_with_one_to_the_bit_in_the_forward(model: Path, world: World, tmp_path: Path) -> None:
    """The same batches at one and at two ranks; the checkpoint of two ranks goes on at one."""
    algorithm = replace(ALGORITHM, kl="k2", kl_coef=0.01)
    config = run_config(model, lag=1, micro_batch_tokens=40, optimizer=OptimizerConfig(lr=1e-3), algorithm=algorithm)
    learner = build_learner(config, world)
    archive = str(tmp_path / "batches")
    engines = {0: engine_of(learner, publish(learner, 0))}
    batches = [batch_of(engines[0], config, step) for step in range(2)]
    assert len(batches[0].mini_steps[0].micro_batches) == 3, "an odd number: one rank gets an empty one"
    for batch in batches:
        write_step(archive, batch.step, batch.groups)
    (tmp_path / "config.json").write_text(json.dumps(unstructure(config)))
    out = tmp_path / "two"
    out.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
               "tests.integration.trainer_ranks", str(tmp_path / "config.json"), archive, str(out)]  # fmt: skip
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    assert (out / "rank-0").exists()
    assert (out / "rank-1").exists()
    for batch in batches:
        scores = learner.score(batch)
        result = learner.train(batch, scores)
        publish(learner, batch.step + 1)
        two = torch.load(out / f"step-{batch.step}.pt", weights_only=True)
        assert two["exact"]
        assert two["compared"] == batch.num_tokens
        if scores.sampled is not None:
            assert torch.equal(two["sampled"], scores.sampled.logprob_T.view(torch.int32))
        assert two["loss"] == pytest.approx(result.metrics["loss"], rel=1e-3, abs=1e-5)
        assert two["grad_norm"] == pytest.approx(result.metrics["grad_norm"], rel=1e-3)
        if batch.step == 0:
            # From the same weights every metric and decision is the same number, but for the norm of summed gradients.
            assert without_norms(json.loads(two["metrics"])) == without_norms(result.metrics)
    for rank in range(2):
        said = torch.load(out / f"faults-{rank}.pt", weights_only=True)
        assert (said["one.rejected"], said["one.steps"], said["one.finite"]) == (said["one.broken"], 1, True)
        assert 0 < said["one.broken"] < 12
        assert said["one.moved"] > 0
        assert (said["all.rejected"], said["all.steps"], said["all.moved"]) == (12, 0, 0)
    resumed = build_learner(config, world)
    path = checkpoint.latest(out / "checkpoints")
    assert path is not None
    assert checkpoint.load(path, resumed).step == 2
    for name, weight in masters(learner).items():
        torch.testing.assert_close(masters(resumed)[name], weight, rtol=1e-3, atol=1e-3)
    third = batch_of(engine_of(resumed, publish(resumed, 2)), replace(config, lag=0), 2)
    assert resumed.train(third, resumed.score(third)).mismatch.is_exact


def test_a_run_configuration_survives_its_manifest(model: Path) -> None:
    config = run_config(model, algorithm=replace(ALGORITHM, tis_cap=None))
    assert structure(RunConfig, json.loads(json.dumps(unstructure(config)))) == config
