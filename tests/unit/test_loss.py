"""Policy losses: worked examples, gradients against the closed forms, and what must hold for any batch."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from services.trainer.correction import importance_weights
from services.trainer.loss import PolicyLoss, policy_loss, token_scale
from shared.wire.run import AlgorithmConfig

EXAMPLES = json.loads((Path(__file__).parents[1] / "data" / "algorithms_examples.json").read_text())
MASK = torch.tensor(EXAMPLES["B0"]["mask"]).bool()
SEQUENCE = torch.tensor([0, 0, 0, 0, 1, 1, 1])
UNCLIPPED = AlgorithmConfig(clip_low=1.0, clip_high=math.inf, tis_cap=math.inf)
PPO = AlgorithmConfig(clip_low=0.2, clip_high=0.2, tis_cap=None)


def flat(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows)[MASK]


def b0(**changes: Any) -> dict[str, Tensor]:
    """The reference batch as `policy_loss` takes it, token mean over 7 tokens."""
    example = EXAMPLES["B0"]
    return {
        "logprob_T": flat(example["current"]).requires_grad_(),
        "proximal_T": flat(example["train_old"]),
        "rollout_T": flat(example["rollout"]),
        "advantage_T": flat(example["adv"]),
        "accepted_T": torch.ones(7, dtype=torch.bool),
        "scale_T": token_scale("token_mean", SEQUENCE, 2),
        "sequence_T": SEQUENCE,
        "segment_T": SEQUENCE,
        **changes,
    }


def graded(config: AlgorithmConfig, batch: dict[str, Tensor]) -> tuple[PolicyLoss, Tensor]:
    out = policy_loss(config, **batch)  # type: ignore[arg-type]
    (grad,) = torch.autograd.grad(out.loss, batch["logprob_T"])
    return out, grad


def bypass(**changes: Any) -> dict[str, Tensor]:
    """The rollout's policy taken as the proximal one."""
    return b0(proximal_T=flat(EXAMPLES["B0"]["rollout"]), **changes)


@pytest.mark.parametrize(
    ("name", "config", "batch"),
    [
        ("recompute", PPO, b0),
        ("decoupled_raw", replace(PPO, tis_cap=math.inf), b0),
        ("decoupled_tis2", replace(PPO, tis_cap=2.0), b0),
        ("decoupled_raw_unclipped", UNCLIPPED, b0),
        ("bypass_no_dualclip", PPO, bypass),
        ("bypass_unclipped", replace(UNCLIPPED, tis_cap=None), bypass),
        ("bypass_reinforce_tis2", replace(PPO, loss="reinforce", tis_cap=2.0), b0),
    ],
)
def test_losses_and_gradients_of_the_reference_batch(name: str, config: AlgorithmConfig, batch: Any) -> None:
    out, grad = graded(config, batch())
    example = EXAMPLES["X6_losses"][name]
    assert out.loss.item() == pytest.approx(example["token_mean_loss"], rel=1e-5)
    torch.testing.assert_close(grad * 7, flat(example["grad_logp_times_N"]), rtol=1e-5, atol=1e-6)


def test_clip_table() -> None:
    """Loss and gradient on both sides of each bound, for both signs of the advantage."""
    table = EXAMPLES["X5_clip_table"]
    config = AlgorithmConfig(clip_low=table["clip_low"], clip_high=table["clip_high"], tis_cap=None)
    for advantage, ratio, loss, gradient in table["rows"]:
        logprob = torch.tensor([math.log(ratio)], requires_grad=True)
        out = policy_loss(
            config,
            logprob_T=logprob,
            proximal_T=torch.zeros(1),
            rollout_T=torch.zeros(1),
            advantage_T=torch.tensor([float(advantage)]),
            accepted_T=torch.ones(1, dtype=torch.bool),
            scale_T=torch.ones(1),
            sequence_T=torch.zeros(1, dtype=torch.int64),
            segment_T=torch.zeros(1, dtype=torch.int64),
        )
        (grad,) = torch.autograd.grad(out.loss, logprob)
        assert (out.loss.item(), grad.item()) == pytest.approx((loss, gradient), rel=1e-5), (advantage, ratio)
        assert bool(out.is_clipped_T) == (gradient == 0)


def test_a_forgotten_detach_would_flip_the_sign_of_a_gradient() -> None:
    _, grad = graded(replace(PPO, loss="reinforce", tis_cap=2.0), b0())
    assert grad[1].item() * 7 == pytest.approx(-0.67032005, rel=1e-5)


def test_aggregations_use_the_denominators_of_the_whole_step() -> None:
    example = EXAMPLES["X8_aggregation"]
    losses = torch.tensor([x for row in example["losses"] for x in row])
    sequence = torch.tensor([0, 0, 0, 0, 1, 1])
    token_mean = token_scale("token_mean", sequence, 2)
    assert (losses * token_mean).sum().item() == pytest.approx(example["token_mean"])
    assert (losses * token_scale("seq_mean_token_mean", sequence, 2)).sum().item() == pytest.approx(
        example["seq_mean_token_mean"]
    )
    # The rejected keep their place in the denominator.
    kept = torch.where(sequence == 0, losses, 0)
    assert (kept * token_mean).sum().item() == pytest.approx(example["reject_second_token_mean"])
    # Two micro-batches of one sequence each add up to the same, which means of means would not.
    assert sum((losses * token_mean)[sequence == i].sum().item() for i in (0, 1)) == pytest.approx(
        example["token_mean"]
    )
    with pytest.raises(ValueError, match="aggregation must be"):
        token_scale("mean", sequence, 2)


def test_equal_logprobs_give_the_uncorrected_loss_to_the_bit() -> None:
    for kind in ("ppo_clip", "reinforce"):
        same = flat(EXAMPLES["B0"]["current"])
        batch = b0(proximal_T=same, rollout_T=same.clone())
        corrected, grad = graded(replace(PPO, loss=kind, tis_cap=2.0), batch)
        plain, plain_grad = graded(replace(PPO, loss=kind, tis_cap=None), batch)
        assert torch.equal(corrected.loss, plain.loss)
        assert torch.equal(grad, plain_grad)
        torch.testing.assert_close(grad, -batch["advantage_T"] * batch["scale_T"], rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["ppo_clip", "reinforce"])
def test_a_rejected_sequence_is_the_same_as_one_of_any_other_content(kind: str) -> None:
    config = replace(PPO, loss=kind, tis_cap=2.0)
    accepted = SEQUENCE == 0
    reference, reference_grad = graded(config, b0(accepted_T=accepted))
    for value in (math.nan, math.inf, -math.inf, 1e9, -1e9):
        poisoned = b0(accepted_T=accepted)
        for name in ("proximal_T", "rollout_T", "advantage_T"):
            poisoned[name] = torch.where(accepted, poisoned[name], value)
        poisoned["logprob_T"] = torch.where(accepted, poisoned["logprob_T"].detach(), value).requires_grad_()
        out, grad = graded(config, poisoned)
        assert torch.equal(out.loss, reference.loss), value
        assert torch.equal(grad, reference_grad), value
        assert not grad[~accepted].any()
    only_first = {k: v[accepted] for k, v in b0().items()}
    only_first["logprob_T"] = only_first["logprob_T"].detach().requires_grad_()
    alone, alone_grad = graded(config, only_first)
    torch.testing.assert_close(reference.loss, alone.loss)
    torch.testing.assert_close(reference_grad[accepted], alone_grad)


def test_when_everything_is_rejected_the_loss_is_a_connected_zero() -> None:
    out, grad = graded(PPO, b0(accepted_T=torch.zeros(7, dtype=torch.bool)))
    assert out.loss.item() == 0
    assert out.loss.requires_grad
    assert not grad.any()
    empty = {k: v[:0] for k, v in b0().items()}
    empty["logprob_T"] = empty["logprob_T"].detach().requires_grad_()
    none, _ = graded(PPO, empty)
    assert none.loss.item() == 0
    assert none.loss.requires_grad


@given(
    st.lists(
        st.tuples(*[st.floats(-20, 0, width=32)] * 3, st.floats(-5, 5, width=32), st.booleans()),
        min_size=2,
        max_size=10,
    ),
    st.sampled_from(["ppo_clip", "reinforce"]),
    st.integers(1, 9),
)
def test_loss_and_gradient_do_not_depend_on_cuts_or_order(
    tokens: list[tuple[float, float, float, float, bool]], kind: str, cut: int
) -> None:
    config = AlgorithmConfig(loss=kind, tis_cap=2.0)  # type: ignore[arg-type]
    columns = list(zip(*tokens, strict=True))
    batch = {
        "logprob_T": torch.tensor(columns[0]).requires_grad_(),
        "proximal_T": torch.tensor(columns[1]),
        "rollout_T": torch.tensor(columns[2]),
        "advantage_T": torch.tensor(columns[3]),
        "accepted_T": torch.tensor(columns[4]),
        "scale_T": torch.full((len(tokens),), 1 / len(tokens)),
        "sequence_T": torch.arange(len(tokens)),
        "segment_T": torch.arange(len(tokens)),
    }
    whole, grad = graded(config, batch)
    assert whole.loss.isfinite()
    assert grad.isfinite().all()
    parts = [{k: v[s] for k, v in batch.items()} for s in (slice(0, cut), slice(cut, None))]
    outs = [policy_loss(config, **p).loss for p in parts]  # type: ignore[arg-type]
    (split_grad,) = torch.autograd.grad(outs[0] + outs[1], batch["logprob_T"])
    assert torch.equal(split_grad, grad)
    total = sum(o.detach().double() for o in outs)
    torch.testing.assert_close(total, whole.loss.detach().double(), rtol=1e-5, atol=1e-6)
    flipped = {k: v.flip(0) for k, v in batch.items()}
    reversed_out = policy_loss(config, **flipped)  # type: ignore[arg-type]
    (reversed_grad,) = torch.autograd.grad(reversed_out.loss, batch["logprob_T"])
    assert torch.equal(reversed_grad, grad)


def one_token(current: float, proximal: float, rollout: float) -> dict[str, Tensor]:
    """An advantage and a scale of 1, in float64: the gradient is minus the coefficient of the logprob's own gradient."""
    logprob, proximal_T, rollout_T, one = (
        torch.tensor([x], dtype=torch.float64) for x in (current, proximal, rollout, 1)
    )
    zero = torch.zeros(1, dtype=torch.int64)
    return {
        "logprob_T": logprob.requires_grad_(), "proximal_T": proximal_T, "rollout_T": rollout_T, "advantage_T": one,
        "scale_T": one, "accepted_T": one.bool(), "sequence_T": zero, "segment_T": zero,
    }  # fmt: skip


@given(*[st.floats(-8, 0)] * 3)
def test_behaviour_ratio_is_the_product_of_the_other_two(current: float, proximal: float, rollout: float) -> None:
    batch = one_token(current, proximal, rollout)
    ppo, behaviour = (
        -graded(replace(UNCLIPPED, mode=mode, tis_cap=None), batch)[1]  # type: ignore[arg-type]
        for mode in ("recompute", "bypass")
    )
    zero = batch["sequence_T"]
    corr = importance_weights(batch["proximal_T"], batch["rollout_T"], zero, zero, UNCLIPPED)
    parts = ppo.log() + corr.log()
    assert parts.item() == pytest.approx(behaviour.log().item(), abs=4 * math.ulp(8.0))


@given(*[st.floats(-8, 0)] * 2, st.floats(0.1, 3))
def test_the_gradient_of_weighted_reinforce_is_minus_the_weight(current: float, rollout: float, cap: float) -> None:
    """To the bit: none takes the way through the weight, which is that of the current policy here."""
    batch, config = one_token(current, current, rollout), AlgorithmConfig(loss="reinforce", tis_cap=cap)
    zero = batch["sequence_T"]
    weight = importance_weights(batch["logprob_T"].detach(), batch["rollout_T"], zero, zero, config)
    assert torch.equal(graded(config, batch)[1], -weight)


@pytest.mark.parametrize("delta", [1e4, -1e4])
def test_overflow_stays_finite(delta: float) -> None:
    for kind in ("ppo_clip", "reinforce"):
        batch = b0(rollout_T=torch.full((7,), delta), proximal_T=torch.full((7,), -delta))
        out, grad = graded(replace(PPO, loss=kind, tis_cap=2.0), batch)
        assert out.loss.isfinite()
        assert grad.isfinite().all()


def test_capping_below_every_ratio_scales_the_loss_by_the_cap() -> None:
    tiny, _ = graded(replace(UNCLIPPED, tis_cap=1e-3), b0())
    unit, _ = graded(replace(UNCLIPPED, tis_cap=None), b0())
    assert tiny.loss.item() == pytest.approx(1e-3 * unit.loss.item(), rel=1e-5)
