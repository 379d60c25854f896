"""Correction of what separates the sampler's distribution from the trainer's: token weights and rejected sequences.

With delta = trainer logprob - sampler logprob of a token (positive: the trainer finds it more probable) and r = exp(delta):
    token TIS   w = min(r, cap)                       https://fengyao.notion.site/off-policy-rl
    K1          log r     summed or averaged over a sequence, kept within [log low, log high]: the bounds act on r, not 1 / r
    K3          r - 1 - log r, as expm1(delta) - delta, which stays >= 0 where the textbook form does not; one upper bound
Rejection looks at the unclamped delta; only the weight clamps it. A token without a finite delta rejects its sequence and is
counted: it is never read as "equal".

Legend: T trainable tokens, sequence after sequence; N sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.wire.run import AlgorithmConfig

SAFETY_BOUND = 20.0
"""Clamp of a log-ratio before exp: e^20 = 4.9e8, so every weight and ratio is finite."""


@dataclass(frozen=True)
class Acceptance:
    """Which sequences may teach, decided once per batch."""

    accepted_N: Tensor
    """[N] bool."""
    statistic_N: Tensor
    """[N] float64: what the bounds were applied to; zeros without rejection."""
    num_nonfinite: int
    """Tokens without a finite delta."""


def finite_delta(train_T: Tensor, rollout_T: Tensor) -> tuple[Tensor, Tensor]:
    """delta [T] float32 with 0 where it is not finite, and the [T] bool mask of those places."""
    if train_T.shape != rollout_T.shape or train_T.dtype != torch.float32 or rollout_T.dtype != torch.float32:
        raise ValueError(
            f"logprobs must be float32 of one shape, got {train_T.dtype} {list(train_T.shape)} and "
            f"{rollout_T.dtype} {list(rollout_T.shape)}"
        )
    delta_T = train_T - rollout_T
    bad_T = ~delta_T.isfinite()
    return torch.where(bad_T, 0.0, delta_T), bad_T


def k3(delta_T: Tensor) -> Tensor:
    """exp(delta) - 1 - delta, >= 0 to the last bit and 0 only at 0."""
    return torch.expm1(delta_T) - delta_T


def accept(
    train_T: Tensor, rollout_T: Tensor, sequence_T: Tensor, num_sequences: int, config: AlgorithmConfig
) -> Acceptance:
    """Decide which sequences are kept.

    Args:
        train_T, rollout_T: [T] float32 logprobs.
        sequence_T: [T] int64 sequence of each token.
        num_sequences: N; a sequence without tokens is accepted.
        config: `rejection` and `rejection_bounds`.
    """
    delta_T, bad_T = finite_delta(train_T, rollout_T)
    accepted_N = ~_per_sequence(bad_T.double(), sequence_T, num_sequences).bool()
    statistic_N = torch.zeros(num_sequences, dtype=torch.float64, device=train_T.device)
    if config.rejection != "none":
        _, aggregation, kind = config.rejection.split("_")
        delta_T = delta_T.double()
        statistic_N = _per_sequence(delta_T if kind == "k1" else k3(delta_T), sequence_T, num_sequences)
        if aggregation == "mean":
            num_tokens_N = _per_sequence(torch.ones_like(delta_T), sequence_T, num_sequences)
            statistic_N = statistic_N / num_tokens_N.clamp(min=1)
        low, high = config.rejection_bounds
        if kind == "k1":
            accepted_N &= (statistic_N >= math.log(low)) & (statistic_N <= math.log(high))
        else:
            accepted_N &= statistic_N <= high
    return Acceptance(accepted_N=accepted_N, statistic_N=statistic_N, num_nonfinite=int(bad_T.sum()))


def token_weights(train_T: Tensor, rollout_T: Tensor, cap: float | None) -> Tensor:
    """Truncated importance weights, detached: exactly 1 where the two logprobs are equal and the cap allows it.

    Args:
        train_T, rollout_T: [T] float32 logprobs.
        cap: of the weight; None for weights of 1.

    Returns:
        [T] float32; 0 where delta is not finite.
    """
    delta_T, bad_T = finite_delta(train_T.detach(), rollout_T)
    if cap is None:
        weight_T = torch.ones_like(delta_T)
    else:
        weight_T = delta_T.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp().clamp(max=cap)
    return torch.where(bad_T, 0.0, weight_T)


def _per_sequence(value_T: Tensor, sequence_T: Tensor, num_sequences: int) -> Tensor:
    return torch.zeros(num_sequences, dtype=torch.float64, device=value_T.device).index_add_(0, sequence_T, value_T)
