"""How far the sampler and the trainer lie apart, in the field's metrics: over all tokens, before anything is rejected.

With delta = trainer logprob - sampler logprob, r = exp(delta), all in float64:
    k1, k2, k3         mean -delta; delta² / 2; r - 1 - delta     k3_reverse: the same of -delta
    js                 mean of k3 to the mixture of both, halved  a sample proxy (NeMo-RL), no true divergence
    ratio_*            of the raw r; ratio_error = mean |r - 1|   their mean is 1 where version and support agree
    weight_*           of what was applied
    chi2_token, _seq   mean r² - 1 per token; of the product over a trajectory
    ess_raw, _applied  (Σw)² / (n Σw²)
    ppl_*              exp(-mean logprob) of a trajectory; log_ppl_diff = its mean sampler - mean trainer logprob
    prob_*             |exp(trainer) - exp(sampler)|; pearson of the two probabilities
    mult_prob_error    mean exp |delta|
    corr_*             Pearson of delta with the advantage, by token and summed by trajectory
    skew_*             z = A (r - 1), the part of the gradient that the sampler leaves out; index = (Σz⁺ - Σ|z⁻|) / Σ|z|
    |delta|            counts in fixed logarithmic buckets, so that ranks, steps and runs can be added up; abs_p*: the upper
                       bound of the bucket of the quantile
A correlation without variance is null. Tokens without a finite delta are left out and counted.

Legend: T tokens; N trajectories.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.trainer.correction import SAFETY_BOUND, finite_delta, k3, per_sequence, safe_exp

BUCKET_BOUNDS = tuple(10 ** (e / 4) for e in range(-28, 6))
"""Upper bounds of |delta|, four a decade from 1e-7 to 18; one bucket before them is exactly 0, one behind them open."""
LENGTH_BOUNDS = (64, 256, 1024, 4096, 16384)
"""Upper bounds of a trajectory's trainable tokens."""
STALENESS_BUCKETS = ((0, 0), (1, 1), (2, 3), (4, 7), (8, 2**31))
"""First and last step of each."""


def describe(
    train_T: Tensor, rollout_T: Tensor, weight_T: Tensor, advantage_T: Tensor, sequence_T: Tensor
) -> dict[str, Any]:
    """Every metric of one set of tokens, JSON-ready.

    Args:
        train_T, rollout_T: [T] logprobs, float32 or float64.
        weight_T: [T] applied.
        advantage_T: [T] of each token's trajectory.
        sequence_T: [T] int64 trajectory of each token, ascending.
    """
    _, bad_T = finite_delta(train_T, rollout_T)
    train_T, rollout_T, weight_T, advantage_T = (
        x[~bad_T].double() for x in (train_T, rollout_T, weight_T, advantage_T)
    )
    _, sequence_T = sequence_T[~bad_T].unique(return_inverse=True)
    counts = {"tokens": len(train_T), "nonfinite": int(bad_T.sum())}
    if not len(train_T):
        return counts
    delta_T = train_T - rollout_T
    buckets = histogram(delta_T)
    return {
        **counts,
        **divergences(train_T, rollout_T),
        **ratios(delta_T, weight_T),
        **probabilities(train_T, rollout_T),
        **skew(delta_T, advantage_T),
        **by_sequence(train_T, rollout_T, advantage_T, sequence_T),
        **{f"abs_p{round(100 * q)}": _json_bound(quantile(buckets, q)) for q in (0.5, 0.95, 0.99)},
        "abs_delta_histogram": buckets,
    }


def divergences(train_T: Tensor, rollout_T: Tensor) -> dict[str, float]:
    """KL estimators and their relatives."""
    delta_T = train_T - rollout_T
    mixture_T = torch.logaddexp(train_T, rollout_T) - math.log(2)
    return {
        "k1": float(-delta_T.mean()),
        "k2": float(delta_T.square().mean() / 2),
        "k3": float(k3(delta_T).mean()),
        "k3_reverse": float(k3(-delta_T).mean()),
        "js": float((k3(train_T - mixture_T) + k3(rollout_T - mixture_T)).mean() / 2) if bool(delta_T.any()) else 0.0,
        "abs_mean": float(delta_T.abs().mean()),
        "abs_max": float(delta_T.abs().max()),
        "mult_prob_error": float(safe_exp(delta_T.abs()).mean()),
    }


def ratios(delta_T: Tensor, weight_T: Tensor) -> dict[str, float]:
    """Raw ratios and applied weights."""
    ratio_T = safe_exp(delta_T)
    return {
        **_spread("ratio", ratio_T),
        "ratio_error": float((ratio_T - 1).abs().mean()),
        "chi2_token": float(safe_exp(2 * delta_T).mean() - 1),
        "ess_raw": effective_sample_size(ratio_T),
        **_spread("weight", weight_T),
        "ess_applied": effective_sample_size(weight_T),
    }


def probabilities(train_T: Tensor, rollout_T: Tensor) -> dict[str, float | None]:
    """Distances of probabilities, which rare tokens don't dominate."""
    p_T, q_T = train_T.exp(), rollout_T.exp()
    distance_T = (p_T - q_T).abs()
    return {
        "prob_diff_mean": float(distance_T.mean()),
        "prob_diff_max": float(distance_T.max()),
        "prob_diff_std": float(distance_T.std()) if len(distance_T) > 1 else 0.0,
        "pearson": pearson(p_T, q_T),
    }


def skew(delta_T: Tensor, advantage_T: Tensor) -> dict[str, float | None]:
    """Zero-centred contributions z = A (r - 1), all and by the sign of the advantage."""
    z_T = advantage_T * torch.expm1(delta_T.clamp(-20, 20))
    up, down = float(z_T.clamp(min=0).sum()), float(-z_T.clamp(max=0).sum())
    centred_T = z_T - z_T.mean()
    variance = float(centred_T.square().mean())
    return {
        "skew_positive": up,
        "skew_negative": down,
        "skew_index": (up - down) / (up + down) if up + down > 0 else 0.0,
        "skew_fisher": float(centred_T.pow(3).mean()) / variance**1.5 if variance > 0 else None,
        "skew_of_positive_advantages": float(z_T[advantage_T > 0].sum()),
        "skew_of_negative_advantages": float(z_T[advantage_T < 0].sum()),
        "corr_token": pearson(delta_T, advantage_T),
    }


def by_sequence(train_T: Tensor, rollout_T: Tensor, advantage_T: Tensor, sequence_T: Tensor) -> dict[str, Any]:
    """What adds up over a trajectory; `sequence_T` numbers them from 0 without a gap."""
    n, delta_T = int(sequence_T[-1]) + 1, train_T - rollout_T
    length_N = per_sequence(torch.ones_like(delta_T), sequence_T, n)
    sum_N = per_sequence(delta_T, sequence_T, n)
    train_N, rollout_N = (per_sequence(x, sequence_T, n) / length_N for x in (train_T, rollout_T))
    difference_N = -(sum_N / length_N)
    error_N = per_sequence(safe_exp(delta_T.abs()), sequence_T, n) / length_N
    return {
        "ppl_train": float(safe_exp(-train_N).mean()),
        "ppl_rollout": float(safe_exp(-rollout_N).mean()),
        "ppl_ratio": float(safe_exp(difference_N).mean()),
        "log_ppl_diff_mean": float(difference_N.mean()),
        "log_ppl_diff_abs": float(difference_N.abs().mean()),
        "log_ppl_diff_max": float(difference_N.max()),
        "log_ppl_diff_min": float(difference_N.min()),
        "chi2_seq": float(safe_exp(sum_N).square().mean() - 1),
        "mult_prob_error_seq_mean": float(error_N.mean()),
        "mult_prob_error_seq_max": float(error_N.max()),
        "mult_prob_error_seq_min": float(error_N.min()),
        "corr_seq": pearson(sum_N, per_sequence(advantage_T, sequence_T, n) / length_N),
        "accumulated": list(_accumulated(delta_T, sequence_T, length_N, sum_N)),
    }


def _accumulated(delta_T: Tensor, sequence_T: Tensor, length_N: Tensor, sum_N: Tensor) -> Iterator[dict[str, Any]]:
    n = len(length_N)
    running_T = delta_T.cumsum(0)
    # The running sum of a trajectory is that of the batch minus what came before it.
    before_N = torch.cat([running_T.new_zeros(1), running_T])[(length_N.cumsum(0) - length_N).long()]
    prefix_N = torch.zeros(n, dtype=torch.float64).scatter_reduce_(
        0, sequence_T, (running_T - before_N[sequence_T]).abs(), "amax"
    )
    size_N = per_sequence(delta_T.abs(), sequence_T, n)
    k3_N = per_sequence(k3(delta_T), sequence_T, n)
    bucket_N = torch.bucketize(length_N, torch.tensor(LENGTH_BOUNDS, dtype=torch.float64))
    for index, longest in enumerate((*LENGTH_BOUNDS, None)):
        of = bucket_N == index
        if bool(of.any()):
            yield {
                "bucket": f"up to {longest}" if longest else f"above {LENGTH_BOUNDS[-1]}",
                "longest": longest or int(length_N.max()),
                "trajectories": int(of.sum()),
                "abs_sum_mean": float(sum_N[of].abs().mean()),
                "sum_abs_mean": float(size_N[of].mean()),
                "sum_k3_mean": float(k3_N[of].mean()),
                "max_prefix": float(prefix_N[of].max()),
            }


def by_staleness(staleness_T: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Name and [T] bool mask of each bucket that holds a token: 0, 1, 2-3, 4-7, 8+."""
    for first, last in STALENESS_BUCKETS:
        of_T = (staleness_T >= first) & (staleness_T <= last)
        if bool(of_T.any()):
            yield f"{first}+" if last > 8 else str(first) if first == last else f"{first}-{last}", of_T


def clips_by_tim(
    logprob_T: Tensor, proximal_T: Tensor, rollout_T: Tensor, advantage_T: Tensor, low: float, high: float
) -> dict[str, float]:
    """Tokens that the clip treats otherwise than it would if sampler and trainer agreed.

    `caused`: only the ratio to the sampler is clipped; `missed`: only the ratio to the proximal policy. As shares.
    """

    def is_clipped(behind_T: Tensor) -> Tensor:
        ratio_T = safe_exp(logprob_T - behind_T)
        return ((advantage_T > 0) & (ratio_T > 1 + high)) | ((advantage_T < 0) & (ratio_T < 1 - low))

    to_sampler_T, to_proximal_T = is_clipped(rollout_T), is_clipped(proximal_T)
    num_tokens = max(len(logprob_T), 1)
    return {
        "clip_caused": int((to_sampler_T & ~to_proximal_T).sum()) / num_tokens,
        "clip_missed": int((to_proximal_T & ~to_sampler_T).sum()) / num_tokens,
    }


def histogram(delta_T: Tensor) -> list[int]:
    """Counts of |delta|: [exactly 0, up to each of BUCKET_BOUNDS, above]; histograms add up element by element."""
    size = delta_T.abs().numpy()
    counts = np.bincount(np.searchsorted(BUCKET_BOUNDS, size[size > 0]), minlength=len(BUCKET_BOUNDS) + 1)
    return [int((size == 0).sum()), *counts.tolist()]


def quantile(counts: list[int], q: float) -> float:
    """Upper bound of the bucket that holds the q-quantile of |delta|; inf in the last one, 0 without tokens."""
    bounds = (0.0, *BUCKET_BOUNDS, math.inf)
    total = np.cumsum(counts)
    return bounds[int(np.searchsorted(total, q * total[-1]))] if total[-1] else 0.0


def _json_bound(bound: float) -> float:
    """The open bucket's bound, which JSON can't hold, becomes the largest difference that has meaning."""
    return min(bound, SAFETY_BOUND)


def pearson(x: Tensor, y: Tensor) -> float | None:
    """None where a side is constant or there are fewer than two values."""
    if len(x) < 2 or bool((x == x[0]).all()) or bool((y == y[0]).all()):
        return None
    x, y = x - x.mean(), y - y.mean()
    norm = float(x.square().sum().sqrt() * y.square().sum().sqrt())
    return float((x * y).sum()) / norm if norm > 0 else None


def effective_sample_size(weight_T: Tensor) -> float:
    """(Σw)² / (n Σw²): 1 when all weights are equal; 0 without any."""
    weight_T = weight_T.double()
    squares = weight_T.square().sum()
    return float(weight_T.sum().square() / (len(weight_T) * squares)) if bool(squares > 0) else 0.0


def _spread(name: str, value: Tensor) -> dict[str, float]:
    return {
        f"{name}_mean": float(value.mean()),
        f"{name}_min": float(value.min()),
        f"{name}_max": float(value.max()),
        f"{name}_std": float(value.std()) if len(value) > 1 else 0.0,
    }
