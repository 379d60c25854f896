"""One training step: score the batch, then update the weights, mini-step after mini-step.

Which forwards a step needs:
    under the sampling version    always, for the TIM; the training forward is that forward when the version is the current one
    under the current version     before the first optimizer step (the proximal policy), when there is more than one, or when
                                  rejection must be decided before the advantages; otherwise the training forward gives it

Legend: T trainable tokens, N trajectories.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from services.trainer.advantage import advantages, shape_overlong
from services.trainer.batch import Batch, MicroBatch, MiniStep
from services.trainer.copies import ForwardCopies
from services.trainer.correction import importance_weights, mean_weight
from services.trainer.distributed import World
from services.trainer.filters import Acceptance, accept, keep_tokens
from services.trainer.loss import policy_loss, token_scale
from services.trainer.mismatch import Mismatch, divergence, measure
from services.trainer.mismatch_metrics import clips_by_tim, effective_sample_size, tables
from services.trainer.optimizer import apply, build_optimizer, learning_rate
from services.trainer.policy import TokenScores, accumulate_gradients, build_shell, fill, score_batch
from shared.kernels import LogprobOutput
from shared.models import Decoder
from shared.wire.run import RunConfig


@dataclass(frozen=True)
class Scores:
    """Logprobs from before the step."""

    sampled: TokenScores | None
    """Under each token's own version; None: the training forward will give them."""
    is_comparable_T: Tensor
    """[T] bool: the token's version is held here."""
    proximal_T: Tensor | None
    """[T] float32 under the current version; None: the training forward will give them."""


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


@dataclass(frozen=True)
class Decision:
    """What each token counts, fixed before the first gradient."""

    acceptance: Acceptance
    advantage_N: Tensor
    """[N] float32."""
    keep_T: Tensor
    """[T] bool: passed every token filter."""
    mean_weight: float
    """What batch normalisation divides by."""


class Learner:
    """A run's model, optimizer and forward copies.

    >>> scores = learner.score(batch)
    >>> result = learner.train(batch, scores)  # weights are now those of version batch.step + 1
    """

    def __init__(self, decoder: Decoder, config: RunConfig, dtype: torch.dtype, world: World) -> None:
        self.decoder, self.config, self.dtype, self.world = decoder, config, dtype, world
        self.optimizer = build_optimizer(decoder, config.optimizer)
        self.copies = ForwardCopies(decoder, dtype, lag=config.lag)
        self._shell: Decoder | None = None

    def decoder_at(self, step: int) -> Decoder:
        """A decoder whose forward uses the weights of a held version; valid until the next call."""
        held = {c.version.step: c for c in self.copies.held}
        if held[step] is self.copies.current:
            return self.decoder
        if self._shell is None:
            self._shell = build_shell(self.decoder.config, self.decoder.ops, self.dtype, self.world)
        fill(self._shell, held[step].shards)
        return self._shell

    def score(self, batch: Batch) -> Scores:
        """Logprobs of every trainable token that must exist before the first gradient."""
        needs_proximal = len(batch.mini_steps) > 1 or self.config.algorithm.is_decided_before
        copies = [self.copies.find(version) for version in batch.versions]
        is_held = torch.tensor([copy is not None for copy in copies] + [False])
        is_comparable_T = is_held[batch.version_T]
        current = score_batch(self.decoder, batch, self.world) if needs_proximal else None
        if all(copy is None or copy is self.copies.current for copy in copies):
            return Scores(current, is_comparable_T, current.logprob_T if current else None)
        sampled = TokenScores.blank(batch.num_tokens)
        for index, copy in enumerate(copies):
            if copy is None:
                continue
            if copy is self.copies.current and current is not None:
                scores = current
            else:
                scores = score_batch(self.decoder_at(copy.version.step), batch, self.world)
            of_version = batch.version_T == index
            sampled.bits[:, of_version] = scores.bits[:, of_version]
        return Scores(sampled, is_comparable_T, current.logprob_T if current else None)

    def train(self, batch: Batch, scores: Scores) -> StepResult:
        """One optimizer step per mini-step; collects what there is to report."""
        decision = self._decide(batch, scores.proximal_T)
        trained = TokenScores.blank(batch.num_tokens)
        norms: list[float] = []
        num_taken, lr = 0, 0.0
        num_mini_steps = self.config.algorithm.mini_steps
        for index, mini_step in enumerate(batch.mini_steps):
            part = self._accumulate(batch, mini_step, scores.proximal_T, decision)
            trained.bits[:, mini_step.tokens] = part.bits[:, mini_step.tokens]
            if scores.proximal_T is None:
                decision = replace(decision, acceptance=self._accept(batch, trained.logprob_T))
            lr = learning_rate(
                self.config.optimizer, batch.step * num_mini_steps + index, self.config.num_steps * num_mini_steps
            )
            norm, is_taken = apply(
                self.optimizer,
                lr=lr,
                max_grad_norm=self.config.optimizer.max_grad_norm,
                is_empty=not bool(_accepted(batch, decision)[mini_step.tokens].any()),
            )
            norms.append(norm)
            num_taken += is_taken
        update = {"grad_norm": max(norms, default=0.0), "lr": lr, "optimizer_steps": num_taken}
        return self._report(batch, scores, trained, decision, update)

    def _decide(self, batch: Batch, proximal_T: Tensor | None) -> Decision:
        """Without a proximal forward there is nothing to filter by: only a number that is missing rejects, later."""
        algorithm = self.config.algorithm
        acceptance = _all(batch) if proximal_T is None else self._accept(batch, proximal_T)
        reward_N = batch.reward_N
        if algorithm.overlong_buffer:
            reward_N = shape_overlong(
                reward_N,
                batch.num_tokens_N,
                limit=algorithm.overlong_limit,
                buffer=algorithm.overlong_buffer,
                factor=algorithm.overlong_factor,
            )
        advantage_N = advantages(
            algorithm.advantage,
            reward_N=reward_N,
            group_N=batch.group_N,
            num_tokens_N=batch.num_tokens_N,
            accepted_N=acceptance.accepted_N,
        ).float()
        if proximal_T is None:
            return Decision(acceptance, advantage_N, torch.ones(batch.num_tokens, dtype=torch.bool), 1.0)
        keep_T = keep_tokens(
            proximal_T, batch.rollout_T, advantage_N[batch.sequence_T], batch.sequence_T, batch.num_sequences, algorithm
        )
        mean = 1.0
        if algorithm.batch_normalize:
            weight_T = importance_weights(proximal_T, batch.rollout_T, batch.sequence_T, batch.segment_T, algorithm)
            mean = mean_weight(weight_T, batch.sequence_T, algorithm.weight)
        return Decision(acceptance, advantage_N, keep_T, mean)

    def _accumulate(
        self, batch: Batch, mini_step: MiniStep, proximal_T: Tensor | None, decision: Decision
    ) -> TokenScores:
        """Gradients of one mini-step."""
        device = self.world.device
        scale_T = torch.zeros(batch.num_tokens)
        scale_T[mini_step.tokens] = self._scale(
            batch.sequence_T[mini_step.tokens], mini_step.sequences.stop - mini_step.sequences.start
        )

        def loss_of(micro: MicroBatch, output: LogprobOutput) -> Tensor:
            sequence_T = batch.sequence_T[micro.tokens]
            accepted_N = decision.acceptance.accepted_N
            if proximal_T is None:
                own = output.logprob.detach()
                accepted_N = accept(
                    own.cpu(), batch.rollout_T[micro.tokens], sequence_T, batch.num_sequences, self.config.algorithm
                ).accepted_N
            else:
                own = proximal_T[micro.tokens].to(device)
            return policy_loss(
                self.config.algorithm,
                logprob_T=output.logprob,
                proximal_T=own,
                rollout_T=batch.rollout_T[micro.tokens].to(device),
                advantage_T=decision.advantage_N[sequence_T].to(device),
                accepted_T=(accepted_N[sequence_T] & decision.keep_T[micro.tokens]).to(device),
                scale_T=scale_T[micro.tokens].to(device),
                sequence_T=sequence_T.to(device),
                segment_T=batch.segment_T[micro.tokens].to(device),
                entropy_T=output.entropy,
                mean_weight=decision.mean_weight,
            ).loss

        return accumulate_gradients(self.decoder, batch, mini_step, self.world, loss_of)

    def _scale(self, sequence_T: Tensor, num_sequences: int) -> Tensor:
        algorithm = self.config.algorithm
        return token_scale(algorithm.aggregation, sequence_T, num_sequences, algorithm.aggregation_length)

    def _accept(self, batch: Batch, train_T: Tensor) -> Acceptance:
        return accept(train_T, batch.rollout_T, batch.sequence_T, batch.num_sequences, self.config.algorithm)

    def _report(
        self,
        batch: Batch,
        scores: Scores,
        trained: TokenScores,
        decision: Decision,
        update: dict[str, float],
    ) -> StepResult:
        """Metrics from the whole batch's arrays, so that they do not depend on how it was cut; before rejection."""
        sampled = scores.sampled or trained
        proximal_T = trained.logprob_T if scores.proximal_T is None else scores.proximal_T
        comparable = scores.is_comparable_T
        # What another engine sampled differs by design; `mismatch` is a statement on ours.
        own_T = ~batch.is_ingested_T
        mismatch, ingested = (
            measure(sampled.logprob_T[of], batch.rollout_T[of], sampled.top1_T[of], batch.top1_T[of], comparable[of])
            for of in (own_T, batch.is_ingested_T)
        )
        acceptance, accepted_T = decision.acceptance, _accepted(batch, decision)
        advantage_T = decision.advantage_N[batch.sequence_T]
        loss = policy_loss(
            self.config.algorithm,
            logprob_T=trained.logprob_T,
            proximal_T=proximal_T,
            rollout_T=batch.rollout_T,
            advantage_T=advantage_T,
            accepted_T=accepted_T,
            scale_T=self._scale(batch.sequence_T, batch.num_sequences),
            sequence_T=batch.sequence_T,
            segment_T=batch.segment_T,
            entropy_T=trained.entropy_T,
            mean_weight=decision.mean_weight,
        )
        algorithm = self.config.algorithm
        cap = algorithm.tis_cap
        steps = torch.tensor([version.step for version in batch.versions] + [batch.step])
        staleness_T = batch.step - steps[batch.version_T]
        metrics: dict[str, Any] = {
            **update,
            "loss": float(loss.loss),
            "reward_mean": _mean(batch.reward_N),
            "reward_std": float(batch.reward_N.std(correction=0)) if batch.num_sequences else 0.0,
            "entropy": _mean(trained.entropy_T),
            "groups": len(batch.groups),
            "trajectories": batch.num_sequences,
            "tokens": batch.num_tokens,
            "completion_tokens_mean": _mean(batch.num_tokens_N.float()),
            "informative_trajectories": int((decision.advantage_N != 0).sum()),
            "rejected_trajectories": int((~acceptance.accepted_N).sum()),
            "rejected_tokens": int((~accepted_T).sum()),
            "nonfinite_tokens": acceptance.num_nonfinite,
            "clip_fraction": _mean(loss.is_clipped_T.float()),
            "weight_mean": _mean(loss.weight_T),
            "weight_max": float(loss.weight_T.max()) if batch.num_tokens else 0.0,
            "weight_capped_fraction": 0.0
            if cap is None
            else _mean((loss.weight_T >= cap / decision.mean_weight).float()),
            "weight_ess": effective_sample_size(loss.weight_T),
            "lag": _mean(staleness_T.float()),
            "tim": mismatch.as_dict(),
            "ingested_tokens": int(batch.is_ingested_T.sum()),
            "ingested_tim": ingested.as_dict(),
            "staleness": asdict(divergence(proximal_T[comparable], sampled.logprob_T[comparable])),
            "drift": asdict(divergence(trained.logprob_T, proximal_T)),
            "clip": clips_by_tim(
                trained.logprob_T, proximal_T, batch.rollout_T, advantage_T, algorithm.clip_low, algorithm.clip_high
            ),
            "mismatch": tables(
                sampled.logprob_T,
                proximal_T,
                comparable,
                staleness_T,
                batch.is_ingested_T,
                (batch.rollout_T, loss.weight_T, advantage_T, batch.sequence_T),
            ),
        }
        delta_T = (sampled.logprob_T - batch.rollout_T).abs()
        return StepResult(
            mismatch, metrics, delta_T[comparable & own_T], staleness_T, delta_T[comparable & batch.is_ingested_T]
        )


def _accepted(batch: Batch, decision: Decision) -> Tensor:
    """[T] bool."""
    return decision.acceptance.accepted_N[batch.sequence_T] & decision.keep_T


def _all(batch: Batch) -> Acceptance:
    everyone = torch.ones(batch.num_sequences, dtype=torch.bool)
    return Acceptance(everyone, torch.zeros(batch.num_sequences, dtype=torch.float64), 0)


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if len(values) else 0.0
