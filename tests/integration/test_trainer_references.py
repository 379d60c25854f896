"""Weights other than the ones in training: the reference of a KL penalty, and older versions that tokens are audited under."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from services.trainer import checkpoint
from services.trainer.batch import Batch, build_batch
from services.trainer.learner import Learner
from services.trainer.loss import kl_penalty
from services.trainer.policy import score_batch
from services.trainer.scoring import Scorer
from shared.models import resolve_model
from shared.wire.algorithm import AlgorithmConfig
from shared.wire.tensor_file import write_version
from shared.wire.tensors import build_manifest
from shared.wire.types import Group, Kv
from tests.integration.algorithm_testing import HOT, Changing, Rig
from tests.integration.trainer_testing import (
    VOCAB,
    Engine,
    build_learner,
    engine_of,
    masters,
    publish,
    tiny_model,
)
from tests.kernels.kernel_testing import same_bits

pytest_plugins = ("tests.integration.trainer_fixtures",)

KINDS = ("k1", "k2", "k3+")


def penalised(kind: str, coef: float = 0.5, **changes: Any) -> AlgorithmConfig:
    return AlgorithmConfig(kl=kind, kl_coef=coef, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_that_is_its_own_reference_pays_nothing(rig: Rig, kind: str) -> None:
    (got,), digest = rig.train(rig.learner(penalised(kind)))
    _, plain = rig.train(rig.learner())
    assert got.metrics["kl"] == {"coef": 0.5, "penalty": 0, "k1": 0, "k3": 0}
    assert digest == plain, "version 0 is the reference, to the bit"


@pytest.mark.parametrize("kind", KINDS)
def test_the_penalty_is_that_of_version_zero_however_far_the_policy_is(rig: Rig, kind: str) -> None:
    learner = rig.learner(penalised(kind))
    rig.train(learner)
    batch = rig.batch(learner, 1)
    scores = learner.score(batch)
    zero = score_batch(rig.learner().decoder, batch, rig.world).logprob_T
    assert scores.reference_T is not None
    assert same_bits(scores.reference_T, zero)
    policy = score_batch(learner.decoder, batch, rig.world).logprob_T
    metrics = learner.train(batch, scores).metrics
    assert metrics["kl"]["penalty"] == pytest.approx(float(kl_penalty(kind, policy, zero).double().mean()), abs=1e-9)
    assert metrics["kl"]["k3"] > 0
    assert metrics["mismatch"]["same_version"]["equal_fraction"] == 1, "the reference does not disturb the audit"


@pytest.mark.parametrize("kind", KINDS)
def test_a_strong_penalty_keeps_the_policy_near(rig: Rig, kind: str) -> None:
    distances = []
    for coef in (1e-9, 30.0):
        learner = rig.learner(penalised(kind, coef), lag=0, optimizer=replace(HOT, lr=3e-3))
        rig.train(learner)
        # The same batch again and again, off-policy ever more: the pull is all that differs.
        for _ in range(3):
            batch = rig.batch(learner)
            learner.train(batch, learner.score(batch))
        batch = rig.batch(learner)
        distances.append(learner.train(batch, learner.score(batch)).metrics["kl"]["k3"])
    assert distances[1] < distances[0]


def test_a_named_model_is_the_reference_and_one_of_another_shape_is_refused(rig: Rig, tmp_path: Path) -> None:
    other = rig.learner().world
    named = tiny_model(tmp_path / "named", seed=1)
    config = rig.learner(penalised("k2", kl_reference=str(named))).config
    theirs = build_learner(replace(config, model=str(named), algorithm=AlgorithmConfig()), other)
    mine = build_learner(replace(config, algorithm=AlgorithmConfig()), other)
    learner = Learner(mine.decoder, config, mine.dtype, other, reference=theirs.decoder)
    publish(learner, 0)
    batch = rig.batch(learner)
    scores = learner.score(batch)
    assert scores.reference_T is not None
    assert same_bits(scores.reference_T, score_batch(theirs.decoder, batch, other).logprob_T)
    assert learner.train(batch, scores).metrics["kl"]["k3"] > 0
    wide = build_learner(replace(theirs.config, model=str(tiny_model(tmp_path / "wide", intermediate_size=64))), other)
    with pytest.raises(ValueError, match="another architecture"):
        Learner(mine.decoder, config, mine.dtype, other, reference=wide.decoder)
    assert resolve_model(str(named)) == named


def test_an_adaptive_coefficient_moves_towards_its_target_and_is_resumed(rig: Rig, tmp_path: Path) -> None:
    algorithm = penalised("k3+", kl_target=1e-6, kl_horizon=100)
    learner = rig.learner(algorithm)
    rig.train(learner, (0,))
    assert learner.kl_coef == pytest.approx(0.5 * (1 - 0.2 * 16 / 100)), "below the target: no penalty at version 0"
    rig.train(learner, (1,))
    assert learner.kl_coef == pytest.approx(0.5 * (1 - 0.2 * 16 / 100) * (1 + 0.2 * 16 / 100))
    path = checkpoint.save(tmp_path, learner, keep=1)
    resumed = rig.learner(algorithm)
    checkpoint.load(path, resumed)
    assert resumed.kl_coef == learner.kl_coef
    again = [rig.batch(one, 1) for one in (learner, resumed)]
    results = [one.train(batch, one.score(batch)) for one, batch in zip((learner, resumed), again, strict=True)]
    assert results[0].metrics == results[1].metrics
    for name, weight in masters(learner).items():
        assert same_bits(weight, masters(resumed)[name]), name


@dataclass(frozen=True)
class History:
    """Three versions of one run."""

    engines: list[Engine]
    weights: list[dict[str, torch.Tensor]]
    """Masters of each."""
    groups: dict[int, list[Group]]
    """Batch 2, with tokens of the first two or of all three versions in every group."""


@pytest.fixture(scope="module")
def history(rig: Rig) -> History:
    learner = rig.learner(max_lag=2)
    engines, weights = [], []
    for step in range(3):
        engines.append(engine_of(learner, publish(learner, step)))
        weights.append(masters(learner))
        if step < 2:
            batch = rig.batch(learner, step)
            learner.train(batch, learner.score(batch))
    groups = {
        n: [Changing(engines[:n]).group(learner.config, number, length=5) for number in range(8, 12)] for n in (2, 3)
    }
    return History(engines, weights, groups)


def at_version_two(
    rig: Rig, history: History, root: Path, behind: Literal["device", "host", "directory"] = "device"
) -> Learner:
    """A learner that holds all three, and their files."""
    plain = rig.learner(max_lag=2)
    learner = Learner(plain.decoder, plain.config, plain.dtype, rig.world, behind=behind, directory=root)
    for step, weights in enumerate(history.weights):
        with torch.no_grad():
            for name, parameter in learner.decoder.named_parameters():
                parameter.to_local().copy_(weights[name])  # type: ignore[attr-defined]
        tensors = publish(learner, step)
        manifest = build_manifest(run="demo", lineage=0, step=step, tensors=tensors, model_config_json="{}",
                                  run_config_json="{}", fingerprint="test", probe_token_ids=[], probe_logprobs=[])  # fmt: skip
        assert manifest.version.digest == history.engines[step].version.digest
        write_version(root, manifest, tensors)
    return learner


def batch_two(learner: Learner, groups: list[Group]) -> Batch:
    return build_batch(groups, learner.config, step=2, vocab_size=VOCAB)


def renamed(groups: list[Group], step: int, **changes: Any) -> list[Group]:
    """The spans of one version say something else."""
    return [
        replace(g, trajectories=tuple(
            replace(t, spans=tuple(
                replace(s, **changes) if s.manifest_digest and s.policy_step == step else s for s in t.spans
            ))
            for t in g.trajectories
        ))
        for g in groups
    ]  # fmt: skip


@pytest.mark.parametrize("behind", ["device", "host", "directory"])
def test_spans_of_several_versions_are_each_scored_under_their_own(
    rig: Rig, history: History, tmp_path: Path, behind: Literal["device", "host", "directory"]
) -> None:
    learner = at_version_two(rig, history, tmp_path, behind)
    kinds = [type(c.shards).__name__ for c in learner.copies.held]
    assert kinds == {"device": ["dict"] * 3, "host": ["HostShards", "HostShards", "dict"],
                     "directory": ["FileShards", "FileShards", "dict"]}[behind]  # fmt: skip
    batch = batch_two(learner, history.groups[3])
    assert [v.step for v in batch.versions] == [0, 1, 2]
    assert all(len(set(batch.version_T[batch.sequence_T == i].tolist())) > 1 for i in range(4))
    result = learner.train(batch, learner.score(batch))
    assert result.mismatch.is_exact
    assert result.mismatch.compared_tokens == batch.num_tokens == 80
    assert list(result.metrics["mismatch"]["same_version_by_staleness"]) == ["0", "1", "2-3"]
    assert result.metrics["lag_max"] == 2


def test_a_span_that_names_another_version_shows(rig: Rig, history: History, tmp_path: Path) -> None:
    learner = at_version_two(rig, history, tmp_path)
    one = history.engines[1].version
    batch = batch_two(learner, renamed(history.groups[3], 0, policy_step=one.step, manifest_digest=one.digest))
    buckets = learner.train(batch, learner.score(batch)).metrics["mismatch"]["same_version_by_staleness"]
    assert [buckets[n]["equal_fraction"] == 1 for n in ("0", "1")] == [True, False]


def test_a_share_of_the_groups_is_audited_and_the_rest_is_counted(rig: Rig, history: History, tmp_path: Path) -> None:
    compared = {}
    learner = at_version_two(rig, history, tmp_path)
    batch = batch_two(learner, history.groups[2])
    for share in (0.0, 0.5, 1.0):
        config = replace(learner.config, audit_share=share)
        scorer = Scorer(learner.decoder, learner.copies, config, learner.dtype, rig.world)
        result = learner.train(batch, scorer.score(batch))
        unaudited = result.metrics["tim"]["unaudited"]
        assert result.mismatch.is_exact, "what is left out on purpose is no failure"
        assert result.mismatch.compared_tokens + unaudited["share"] == batch.num_tokens
        assert (unaudited["mixed_kv"], unaudited["version_not_held"]) == (0, 0)
        compared[share] = result.mismatch.compared_tokens
    assert compared[0.0] == 0 < compared[0.5] < compared[1.0] == batch.num_tokens


def test_a_version_out_of_reach_is_counted_and_alarms(rig: Rig, history: History, tmp_path: Path) -> None:
    learner = at_version_two(rig, history, tmp_path)
    batch = batch_two(learner, renamed(history.groups[3], 0, manifest_digest="ff"))
    result = learner.train(batch, learner.score(batch))
    assert result.metrics["tim"]["unaudited"]["version_not_held"] == result.mismatch.uncompared_tokens > 0
    assert not result.mismatch.is_exact
    assert result.mismatch.differing_tokens == 0


def test_tokens_behind_keys_of_older_weights_are_counted_and_alarm(rig: Rig, history: History, tmp_path: Path) -> None:
    learner = at_version_two(rig, history, tmp_path)
    batch = batch_two(learner, renamed(history.groups[3], 2, kv=Kv.MIXED))
    result = learner.train(batch, learner.score(batch))
    assert result.metrics["tim"]["unaudited"]["mixed_kv"] == result.mismatch.uncompared_tokens > 0
    assert not result.mismatch.is_exact


def test_a_file_that_is_gone_or_broken_leaves_the_copy_on_the_host(rig: Rig, tmp_path: Path) -> None:
    plain = rig.learner(lag=1)
    learner = Learner(plain.decoder, plain.config, plain.dtype, rig.world, behind="directory", directory=tmp_path)
    publish(learner, 0)
    publish(learner, 1)
    assert type(learner.copies.held[0].shards).__name__ == "HostShards"
    assert learner.decoder_at(0) is not learner.decoder
