"""Policy losses per token, and their sum over a batch with denominators fixed before any micro-batch is cut.

    loss = Σ_t scale_t * [accepted] * (w_t * L_t - entropy_coef * H_t + kl_coef * v_t * K_t)
r is the ratio of the policy being optimised to the one of the mode (shared/wire/algorithm.py), w the importance weight of the
mode, A the advantage, H the entropy, K the penalty towards the reference; sg() has no gradient. v = sg(min(policy / sampler,
kl_cap)): K is an expectation under the policy, its tokens are the sampler's. scale_t is 1 / (tokens of the optimizer step), or
what the aggregation says. What is rejected keeps its place in the denominator: it contributes nothing and does not make the
others weigh more.

Legend: T trainable tokens of a micro-batch or batch; N sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from services.trainer.correction import SAFETY_BOUND, importance_weights, k3, safe_exp, unit_mean
from services.trainer.filters import dppo_kl, dppo_tv
from shared.wire.algorithm import AlgorithmConfig

GSPO_BOUND = 10.0
"""Upper clamp of a sequence's mean log-ratio."""
KL_BOUND = 10.0
"""Clamp of a KL penalty."""


@dataclass(frozen=True)
class TokenLoss:
    """L [T], with gradient, and what happened."""

    loss_T: Tensor
    is_clipped_T: Tensor
    """[T] bool: the token's gradient was cut by the clip."""


def ppo_clip(
    logprob_T: Tensor, behind_T: Tensor, advantage_T: Tensor, sequence_T: Tensor, config: AlgorithmConfig
) -> TokenLoss:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), https://arxiv.org/abs/1707.06347; clip-higher, https://arxiv.org/abs/2503.14476.

    Dual clip, https://arxiv.org/abs/1912.09729: at most -A c where A < 0.
    """
    return _clip(safe_exp(logprob_T - behind_T), advantage_T, config)


def gspo(
    logprob_T: Tensor, behind_T: Tensor, advantage_T: Tensor, sequence_T: Tensor, config: AlgorithmConfig
) -> TokenLoss:
    """The clip on s = exp(mean log r) of the sequence; each token carries sg(s) pi / sg(pi). https://arxiv.org/abs/2507.18071."""
    log_s_T = unit_mean((logprob_T - behind_T).detach(), sequence_T).to(logprob_T.dtype)
    return _clip((log_s_T + logprob_T - logprob_T.detach()).clamp(max=GSPO_BOUND).exp(), advantage_T, config)


def cispo(
    logprob_T: Tensor, behind_T: Tensor, advantage_T: Tensor, sequence_T: Tensor, config: AlgorithmConfig
) -> TokenLoss:
    """-sg(min(r, 1 + high)) A logprob: every token keeps a gradient; no lower bound. https://arxiv.org/abs/2506.13585."""
    ratio_T, cap = safe_exp(logprob_T - behind_T).detach(), 1 + config.clip_high
    return TokenLoss(-ratio_T.clamp(max=cap) * advantage_T * logprob_T, ratio_T > cap)


def dppo(is_valid: Callable[[Tensor, Tensor, Tensor, float, float], Tensor]) -> Callable[..., TokenLoss]:
    """-A sg(min(r, 20)) logprob where the probability moved no further than the bounds. https://arxiv.org/abs/2602.04879."""

    def loss(
        logprob_T: Tensor, behind_T: Tensor, advantage_T: Tensor, sequence_T: Tensor, config: AlgorithmConfig
    ) -> TokenLoss:
        p_T, q_T = logprob_T.detach().exp(), behind_T.exp()
        valid_T = is_valid(p_T, q_T, advantage_T, config.clip_low, config.clip_high)
        ratio_T = safe_exp(logprob_T - behind_T).detach().clamp(max=20.0)
        return TokenLoss(torch.where(valid_T, -advantage_T * ratio_T * logprob_T, 0.0), ~valid_T)

    return loss


def sapo(
    logprob_T: Tensor, behind_T: Tensor, advantage_T: Tensor, sequence_T: Tensor, config: AlgorithmConfig
) -> TokenLoss:
    """-A (4 / tau) sigmoid(tau (r - 1)): a smooth gate, gradient -A r at r = 1. https://arxiv.org/abs/2511.20347."""
    positive, negative = config.sapo_tau
    tau_T = torch.full_like(advantage_T, negative).masked_fill(advantage_T > 0, positive)
    gate_T = 4 / tau_T * torch.sigmoid(tau_T * (safe_exp(logprob_T - behind_T) - 1))
    return TokenLoss(-advantage_T * gate_T, torch.zeros_like(logprob_T, dtype=torch.bool))


def topr(
    logprob_T: Tensor, behind_T: Tensor, advantage_T: Tensor, sequence_T: Tensor, config: AlgorithmConfig
) -> TokenLoss:
    """-A sg(c) logprob, c = 1 where A >= 0, else the trajectory's ratio to its sampler cut to [0, 1].

    https://arxiv.org/abs/2503.14286, whose reward minus baseline is A here.
    """
    ratio_T = safe_exp(unit_mean((logprob_T - behind_T).detach(), sequence_T, is_mean=False)).to(logprob_T.dtype)
    coefficient_T = torch.where(advantage_T >= 0, 1.0, ratio_T.clamp(max=1.0))
    return TokenLoss(-advantage_T * coefficient_T * logprob_T, (advantage_T < 0) & (ratio_T > 1))


def reinforce(
    logprob_T: Tensor, behind_T: Tensor, advantage_T: Tensor, sequence_T: Tensor, config: AlgorithmConfig
) -> TokenLoss:
    """Score function; nothing is clipped."""
    return TokenLoss(-advantage_T * logprob_T, torch.zeros_like(logprob_T, dtype=torch.bool))


def ratio_gradient(
    logprob_T: Tensor, behind_T: Tensor, advantage_T: Tensor, sequence_T: Tensor, config: AlgorithmConfig
) -> TokenLoss:
    """-A r, whose gradient is -A r grad logprob: REINFORCE weighted by the live ratio, as in prime-rl."""
    ratio_T = safe_exp(logprob_T - behind_T)
    return TokenLoss(-advantage_T * ratio_T, torch.zeros_like(logprob_T, dtype=torch.bool))


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, AlgorithmConfig], TokenLoss]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "dppo_tv": dppo(dppo_tv),
    "dppo_kl": dppo(dppo_kl),
    "sapo": sapo,
    "topr": topr,
    "reinforce": reinforce,
    "ratio_gradient": ratio_gradient,
}


def _clip(ratio_T: Tensor, advantage_T: Tensor, config: AlgorithmConfig) -> TokenLoss:
    plain_T = -advantage_T * ratio_T
    clipped_T = -advantage_T * ratio_T.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss_T, is_clipped_T = torch.maximum(plain_T, clipped_T), clipped_T > plain_T
    if config.dual_clip is not None:
        most_T = -advantage_T * config.dual_clip
        is_cut_T = (advantage_T < 0) & (loss_T > most_T)
        loss_T, is_clipped_T = torch.where(is_cut_T, most_T, loss_T), is_clipped_T | is_cut_T
    return TokenLoss(loss_T, is_clipped_T)


@dataclass(frozen=True)
class PolicyLoss:
    """A micro-batch's share of the loss."""

    loss: Tensor
    """Scalar connected to the graph, 0 when every token is rejected or there is none."""
    weight_T: Tensor
    """[T] weights applied, before rejection."""
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
    sequence_T: Tensor,
    segment_T: Tensor,
    entropy_T: Tensor | None = None,
    mean_weight: float = 1.0,
    reference_T: Tensor | None = None,
    kl_coef: float = 0.0,
) -> PolicyLoss:
    """Args:
    logprob_T: [T] float32 (float64 for reference) under the weights being optimised, with gradient.
    proximal_T: [T] under the weights before the batch's first optimizer step, detached.
    rollout_T: [T] as recorded by the sampler.
    advantage_T: [T] of the same dtype.
    accepted_T: [T] bool.
    scale_T: [T], `token_scale`.
    sequence_T, segment_T: [T] int64 trajectory and turn of each token; whole ones.
    entropy_T: [T] with gradient; needed with an entropy_coef.
    mean_weight: what batch normalisation divides by.
    reference_T: [T] under the reference policy, detached; needed with kl k2 or k3+.
    kl_coef: of that penalty, as adapted so far.
    """
    mode = config.ratio_mode
    # Without a cap the weights are 1, whatever is compared.
    weighed_T = logprob_T.detach() if mode == "bypass" else proximal_T
    weight_T = importance_weights(weighed_T, rollout_T, sequence_T, segment_T, config)
    if config.batch_normalize:
        weight_T = weight_T / mean_weight
    behind_T = rollout_T if mode in ("bypass", "ratio_gradient") else proximal_T
    # The rejected are replaced before and after the loss: 0 * inf is NaN, in the value and in the gradient alike.
    token = LOSSES["ratio_gradient" if mode == "ratio_gradient" else config.loss](
        torch.where(accepted_T, logprob_T, 0.0),
        torch.where(accepted_T, behind_T, 0.0),
        advantage_T,
        torch.where(accepted_T, sequence_T, -1),
        config,
    )
    loss = (scale_T * torch.where(accepted_T, weight_T * token.loss_T, 0.0)).sum()
    if config.entropy_coef:
        assert entropy_T is not None
        loss = loss - config.entropy_coef * (scale_T * torch.where(accepted_T, entropy_T, 0.0)).sum()
    if config.kl in ("k2", "k3+"):
        assert reference_T is not None
        drawn_T = proximal_T if mode == "recompute" else rollout_T
        penalty_T = _off_policy_kl(config, logprob_T, reference_T, drawn_T, accepted_T)
        loss = loss + kl_coef * (scale_T * torch.where(accepted_T, penalty_T, 0.0)).sum()
    return PolicyLoss(loss=loss, weight_T=weight_T, is_clipped_T=token.is_clipped_T & accepted_T)


def _off_policy_kl(
    config: AlgorithmConfig, logprob_T: Tensor, reference_T: Tensor, drawn_T: Tensor, accepted_T: Tensor
) -> Tensor:
    """The penalty of each token times the truncated weight of having drawn it elsewhere; rejected ones are replaced first."""
    logprob_T, reference_T, drawn_T = (torch.where(accepted_T, x, 0.0) for x in (logprob_T, reference_T, drawn_T))
    weight_T = safe_exp((logprob_T - drawn_T).detach()).clamp(max=config.kl_cap)
    return weight_T * kl_penalty(config.kl, logprob_T, reference_T)


def token_scale(aggregation: str, sequence_T: Tensor, num_sequences: int, length: int | None = None) -> Tensor:
    """Each token's factor in the loss of one optimizer step.

    Args:
        aggregation: token_mean | token_sum | seq_mean_token_sum | seq_mean_token_mean | seq_mean_token_sum_norm.
        sequence_T: [T] int64 sequence of each trainable token of the whole optimizer step.
        num_sequences: of the optimizer step that have trainable tokens or not.
        length: constant of seq_mean_token_sum_norm, https://arxiv.org/abs/2503.20783.

    Returns:
        [T] float32.
    """
    sequences = max(num_sequences, 1)
    if aggregation == "seq_mean_token_mean":
        num_tokens_N = torch.bincount(sequence_T, minlength=1).double()
        return (1 / (sequences * num_tokens_N[sequence_T])).float()
    factors = {"token_mean": 1 / max(len(sequence_T), 1), "token_sum": 1.0, "seq_mean_token_sum": 1 / sequences}
    if length is not None:
        factors["seq_mean_token_sum_norm"] = 1 / (sequences * length)
    if aggregation not in factors:
        raise ValueError(
            f"aggregation must be seq_mean_token_mean or {', '.join(factors)} (seq_mean_token_sum_norm with a length), "
            f"got {aggregation!r}"
        )
    return torch.full(sequence_T.shape, factors[aggregation], dtype=torch.float32)


def kl_penalty(kind: str, logprob_T: Tensor, reference_T: Tensor) -> Tensor:
    """KL(policy || reference) from tokens of the policy: difference clamped to +-20, result to +-10.

    k1 belongs in the reward, detached: its gradient in a loss has expectation 0. k2 has the gradient of the true reverse KL in
    a loss; k3+ has the value of k3, which is unbiased, and the gradient of k2. http://joschu.net/blog/kl-approx.html
    """
    delta_T = (logprob_T - reference_T).clamp(-SAFETY_BOUND, SAFETY_BOUND)
    if kind == "k1":
        value_T = delta_T.detach()
    elif kind == "k2":
        value_T = delta_T.square() / 2
    elif kind == "k3+":
        square_T = delta_T.square() / 2
        value_T = k3(-delta_T).detach() + square_T - square_T.detach()
    else:
        raise ValueError(f"KL must be k1, k2 or k3+, got {kind!r}")
    return value_T.clamp(-KL_BOUND, KL_BOUND)
