"""What must hold for every correction, loss and advantage, whatever the logprobs."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from services.trainer.advantage import ADVANTAGES, advantages
from services.trainer.correction import RATIOS, importance_weights, mean_weight
from services.trainer.filters import accept, keep_tokens
from services.trainer.loss import policy_loss, token_scale
from services.trainer.mismatch import divergence
from services.trainer.mismatch_metrics import by_staleness, describe, histogram, pearson, quantile
from shared.wire.algorithm import AlgorithmConfig, Filter

SEQUENCE = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2, 3])
T, N = len(SEQUENCE), 4
INF = math.inf

logprobs = st.lists(st.floats(-12, -0.01), min_size=T, max_size=T).map(lambda v: torch.tensor(v, dtype=torch.float64))
deltas = st.lists(st.floats(-2, 2), min_size=T, max_size=T).map(lambda v: torch.tensor(v, dtype=torch.float64))
signs = st.lists(st.sampled_from([-1.5, -0.5, 0.5, 2.0]), min_size=N, max_size=N).map(
    lambda v: torch.tensor(v, dtype=torch.float64)[SEQUENCE]
)

RULES = [
    *(
        Filter(on=f"{a}_{k}", high=1.001, low=0.999)
        for a in ("token", "seq_sum", "seq_mean", "seq_max")
        for k in ("k1",)
    ),  # type: ignore[arg-type]
    *(Filter(on=f"{a}_{k}", high=1e-9) for a in ("token", "seq_sum", "seq_mean", "seq_max") for k in ("k2", "k3")),  # type: ignore[arg-type]
    Filter(on="veto", low=1e-4, high=1e4),
    Filter(on="mult_prob_error", high=1.0),
    *(Filter(on=on, high=1e-9) for on in ("kpop", "ipo", "dppo_tv", "dppo_kl", "opsm", "m2po")),  # type: ignore[arg-type]
]
BYPASS: dict[str, Any] = {"mode": "bypass", "tis_cap": None}
LOSSES = {
    "ppo_clip": AlgorithmConfig(),
    "ppo_bypass": AlgorithmConfig(**BYPASS),
    "dual_clip": AlgorithmConfig(dual_clip=3.0, **BYPASS),
    "reinforce": AlgorithmConfig(loss="reinforce"),
    "sequence": AlgorithmConfig(weight="sequence"),
    "geometric": AlgorithmConfig(weight="geometric", tis_floor=0.5, outside="mask"),
    "ratio_gradient": AlgorithmConfig(preset="prime_rl"),
    **{n: AlgorithmConfig(loss=n, **BYPASS) for n in ("gspo", "cispo", "dppo_tv", "dppo_kl", "sapo", "topr")},  # type: ignore[arg-type]
}


def batch(logprob: Tensor, proximal: Tensor, rollout: Tensor, advantage: Tensor, **changes: Any) -> dict[str, Any]:
    return {
        "logprob_T": logprob.clone().requires_grad_(), "proximal_T": proximal, "rollout_T": rollout,
        "advantage_T": advantage, "accepted_T": torch.ones(T, dtype=torch.bool),
        "scale_T": torch.full((T,), 1 / T, dtype=torch.float64), "sequence_T": SEQUENCE, "segment_T": SEQUENCE, **changes,
    }  # fmt: skip


def graded(config: AlgorithmConfig, tensors: dict[str, Any]) -> tuple[Tensor, Tensor]:
    loss = policy_loss(config, **tensors).loss
    return loss.detach(), torch.autograd.grad(loss, tensors["logprob_T"])[0]


def keep(rule: Filter, train: Tensor, rollout: Tensor, advantage: Tensor) -> Tensor:
    """[T] bool of everything that a filter decides."""
    config = AlgorithmConfig(filters=(rule,))
    tokens = keep_tokens(train, rollout, advantage, SEQUENCE, N, config)
    return accept(train, rollout, SEQUENCE, N, config).accepted_N[SEQUENCE] & tokens


@given(logprobs, signs)
def test_equal_bits_leave_every_weight_at_one_and_every_token_in(values: Tensor, advantage: Tensor) -> None:
    for level in RATIOS:
        for outside in ("clamp", "mask"):
            config = AlgorithmConfig(weight=level, tis_floor=0.5, outside=outside)  # type: ignore[arg-type]
            weight = importance_weights(values, values.clone(), SEQUENCE, SEQUENCE, config)
            assert torch.equal(weight, torch.ones(T, dtype=torch.float64))
            assert mean_weight(weight, SEQUENCE, "token") == mean_weight(weight, SEQUENCE, "sequence") == 1
    for rule in RULES:
        # m2po's bound is strict and 1e-9 lies above 0.
        assert keep(rule, values, values.clone(), advantage).all(), rule


@given(logprobs, signs)
def test_equal_bits_give_metrics_of_exactly_nothing(values: Tensor, advantage: Tensor) -> None:
    got = describe(values, values.clone(), torch.ones_like(values), advantage, SEQUENCE)
    for name in ("k1", "k2", "k3", "js", "chi2_token", "chi2_seq", "ratio_error", "prob_diff_max", "skew_index"):
        assert got[name] == 0, name
    for name in ("ess_raw", "ess_applied", "ppl_ratio", "mult_prob_error", "ratio_mean"):
        assert got[name] == 1, name
    assert got["corr_token"] is None
    assert got["corr_seq"] is None
    assert got["abs_delta_histogram"][0] == T


@pytest.mark.parametrize("name", ["ppo_clip", "reinforce", "sequence", "geometric"])
def test_equal_bits_give_the_uncorrected_loss_and_gradient(name: str) -> None:
    values = torch.linspace(-3, -0.1, T, dtype=torch.float64)
    tensors = batch(values, values, values.clone(), torch.ones(T, dtype=torch.float64))
    config = LOSSES[name]
    plain = replace(config, weight="token", tis_cap=None, tis_floor=0.0, outside="clamp")
    assert all(torch.equal(a, b) for a, b in zip(graded(config, tensors), graded(plain, tensors), strict=True))


@pytest.mark.parametrize("name", LOSSES)
@given(logprobs, deltas, deltas, signs)
def test_every_loss_starts_from_the_same_gradient(
    name: str, values: Tensor, one: Tensor, two: Tensor, advantage: Tensor
) -> None:
    """Where all policies agree each is -A; and elsewhere each is finite."""
    same = batch(values, values, values.clone(), advantage)
    torch.testing.assert_close(graded(LOSSES[name], same)[1], -advantage / T, rtol=1e-12, atol=0)
    loss, grad = graded(LOSSES[name], batch(values, values + one, values + two, advantage))
    assert loss.isfinite()
    assert grad.isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e9])
def test_what_is_rejected_is_the_same_as_what_is_not_there(name: str, value: float) -> None:
    generator = torch.Generator().manual_seed(0)
    columns = [-torch.rand(T, generator=generator, dtype=torch.float64) * 3 for _ in range(3)]
    advantage = torch.tensor([1.0, -1.0, 0.5, -2.0], dtype=torch.float64)[SEQUENCE]
    accepted = SEQUENCE != 1
    clean = graded(LOSSES[name], batch(*columns, advantage, accepted_T=accepted))
    poisoned = [torch.where(accepted, c, value) for c in (*columns, advantage)]
    dirty = graded(LOSSES[name], batch(*poisoned, accepted_T=accepted))
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
    assert not clean[1][~accepted].any()
    removed = {k: v[accepted] for k, v in batch(*columns, advantage).items()}
    removed["logprob_T"] = removed["logprob_T"].detach().requires_grad_()
    gone = graded(LOSSES[name], removed)
    torch.testing.assert_close(clean[0], gone[0])
    torch.testing.assert_close(clean[1][accepted], gone[1])


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_accepted_and_nothing_there_are_connected_zeros(name: str) -> None:
    one = torch.full((T,), -1.0, dtype=torch.float64)
    loss, grad = graded(LOSSES[name], batch(one, one, one, one, accepted_T=torch.zeros(T, dtype=torch.bool)))
    assert loss == 0
    assert not grad.any()
    empty = {k: v[:0] for k, v in batch(one, one, one, one).items()}
    empty["logprob_T"] = empty["logprob_T"].detach().requires_grad_()
    assert graded(LOSSES[name], empty)[0] == 0


@pytest.mark.parametrize("name", LOSSES)
def test_overflow_stays_finite(name: str) -> None:
    zero = torch.zeros(T, dtype=torch.float32)
    for delta in (1e4, -1e4):
        for advantage in (1.0, -1.0):
            tensors = batch(zero - 1, zero - 1, zero - 1 + delta, zero + advantage, scale_T=zero + 1 / T)
            loss, grad = graded(LOSSES[name], tensors)
            assert loss.isfinite()
            assert grad.isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
@given(logprobs, deltas, signs)
def test_order_and_cuts_between_sequences_change_nothing(
    name: str, values: Tensor, delta: Tensor, advantage: Tensor
) -> None:
    whole = batch(values, values + delta / 2, values + delta, advantage)
    loss, grad = graded(LOSSES[name], whole)
    flipped = {k: v.detach().flip(0) for k, v in whole.items()}
    flipped["logprob_T"] = flipped["logprob_T"].requires_grad_()
    torch.testing.assert_close(graded(LOSSES[name], flipped)[1].flip(0), grad, rtol=1e-12, atol=1e-15)
    total = torch.zeros((), dtype=torch.float64)
    for first, last in pairwise((0, 4, 7, 10)):
        part = {k: v.detach()[first:last] for k, v in whole.items()}
        part["logprob_T"] = part["logprob_T"].requires_grad_()
        total += graded(LOSSES[name], part)[0]
    torch.testing.assert_close(total, loss, rtol=1e-11, atol=1e-13)


@given(logprobs, deltas, signs, st.sampled_from(RULES), st.floats(0, 3), st.floats(0, 3))
def test_a_looser_bound_keeps_a_superset_and_two_filters_the_intersection(
    values: Tensor, delta: Tensor, advantage: Tensor, rule: Filter, a: float, b: float
) -> None:
    def bounded(width: float) -> Filter:
        return replace(rule, high=1 + width, low=1 / (1 + width)) if rule.low is not None else replace(rule, high=width)

    tight, loose = (keep(bounded(w), values + delta, values, advantage) for w in (min(a, b), max(a, b)))
    assert (loose | ~tight).all()
    other = Filter(on="seq_mean_k2", high=0.3)
    if rule.on != other.on:
        config = AlgorithmConfig(filters=(bounded(a), other))
        tokens = keep_tokens(values + delta, values, advantage, SEQUENCE, N, config)
        both = accept(values + delta, values, SEQUENCE, N, config).accepted_N[SEQUENCE] & tokens
        alone = keep(bounded(a), values + delta, values, advantage) & keep(other, values + delta, values, advantage)
        assert torch.equal(both, alone)


@given(deltas, st.floats(0.05, 1), st.floats(1.01, 5))
def test_weights_stay_within_their_bounds_and_one_token_makes_all_levels_equal(
    delta: Tensor, floor: float, cap: float
) -> None:
    origin, alone = torch.zeros_like(delta), torch.arange(T)
    for outside in ("clamp", "mask"):
        kinds = []
        for level in RATIOS:
            config = AlgorithmConfig(weight=level, tis_cap=cap, tis_floor=floor, outside=outside)  # type: ignore[arg-type]
            weight = importance_weights(delta.clone().requires_grad_(), origin, SEQUENCE, SEQUENCE, config)
            assert not weight.requires_grad
            assert (((weight >= floor) & (weight <= cap)) | ((weight == 0) & (outside == "mask"))).all()
            kinds.append(importance_weights(delta, origin, alone, alone, config))
        for other in kinds[1:]:
            torch.testing.assert_close(other, kinds[0], rtol=1e-12, atol=0)


@given(deltas)
def test_batch_normalised_weights_have_mean_one(delta: Tensor) -> None:
    for unit in ("token", "sequence"):
        config = AlgorithmConfig(weight=unit)  # type: ignore[arg-type]
        weight = importance_weights(delta, torch.zeros_like(delta), SEQUENCE, SEQUENCE, config)
        normal = weight / mean_weight(weight, SEQUENCE, unit)
        assert mean_weight(normal, SEQUENCE, unit) == pytest.approx(1, rel=1e-12)


@given(st.lists(st.floats(-3, 3), min_size=3, max_size=3), st.lists(st.floats(-3, 3), min_size=3, max_size=3))
def test_the_expected_weight_is_one_untruncated_and_less_when_cut(a: list[float], b: list[float]) -> None:
    train, rollout = (torch.tensor(x, dtype=torch.float64).log_softmax(0) for x in (a, b))
    each = torch.arange(3)

    def expected(cap: float) -> float:
        config = AlgorithmConfig(tis_cap=cap)
        return float((rollout.exp() * importance_weights(train, rollout, each, each, config)).sum())

    assert expected(INF) == pytest.approx(1, rel=1e-12)
    largest = float((train - rollout).exp().max())
    if largest > 1.01:
        assert expected((1 + largest) / 2) < 1


@given(logprobs, deltas, signs)
def test_decoupled_without_bounds_is_bypass_without_bounds(values: Tensor, delta: Tensor, advantage: Tensor) -> None:
    tensors = batch(values, values + delta / 3, values + delta, advantage)
    wide: dict[str, Any] = {"clip_low": 1.0, "clip_high": INF}
    decoupled = graded(AlgorithmConfig(tis_cap=INF, **wide), tensors)
    bypass = graded(AlgorithmConfig(**BYPASS, **wide), tensors)
    for one, other in zip(decoupled, bypass, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@given(st.floats(-1, 1), signs)
def test_gspo_of_equal_ratios_is_ppo_on_that_ratio(delta: float, advantage: Tensor) -> None:
    values = torch.linspace(-3, -0.1, T, dtype=torch.float64)
    tensors = batch(values, values, values - delta, advantage)
    gspo, ppo = (graded(AlgorithmConfig(loss=n, **BYPASS), tensors) for n in ("gspo", "ppo_clip"))  # type: ignore[arg-type]
    torch.testing.assert_close(gspo[0], ppo[0], rtol=1e-12, atol=1e-14)
    if min(abs(math.exp(delta) - bound) for bound in (0.8, 1.28)) > 1e-6:
        torch.testing.assert_close(gspo[1], ppo[1], rtol=1e-12, atol=1e-14)


@given(logprobs, deltas, signs)
def test_a_dual_clip_that_is_never_reached_is_none(values: Tensor, delta: Tensor, advantage: Tensor) -> None:
    tensors = batch(values, values, values + delta, advantage)
    far, none = (graded(AlgorithmConfig(dual_clip=c, **BYPASS), tensors) for c in (1e9, None))
    assert all(torch.equal(a, b) for a, b in zip(far, none, strict=True))


@given(logprobs, deltas, signs)
def test_topr_reinforces_the_good_and_tapers_the_bad(values: Tensor, delta: Tensor, advantage: Tensor) -> None:
    _, grad = graded(LOSSES["topr"], batch(values, values, values - delta, advantage))
    ratio = torch.zeros(N, dtype=torch.float64).index_add_(0, SEQUENCE, delta).exp()[SEQUENCE]
    expected = -advantage * torch.where(advantage >= 0, 1.0, ratio.clamp(max=1.0)) / T
    torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-15)


@given(logprobs, deltas, signs)
def test_sapo_has_the_gradient_of_its_gate(values: Tensor, delta: Tensor, advantage: Tensor) -> None:
    _, grad = graded(LOSSES["sapo"], batch(values, values, values - delta, advantage))
    tau = torch.where(advantage > 0, torch.tensor(1.0).double(), torch.tensor(1.05, dtype=torch.float64))
    gate = torch.sigmoid(tau * (delta.exp() - 1))
    torch.testing.assert_close(grad, -advantage * 4 * gate * (1 - gate) * delta.exp() / T, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
@given(logprobs, deltas, signs)
def test_dppo_is_weighted_reinforce_where_its_filter_keeps(
    name: str, values: Tensor, delta: Tensor, advantage: Tensor
) -> None:
    config = LOSSES[name]
    _, grad = graded(config, batch(values, values, values - delta, advantage))
    rule = Filter(on=name, high=config.clip_high, low=config.clip_low)  # type: ignore[arg-type]
    kept = keep_tokens(values, values - delta, advantage, SEQUENCE, N, AlgorithmConfig(filters=(rule,)))
    expected = torch.where(kept, -advantage * delta.exp().clamp(max=20) / T, 0.0)
    torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-15)


def test_a_dropped_token_leaves_the_mean_of_its_trajectory() -> None:
    values = torch.full((T,), -1.0, dtype=torch.float64)
    accepted = torch.arange(T) != 2
    for name in ("gspo", "topr"):
        losses = []
        for odd in (0.0, 0.1):
            rollout = torch.where(accepted, values, values - odd)
            losses.append(
                graded(LOSSES[name], batch(values, values, rollout, -torch.ones_like(values), accepted_T=accepted))
            )
        assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))
    rollout = torch.where(accepted, values - 0.1, values)
    _, grad = graded(LOSSES["gspo"], batch(values, values, rollout, -torch.ones_like(values), accepted_T=accepted))
    assert grad[0].item() == pytest.approx(math.exp(0.1) / T, rel=1e-12)


def test_normalised_weights_scale_the_loss_by_their_mean() -> None:
    values = torch.linspace(-3, -0.1, T, dtype=torch.float64)
    tensors = batch(values, values, values - 0.1, torch.ones_like(values))
    plain, halved = (
        graded(AlgorithmConfig(), tensors),
        graded(AlgorithmConfig(batch_normalize=True), {**tensors, "mean_weight": 2.0}),
    )
    assert torch.equal(halved[0] * 2, plain[0])
    assert torch.equal(halved[1] * 2, plain[1])


def test_the_entropy_bonus_has_the_mask_and_the_scale_of_the_loss() -> None:
    one = torch.full((T,), -1.0, dtype=torch.float64)
    entropy = torch.linspace(0.1, 2, T, dtype=torch.float64).requires_grad_()
    accepted, scale = SEQUENCE != 1, token_scale("seq_mean_token_mean", SEQUENCE, N).double()
    tensors = batch(one, one, one, one, accepted_T=accepted, scale_T=scale, entropy_T=entropy)
    policy_loss(AlgorithmConfig(entropy_coef=0.1), **tensors).loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(entropy.grad, torch.where(accepted, -0.1 * scale, 0.0))


@pytest.mark.parametrize("name", ADVANTAGES)
@given(st.lists(st.floats(0, 5), min_size=6, max_size=6), st.floats(0.1, 5))
def test_advantages_forget_a_shift_of_the_rewards(name: str, reward: list[float], shift: float) -> None:
    group = torch.tensor([0, 0, 0, 1, 1, 1])

    def run(values: list[float], accepted: Tensor) -> Tensor:
        return advantages(
            name,
            reward_N=torch.tensor(values, dtype=torch.float64),
            group_N=group,
            num_tokens_N=torch.tensor([3, 1, 2, 5, 1, 1]),
            accepted_N=accepted,
        )

    everyone = torch.ones(6, dtype=torch.bool)
    if name != "maxrl" and max(reward) - min(reward) > 0.1:
        spread = [max(g) - min(g) for g in (reward[:3], reward[3:])]
        if all(s > 0.05 for s in spread):
            shifted = run([r + shift for r in reward], everyone)
            torch.testing.assert_close(shifted, run(reward, everyone), rtol=1e-6, atol=1e-6)
    assert not run([2.0] * 6, everyone).any(), "equal rewards teach nothing"
    without = torch.tensor([True, True, False, True, True, True])
    other = [*reward[:2], 1e6, *reward[3:]]
    assert torch.equal(run(other, without), run(reward, without)), "a rejected reward changes nothing"


@given(logprobs, deltas, deltas, deltas)
def test_mismatch_staleness_and_drift_add_up(sampled: Tensor, tim: Tensor, staleness: Tensor, drift: Tensor) -> None:
    series = list(accumulate((tim, staleness, drift), torch.add, initial=sampled))
    parts = sum(divergence(new, old).k1 for old, new in pairwise(series))
    assert parts == pytest.approx(divergence(series[-1], sampled).k1, abs=1e-12)
    assert divergence(series[-1], sampled).k1 == pytest.approx(float((sampled - series[-1]).mean()), abs=1e-12)


@given(logprobs, deltas, signs)
def test_metrics_do_not_depend_on_the_order_of_the_trajectories(
    values: Tensor, delta: Tensor, advantage: Tensor
) -> None:
    columns = [values + delta, values, delta.exp().clamp(max=2), advantage]
    got, other = describe(*columns, SEQUENCE), describe(*(c.flip(0) for c in columns), (N - 1 - SEQUENCE).flip(0))
    # A prefix has a direction, and a correlation or a skewness of what hardly varies is rounding.
    for name in got.keys() - {"accumulated", "corr_token", "corr_seq", "pearson", "skew_fisher"}:
        if got[name] is not None:
            assert other[name] == pytest.approx(got[name], rel=1e-9, abs=1e-9), name


@given(deltas, deltas)
def test_histograms_add_up_and_their_quantiles_bracket_the_true_ones(one: Tensor, two: Tensor) -> None:
    together = histogram(torch.cat([one, two]))
    assert together == [a + b for a, b in zip(histogram(one), histogram(two), strict=True)]
    size = torch.cat([one, two]).abs().sort().values
    for q in (0.5, 0.95, 1.0):
        true = float(size[math.ceil(q * len(size)) - 1])
        got = quantile(together, q)
        assert true <= got
        assert got == 0 or true > got / 10**0.25 * (1 - 1e-9) or got <= 1e-7
    assert quantile([0] * len(together), 0.5) == 0


def test_a_known_noise_is_reported_at_its_analytic_size() -> None:
    generator = torch.Generator().manual_seed(1)
    n, sigma = 200_000, 0.02
    delta = torch.randn(n, generator=generator, dtype=torch.float64) * sigma
    rollout = -torch.rand(n, generator=generator, dtype=torch.float64) * 3
    advantage = torch.where(torch.rand(n, generator=generator) < 0.5, 1.0, -1.0).double()
    sequence = torch.arange(n) // 100
    got = describe(rollout + delta, rollout, delta.exp(), advantage, sequence)
    assert got["k3"] == pytest.approx(sigma**2 / 2, rel=0.02)
    assert got["chi2_token"] == pytest.approx(math.exp(2 * sigma**2) - 1, rel=0.3)
    assert got["abs_mean"] == pytest.approx(sigma * math.sqrt(2 / math.pi), rel=0.01)
    assert got["ess_raw"] == pytest.approx(math.exp(-(sigma**2)), rel=1e-3)
    assert abs(got["corr_token"]) < 0.01
    # The same size, correlated with the advantage: the probes of its size stay, those of its direction don't.
    biased = describe(rollout + delta.abs() * advantage, rollout, delta.exp(), advantage, sequence)
    assert biased["k3"] == pytest.approx(got["k3"], rel=0.05)
    assert biased["corr_token"] == pytest.approx(math.sqrt(2 / math.pi), rel=0.01)
    assert biased["skew_index"] == pytest.approx(1)
    assert abs(got["skew_index"]) < 0.05


def test_one_flipped_router_shows_in_the_maximum_and_is_vetoed() -> None:
    values = torch.full((T,), -1.0, dtype=torch.float64)
    flipped = values.clone()
    flipped[5] -= 12
    rule = Filter(on="veto", low=1e-4, high=1e4)
    for train, rollout in ((flipped, values), (values, flipped)):
        kept = accept(train, rollout, SEQUENCE, N, AlgorithmConfig(filters=(rule,))).accepted_N
        assert kept.tolist() == [True, False, True, True]
        got = describe(train, rollout, torch.ones_like(values), torch.ones_like(values), SEQUENCE)
        assert got["abs_max"] == 12
        assert got["accumulated"][0]["max_prefix"] == pytest.approx(12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_missing_number_is_counted_and_never_read_as_equal(bad: float) -> None:
    values = torch.full((T,), -1.0, dtype=torch.float64)
    train = values.clone()
    train[5] = bad
    one = torch.ones_like(values)
    for rule in RULES:
        assert torch.equal(keep(rule, train, values, one), SEQUENCE != 1)
    assert accept(train, values, SEQUENCE, N, AlgorithmConfig()).accepted_N.tolist() == [True, False, True, True]
    got = describe(train, values, one, one, SEQUENCE)
    assert (got["tokens"], got["nonfinite"], got["k3"]) == (T - 1, 1, 0)


def test_staleness_buckets_and_what_has_no_correlation() -> None:
    staleness = torch.tensor([0, 0, 1, 2, 3, 4, 7, 8, 100])
    got = {name: of.sum().item() for name, of in by_staleness(staleness)}
    assert got == {"0": 2, "1": 1, "2-3": 2, "4-7": 2, "8+": 2}
    assert pearson(torch.ones(3), torch.rand(3)) is None
    assert pearson(torch.rand(1), torch.rand(1)) is None
    assert describe(*[torch.zeros(0)] * 4, torch.zeros(0, dtype=torch.int64)) == {"tokens": 0, "nonfinite": 0}


def test_m2po_drops_the_fewest_that_bring_the_second_moment_down() -> None:
    delta = torch.tensor([0.0, 0.1, -0.2, 3.0, 0.1, -2.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    rule = Filter(on="m2po", high=0.04)
    kept = keep(rule, delta, torch.zeros_like(delta), torch.ones_like(delta))
    assert kept.tolist() == [True, True, True, False, True, False, True, True, True, True]


def test_opsm_drops_negative_sequences_that_the_policy_has_left() -> None:
    rollout = torch.full((T,), -1.0, dtype=torch.float64)
    train = torch.where(SEQUENCE <= 1, rollout - 0.5, rollout)
    advantage = torch.tensor([-1.0, 1.0, -1.0, 1.0], dtype=torch.float64)[SEQUENCE]
    kept = keep(Filter(on="opsm", high=0.4), train, rollout, advantage)
    assert torch.equal(kept, SEQUENCE != 0)
