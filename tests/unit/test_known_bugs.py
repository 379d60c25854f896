"""Behaviours that other trainers got wrong, as far as no other test holds them; docs/known_bugs.md has the whole table."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import Tensor

from services.trainer.advantage import advantages
from services.trainer.correction import TOKEN_TIS, importance_weights
from services.trainer.filters import accept, keep_tokens
from services.trainer.loss import policy_loss, token_scale
from services.trainer.mismatch_metrics import describe
from shared.wire.algorithm import AlgorithmConfig, Filter
from shared.wire.presets import K1_FILTERS

ROOT = Path(__file__).resolve().parents[2]
SEQUENCE = torch.tensor([0, 0, 0, 1, 1])
MODES: dict[str, AlgorithmConfig] = {
    "recompute": AlgorithmConfig(mode="recompute", tis_cap=None),
    "decoupled": AlgorithmConfig(),
    "bypass": AlgorithmConfig(mode="bypass", tis_cap=None),
    "bypass-reinforce": AlgorithmConfig(loss="reinforce"),
    "ratio-gradient": AlgorithmConfig(preset="prime_rl"),
}
AGGREGATIONS = ("token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm")


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def gradient(config: AlgorithmConfig, scale: Tensor, **changes: Any) -> Tensor:
    values = double(-0.5, -1.0, -2.0, -0.3, -0.7)
    tensors: dict[str, Any] = {
        "logprob_T": values, "proximal_T": values, "rollout_T": values, "advantage_T": torch.ones(5).double(),
        "accepted_T": torch.ones(5, dtype=torch.bool), "scale_T": scale, "sequence_T": SEQUENCE, "segment_T": SEQUENCE,
        **changes,
    }  # fmt: skip
    logprob = tensors.pop("logprob_T").clone().requires_grad_()
    loss = policy_loss(config, logprob_T=logprob, **tensors).loss
    return torch.autograd.grad(loss, logprob)[0]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("mode", MODES)
def test_rejection_leaves_every_denominator_alone_in_every_mode(mode: str, aggregation: str) -> None:
    scale = token_scale(aggregation, SEQUENCE, 2, 8).double()
    whole = gradient(MODES[mode], scale)
    part = gradient(MODES[mode], scale, accepted_T=SEQUENCE == 0)
    assert torch.equal(part[:3], whole[:3]), "the others weigh what they weighed"
    assert not part[3:].any()


def test_the_reward_survives_the_rejection_of_the_token_it_came_with() -> None:
    """It belongs to the trajectory, whose other tokens still learn from it; one that is rejected whole has no advantage."""
    train = double(-0.5, -1.0, -9.0, -0.3, -0.7)
    rollout = double(-0.5, -1.0, -1.0, -0.3, -0.7)
    config = AlgorithmConfig(filters=(Filter(on="token_k1", low=0.5, high=2.0),))
    kept = keep_tokens(train, rollout, torch.ones(5).double(), SEQUENCE, 2, config)
    assert kept.tolist() == [True, True, False, True, True]
    accepted = accept(train, rollout, SEQUENCE, 2, config).accepted_N
    got = advantages("dr_grpo", reward_N=double(1.0, 0.0), group_N=torch.zeros(2, dtype=torch.int64),
                     num_tokens_N=torch.tensor([3, 2]), accepted_N=accepted)  # fmt: skip
    assert got.tolist() == [0.5, -0.5]
    grad = gradient(config, torch.full((5,), 0.2).double(), accepted_T=kept, advantage_T=got[SEQUENCE])
    assert grad.tolist() == pytest.approx([-0.1, -0.1, 0, 0.1, 0.1])


def test_tensors_are_passed_by_name_and_checked() -> None:
    with pytest.raises(TypeError, match="positional"):
        policy_loss(AlgorithmConfig(), *[torch.zeros(3)] * 8)  # type: ignore[misc]
    with pytest.raises(TypeError, match="positional"):
        advantages("grpo", *[torch.zeros(3)] * 4)  # type: ignore[misc]
    with pytest.raises(ValueError, match="bool mask"):
        advantages(
            "grpo", reward_N=double(1, 0), group_N=torch.zeros(2), num_tokens_N=torch.ones(2), accepted_N=double(1, 1)
        )


@pytest.mark.parametrize("shape", [(5, 1), (1, 5), (1,), ()])
def test_a_shape_that_would_broadcast_is_refused(shape: tuple[int, ...]) -> None:
    """[B, 1] times [B] is [B, B]: a metric B times too large."""
    with pytest.raises(ValueError, match="of one shape"):
        importance_weights(torch.zeros(5), torch.zeros(shape), SEQUENCE, SEQUENCE, TOKEN_TIS)
    with pytest.raises(ValueError, match="of one shape"):
        describe(torch.zeros(5), torch.zeros(shape), torch.zeros(5), torch.zeros(5), SEQUENCE)
    two = describe(double(0.9, 1.1).log(), double(0, 0), double(0.9, 1.1), double(1, 1), torch.arange(2))
    assert (two["ratio_mean"], two["weight_mean"]) == (pytest.approx(1), pytest.approx(1)), "and not 2"


def test_sums_over_a_constant_do_not_depend_on_padding_or_on_the_size_of_the_batch() -> None:
    one = token_scale("seq_mean_token_sum_norm", SEQUENCE, 2, 8)
    twice = token_scale("seq_mean_token_sum_norm", torch.cat([SEQUENCE, SEQUENCE + 2]), 4, 8)
    assert torch.equal(twice, torch.cat([one, one]) / 2), "a mean over trajectories"
    assert one.unique().tolist() == [1 / (2 * 8)]
    with pytest.raises(ValueError, match="aggregation_length"):
        AlgorithmConfig(aggregation="seq_mean_token_sum_norm")


def test_the_weight_of_a_product_dies_with_length_and_those_for_long_answers_do_not() -> None:
    n = 9000
    delta = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.02 - 0.0005
    zero, whole = torch.zeros_like(delta), torch.zeros(n, dtype=torch.int64)

    def mean(level: str) -> float:
        config = AlgorithmConfig(weight=level)  # type: ignore[arg-type]
        return float(importance_weights(delta, zero, whole, whole, config).mean())

    assert mean("sequence") < 0.1
    assert mean("token") == pytest.approx(1, abs=2e-3)
    assert mean("geometric") == pytest.approx(1, abs=2e-3)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_baseline", "reinforce_whitened"])
def test_one_odd_reward_among_equals_gives_no_huge_advantage(name: str) -> None:
    """Leave-one-out deviations are 0 there; here the deviation is that of the whole group, or there is none."""
    for size in (2, 8, 64):
        for odd in (1.0, 1e-3):
            reward = torch.zeros(size, dtype=torch.float64)
            reward[0] = odd
            got = advantages(name, reward_N=reward, group_N=torch.zeros(size, dtype=torch.int64),
                             num_tokens_N=torch.ones(size, dtype=torch.int64),
                             accepted_N=torch.ones(size, dtype=torch.bool))  # fmt: skip
            assert float(got.abs().max()) <= math.sqrt(size)


def test_metrics_are_of_the_raw_difference_however_weights_are_clamped() -> None:
    rollout = torch.full((5,), -60.0, dtype=torch.float64)
    delta = double(50, 0, 0, 0, 0)
    config = AlgorithmConfig(weight="sequence")
    weight = importance_weights(rollout + delta, rollout, SEQUENCE, SEQUENCE, config)
    got = describe(rollout + delta, rollout, weight, torch.ones(5).double(), SEQUENCE)
    assert (got["k1"], got["abs_max"], got["k2"]) == (-10, 50, 250)
    assert got["k3"] == pytest.approx((math.exp(50) - 51) / 5)
    assert (got["weight_max"], got["ratio_max"]) == (2, pytest.approx(math.exp(20)))


def test_the_default_corrects_for_the_sampler_and_ignoring_it_must_be_said_twice() -> None:
    default = AlgorithmConfig()
    assert (default.ratio_mode, default.tis_cap) == ("decoupled", 2.0)
    with pytest.raises(ValueError, match="ignores the sampler"):
        AlgorithmConfig(mode="recompute")
    assert AlgorithmConfig(mode="recompute", tis_cap=None).ratio_mode == "recompute"


def filter_names() -> tuple[str, ...]:
    return get_args(get_type_hints(Filter)["on"])


@pytest.mark.parametrize("on", filter_names())
def test_every_filter_that_can_be_configured_is_executed(on: str) -> None:
    rule = Filter(on=on, high=1.01, low=0.99) if on in K1_FILTERS else Filter(on=on, high=1e-4)  # type: ignore[arg-type]
    if on == "mult_prob_error":
        rule = Filter(on="mult_prob_error", high=1.01)
    config = AlgorithmConfig(filters=(rule,))
    rollout = double(-1.0, -1.0, -1.0, -1.0, -1.0)
    for delta in (double(0.7, 0.7, 0.7, 0, 0), double(-0.7, -0.7, -0.7, 0, 0)):
        for sign in (1.0, -1.0):
            kept = keep_tokens(rollout + delta, rollout, sign * torch.ones(5).double(), SEQUENCE, 2, config)
            kept &= accept(rollout + delta, rollout, SEQUENCE, 2, config).accepted_N[SEQUENCE]
            assert kept[3:].all(), "what agrees stays"
            if not kept[0]:
                return
    pytest.fail(f"{on} never acts")


def test_an_infinite_ratio_is_capped_and_a_missing_number_is_neither_one_nor_the_cap() -> None:
    zero, far = torch.zeros(5), torch.tensor([1e4, -1e4, math.nan, math.inf, -math.inf])
    assert importance_weights(far, zero, SEQUENCE, SEQUENCE, TOKEN_TIS).tolist() == [
        2.0,
        pytest.approx(0, abs=1e-8),
        0,
        0,
        0,
    ]
    assert accept(far, zero, torch.arange(5), 5, TOKEN_TIS).accepted_N.tolist() == [True, True, False, False, False]


def test_the_smallest_ratio_is_that_of_a_token_and_not_of_padding() -> None:
    rollout = double(-1, -1, -1, -1, -1)
    got = describe(rollout + double(0.1, 0.2, 0.3, 0.2, 0.1), rollout, torch.ones(5), torch.ones(5), SEQUENCE)
    assert got["ratio_min"] == pytest.approx(math.exp(0.1))
    assert got["ratio_std"] == pytest.approx(float(double(0.1, 0.2, 0.3, 0.2, 0.1).exp().std()))


def test_the_table_of_known_bugs_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "known_bugs.md").read_text()
    numbers = [int(n) for n in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)]
    assert numbers == list(range(1, 31))
    assert re.findall(r"^\| A(\d+) \|", text, re.MULTILINE) == [str(n) for n in range(1, 26)]
    named = re.findall(r"`([\w/]+)::(test_\w+)`", text)
    assert len(named) > 40
    for file, test in named:
        (path,) = (ROOT / "tests").rglob(f"{file}.py")
        assert re.search(rf"^(async )?def {test}\(", path.read_text(), re.MULTILINE), f"{file}::{test}"
    assert [f.name for f in fields(Filter)] == ["on", "high", "low"]
