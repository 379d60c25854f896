"""Every named algorithm through the real learner: nothing where the bits are equal, something where they are not."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from services.trainer.policy import score_batch
from shared.wire.algorithm import PRESETS, AlgorithmConfig
from tests.integration.algorithm_testing import GROUPS, Rig

pytest_plugins = ("tests.integration.trainer_fixtures",)

PLAIN = {
    "tis_cap": None,
    "tis_floor": 0.0,
    "outside": "clamp",
    "weight": "token",
    "batch_normalize": False,
    "filters": (),
}
EXTRA: dict[str, dict[str, Any]] = {"dr_grpo": {"aggregation_length": 16}}
MODES: dict[str, dict[str, Any]] = {
    "recompute": {"mode": "recompute", "tis_cap": None},
    "decoupled": {"mode": "decoupled"},
    "bypass-ppo-clip": {"mode": "bypass", "tis_cap": None},
    "bypass-reinforce": {"loss": "reinforce", "mode": "bypass"},
    "ratio-gradient": {"loss": "reinforce", "mode": "ratio_gradient", "tis_cap": None},
}


def uncorrected(config: AlgorithmConfig) -> AlgorithmConfig:
    """The same loss as if there were no sampler but the trainer."""
    mode = {"ppo_clip": "recompute", "reinforce": "bypass"}.get(config.loss, config.mode)
    return replace(config, preset=None, mode=mode, **PLAIN)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def trained(rig: Rig) -> dict[AlgorithmConfig, tuple[dict[str, Any], str]]:
    """Metrics of one step and the weights behind it, by algorithm, so that none is trained twice."""
    return {}


def one_step(
    rig: Rig, trained: dict[AlgorithmConfig, tuple[dict[str, Any], str]], config: AlgorithmConfig
) -> tuple[dict[str, Any], str]:
    if config not in trained:
        (result,), digest = rig.train(rig.learner(config, lag=0))
        trained[config] = result.metrics, digest
    return trained[config]


@pytest.mark.parametrize("name", PRESETS)
def test_with_equal_bits_a_preset_trains_the_weights_of_no_correction(
    rig: Rig, trained: dict[AlgorithmConfig, tuple[dict[str, Any], str]], name: str
) -> None:
    config = AlgorithmConfig(preset=name, **EXTRA.get(name, {}))
    got, digest = one_step(rig, trained, config)
    plain, plain_digest = one_step(rig, trained, uncorrected(config))
    assert got["tim"]["equal_fraction"] == 1
    assert (got["weight_mean"], got["weight_max"], got["weight_ess"]) == (1, 1, 1)
    assert got["correction"]["weight_seq_max_deviation"] == 0
    assert got["rejected_tokens"] == got["rejected_trajectories"] == 0
    assert all(not any(rejected.values()) for rejected in got["correction"]["rejected_by"].values())
    assert digest == plain_digest
    assert got["grad_norm"] == plain["grad_norm"] > 0
    if config.ratio_mode != "ratio_gradient":
        # That loss is -A r, whose value is not that of -A logprob, only its gradient.
        assert got["loss"] == plain["loss"]


@pytest.mark.parametrize("name", MODES)
def test_mini_steps_move_away_from_a_frozen_policy_and_start_on_it(rig: Rig, name: str) -> None:
    """Four optimizer steps a batch, on a batch that is a step old: the papers' 64 / 16."""
    learner = rig.learner(AlgorithmConfig(mini_steps=GROUPS, **MODES[name]))
    rig.train(learner)
    batch = rig.batch(learner, 1)
    scores = learner.score(batch)
    assert scores.proximal_T is not None
    frozen = score_batch(learner.decoder, batch, rig.world).logprob_T
    assert torch.equal(scores.proximal_T.view(torch.int32), frozen.view(torch.int32))
    metrics = learner.train(batch, scores).metrics
    assert torch.equal(scores.proximal_T.view(torch.int32), frozen.view(torch.int32)), "no later step touches it"
    first, *later = metrics["mini_steps"]
    assert (first["ratio_min"], first["ratio_mean"], first["ratio_max"]) == (1, 1, 1)
    assert all(m["ratio_min"] < 1 or m["ratio_max"] > 1 for m in later)
    assert [m["is_taken"] for m in metrics["mini_steps"]] == [True] * GROUPS
    assert metrics["optimizer_steps"] == GROUPS
    assert metrics["mismatch"]["same_version"]["equal_fraction"] == 1
    assert metrics["mismatch"]["correction"]["abs_max"] > 0
    assert json.loads(json.dumps(metrics)) == metrics


def test_every_mode_learns_something_else_from_a_stale_batch(rig: Rig) -> None:
    digests = {}
    for name, mode in MODES.items():
        config = AlgorithmConfig(mini_steps=2, **mode)
        results, digests[name] = rig.train(rig.learner(config), (0, 1))
        assert all(math.isfinite(r.metrics["loss"]) for r in results)
    assert len(set(digests.values())) == len(MODES)


def test_a_decoupled_weight_compares_the_frozen_policy_and_not_the_current_one(rig: Rig) -> None:
    """On the sampler's own policy it stays 1 throughout, however far the mini-steps have moved."""
    learner = rig.learner(AlgorithmConfig(mini_steps=GROUPS), lag=0)
    (result,), _ = rig.train(learner)
    metrics = result.metrics
    assert metrics["drift"]["abs_max"] > 0
    assert (metrics["weight_mean"], metrics["weight_max"], metrics["correction"]["weight_seq_min"]) == (1, 1, 1)
    learner = rig.learner(AlgorithmConfig(mini_steps=GROUPS, **MODES["bypass-reinforce"]), lag=0)
    (result,), _ = rig.train(learner)
    assert result.metrics["weight_max"] > 1, "the weight of a bypass is of the policy as it is now"
