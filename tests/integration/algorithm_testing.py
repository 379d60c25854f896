"""Batches sampled once and trained many times, for tests of what an algorithm makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.trainer.batch import Batch, build_batch
from services.trainer.distributed import World
from services.trainer.learner import Learner, StepResult
from shared.models import packed_layout
from shared.wire.algorithm import AlgorithmConfig
from shared.wire.run import OptimizerConfig, RunConfig
from shared.wire.types import Group, Span, SpanKind
from tests.integration.trainer_testing import (
    VOCAB,
    Engine,
    build_learner,
    digest_of,
    engine_of,
    publish,
    reward_of,
    run_config,
    tiny_model,
)

HOT = OptimizerConfig(lr=1e-2)
GROUPS = 4


@dataclass(frozen=True)
class Rig:
    """Two batches, both sampled by version 0: trained in order, the second one is a step old."""

    model: Path
    world: World
    groups: tuple[tuple[Group, ...], tuple[Group, ...]]

    def learner(self, algorithm: AlgorithmConfig | None = None, **changes: Any) -> Learner:
        """At version 0."""
        changes = {"lag": 1, "prompts_per_step": GROUPS, "optimizer": HOT, **changes}
        return build_learner(run_config(self.model, algorithm=algorithm or AlgorithmConfig(), **changes), self.world)

    def batch(self, learner: Learner, step: int = 0, groups: Sequence[Group] | None = None) -> Batch:
        """Cut as the learner's configuration says."""
        return build_batch(groups or self.groups[step], learner.config, step=step, vocab_size=VOCAB)

    def train(self, learner: Learner, steps: Sequence[int] = (0,)) -> tuple[list[StepResult], str]:
        """Results, and the digest of the weights behind the last step."""
        results, digest = [], ""
        for step in steps:
            batch = self.batch(learner, step)
            results.append(learner.train(batch, learner.score(batch)))
            digest = digest_of(publish(learner, step + 1))
        return results, digest


def make_rig(directory: Path, world: World) -> Rig:
    model = tiny_model(directory)
    config = run_config(model, prompts_per_step=GROUPS)
    learner = build_learner(config, world)
    engine = engine_of(learner, publish(learner, 0))
    groups = tuple(engine.group(config, n, lengths=[5] * 4, tool_tokens=1) for n in range(2 * GROUPS))
    return Rig(model, world, (groups[:GROUPS], groups[GROUPS:]))


class Changing:
    """An engine whose weights change within a trajectory: the prefix is recomputed, the next token is a new span's.

    Args:
        engines: of one version each; sample i takes the next one after every `i + 1` tokens.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = engines

    @torch.no_grad()
    def group(self, config: RunConfig, number: int, *, length: int) -> Group:
        """A complete group whose samples have spans of several versions."""
        plain = self.engines[0].group(config, number, lengths=[length] * config.samples_per_prompt)
        trajectories = []
        for t in plain.trajectories:
            begin, tokens = t.num_prompt_tokens, t.token_ids[: t.num_prompt_tokens].tolist()
            rng = np.random.default_rng([number, t.sample_index])
            logprobs, top1, spans = [], [], [Span(start=0, end=begin, kind=SpanKind.PROMPT)]
            for place in range(length):
                engine = self.engines[min(place // (t.sample_index + 1), len(self.engines) - 1)]
                layout = packed_layout([len(tokens)])
                hidden = engine.decoder(torch.tensor(tokens), layout.positions, layout)[-1:]
                token = int(rng.integers(3, VOCAB))
                score = engine.decoder.logprobs(hidden, torch.tensor([token]), torch.tensor([config.temperature]))
                tokens.append(token)
                logprobs.append(score.logprob.item())
                top1.append(int(score.top1))
                spans.append(_sampled(begin + place, engine))
            trajectories.append(
                replace(
                    t,
                    token_ids=np.array(tokens, np.int32),
                    logprobs=np.array(logprobs, np.float32),
                    top1=np.array(top1, np.int32),
                    spans=tuple(spans),
                    reward=reward_of(tokens[begin:]),
                )
            )
        return replace(plain, trajectories=tuple(trajectories))


def _sampled(start: int, engine: Engine) -> Span:
    v = engine.version
    return Span(
        start=start,
        end=start + 1,
        kind=SpanKind.SAMPLED,
        lineage=v.lineage,
        policy_step=v.step,
        manifest_digest=v.digest,
    )
