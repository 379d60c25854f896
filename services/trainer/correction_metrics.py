"""What the correction did to a batch: whom it weighed down, whom it kept out, and what the clip cut.

    ratio_high, ratio_low    share of tokens whose raw ratio lies above tis_cap, below tis_floor
    weight_seq_*             of the trajectories' mean applied weights; max_deviation = max |mean - 1|
    rejected_by              what each filter alone would keep out, so that one that never acts or does everything shows
    rejected_of_positive     share of the tokens with A > 0 that is kept out; of_negative: with A < 0
    accepted_k3, rejected_k3 mean k3 on either side: a filter that keeps out what agrees is set wrong
    tightest                 of each statistic, the bounds that would just keep this batch: what to calibrate with
    clip_*                   shares of all tokens: cut above with A > 0, below with A < 0, and by the dual clip

Legend: T trainable tokens; N trajectories.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from services.trainer.correction import RATIOS, finite_delta, k3, per_sequence, safe_exp
from services.trainer.filters import AGGREGATIONS, KINDS, accept, keep_tokens
from shared.wire.algorithm import AlgorithmConfig, Filter

ROUNDING = 1e-12
"""More than exp and log lose on the way there and back."""


def describe_weights(
    train_T: Tensor, rollout_T: Tensor, weight_T: Tensor, sequence_T: Tensor, segment_T: Tensor, config: AlgorithmConfig
) -> dict[str, float]:
    """Raw ratios against their bounds, and the applied weights by trajectory.

    Args:
        train_T, rollout_T: [T] float32 that the weights compare.
        weight_T: [T] applied.
    """
    delta_T, bad_T = finite_delta(train_T, rollout_T)
    if bool(bad_T.all()):
        return {}
    ratio_T = RATIOS[config.weight](delta_T, sequence_T, segment_T)[~bad_T]
    _, unit_T = sequence_T[~bad_T].unique(return_inverse=True)
    num_sequences = int(unit_T.max()) + 1
    num_tokens_N = per_sequence(torch.ones_like(ratio_T), unit_T, num_sequences)
    mean_N = per_sequence(weight_T[~bad_T], unit_T, num_sequences) / num_tokens_N
    return {
        "ratio_high": 0.0 if config.tis_cap is None else _share(ratio_T > config.tis_cap),
        "ratio_low": _share(ratio_T < config.tis_floor),
        "weight_seq_mean": float(mean_N.mean()),
        "weight_seq_std": float(mean_N.std()) if num_sequences > 1 else 0.0,
        "weight_seq_min": float(mean_N.min()),
        "weight_seq_max": float(mean_N.max()),
        "weight_seq_max_deviation": float((mean_N - 1).abs().max()),
    }


def describe_rejection(
    train_T: Tensor, rollout_T: Tensor, advantage_T: Tensor, accepted_T: Tensor, sequence_T: Tensor, num_sequences: int,
    config: AlgorithmConfig,
) -> dict[str, Any]:  # fmt: skip
    """Who was kept out, by which filter, and how far off it was.

    Args:
        train_T, rollout_T: [T] float32 that the filters compared.
        accepted_T: [T] bool, the decision.
    """
    delta_T, bad_T = finite_delta(train_T, rollout_T)
    positive_T, negative_T = advantage_T > 0, advantage_T < 0
    return {
        "rejected_by": {
            rule.on: {"trajectories": int((~kept_N).sum()), "tokens": int((~kept_T).sum())}
            for rule in config.all_filters
            for kept_N, kept_T in [_alone(rule, train_T, rollout_T, advantage_T, sequence_T, num_sequences)]
        },
        "rejected_of_positive": _share(~accepted_T[positive_T]),
        "rejected_of_negative": _share(~accepted_T[negative_T]),
        "accepted_k3": _mean_k3(delta_T[accepted_T & ~bad_T]),
        "rejected_k3": _mean_k3(delta_T[~accepted_T & ~bad_T]),
    }


def tightest(train_T: Tensor, rollout_T: Tensor, sequence_T: Tensor, num_sequences: int) -> dict[str, dict[str, float]]:
    """`low` and `high` as a filter takes them, by its name; on a batch without mismatch 1 and 1, or 0.

    Bounds on the ratio are widened by a rounding of their logarithm.
    """
    delta_T, bad_T = finite_delta(train_T, rollout_T)
    delta_T, sequence_T = delta_T[~bad_T].double(), sequence_T[~bad_T]
    bounds: dict[str, dict[str, float]] = {}
    if not len(delta_T):
        return bounds
    for kind, statistic in KINDS.items():
        of_token_T = statistic(delta_T)
        values = {f"token_{kind}": of_token_T}
        for name, aggregate in AGGREGATIONS.items():
            values[f"seq_{name}_{kind}"] = aggregate(of_token_T, sequence_T, num_sequences)
        if kind == "k1":
            # The largest k1 of a trajectory has bounds in both directions, as the tokens have.
            values["seq_max_k1"] = values["veto"] = of_token_T
            bounds.update({name: _ratio_bounds(value) for name, value in values.items()})
        else:
            bounds.update({name: {"high": float(value.max())} for name, value in values.items()})
    return bounds


def _ratio_bounds(log_ratio: Tensor) -> dict[str, float]:
    # Beyond e^700 a double ends; nothing has such a ratio but by a fault.
    low, high = (min(max(float(x), -700.0), 700.0) for x in (log_ratio.min(), log_ratio.max()))
    return {"low": min(1.0, math.exp(low) * (1 - ROUNDING)), "high": max(1.0, math.exp(high) * (1 + ROUNDING))}


def describe_clip(is_clipped_T: Tensor, ratio_T: Tensor, advantage_T: Tensor) -> dict[str, float]:
    """Which bound cut how many of all tokens.

    Args:
        is_clipped_T: [T] bool, the token's gradient was cut.
        ratio_T: [T] that the loss sees.
    """
    negative_T = is_clipped_T & (advantage_T < 0)
    return {
        "clip_high": _share(is_clipped_T & (advantage_T > 0)),
        "clip_low": _share(negative_T & (ratio_T < 1)),
        "clip_dual": _share(negative_T & (ratio_T >= 1)),
    }


def describe_mini_step(logprob_T: Tensor, proximal_T: Tensor, is_clipped_T: Tensor) -> dict[str, float | int]:
    """How far the policy had moved from the batch's frozen one when it saw this part; ratios are exactly 1 in the first.

    Args:
        logprob_T: [T] float32 of the mini-step's tokens while they were trained on.
        proximal_T: [T] frozen.
    """
    delta_T, bad_T = finite_delta(logprob_T, proximal_T)
    ratio_T = safe_exp(delta_T[~bad_T].double())
    if not len(ratio_T):
        return {"tokens": 0}
    return {
        "tokens": len(ratio_T),
        "ratio_mean": float(ratio_T.mean()),
        "ratio_min": float(ratio_T.min()),
        "ratio_max": float(ratio_T.max()),
        "clip_fraction": _share(is_clipped_T),
    }


def _alone(
    rule: Filter, train_T: Tensor, rollout_T: Tensor, advantage_T: Tensor, sequence_T: Tensor, num_sequences: int
) -> tuple[Tensor, Tensor]:
    """[N] and [T] bool that one filter would keep."""
    config = AlgorithmConfig(filters=(rule,))
    kept_N = accept(train_T, rollout_T, sequence_T, num_sequences, config).accepted_N
    kept_T = keep_tokens(train_T, rollout_T, advantage_T, sequence_T, num_sequences, config)
    return kept_N, kept_N[sequence_T] & kept_T


def _share(of: Tensor) -> float:
    return float(of.double().mean()) if len(of) else 0.0


def _mean_k3(delta_T: Tensor) -> float:
    return float(k3(delta_T.double()).mean()) if len(delta_T) else 0.0
