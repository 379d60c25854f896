"""Correction weights and rejection: worked examples, direction of the bounds, and what must hold for any logprobs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from services.trainer.correction import k3, token_weights
from services.trainer.filters import KINDS as KIND_FUNCTIONS
from services.trainer.filters import Acceptance, accept
from shared.wire.run import AlgorithmConfig

EXAMPLES = json.loads((Path(__file__).parents[1] / "data" / "algorithms_examples.json").read_text())
KINDS = ("seq_mean_k1", "seq_sum_k1", "seq_mean_k3", "seq_sum_k3")

logprobs = st.lists(st.floats(-30, 0, width=32), min_size=1, max_size=12)
deltas = st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=12)


def flat(rows: list[list[float]]) -> Tensor:
    mask = torch.tensor(EXAMPLES["B0"]["mask"]).bool()
    return torch.tensor(rows)[mask]


def b0() -> tuple[Tensor, Tensor, Tensor]:
    """train, rollout, sequence of the reference batch: two sequences of 4 and 3 tokens."""
    return flat(EXAMPLES["B0"]["train_old"]), flat(EXAMPLES["B0"]["rollout"]), torch.tensor([0, 0, 0, 0, 1, 1, 1])


def config(rejection: str, low: float, high: float) -> AlgorithmConfig:
    if rejection == "none":
        return AlgorithmConfig()
    return AlgorithmConfig(rejection=rejection, rejection_bounds=(low, high))  # type: ignore[arg-type]


def decide(delta: list[list[float]], rejection: str, low: float, high: float) -> Acceptance:
    sizes = torch.tensor([len(d) for d in delta])
    train = torch.tensor([x for row in delta for x in row])
    sequence = torch.repeat_interleave(torch.arange(len(delta)), sizes)
    return accept(train, torch.zeros_like(train), sequence, len(delta), config(rejection, low, high))


def test_token_weights_of_the_reference_batch() -> None:
    train, rollout, _ = b0()
    expected = flat(EXAMPLES["X1_weights"]["token_tis_C2"])
    torch.testing.assert_close(token_weights(train, rollout, 2.0), expected, rtol=1e-6, atol=0)
    raw = flat(EXAMPLES["B0"]["r_corr"])
    torch.testing.assert_close(token_weights(train, rollout, math.inf), raw, rtol=1e-6, atol=0)
    assert torch.equal(token_weights(train, rollout, None), torch.ones(7))


@pytest.mark.parametrize(
    ("kind", "statistic"),
    [("seq_sum_k1", "sum"), ("seq_mean_k1", "mean"), ("seq_sum_k3", "sum"), ("seq_mean_k3", "mean")],
)
def test_k_statistics_of_the_reference_batch(kind: str, statistic: str) -> None:
    train, rollout, sequence = b0()
    got = accept(train, rollout, sequence, 2, config(kind, 0.5, 2.0)).statistic_N
    name = kind.rsplit("_", 1)[1]
    # The reference states k1 as -delta; bounds here act on the ratio, so the statistic is +delta.
    expected = torch.tensor(EXAMPLES["X2_K"][name][statistic], dtype=torch.float64) * (-1 if name == "k1" else 1)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("kind", "low", "high"),
    [("seq_sum_k1", 0.5, 2.0), ("seq_sum_k3", 0.5, 0.7), ("seq_mean_k1", 0.8, 1.25), ("seq_mean_k3", 0.5, 0.2)],
)
def test_rejections_that_keep_the_first_sequence_and_drop_the_second(kind: str, low: float, high: float) -> None:
    train, rollout, sequence = b0()
    assert accept(train, rollout, sequence, 2, config(kind, low, high)).accepted_N.tolist() == [True, False]


def test_k1_bounds_act_on_the_ratio_and_not_on_its_inverse() -> None:
    example = EXAMPLES["X4_k1_bound"]
    delta = [[math.log(r)] for r in example["ratios"]]
    assert decide(delta, "seq_mean_k1", *example["bounds"]).accepted_N.tolist() == example["keep"]


def test_sums_grow_with_length_and_means_do_not() -> None:
    long = {n: [[0.01] * n] for n in (10, 100, 1000)}
    assert [bool(decide(d, "seq_sum_k1", 0.5, 2.0).accepted_N) for d in long.values()] == [True, False, False]
    means = [decide(d, "seq_mean_k3", 0.5, 2.0).statistic_N.item() for d in long.values()]
    assert means == pytest.approx([5.016708e-05] * 3, rel=1e-5)
    sums = [decide(d, "seq_sum_k3", 0.5, 2.0).statistic_N.item() for d in long.values()]
    assert sums == pytest.approx([5.016708e-4, 5.016708e-3, 5.016708e-2], rel=1e-5)


def test_huge_deltas_give_finite_weights() -> None:
    train = torch.tensor([100.0, -100.0, 1e4, -1e4])
    weights = token_weights(train, torch.zeros(4), 2.0)
    assert weights[0] == weights[2] == 2.0
    assert weights.isfinite().all()
    assert not decide([[1e4]], "seq_mean_k3", 0.5, 2.0).accepted_N
    assert token_weights(train, torch.zeros(4), math.inf).isfinite().all()


def test_k3_stays_positive_for_tiny_deltas() -> None:
    delta = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 1e-4
    assert (k3(delta) >= 0).all()
    textbook = torch.exp(delta) - 1 - delta
    assert (textbook < 0).float().mean() > 0.3, "the plain form would have done as well"
    assert float(k3(delta).mean()) == pytest.approx(float(k3(delta.double()).mean()), rel=1e-4)
    assert k3(torch.zeros(1)) == 0


def test_x22_k3_of_the_small_mismatch_regime() -> None:
    delta = np.random.default_rng(0).normal(0, 1e-4, 100_000)
    narrow = delta.astype(np.float32)
    textbook = np.exp(narrow) - np.float32(1) - narrow
    assert (textbook < 0).mean() == pytest.approx(0.376, abs=0.01)
    assert textbook.mean(dtype=np.float64) == pytest.approx(1.693e-8, rel=0.02)
    for values in (delta, narrow):
        got = k3(torch.from_numpy(values))
        assert (got >= 0).all()
        assert float(got.double().mean()) == pytest.approx(5.001e-9, rel=2e-4)
    assert float(k3(torch.tensor(3.3e-4, dtype=torch.float64))) == pytest.approx(5.4456e-8, rel=1e-5)


@given(*[st.floats(-20, -(2.0**-20), width=32)] * 2)
def test_k2_and_k3_are_nothing_only_where_the_logprobs_are_equal(train: float, rollout: float) -> None:
    delta = torch.tensor([train - rollout], dtype=torch.float64)
    for kind in ("k2", "k3"):
        for value in (KIND_FUNCTIONS[kind](delta), KIND_FUNCTIONS[kind](-delta)):
            assert (value > 0) if train != rollout else (value == 0), kind


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_token_without_a_finite_logprob_rejects_its_sequence_and_is_counted(bad: float) -> None:
    train, rollout, sequence = b0()
    train[5] = bad
    for kind in ("none", *KINDS):
        decision = accept(train, rollout, sequence, 2, config(kind, 0.001, 1000))
        assert decision.accepted_N.tolist() == [True, False]
        assert decision.num_nonfinite == 1
    weights = token_weights(train, rollout, 2.0)
    assert weights[5] == 0
    assert weights.isfinite().all()


def test_a_sequence_without_trainable_tokens_is_kept_and_counts_nowhere() -> None:
    assert decide([[], [0.1]], "seq_mean_k1", 0.5, 2.0).accepted_N.tolist() == [True, True]


@given(logprobs)
def test_equal_bits_give_weights_of_exactly_one(values: list[float]) -> None:
    train = torch.tensor(values)
    for cap in (None, 1.0, 2.0):
        assert torch.equal(token_weights(train, train.clone(), cap), torch.ones(len(values)))
    for kind in KINDS:
        decision = accept(
            train, train.clone(), torch.zeros(len(values), dtype=torch.int64), 1, config(kind, 0.999, 1.001)
        )
        assert decision.accepted_N.all()
        assert decision.statistic_N.item() == 0


@given(deltas, st.floats(0.01, 4))
def test_weights_lie_in_zero_to_cap_and_a_cap_above_all_changes_nothing(values: list[float], cap: float) -> None:
    train, rollout = torch.tensor(values), torch.zeros(len(values))
    weights = token_weights(train, rollout, cap)
    assert ((weights >= 0) & (weights <= torch.tensor(cap))).all()
    raw = token_weights(train, rollout, math.inf)
    assert torch.equal(token_weights(train, rollout, float(raw.max())), raw)
    assert not token_weights(train.requires_grad_(), rollout, cap).requires_grad


@given(deltas)
def test_a_cap_towards_zero_is_the_weight(values: list[float]) -> None:
    """Below every ratio it leaves the uncorrected loss, times the cap."""
    cap = 2.0**-10
    assert token_weights(torch.tensor(values), torch.zeros(len(values)), cap).tolist() == [cap] * len(values)


@given(deltas)
def test_swapping_the_sides_keeps_k2(values: list[float]) -> None:
    delta = torch.tensor(values)
    assert torch.equal(KIND_FUNCTIONS["k2"](delta), KIND_FUNCTIONS["k2"](-delta))


@given(st.lists(deltas, min_size=1, max_size=5), st.sampled_from(KINDS), st.floats(1, 3), st.floats(1, 3))
def test_a_looser_threshold_keeps_a_superset(delta: list[list[float]], kind: str, a: float, b: float) -> None:
    tight, loose = min(a, b), max(a, b)
    kept_tight = decide(delta, kind, 1 / tight, tight).accepted_N
    kept_loose = decide(delta, kind, 1 / loose, loose).accepted_N
    assert (kept_loose | ~kept_tight).all()


@given(deltas)
def test_swapping_the_sides_flips_k1_and_changes_k3(values: list[float]) -> None:
    a, b = torch.tensor(values), torch.zeros(len(values))
    sequence = torch.zeros(len(values), dtype=torch.int64)
    k1 = [accept(x, y, sequence, 1, config("seq_sum_k1", 0.5, 2.0)).statistic_N.item() for x, y in ((a, b), (b, a))]
    assert k1[0] == -k1[1]
    if max(abs(v) for v in values) > 0.1:
        both = [
            accept(x, y, sequence, 1, config("seq_sum_k3", 0.5, 2.0)).statistic_N.item() for x, y in ((a, b), (b, a))
        ]
        mirrored = sorted(values) == sorted(-v for v in values)
        assert mirrored or both[0] != both[1]
        assert min(both) > 0


@given(deltas, st.sampled_from(KINDS))
def test_repeating_every_token_doubles_sums_and_keeps_means(values: list[float], kind: str) -> None:
    once = decide([values], kind, 0.5, 2.0).statistic_N.item()
    twice = decide([[v for v in values for _ in range(2)]], kind, 0.5, 2.0).statistic_N.item()
    assert twice == pytest.approx(2 * once if "sum" in kind else once, rel=1e-9, abs=1e-12)


@given(st.floats(-3, 3, width=32), st.floats(1.01, 3))
def test_levels_agree_on_one_token_sequences(delta: float, high: float) -> None:
    for name in ("k1", "k3"):
        kept = [bool(decide([[delta]], f"seq_{a}_{name}", 1 / high, high).accepted_N) for a in ("mean", "sum")]
        assert kept[0] == kept[1]


def test_shapes_and_dtypes_are_checked() -> None:
    with pytest.raises(ValueError, match="float32 of one shape"):
        token_weights(torch.zeros(2), torch.zeros(3), 2.0)
    with pytest.raises(ValueError, match="float32 of one shape"):
        token_weights(torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2), 2.0)


def test_rejection_needs_no_weights_and_weights_no_rejection() -> None:
    train, rollout, sequence = b0()
    weightless = replace(config("seq_sum_k1", 0.5, 2.0), tis_cap=None)
    assert accept(train, rollout, sequence, 2, weightless).accepted_N.tolist() == [True, False]
