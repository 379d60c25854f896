"""What is kept out of the loss: tokens and whole sequences, decided once per batch, before the first gradient.

With delta = trainer logprob - sampler logprob, r = exp(delta), p = exp(trainer), q = exp(sampler):
    k1          log r, kept within [log low, log high]: the bounds act on r, not 1 / r
    k2, k3      delta² / 2 and r - 1 - log r; one upper bound
    token_*     each token; seq_sum_*, seq_mean_*, seq_max_* whole sequences (max of k1: every token within the bounds)
    veto        seq_max_k1: one impossible token, either way, rejects its sequence
    mult_prob_error   mean exp|delta| of a sequence                      NeMo-RL
    kpop        max(D(p,q), D(q,p)), D the KL of two coins               https://ringtech.notion.site/kpop
    ipo         |p - q|                                                  prime-rl
    dppo_tv     p - q <= high where A > 0, p - q >= -low elsewhere       https://arxiv.org/abs/2602.04879
    dppo_kl     D(q,p) <= bound, or the step leads back                  the same
    opsm        sequences with A < 0 whose mean of -delta exceeds high   https://arxiv.org/abs/2512.02556, eq. 9
    m2po        drops the largest delta² until the mean of the rest is below high   https://arxiv.org/abs/2510.01161
All must be passed. Bounds look at the unclamped delta. Sequences that fail leave the statistics of their siblings, except
by opsm, which needs the advantages first.

Legend: T trainable tokens, sequence after sequence; N sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from services.trainer.correction import finite_delta, k3, per_sequence
from shared.wire.algorithm import AlgorithmConfig, Filter

PROBABILITY_FLOOR = 1e-8
"""Of p and q in the KL of two coins, which is infinite at 0 and 1."""


@dataclass(frozen=True)
class Acceptance:
    """Which sequences may teach, decided once per batch."""

    accepted_N: Tensor
    """[N] bool."""
    statistic_N: Tensor
    """[N] float64: what the bounds of the first sequence filter were applied to; zeros without one."""
    num_nonfinite: int
    """Tokens without a finite delta."""


def k1(delta_T: Tensor) -> Tensor:
    """log r."""
    return delta_T


def k2(delta_T: Tensor) -> Tensor:
    """(log r)² / 2."""
    return delta_T.square() / 2


KINDS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def seq_sum(value_T: Tensor, sequence_T: Tensor, num_sequences: int) -> Tensor:
    """Grows with length."""
    return per_sequence(value_T, sequence_T, num_sequences)


def seq_mean(value_T: Tensor, sequence_T: Tensor, num_sequences: int) -> Tensor:
    """Does not; 0 for a sequence without tokens."""
    num_tokens_N = per_sequence(torch.ones_like(value_T), sequence_T, num_sequences)
    return per_sequence(value_T, sequence_T, num_sequences) / num_tokens_N.clamp(min=1)


def seq_max(value_T: Tensor, sequence_T: Tensor, num_sequences: int) -> Tensor:
    """0 for a sequence without tokens."""
    largest_N = torch.zeros(num_sequences, dtype=torch.float64, device=value_T.device)
    return largest_N.scatter_reduce_(0, sequence_T, value_T.double(), "amax", include_self=False)


AGGREGATIONS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {"sum": seq_sum, "mean": seq_mean, "max": seq_max}


def coin_kl(p_T: Tensor, q_T: Tensor) -> Tensor:
    """p log(p/q) + (1-p) log((1-p)/(1-q)) in float64."""
    p_T, q_T = (x.double().clamp(PROBABILITY_FLOOR, 1 - PROBABILITY_FLOOR) for x in (p_T, q_T))
    return p_T * (p_T / q_T).log() + (1 - p_T) * ((1 - p_T) / (1 - q_T)).log()


def kpop(p_T: Tensor, q_T: Tensor, advantage_T: Tensor, low: float, high: float) -> Tensor:
    """Both directions of the coins' KL are at most `high`."""
    return torch.maximum(coin_kl(p_T, q_T), coin_kl(q_T, p_T)) <= high


def ipo(p_T: Tensor, q_T: Tensor, advantage_T: Tensor, low: float, high: float) -> Tensor:
    """The probability moved by at most `high`."""
    return (p_T - q_T).abs() <= high


def dppo_tv(p_T: Tensor, q_T: Tensor, advantage_T: Tensor, low: float, high: float) -> Tensor:
    """The probability has not moved further than the bound in the direction in which the advantage pushes."""
    return torch.where(advantage_T > 0, p_T - q_T <= high, p_T - q_T >= -low)


def dppo_kl(p_T: Tensor, q_T: Tensor, advantage_T: Tensor, low: float, high: float) -> Tensor:
    """The same with D(q, p) as the distance."""
    distance_T = coin_kl(q_T, p_T)
    return torch.where(advantage_T > 0, (distance_T <= high) | (p_T <= q_T), (distance_T <= low) | (p_T >= q_T))


PROBABILITY_FILTERS: dict[str, Callable[[Tensor, Tensor, Tensor, float, float], Tensor]] = {
    "kpop": kpop,
    "ipo": ipo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
}


def m2po(delta_T: Tensor, high: float) -> Tensor:
    """Largest second moment first, tokens are dropped until the mean of delta² over the rest is below `high`."""
    square_T = delta_T.double().square()
    ascending, order = square_T.sort(stable=True)
    means = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1, device=delta_T.device)
    keep_T = torch.zeros_like(delta_T, dtype=torch.bool)
    # Means of a sorted series ascend, so those below the bound are a prefix.
    keep_T[order[means < high]] = True
    return keep_T


def _statistic(rule: Filter, delta_T: Tensor, sequence_T: Tensor, num_sequences: int) -> Tensor:
    if rule.on == "mult_prob_error":
        return seq_mean(delta_T.abs().exp(), sequence_T, num_sequences)
    _, aggregation, kind = ("seq_max_k1" if rule.on == "veto" else rule.on).split("_")
    return AGGREGATIONS[aggregation](KINDS[kind](delta_T), sequence_T, num_sequences)


def _keep_sequences(rule: Filter, delta_T: Tensor, sequence_T: Tensor, num_sequences: int) -> tuple[Tensor, Tensor]:
    """[N] bool and the [N] statistic."""
    statistic_N = _statistic(rule, delta_T, sequence_T, num_sequences)
    if rule.low is None:
        return statistic_N <= rule.high, statistic_N
    smallest_N = statistic_N
    if rule.on in ("veto", "seq_max_k1"):
        smallest_N = -seq_max(-delta_T, sequence_T, num_sequences)
    return (smallest_N >= math.log(rule.low)) & (statistic_N <= math.log(rule.high)), statistic_N


def accept(
    train_T: Tensor, rollout_T: Tensor, sequence_T: Tensor, num_sequences: int, config: AlgorithmConfig
) -> Acceptance:
    """Decide which sequences are kept, by everything that does not need their advantage.

    Args:
        train_T, rollout_T: [T] logprobs, float32 or float64.
        sequence_T: [T] int64 sequence of each token.
        num_sequences: N; a sequence without tokens is accepted.
        config: rejection, rejection_bounds, filters.
    """
    delta_T, bad_T = finite_delta(train_T, rollout_T)
    accepted_N = is_finite(train_T, rollout_T, sequence_T, num_sequences)
    statistic_N = torch.zeros(num_sequences, dtype=torch.float64, device=train_T.device)
    rules = [f for f in config.all_filters if f.on.startswith("seq") or f.on in ("veto", "mult_prob_error")]
    for index, rule in enumerate(rules):
        kept_N, values_N = _keep_sequences(rule, delta_T.double(), sequence_T, num_sequences)
        accepted_N &= kept_N
        statistic_N = values_N if index == 0 else statistic_N
    return Acceptance(accepted_N=accepted_N, statistic_N=statistic_N, num_nonfinite=int(bad_T.sum()))


def is_finite(train_T: Tensor, rollout_T: Tensor, sequence_T: Tensor, num_sequences: int) -> Tensor:
    """[N] bool: no logprob of the sequence is missing. Waits for no device; arguments as for `accept`."""
    _, bad_T = finite_delta(train_T, rollout_T)
    return ~per_sequence(bad_T, sequence_T, num_sequences).bool()


def keep_tokens(
    train_T: Tensor, rollout_T: Tensor, advantage_T: Tensor, sequence_T: Tensor, num_sequences: int,
    config: AlgorithmConfig,
) -> Tensor:  # fmt: skip
    """Decide which tokens are kept, by token filters and opsm; [T] bool over the whole batch.

    Args:
        train_T, rollout_T: [T] logprobs, float32 or float64.
        advantage_T: [T] of each token's trajectory.
    """
    delta_T, bad_T = finite_delta(train_T, rollout_T)
    keep_T = ~bad_T
    # Where delta is not finite the probabilities are replaced as well; such tokens are out already.
    p_T, q_T = (torch.where(bad_T, 0.0, x.double()).exp() for x in (train_T, rollout_T))
    for rule in config.all_filters:
        if rule.on in PROBABILITY_FILTERS:
            low = rule.high if rule.low is None else rule.low
            keep_T &= PROBABILITY_FILTERS[rule.on](p_T, q_T, advantage_T, low, rule.high)
        elif rule.on == "m2po":
            keep_T &= m2po(delta_T, rule.high)
        elif rule.on == "opsm":
            behind_N = seq_mean(-delta_T.double(), sequence_T, num_sequences)
            keep_T &= (advantage_T >= 0) | (behind_N[sequence_T] <= rule.high)
        elif rule.on == "token_k1":
            assert rule.low is not None
            keep_T &= (delta_T.double() >= math.log(rule.low)) & (delta_T.double() <= math.log(rule.high))
        elif rule.on.startswith("token_"):
            keep_T &= KINDS[rule.on.removeprefix("token_")](delta_T.double()) <= rule.high
    return keep_T
