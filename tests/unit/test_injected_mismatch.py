"""A mismatch of known size and shape is reported at that size by every metric; one that is not there rejects nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from services.trainer.correction import importance_weights, k3
from services.trainer.correction_metrics import describe_rejection, describe_weights, tightest
from services.trainer.filters import accept, keep_tokens
from services.trainer.mismatch_metrics import describe, quantile
from services.trainer.mismatch_tables import Observed, tables
from shared.wire.algorithm import AlgorithmConfig, Filter

N, L = 2000, 100
T = N * L
SEQUENCE = torch.arange(N).repeat_interleave(L)
SIGMA = 0.02
"""Of the gaussian. Standard errors are SIGMA / sqrt(T) = 4.5e-5 of a token's mean, 1 / sqrt(2 T) = 0.16 % of a variance."""


def phi(x: float) -> float:
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


ROLLOUT = -torch.rand(T, generator=draw(0), dtype=torch.float64) * 3
SIGN = torch.where(torch.rand(N, generator=draw(1)) < 0.5, 1.0, -1.0).double()
ADVANTAGE = SIGN[SEQUENCE]
NORMAL = torch.randn(T, generator=draw(2), dtype=torch.float64)
HALF = math.sqrt(2 / math.pi)
"""Mean of |x| of a standard normal."""


def described(delta: Tensor, config: AlgorithmConfig | None = None) -> dict[str, Any]:
    train = ROLLOUT + delta
    weight = importance_weights(train, ROLLOUT, SEQUENCE, SEQUENCE, config or AlgorithmConfig())
    return describe(train, ROLLOUT, weight, ADVANTAGE, SEQUENCE)


def agree(got: dict[str, Any], expected: dict[str, tuple[float, float]]) -> None:
    """Each (value, absolute tolerance)."""
    for name, (value, tolerance) in expected.items():
        assert got[name] == pytest.approx(value, abs=tolerance), name


def test_a_gaussian_mismatch_is_reported_at_its_analytic_size() -> None:
    cap, s, total = 1.02, SIGMA, SIGMA * math.sqrt(L)
    mean_ratio, q = math.exp(s**2 / 2), float(ROLLOUT.exp().mean())
    error = mean_ratio * (2 * phi(s) - 1)
    a = math.log(cap) / s
    got = described(s * NORMAL, AlgorithmConfig(tis_cap=cap))
    agree(got, {
        "k1": (0, 2e-4),
        "k2": (s**2 / 2, 2e-6),
        "k3": (math.expm1(s**2 / 2), 2e-6),
        "k3_reverse": (math.expm1(s**2 / 2), 2e-6),
        "js": (s**2 / 8, 5e-7),
        "abs_mean": (s * HALF, 1e-4),
        "mult_prob_error": (2 * mean_ratio * phi(s), 2e-4),
        "ratio_mean": (mean_ratio, 2e-4),
        "ratio_std": (math.sqrt(math.exp(s**2) * math.expm1(s**2)), 2e-4),
        "ratio_error": (error, 1e-4),
        "chi2_token": (math.expm1(2 * s**2), 4e-4),
        "ess_raw": (math.exp(-(s**2)), 1e-5),
        "weight_mean": (mean_ratio * phi(a - s) + cap * (1 - phi(a)), 2e-4),
        "weight_max": (cap, 1e-12),
        "prob_diff_mean": (q * error, 1e-4),
        "pearson": (1, 1e-3),
        "ppl_ratio": (math.exp(s**2 / L / 2), 2e-4),
        "log_ppl_diff_mean": (0, 2e-4),
        "log_ppl_diff_abs": (s / math.sqrt(L) * HALF, 1e-4),
        "chi2_seq": (math.expm1(2 * total**2), 0.04),
        "mult_prob_error_seq_mean": (2 * mean_ratio * phi(s), 2e-4),
        "corr_token": (0, 0.01),
        "corr_seq": (0, 0.08),
        "skew_index": (0, 0.02),
        "skew_fisher": (0, 0.05),
    })  # fmt: skip
    assert got["ess_applied"] > got["ess_raw"], "a cap evens out"
    for q, z in ((0.5, 0.6745), (0.95, 1.96), (0.99, 2.576)):
        assert s * z / 10**0.25 < got[f"abs_p{round(100 * q)}"] < s * z * 10**0.25
        assert got[f"abs_p{round(100 * q)}"] == quantile(got["abs_delta_histogram"], q)
    assert 4 * s < got["abs_max"] < 6 * s
    (bucket,) = got["accumulated"]
    assert bucket["bucket"] == "up to 256"
    assert bucket["abs_sum_mean"] == pytest.approx(total * HALF, rel=0.06)
    assert bucket["sum_abs_mean"] == pytest.approx(L * s * HALF, rel=0.01)
    assert bucket["sum_k3_mean"] == pytest.approx(L * math.expm1(s**2 / 2), rel=0.01)
    assert 3 * total < bucket["max_prefix"] < 5.5 * total


def test_a_heavy_tail_is_reported_at_its_analytic_size() -> None:
    """Laplace: its variance is that of a gaussian of 0.07, its largest of 200,000 is about twice that one's."""
    b = 0.05
    uniform = torch.rand(T, generator=draw(3), dtype=torch.float64) - 0.5
    got = described(-b * uniform.sign() * torch.log1p(-2 * uniform.abs()))
    agree(got, {
        "k1": (0, 7e-4),
        "k2": (b**2, 4e-5),
        "k3": (b**2 / (1 - b**2), 4e-5),
        "abs_mean": (b, 5e-4),
        "mult_prob_error": (1 / (1 - b), 1e-3),
        "ratio_mean": (1 / (1 - b**2), 7e-4),
        "chi2_token": (1 / (1 - 4 * b**2) - 1, 2e-3),
        "ess_raw": ((1 - 4 * b**2) / (1 - b**2) ** 2, 1e-3),
    })  # fmt: skip
    assert b * math.log(T) * 0.7 < got["abs_max"] < b * math.log(T) * 2
    gaussian = described(b * math.sqrt(2) * NORMAL)
    assert gaussian["k2"] == pytest.approx(got["k2"], rel=0.02), "of the same variance,"
    assert got["abs_max"] > 1.6 * gaussian["abs_max"], "told apart by the tail"
    assert got["abs_mean"] < gaussian["abs_mean"]


@pytest.mark.parametrize("c", [0.01, -0.02])
def test_a_mismatch_that_follows_the_advantage_shows_in_what_has_a_direction(c: float) -> None:
    got = described(c * ADVANTAGE + SIGMA * NORMAL)
    size = math.sqrt(c**2 + SIGMA**2)
    agree(got, {
        "k2": (size**2 / 2, 5e-6),
        "k1": (-c * float(SIGN.mean()), 2e-4),
        "corr_token": (c / size, 0.01),
        "corr_seq": (L * c / math.sqrt(L**2 * c**2 + L * SIGMA**2), 0.02),
    })  # fmt: skip
    z = ADVANTAGE * (c * ADVANTAGE + SIGMA * NORMAL).expm1()
    mean = c * math.exp(SIGMA**2 / 2)
    spread = size / SIGMA * 0.03
    assert (got["skew_positive"] - got["skew_negative"]) / T == pytest.approx(mean, abs=5e-4)
    # E|x| of a normal around c.
    magnitude = SIGMA * HALF * math.exp(-(c**2) / (2 * SIGMA**2)) + c * (1 - 2 * phi(-c / SIGMA))
    assert got["skew_index"] == pytest.approx(c / magnitude, abs=spread)
    assert got["skew_of_positive_advantages"] + got["skew_of_negative_advantages"] == pytest.approx(float(z.sum()))


def observed(train: Tensor, **changes: Any) -> Observed:
    top1 = torch.arange(T, dtype=torch.int32)
    fields: dict[str, Any] = {
        "rollout_T": ROLLOUT.float(), "sampled_T": train, "proximal_T": train, "trained_T": train,
        "target_T": top1.long(), "top1_T": top1, "rollout_top1_T": top1, "weight_T": torch.ones(T),
        "advantage_T": ADVANTAGE.float(), "sequence_T": SEQUENCE, "staleness_T": torch.zeros(T, dtype=torch.int64),
        "is_comparable_T": torch.ones(T, dtype=torch.bool), "is_ingested_T": torch.zeros(T, dtype=torch.bool), **changes,
    }  # fmt: skip
    return Observed(**fields)


def test_one_flipped_router_shows_once_everywhere_and_rejects_its_trajectory_only() -> None:
    """One token of 200,000 was computed by another expert: far off, everything else to the bit."""
    place, size = 12_345, 8.0
    train, top1 = ROLLOUT.float(), torch.arange(T, dtype=torch.int32)
    train[place] -= size
    top1[place] = 0
    got = tables(observed(train, top1_T=top1), 0.2, 0.28)["same_version"]
    assert got["equal_fraction"] == 1 - 1 / T
    assert got["top1_flip"] == got["top1_lost"] == 1 / T
    assert got["abs_max"] == pytest.approx(size, rel=1e-6)
    assert got["abs_mean"] == pytest.approx(size / T, rel=1e-6)
    assert got["k3"] == pytest.approx((math.exp(-size) - 1 + size) / T, rel=1e-6)
    assert got["ratio_min"] == pytest.approx(math.exp(-size), rel=1e-6)
    assert got["ulp_max"] > 2**20
    assert got["accumulated"][0]["max_prefix"] == pytest.approx(size, rel=1e-6)
    assert [n for n in got["abs_delta_histogram"] if n] == [T - 1, 1]
    assert got["abs_p99"] == 0, "quantiles don't see it; the maximum and the bits do"
    veto = AlgorithmConfig(filters=(Filter(on="veto", low=1e-3, high=1e3),))
    kept = accept(train, ROLLOUT.float(), SEQUENCE, N, veto).accepted_N
    assert (~kept).nonzero().tolist() == [[place // L]]


def test_clips_and_flips_are_counted_by_staleness_and_engine() -> None:
    s, bound = SIGMA, 0.02
    staleness = torch.arange(T) % 3
    is_ingested = torch.arange(T) % 2 == 1
    train = (ROLLOUT + s * NORMAL).float()
    seen = observed(train, staleness_T=staleness, is_ingested_T=is_ingested)
    got = tables(seen, bound, bound)
    up, down = phi(-math.log(1 + bound) / s), phi(math.log(1 - bound) / s)
    for table in (got["correction"], *got["correction_by_staleness"].values()):
        assert table["clip_caused"] == pytest.approx((up + down) / 2, abs=0.006)
        assert table["clip_missed"] == 0
    assert list(got["same_version_by_staleness"]) == ["0", "1", "2-3"]
    assert got["same_version"]["tokens"] == got["ingested"]["tokens"] == T // 2
    for table in (got["same_version"], got["ingested"], *got["same_version_by_staleness"].values()):
        assert table["k2"] == pytest.approx(s**2 / 2, rel=0.02)
        assert table["equal_fraction"] < 0.01


RULES: dict[str, Callable[[float], Filter]] = {
    "token_k1": lambda b: Filter(on="token_k1", low=math.exp(-b), high=math.exp(b)),
    "seq_mean_k1": lambda b: Filter(on="seq_mean_k1", low=math.exp(-b / 10), high=math.exp(b / 10)),
    "seq_sum_k1": lambda b: Filter(on="seq_sum_k1", low=math.exp(-b * 10), high=math.exp(b * 10)),
}


@pytest.mark.parametrize("name", RULES)
def test_filters_keep_out_their_analytic_share(name: str) -> None:
    """The mean of 100 tokens has a tenth of the deviation and their sum ten times: one bound in deviations for all."""
    train, wide = ROLLOUT + SIGMA * NORMAL, 1.5
    config = AlgorithmConfig(filters=(RULES[name](wide * SIGMA),))
    kept = keep_tokens(train, ROLLOUT, ADVANTAGE, SEQUENCE, N, config)
    kept &= accept(train, ROLLOUT, SEQUENCE, N, config).accepted_N[SEQUENCE]
    expected = 2 * phi(-wide)
    got = describe_rejection(train, ROLLOUT, ADVANTAGE, kept, SEQUENCE, N, config)
    assert got["rejected_by"][name]["tokens"] == int((~kept).sum())
    assert float((~kept).double().mean()) == pytest.approx(expected, abs=0.025)
    assert got["rejected_of_positive"] == pytest.approx(expected, abs=0.035)
    assert got["rejected_of_negative"] == pytest.approx(expected, abs=0.035)
    assert got["rejected_k3"] > got["accepted_k3"]


def test_weights_report_their_bounds_raw_and_their_trajectories_applied() -> None:
    train, a = ROLLOUT + SIGMA * NORMAL, 1.0
    config = AlgorithmConfig(tis_cap=math.exp(a * SIGMA), tis_floor=math.exp(-a * SIGMA))
    weight = importance_weights(train, ROLLOUT, SEQUENCE, SEQUENCE, config)
    got = describe_weights(train, ROLLOUT, weight, SEQUENCE, SEQUENCE, config)
    assert got["ratio_high"] == pytest.approx(phi(-a), abs=0.003)
    assert got["ratio_low"] == pytest.approx(phi(-a), abs=0.003)
    assert got["weight_seq_mean"] == pytest.approx(float(weight.mean()), abs=1e-9)
    assert got["weight_seq_max_deviation"] < SIGMA


@pytest.mark.parametrize("sigma", [0.0, 0.005])
def test_bounds_calibrated_without_mismatch_reject_nothing_there_and_what_is_injected_later(sigma: float) -> None:
    """On fresh tokens without mismatch and on stale ones, whose difference is staleness alone."""
    clean = ROLLOUT + sigma * NORMAL
    bounds = tightest(clean, ROLLOUT, SEQUENCE, N)
    assert len(bounds) == 13
    noisy = clean + 0.05 * NORMAL.flip(0)
    for name, bound in bounds.items():
        config = AlgorithmConfig(filters=(Filter(on=name, **bound),))  # type: ignore[arg-type]
        if sigma == 0:
            assert bound in ({"low": 1 - 1e-12, "high": 1 + 1e-12}, {"high": 0.0})
        assert accept(clean, ROLLOUT, SEQUENCE, N, config).accepted_N.all(), name
        assert keep_tokens(clean, ROLLOUT, ADVANTAGE, SEQUENCE, N, config).all(), name
        kept_T = accept(noisy, ROLLOUT, SEQUENCE, N, config).accepted_N[SEQUENCE]
        kept_T &= keep_tokens(noisy, ROLLOUT, ADVANTAGE, SEQUENCE, N, config)
        assert float(kept_T.double().mean()) < 0.7, name
    assert bounds["seq_mean_k3"]["high"] == pytest.approx(sigma**2 / 2, rel=0.7)


def test_without_mismatch_every_metric_is_exactly_nothing() -> None:
    got = tables(observed(ROLLOUT.float()), 0.2, 0.28)
    for series in ("same_version", "correction"):
        table = got[series]
        zeros = ("k1", "k2", "k3", "k3_reverse", "js", "abs_max", "ratio_error", "chi2_token", "chi2_seq", "prob_diff_max",
                 "skew_positive", "skew_negative", "log_ppl_diff_abs")  # fmt: skip
        assert [table[n] for n in zeros] == [0] * len(zeros)
        assert {table[n] for n in ("ratio_min", "ratio_max", "ess_raw", "ess_applied", "ppl_ratio")} == {1}
    assert got["same_version"]["equal_fraction"] == 1
    assert got["same_version"]["ulp_max"] == got["same_version"]["top1_flip"] == 0
    assert float(k3(torch.zeros(1))) == 0
