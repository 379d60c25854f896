"""What an algorithm may be: presets, and combinations that are refused because they do nothing or count twice."""

from __future__ import annotations

from typing import Any

import pytest

from shared.config import structure, unstructure
from shared.wire.algorithm import PRESETS, AlgorithmConfig, Filter

VERL = {
    "decoupled_token_is", "decoupled_seq_is", "decoupled_token_icepop", "decoupled_seq_is_rs", "decoupled_geo_rs",
    "decoupled_geo_rs_seq_tis", "decoupled_geo_rs_token_tis", "decoupled_k3_rs", "decoupled_k3_rs_seq_tis",
    "decoupled_k3_rs_token_tis", "bypass_ppo_clip", "bypass_ppo_clip_geo_rs", "bypass_ppo_clip_k3_rs", "bypass_pg_is",
    "bypass_pg_token_icepop", "bypass_pg_geo_rs", "bypass_pg_geo_rs_seq_tis", "bypass_pg_geo_rs_token_tis", "disabled",
}  # fmt: skip


def preset(name: str) -> AlgorithmConfig:
    length = {"aggregation_length": 1024} if name == "dr_grpo" else {}
    return AlgorithmConfig(preset=name, **length)  # type: ignore[arg-type]


def test_every_preset_of_verl_exists() -> None:
    assert set(PRESETS) >= VERL


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_its_values_and_comes_back_from_json(name: str) -> None:
    config = preset(name)
    for key, value in PRESETS[name].items():
        assert getattr(config, key) == value
    assert structure(AlgorithmConfig, unstructure(config)) == config


def test_a_preset_bounds_the_ratio_and_not_its_inverse() -> None:
    (rule,) = preset("decoupled_seq_is_rs").all_filters
    assert (rule.on, rule.low, rule.high) == ("seq_sum_k1", 0.5, 2.0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"preset": "decoupled_geo"}, "preset must be one of"),
        ({"preset": "decoupled_seq_is", "weight": "geometric"}, "leave out one of the two"),
        # does nothing
        ({"tis_cap": None, "weight": "sequence"}, "do nothing without a weight"),
        ({"tis_cap": None, "outside": "mask"}, "do nothing without a weight"),
        ({"tis_cap": None, "batch_normalize": True}, "do nothing without a weight"),
        ({"mode": "recompute"}, "ignores the sampler"),
        ({"dual_clip": 3.0}, "1 throughout a single optimizer step"),
        ({"loss": "gspo"}, "1 throughout a single optimizer step"),
        ({"loss": "cispo", "mode": "recompute", "tis_cap": None}, "1 throughout a single optimizer step"),
        ({"loss": "sapo", "dual_clip": 3.0, "mini_steps": 2}, "dual_clip belongs to ppo_clip"),
        ({"sapo_tau": [2.0, 2.0]}, "sapo_tau belongs to sapo"),
        ({"aggregation_length": 10}, "aggregation_length belongs"),
        ({"aggregation": "seq_mean_token_sum_norm"}, "aggregation_length belongs"),
        ({"overlong_limit": 100}, "do nothing without overlong_buffer"),
        ({"rejection_bounds": [0.9, 1.1]}, "do nothing without rejection"),
        ({"dynamic_groups": 4}, "does nothing without dynamic_sampling"),
        ({"kl": "k2"}, "does nothing without a finite kl_coef"),
        ({"kl_coef": 0.1}, "do nothing without kl"),
        ({"kl_reference": "other"}, "do nothing without kl"),
        ({"kl": "k1", "kl_coef": 0.1, "kl_cap": 3.0}, "no weight of its own"),
        ({"kl": "k2", "kl_coef": 0.1, "kl_horizon": 10}, "kl_horizon does nothing"),
        # counts twice
        ({"mode": "bypass"}, "count it twice"),
        ({"loss": "topr"}, "count it twice"),
        ({"loss": "reinforce", "mode": "ratio_gradient"}, "count it twice"),
        ({"rejection": "seq_mean_k3", "filters": [{"on": "seq_mean_k3", "high": 0.1}]}, "more than once"),
        # cannot be
        ({"loss": "reinforce", "mode": "decoupled"}, "bypass or ratio_gradient"),
        ({"mode": "ratio_gradient", "tis_cap": None}, "recompute or decoupled or bypass"),
        ({"loss": "topr", "mode": "decoupled"}, "runs in mode bypass"),
        ({"batch_normalize": True, "weight": "geometric"}, "batch_normalize"),
        ({"batch_normalize": True, "loss": "reinforce"}, "batch_normalize"),
        # numbers
        ({"tis_floor": 3.0}, "tis_floor"),
        ({"dual_clip": 1.0, "mini_steps": 2}, "dual_clip"),
        ({"kl": "k3+", "kl_coef": 0.1, "kl_cap": 0.0}, "kl_cap must be above 0"),
        ({"kl": "k1", "kl_coef": 0.1, "kl_target": 0.0}, "kl_target must be above 0"),
        ({"dynamic_sampling": True, "dynamic_groups": -1}, "dynamic_groups must be"),
        ({"entropy_coef": -1.0}, "entropy_coef"),
        ({"overlong_buffer": 10, "overlong_limit": 5}, "overlong_limit above it"),
        ({"filters": [{"on": "veto", "high": 1e4}]}, "give low and high"),
        ({"filters": [{"on": "token_k1", "low": 1.5, "high": 2.0}]}, "0 < low <= 1 <= high"),
        ({"filters": [{"on": "kpop", "high": 0.1, "low": 0.1}]}, "takes no such low"),
        ({"filters": [{"on": "kpop", "high": -0.1}]}, "needs high >= 0"),
        ({"filters": [{"on": "k4", "high": 1.0}]}, "filters"),
        ({"filters": [{"on": "kpop", "high": 1.0, "max": 2.0}]}, "filters"),
    ],
)  # fmt: skip
def test_an_algorithm_that_cannot_work_is_refused_and_told_why(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        structure(AlgorithmConfig, changes)


def test_a_mask_without_bounds_is_refused() -> None:
    with pytest.raises(ValueError, match="no bounds to mask outside of"):
        AlgorithmConfig(tis_cap=float("inf"), outside="mask")


def test_the_mode_follows_from_the_loss_unless_it_is_given() -> None:
    assert AlgorithmConfig().ratio_mode == "decoupled"
    assert AlgorithmConfig(loss="reinforce").ratio_mode == "bypass"
    assert AlgorithmConfig(loss="gspo", mode="bypass", tis_cap=None).ratio_mode == "bypass"


def test_rejection_is_short_for_a_filter() -> None:
    config = AlgorithmConfig(
        rejection="seq_mean_k3", rejection_bounds=(0.5, 0.02), filters=(Filter(on="ipo", high=0.1),)
    )
    assert config.all_filters == (Filter(on="seq_mean_k3", high=0.02), Filter(on="ipo", high=0.1))
    assert config.is_decided_before
    assert not AlgorithmConfig().is_decided_before
