"""Advantages: worked examples, and what must hold for any rewards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from services.trainer.advantage import advantages

EXAMPLES = json.loads((Path(__file__).parents[1] / "data" / "algorithms_examples.json").read_text())

rewards = st.lists(st.floats(-100, 100, allow_nan=False), min_size=2, max_size=8)


def run(
    name: str, reward: list[float], group: list[int], tokens: list[int], accepted: list[bool] | None = None
) -> Tensor:
    return advantages(
        name,
        reward_N=torch.tensor(reward, dtype=torch.float64),
        group_N=torch.tensor(group),
        num_tokens_N=torch.tensor(tokens),
        accepted_N=torch.tensor(accepted if accepted is not None else [True] * len(reward)),
    )


def grpo(reward: list[float], accepted: list[bool] | None = None) -> Tensor:
    return run("grpo", reward, [0] * len(reward), [1] * len(reward), accepted)


def test_grpo_divides_by_the_sample_deviation() -> None:
    example = EXAMPLES["X9_advantages"]
    high, low = example["grpo"]
    expected = torch.tensor([high if r else low for r in example["reward"]], dtype=torch.float64)
    torch.testing.assert_close(grpo(example["reward"]), expected, rtol=1e-8, atol=0)


def test_whitening_weighs_each_trajectory_by_its_tokens() -> None:
    example = EXAMPLES["X9_advantages"]["whitened"]
    got = run("reinforce_whitened", example["reward"], [0, 1], example["num_tokens"])
    # The reference's eight digits leave out the 1e-8 inside the root.
    torch.testing.assert_close(got, torch.tensor(example["advantage"], dtype=torch.float64), rtol=1e-7, atol=0)


def test_a_rejected_sibling_leaves_the_statistics_of_its_group() -> None:
    without = grpo([1.0, 0.0, 0.5])
    leaked = grpo([1.0, 0.0, 100.0, 0.5], [True, True, False, True])
    assert leaked[2] == 0
    assert torch.equal(leaked[[0, 1, 3]], without)
    both = run("reinforce_whitened", [100.0, 1.0, 0.0], [0, 0, 1], [9, 4, 3], [False, True, True])
    assert torch.equal(both[1:], run("reinforce_whitened", [1.0, 0.0], [0, 1], [4, 3]))


def test_a_lone_survivor_teaches_nothing_instead_of_its_raw_reward() -> None:
    assert grpo([100.0, 1.0], [False, True]).tolist() == [0, 0]
    assert grpo([7.0]).tolist() == [0]


@given(rewards, st.floats(-50, 50, allow_nan=False), st.sampled_from([0.5, 2.0, 8.0]))
def test_grpo_ignores_shift_and_scale_of_the_rewards(reward: list[float], shift: float, scale: float) -> None:
    base = grpo(reward)
    spread = max(reward) - min(reward)
    if spread < 1e-2:
        return
    torch.testing.assert_close(grpo([r + shift for r in reward]), base, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(grpo([r * scale for r in reward]), base, rtol=1e-3, atol=1e-6)


@given(st.floats(-1e6, 1e6, allow_nan=False), st.integers(2, 8))
def test_equal_rewards_give_exactly_zero(reward: float, size: int) -> None:
    assert not grpo([reward] * size).any()


@given(rewards, st.randoms(use_true_random=False))
def test_groups_do_not_see_each_other_and_order_does_not_matter(reward: list[float], random) -> None:  # type: ignore[no-untyped-def]
    alone = grpo(reward)
    together = run("grpo", [*reward, 3.0, -1.0], [0] * len(reward) + [1, 1], [2] * (len(reward) + 2))
    assert torch.equal(together[: len(reward)], alone)
    order = list(range(len(reward)))
    random.shuffle(order)
    torch.testing.assert_close(grpo([reward[i] for i in order]), alone[order], rtol=1e-9, atol=1e-9)


@given(rewards)
def test_leaving_one_out_is_centring_times_g_over_g_minus_one(reward: list[float]) -> None:
    got, centred = (run(n, reward, [0] * len(reward), [1] * len(reward)) for n in ("rloo", "dr_grpo"))
    torch.testing.assert_close(got, centred * len(reward) / (len(reward) - 1), rtol=1e-12, atol=1e-12)
    others = torch.tensor([sum(reward) - r for r in reward], dtype=torch.float64) / (len(reward) - 1)
    if len(set(reward)) > 1:
        expected = torch.tensor(reward, dtype=torch.float64) - others
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_shapes_and_dtypes_are_checked() -> None:
    with pytest.raises(ValueError, match="one reward, group, token count and mask per trajectory"):
        run("grpo", [1.0, 0.0], [0], [1, 1])
    with pytest.raises(ValueError, match="float64"):
        advantages(
            "grpo",
            reward_N=torch.zeros(1),
            group_N=torch.zeros(1),
            num_tokens_N=torch.zeros(1),
            accepted_N=torch.ones(1, dtype=torch.bool),
        )
