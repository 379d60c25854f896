"""Policy losses per token, and their sum over a batch with denominators fixed before any micro-batch is cut.

    loss = Σ_t scale_t * [accepted] * w_t * L_t
    ppo_clip    L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)),  r = exp(logprob - proximal)   (decoupled: w from the
                proximal policy, https://arxiv.org/abs/2110.00641; clip-higher, https://arxiv.org/abs/2503.14476)
    reinforce   L = -A * logprob,  w from the policy being optimised
scale_t is 1 / (tokens of the optimizer step), or 1 / (its sequences * tokens of the sequence). What is rejected keeps its
place in the denominator: it contributes nothing and does not make the others weigh more.

Legend: T trainable tokens of a micro-batch or batch; N sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from services.trainer.correction import SAFETY_BOUND, token_weights
from shared.wire.run import AlgorithmConfig


@dataclass(frozen=True)
class TokenLoss:
    """L [T], with gradient, and what happened."""

    loss_T: Tensor
    is_clipped_T: Tensor
    """[T] bool: the token's gradient was cut by the clip."""


def ppo_clip(logprob_T: Tensor, proximal_T: Tensor, advantage_T: Tensor, config: AlgorithmConfig) -> TokenLoss:
    """The clipped surrogate; the log-ratio is clamped to +-20 so that it is finite."""
    ratio_T = (logprob_T - proximal_T).clamp(-SAFETY_BOUND, SAFETY_BOUND).exp()
    plain_T = -advantage_T * ratio_T
    clipped_T = -advantage_T * ratio_T.clamp(1 - config.clip_low, 1 + config.clip_high)
    return TokenLoss(torch.maximum(plain_T, clipped_T), clipped_T > plain_T)


def reinforce(logprob_T: Tensor, proximal_T: Tensor, advantage_T: Tensor, config: AlgorithmConfig) -> TokenLoss:
    """Score function; nothing is clipped."""
    return TokenLoss(-advantage_T * logprob_T, torch.zeros_like(logprob_T, dtype=torch.bool))


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor, AlgorithmConfig], TokenLoss]] = {
    "ppo_clip": ppo_clip,
    "reinforce": reinforce,
}


@dataclass(frozen=True)
class PolicyLoss:
    """A micro-batch's share of the loss."""

    loss: Tensor
    """Scalar connected to the graph, 0 when every token is rejected or there is none."""
    weight_T: Tensor
    """[T] float32 weights applied, before rejection."""
    is_clipped_T: Tensor
    """[T] bool."""


def policy_loss(
    config: AlgorithmConfig,
    *,
    logprob_T: Tensor,
    proximal_T: Tensor,
    rollout_T: Tensor,
    advantage_T: Tensor,
    accepted_T: Tensor,
    scale_T: Tensor,
) -> PolicyLoss:
    """Args:
    logprob_T: [T] float32 under the weights being optimised, with gradient.
    proximal_T: [T] float32 under the weights before the batch's first optimizer step, detached.
    rollout_T: [T] float32 as recorded by the sampler.
    advantage_T: [T] float32.
    accepted_T: [T] bool.
    scale_T: [T] float32, `token_scale`.
    """
    behind_T = logprob_T.detach() if config.loss == "reinforce" else proximal_T
    weight_T = token_weights(behind_T, rollout_T, config.tis_cap)
    # The rejected are replaced before and after the loss: 0 * inf is NaN, in the value and in the gradient alike.
    safe_T = torch.where(accepted_T, logprob_T, 0.0)
    token = LOSSES[config.loss](safe_T, torch.where(accepted_T, proximal_T, 0.0), advantage_T, config)
    loss = (scale_T * torch.where(accepted_T, weight_T * token.loss_T, 0.0)).sum()
    return PolicyLoss(loss=loss, weight_T=weight_T, is_clipped_T=token.is_clipped_T & accepted_T)


def token_scale(aggregation: str, sequence_T: Tensor, num_sequences: int) -> Tensor:
    """Each token's factor in the loss of one optimizer step.

    Args:
        aggregation: token_mean | seq_mean_token_mean.
        sequence_T: [T] int64 sequence of each trainable token of the whole optimizer step.
        num_sequences: of the optimizer step that have trainable tokens or not.

    Returns:
        [T] float32.
    """
    if aggregation == "token_mean":
        return torch.full(sequence_T.shape, 1 / max(len(sequence_T), 1), dtype=torch.float32)
    if aggregation == "seq_mean_token_mean":
        num_tokens_N = torch.bincount(sequence_T, minlength=1).double()
        return (1 / (max(num_sequences, 1) * num_tokens_N[sequence_T])).float()
    raise ValueError(f"aggregation must be token_mean or seq_mean_token_mean, got {aggregation!r}")
