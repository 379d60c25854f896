"""One training step: score the batch, decide what each token counts, then update the weights, mini-step after mini-step.

    scoring.py   logprobs that must exist before the first gradient
    decision.py  rejection, advantages
    loss.py      per micro-batch, here
    step_metrics.py  what to report

Legend: T trainable tokens, N trajectories.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from services.trainer.batch import Batch, MicroBatch, MiniStep
from services.trainer.copies import ForwardCopies
from services.trainer.decision import Decision, accept_all, decide, next_kl_coef
from services.trainer.distributed import World
from services.trainer.filters import is_finite
from services.trainer.loss import policy_loss, token_scale
from services.trainer.optimizer import apply, build_optimizer, learning_rate
from services.trainer.policy import TokenScores, accumulate_gradients, to_device
from services.trainer.scoring import Scorer, Scores
from services.trainer.step_metrics import StepResult, step_result
from shared.kernels import LogprobOutput
from shared.models import Decoder
from shared.wire.run import RunConfig

__all__ = ["Learner", "Scores", "StepResult"]


class Learner:
    """A run's model, optimizer, forward copies and reference.

    >>> scores = learner.score(batch)
    >>> result = learner.train(batch, scores)  # weights are now those of version batch.step + 1

    Args:
        decoder: with the run's initial weights.
        behind, directory: where older versions lie, see copies.py.
        reference: its weights, as they are now, are the reference of a KL penalty; None: the decoder's.
    """

    def __init__(
        self,
        decoder: Decoder,
        config: RunConfig,
        dtype: torch.dtype,
        world: World,
        *,
        behind: Literal["device", "host", "directory"] = "device",
        directory: Path | None = None,
        reference: Decoder | None = None,
    ) -> None:
        self.decoder, self.config, self.dtype, self.world = decoder, config, dtype, world
        self.optimizer = build_optimizer(decoder, config.optimizer)
        self.copies = ForwardCopies(
            decoder, dtype, lag=config.oldest_lag, behind=behind, run=config.run, directory=directory
        )
        self.kl_coef = config.algorithm.kl_coef
        """As adapted so far; part of the checkpoint."""
        self._scorer = Scorer(decoder, self.copies, config, dtype, world)
        if config.algorithm.kl != "none":
            self._scorer.keep_reference(reference or decoder)

    def decoder_at(self, step: int) -> Decoder:
        """A decoder whose forward uses the weights of a held version; valid until the next call."""
        return self._scorer.decoder_at(step)

    def score(self, batch: Batch) -> Scores:
        """Logprobs of every trainable token that must exist before the first gradient."""
        return self._scorer.score(batch)

    def train(self, batch: Batch, scores: Scores, *, meanwhile: Callable[[], None] | None = None) -> StepResult:
        """One optimizer step per mini-step; collects what there is to report.

        Args:
            meanwhile: work for this rank's host where it would wait for its device; called until that is done.
        """
        config = self.config.algorithm
        decision = decide(batch, scores, config, self.kl_coef)
        trained = TokenScores.blank(batch.num_tokens)
        taken: list[dict[str, float | bool]] = []
        for index, mini_step in enumerate(batch.mini_steps):
            part = self._accumulate(batch, mini_step, scores, decision, meanwhile)
            trained.bits[:, mini_step.tokens] = part.bits[:, mini_step.tokens]
            if scores.proximal_T is None:
                acceptance = accept_all(batch, trained.logprob_T, scores.reference_T, config)
                decision = replace(decision, acceptance=acceptance)
            is_empty = not bool(decision.accepted_T(batch)[mini_step.tokens].any())
            taken.append(self._apply(batch.step * config.mini_steps + index, is_empty=is_empty))
        result = step_result(batch, scores, trained, decision, config)
        for of_mini_step, update in zip(result.metrics["mini_steps"], taken, strict=True):
            of_mini_step.update(update)
        result.metrics["grad_norm"] = max((u["grad_norm"] for u in taken), default=0.0)
        result.metrics["lr"] = taken[-1]["lr"] if taken else 0.0
        result.metrics["optimizer_steps"] = sum(bool(u["is_taken"]) for u in taken)
        if config.kl_target is not None:
            penalty = result.metrics["kl"]["penalty"]
            self.kl_coef = next_kl_coef(self.kl_coef, penalty, batch.num_sequences, config)
        return result

    def _apply(self, optimizer_step: int, *, is_empty: bool) -> dict[str, float | bool]:
        config = self.config
        num_optimizer_steps = config.num_steps * config.algorithm.mini_steps
        lr = learning_rate(config.optimizer, optimizer_step, num_optimizer_steps)
        norm, is_taken = apply(self.optimizer, lr=lr, max_grad_norm=config.optimizer.max_grad_norm, is_empty=is_empty)
        return {"grad_norm": norm, "lr": lr, "is_taken": is_taken}

    def _accumulate(
        self,
        batch: Batch,
        mini_step: MiniStep,
        scores: Scores,
        decision: Decision,
        meanwhile: Callable[[], None] | None,
    ) -> TokenScores:
        """Gradients of one mini-step."""
        device, config, proximal_T = self.world.device, self.config.algorithm, scores.proximal_T
        scale_T = torch.zeros(batch.num_tokens)
        scale_T[mini_step.tokens] = token_scale(
            config.aggregation,
            batch.sequence_T[mini_step.tokens],
            mini_step.sequences.stop - mini_step.sequences.start,
            config.aggregation_length,
        )

        decided_T, advantage_T = decision.accepted_T(batch), decision.advantage_N[batch.sequence_T]

        def loss_of(micro: MicroBatch, output: LogprobOutput) -> Tensor:
            def part(values: Tensor) -> Tensor:
                return to_device(values[micro.tokens], device)

            sequence_T, rollout_T = part(batch.sequence_T), part(batch.rollout_T)
            accepted_T = part(decided_T)
            if proximal_T is None:
                own = output.logprob.detach()
                # Nothing but a number that is missing rejects what was not decided before; the host need not know it now.
                accepted_T = accepted_T & is_finite(own, rollout_T, sequence_T, batch.num_sequences)[sequence_T]
            else:
                own = part(proximal_T)
            return policy_loss(
                config,
                logprob_T=output.logprob,
                proximal_T=own,
                rollout_T=rollout_T,
                advantage_T=part(advantage_T),
                accepted_T=accepted_T,
                scale_T=part(scale_T),
                sequence_T=sequence_T,
                segment_T=part(batch.segment_T),
                entropy_T=output.entropy,
                mean_weight=decision.mean_weight,
                reference_T=None if scores.reference_T is None else part(scores.reference_T),
                kl_coef=decision.kl_coef,
            ).loss

        return accumulate_gradients(self.decoder, batch, mini_step, self.world, loss_of, meanwhile)
