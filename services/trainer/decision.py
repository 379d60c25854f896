"""What each token counts, decided once per batch and frozen over its mini-steps: who may teach, and how strongly.

Legend: T trainable tokens, N trajectories.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.trainer.advantage import advantages, shape_overlong
from services.trainer.batch import Batch
from services.trainer.correction import TOKEN_TIS, importance_weights, mean_weight, per_sequence
from services.trainer.filters import Acceptance, accept, keep_tokens
from services.trainer.loss import kl_penalty
from services.trainer.scoring import Scores
from shared.wire.algorithm import AlgorithmConfig

ADAPTIVE_KL_CLIP = 0.2
"""Largest relative error that moves the KL coefficient."""


@dataclass(frozen=True)
class Decision:
    """Fixed before the first gradient."""

    acceptance: Acceptance
    advantage_N: Tensor
    """[N] float32."""
    keep_T: Tensor
    """[T] bool: passed every token filter."""
    mean_weight: float
    """What batch normalisation divides by."""
    kl_coef: float
    """Of the penalty towards the reference in this step."""

    def accepted_T(self, batch: Batch) -> Tensor:
        """[T] bool."""
        return self.acceptance.accepted_N[batch.sequence_T] & self.keep_T


def decide(batch: Batch, scores: Scores, config: AlgorithmConfig, kl_coef: float) -> Decision:
    """Without a proximal forward there is nothing to filter by: what has no number is out, by its recorded logprob here and by
    the trainer's once that exists.
    """
    proximal_T = scores.proximal_T
    acceptance = accept_all(batch, batch.rollout_T if proximal_T is None else proximal_T, scores.reference_T, config)
    reward_N = batch.reward_N
    if config.overlong_buffer:
        reward_N = shape_overlong(
            reward_N,
            batch.num_tokens_N,
            limit=config.overlong_limit,
            buffer=config.overlong_buffer,
            factor=config.overlong_factor,
        )
    if config.kl == "k1":
        assert proximal_T is not None
        assert scores.reference_T is not None
        penalty_T = kl_penalty("k1", proximal_T, scores.reference_T)
        penalty_N = per_sequence(penalty_T, batch.sequence_T, batch.num_sequences)
        reward_N = reward_N - kl_coef * torch.where(acceptance.accepted_N, penalty_N, 0.0)
    advantage_N = advantages(
        config.advantage,
        reward_N=reward_N,
        group_N=batch.group_N,
        num_tokens_N=batch.num_tokens_N,
        accepted_N=acceptance.accepted_N,
    ).float()
    if proximal_T is None:
        return Decision(acceptance, advantage_N, torch.ones(batch.num_tokens, dtype=torch.bool), 1.0, kl_coef)
    keep_T = keep_tokens(
        proximal_T, batch.rollout_T, advantage_N[batch.sequence_T], batch.sequence_T, batch.num_sequences, config
    )
    mean = 1.0
    if config.batch_normalize:
        weight_T = importance_weights(proximal_T, batch.rollout_T, batch.sequence_T, batch.segment_T, config)
        mean = mean_weight(weight_T, batch.sequence_T, config.weight)
    return Decision(acceptance, advantage_N, keep_T, mean, kl_coef)


def accept_all(batch: Batch, train_T: Tensor, reference_T: Tensor | None, config: AlgorithmConfig) -> Acceptance:
    """By the algorithm's filters, and by whether the reference's logprobs are numbers."""
    of = (batch.rollout_T, batch.sequence_T, batch.num_sequences)
    acceptance = accept(train_T, *of, config)
    if reference_T is None:
        return acceptance
    known = accept(reference_T, *of, TOKEN_TIS)
    bad_T = ~(train_T - batch.rollout_T).isfinite() | ~reference_T.isfinite()
    return Acceptance(acceptance.accepted_N & known.accepted_N, acceptance.statistic_N, int(bad_T.sum()))


def next_kl_coef(coef: float, mean_penalty: float, num_trajectories: int, config: AlgorithmConfig) -> float:
    """coef * (1 + clip(kl / target - 1, +-0.2) * trajectories / horizon); unchanged without a target. As in verl."""
    if config.kl_target is None or not num_trajectories:
        return coef
    error = min(max(mean_penalty / config.kl_target - 1, -ADAPTIVE_KL_CLIP), ADAPTIVE_KL_CLIP)
    return coef * (1 + error * num_trajectories / config.kl_horizon)
