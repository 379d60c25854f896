"""Importance weights for what separates the sampler's distribution from the trainer's.

With delta = trainer logprob - sampler logprob of a token (positive: the trainer finds it more probable) and r = exp(delta):
    token       r of each token                        token TIS, https://fengyao.notion.site/off-policy-rl
    sequence    exp(Σ delta)                           unbiased, and dies with length
    geometric   exp(mean delta) of a trajectory        biased, does not depend on length
    segment     exp(mean delta) of a turn              each run of tokens sampled without a break
    clamp       w = clamp(ratio, floor, cap)           truncated importance sampling
    mask        w = ratio inside [floor, cap], else 0  per token IcePop, https://arxiv.org/abs/2510.18855; else masked IS
delta is clamped to +-20 before exp, and a sum of deltas behind the summation. A token without a finite delta has weight 0
and its sequence is rejected (filters.py): it is never read as "equal".

Legend: T trainable tokens, sequence after sequence; U units that one weight covers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from shared.wire.algorithm import AlgorithmConfig

SAFETY_BOUND = 20.0
"""Clamp of a log-ratio before exp: e^20 = 4.9e8, so every weight and ratio is finite."""
NORMALIZE_FLOOR = 1e-8
"""A smaller mean weight is not divided by."""
TOKEN_TIS = AlgorithmConfig()


def finite_delta(train_T: Tensor, rollout_T: Tensor) -> tuple[Tensor, Tensor]:
    """delta [T] with 0 where it is not finite, and the [T] bool mask of those places; float32 or float64."""
    is_float = train_T.dtype in (torch.float32, torch.float64)
    if train_T.shape != rollout_T.shape or train_T.dtype != rollout_T.dtype or not is_float:
        raise ValueError(
            f"logprobs must both be float32 of one shape (float64 for reference), got {train_T.dtype} {list(train_T.shape)} "
            f"and {rollout_T.dtype} {list(rollout_T.shape)}"
        )
    delta_T = train_T - rollout_T
    bad_T = ~delta_T.isfinite()
    return torch.where(bad_T, 0.0, delta_T), bad_T


def safe_exp(delta: Tensor) -> Tensor:
    """exp of the log-ratio clamped to +-20."""
    return delta.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp()


def token_ratio(delta_T: Tensor, sequence_T: Tensor, segment_T: Tensor) -> Tensor:
    """r_t = exp(delta_t)."""
    return safe_exp(delta_T)


def sequence_ratio(delta_T: Tensor, sequence_T: Tensor, segment_T: Tensor) -> Tensor:
    """exp(Σ delta) of the trajectory, at each of its tokens."""
    return _spread(delta_T, sequence_T, is_mean=False)


def geometric_ratio(delta_T: Tensor, sequence_T: Tensor, segment_T: Tensor) -> Tensor:
    """exp(mean delta) of the trajectory, at each of its tokens."""
    return _spread(delta_T, sequence_T, is_mean=True)


def segment_ratio(delta_T: Tensor, sequence_T: Tensor, segment_T: Tensor) -> Tensor:
    """exp(mean delta) of the turn, at each of its tokens."""
    return _spread(delta_T, segment_T, is_mean=True)


RATIOS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "token": token_ratio,
    "sequence": sequence_ratio,
    "geometric": geometric_ratio,
    "segment": segment_ratio,
}


def importance_weights(
    train_T: Tensor, rollout_T: Tensor, sequence_T: Tensor, segment_T: Tensor, config: AlgorithmConfig
) -> Tensor:
    """Weights, detached: exactly 1 where the logprobs that a weight covers are equal and its bounds allow it.

    Args:
        train_T, rollout_T: [T] logprobs, float32 or float64.
        sequence_T, segment_T: [T] int64 trajectory and turn of each token; whole ones, numbered in any way.
        config: weight, tis_cap, tis_floor, outside.

    Returns:
        [T] of the same dtype; 0 where delta is not finite.
    """
    delta_T, bad_T = finite_delta(train_T.detach(), rollout_T)
    if config.tis_cap is None:
        weight_T = torch.ones_like(delta_T)
    else:
        ratio_T = RATIOS[config.weight](delta_T, sequence_T, segment_T)
        weight_T = ratio_T.clamp(min=config.tis_floor, max=config.tis_cap)
        if config.outside == "mask":
            weight_T = torch.where(weight_T == ratio_T, ratio_T, 0.0)
    return torch.where(bad_T, 0.0, weight_T)


def token_weights(train_T: Tensor, rollout_T: Tensor, cap: float | None) -> Tensor:
    """Token TIS: min(exp(delta), cap); 1 without a cap."""
    none = torch.zeros(0, dtype=torch.int64)
    return importance_weights(train_T, rollout_T, none, none, replace(TOKEN_TIS, tis_cap=cap))


def mean_weight(weight_T: Tensor, sequence_T: Tensor, unit: str) -> float:
    """What batch normalisation divides by, behind the truncation: the mean over tokens, or over trajectories' weights.

    Args:
        weight_T: [T] of a whole batch.
        unit: token | sequence.

    Returns:
        1 where there is nothing to divide by.
    """
    weight_T = weight_T.double()
    if unit == "sequence":
        num_sequences = int(sequence_T.max()) + 1 if len(sequence_T) else 0
        num_tokens_N = per_sequence(torch.ones_like(weight_T), sequence_T, num_sequences)
        weight_T = (per_sequence(weight_T, sequence_T, num_sequences) / num_tokens_N.clamp(min=1))[num_tokens_N > 0]
    mean = float(weight_T.mean()) if len(weight_T) else 1.0
    return mean if mean > NORMALIZE_FLOOR else 1.0


def k3(delta_T: Tensor) -> Tensor:
    """exp(delta) - 1 - delta, never negative, and 0 only where delta² / 2 is below the last bit of delta: expm1 keeps what the
    textbook form cancels."""
    return torch.expm1(delta_T) - delta_T


def per_sequence(value_T: Tensor, sequence_T: Tensor, num_sequences: int) -> Tensor:
    """[N] float64 sums."""
    sums_N = torch.zeros(num_sequences, dtype=torch.float64, device=value_T.device)
    return sums_N.index_add_(0, sequence_T, value_T.double())


def unit_mean(value_T: Tensor, unit_T: Tensor, *, is_mean: bool = True) -> Tensor:
    """[T]: the mean (or sum) over the unit of each token; differentiable, float64 inside."""
    _, unit_T, counts_U = unit_T.unique(return_inverse=True, return_counts=True)
    sums_U = torch.zeros(len(counts_U), dtype=torch.float64, device=value_T.device)
    sums_U = sums_U.index_add(0, unit_T, value_T.double())
    return (sums_U / counts_U if is_mean else sums_U)[unit_T]


def _spread(delta_T: Tensor, unit_T: Tensor, *, is_mean: bool) -> Tensor:
    return safe_exp(unit_mean(delta_T, unit_T, is_mean=is_mean)).to(delta_T.dtype)
