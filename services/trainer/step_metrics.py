"""What a step did, in numbers: from the whole batch's arrays, so that they do not depend on how it was cut or on who ran it.

Mismatch is measured before rejection. Legend: T trainable tokens of the batch, N trajectories.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from services.trainer.batch import Batch
from services.trainer.correction import finite_delta, k3, per_sequence, safe_exp
from services.trainer.correction_metrics import (
    describe_clip,
    describe_mini_step,
    describe_rejection,
    describe_weights,
    tightest,
)
from services.trainer.decision import Decision
from services.trainer.loss import PolicyLoss, kl_penalty, policy_loss, token_scale
from services.trainer.mismatch import Mismatch, divergence, measure
from services.trainer.mismatch_metrics import clips_by_tim, effective_sample_size
from services.trainer.mismatch_tables import Observed, tables
from services.trainer.policy import TokenScores
from services.trainer.scoring import Scores
from shared.wire.algorithm import AlgorithmConfig


@dataclass(frozen=True)
class StepResult:
    """What a step did."""

    mismatch: Mismatch
    metrics: dict[str, Any]
    """JSON-ready."""
    abs_delta_T: Tensor
    """[compared tokens] float32 |trainer - engine|, of our own engine's tokens."""
    staleness_T: Tensor
    """[T] int64: step minus the version that sampled the token."""
    ingested_abs_delta_T: Tensor
    """[compared tokens] float32 the same of tokens that another engine sampled."""
    correction_delta_T: Tensor
    """[T] float32 trainer before the step - sampler; 0 where that is no number."""
    k3_N: Tensor
    """[N] float64 k3 of that, summed over each trajectory."""


def step_result(
    batch: Batch, scores: Scores, trained: TokenScores, decision: Decision, config: AlgorithmConfig
) -> StepResult:
    """Args:
    trained: what the training forwards gave.
    decision: final.
    """
    sampled = scores.sampled_with(trained)
    proximal_T = trained.logprob_T if scores.proximal_T is None else scores.proximal_T
    loss = _whole_loss(batch, scores, trained, proximal_T, decision, config)
    advantage_T = decision.advantage_N[batch.sequence_T]
    steps = torch.tensor([version.step for version in batch.versions] + [batch.step])
    staleness_T = batch.step - steps[batch.version_T]
    comparable = scores.is_comparable_T
    # What another engine sampled differs by design; `mismatch` is a statement on ours.
    own_T = ~batch.is_ingested_T
    mismatch, ingested = (_measure(batch, sampled, scores, of_T) for of_T in (own_T, batch.is_ingested_T))
    seen = Observed(
        rollout_T=batch.rollout_T, sampled_T=sampled.logprob_T, proximal_T=proximal_T, trained_T=trained.logprob_T,
        target_T=batch.targets_T, top1_T=sampled.top1_T, rollout_top1_T=batch.top1_T, weight_T=loss.weight_T,
        advantage_T=advantage_T, sequence_T=batch.sequence_T, staleness_T=staleness_T, is_comparable_T=comparable,
        is_ingested_T=batch.is_ingested_T,
    )  # fmt: skip
    metrics: dict[str, Any] = {
        "loss": float(loss.loss),
        **_of_batch(batch, trained, staleness_T),
        **_of_correction(batch, trained, proximal_T, decision, loss, config),
        "kl": _of_reference(scores, trained, decision, config),
        "tim": {**mismatch.as_dict(), "unaudited": scores.unaudited(batch)},
        "ingested_tokens": int(batch.is_ingested_T.sum()),
        "ingested_tim": ingested.as_dict(),
        "staleness": asdict(divergence(proximal_T[comparable], sampled.logprob_T[comparable])),
        "drift": asdict(divergence(trained.logprob_T, proximal_T)),
        "mini_steps": [
            describe_mini_step(trained.logprob_T[m.tokens], proximal_T[m.tokens], loss.is_clipped_T[m.tokens])
            for m in batch.mini_steps
        ],
        "mismatch": tables(seen, config.clip_low, config.clip_high),
    }
    delta_T = (sampled.logprob_T - batch.rollout_T).abs()
    correction_delta_T, _ = finite_delta(proximal_T, batch.rollout_T)
    return StepResult(
        mismatch=mismatch,
        metrics=metrics,
        abs_delta_T=delta_T[comparable & own_T],
        staleness_T=staleness_T,
        ingested_abs_delta_T=delta_T[comparable & batch.is_ingested_T],
        correction_delta_T=correction_delta_T,
        k3_N=per_sequence(k3(correction_delta_T.double()), batch.sequence_T, batch.num_sequences),
    )


def _measure(batch: Batch, sampled: TokenScores, scores: Scores, of_T: Tensor) -> Mismatch:
    """Of some tokens; those that the audit leaves out on purpose are no failure to compare."""
    if scores.is_left_out_T is not None:
        of_T = of_T & ~scores.is_left_out_T
    series = (sampled.logprob_T, batch.rollout_T, sampled.top1_T, batch.top1_T, scores.is_comparable_T)
    return measure(*(x[of_T] for x in series))


def _whole_loss(
    batch: Batch, scores: Scores, trained: TokenScores, proximal_T: Tensor, decision: Decision, config: AlgorithmConfig
) -> PolicyLoss:
    return policy_loss(
        config,
        logprob_T=trained.logprob_T,
        proximal_T=proximal_T,
        rollout_T=batch.rollout_T,
        advantage_T=decision.advantage_N[batch.sequence_T],
        accepted_T=decision.accepted_T(batch),
        scale_T=token_scale(config.aggregation, batch.sequence_T, batch.num_sequences, config.aggregation_length),
        sequence_T=batch.sequence_T,
        segment_T=batch.segment_T,
        entropy_T=trained.entropy_T,
        mean_weight=decision.mean_weight,
        reference_T=scores.reference_T,
        kl_coef=decision.kl_coef,
    )


def _of_batch(batch: Batch, trained: TokenScores, staleness_T: Tensor) -> dict[str, Any]:
    """Rewards are those of everything that was leased: what dynamic sampling leaves out is no worse a sample of the policy."""
    reward = torch.tensor([t.reward for g in batch.leased for t in g.trajectories], dtype=torch.float64)
    return {
        "reward_mean": _mean(reward),
        "reward_std": float(reward.std(correction=0)) if len(reward) else 0.0,
        "entropy": _mean(trained.entropy_T),
        "groups": len(batch.groups),
        "uniform_groups": len(batch.uniform),
        "surplus_groups": len(batch.surplus),
        "trajectories": batch.num_sequences,
        "missing_trajectories": batch.num_missing,
        "tokens": batch.num_tokens,
        "completion_tokens_mean": _mean(batch.num_tokens_N.float()),
        "lag": _mean(staleness_T.float()),
        "lag_max": int(staleness_T.max()) if batch.num_tokens else 0,
    }


def _of_correction(
    batch: Batch,
    trained: TokenScores,
    proximal_T: Tensor,
    decision: Decision,
    loss: PolicyLoss,
    config: AlgorithmConfig,
) -> dict[str, Any]:
    accepted_T, advantage_T = decision.accepted_T(batch), decision.advantage_N[batch.sequence_T]
    cap = config.tis_cap
    is_bypass = config.ratio_mode in ("bypass", "ratio_gradient")
    ratio_T = safe_exp(trained.logprob_T - (batch.rollout_T if is_bypass else proximal_T))
    is_weighed_now = config.ratio_mode == "bypass"
    weighed = (trained.logprob_T if is_weighed_now else proximal_T, batch.rollout_T, loss.weight_T)
    return {
        "informative_trajectories": int((decision.advantage_N != 0).sum()),
        "rejected_trajectories": int((~decision.acceptance.accepted_N).sum()),
        "rejected_tokens": int((~accepted_T).sum()),
        "nonfinite_tokens": decision.acceptance.num_nonfinite,
        "clip_fraction": _mean(loss.is_clipped_T.float()),
        "weight_mean": _mean(loss.weight_T),
        "weight_max": float(loss.weight_T.max()) if batch.num_tokens else 0.0,
        "weight_capped_fraction": 0.0 if cap is None else _mean((loss.weight_T >= cap / decision.mean_weight).float()),
        "weight_ess": effective_sample_size(loss.weight_T),
        "correction": {
            **describe_weights(*weighed, batch.sequence_T, batch.segment_T, config),
            **describe_rejection(
                proximal_T, batch.rollout_T, advantage_T, accepted_T, batch.sequence_T, batch.num_sequences, config
            ),
            "tightest": tightest(proximal_T, batch.rollout_T, batch.sequence_T, batch.num_sequences),
        },
        "clip": {
            **describe_clip(loss.is_clipped_T, ratio_T, advantage_T),
            **clips_by_tim(
                trained.logprob_T, proximal_T, batch.rollout_T, advantage_T, config.clip_low, config.clip_high
            ),
        },
    }


def _of_reference(
    scores: Scores, trained: TokenScores, decision: Decision, config: AlgorithmConfig
) -> dict[str, float]:
    """Empty without a reference; the policy is the one before the step."""
    if scores.reference_T is None:
        return {}
    policy_T = trained.logprob_T if scores.proximal_T is None else scores.proximal_T
    finite_T = (policy_T - scores.reference_T).isfinite()
    values = {
        name: _mean(kl_penalty(kind, policy_T, scores.reference_T)[finite_T])
        for name, kind in (("penalty", config.kl), ("k1", "k1"), ("k3", "k3+"))
    }
    return {"coef": decision.kl_coef, **values}


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if len(values) else 0.0
