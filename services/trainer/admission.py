"""Which leased groups may be trained on, and which are: validation, and dynamic sampling.

Dynamic sampling (DAPO, https://arxiv.org/abs/2503.14476) leaves out groups in which every sibling has the same reward, because
they teach nothing and would shorten the gradient of the others. Sampling more until a batch is full would make it depend on
the clock; here prompts_per_step oversamples and a fixed rule picks: the first `dynamic_groups` that are left, by number. What
a step trains on is then a function of its prompts and rewards, as everything else.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shared.wire.algorithm import AlgorithmConfig
from shared.wire.run import RunConfig
from shared.wire.types import Group


class BatchError(ValueError):
    """A leased group contradicts the run; the text names it and says what is wrong."""


class NonfiniteReward(BatchError):
    """A reward that is no number: refused and counted, never read as 0."""


def choose(
    groups: Sequence[Group], config: AlgorithmConfig
) -> tuple[tuple[Group, ...], tuple[Group, ...], tuple[Group, ...]]:
    """Those to train on, those whose rewards are all alike, and those that are not needed any more.

    Args:
        groups: in prompt order, validated.
    """
    if not config.dynamic_sampling:
        return tuple(groups), (), ()
    informative = [g for g in groups if len({t.reward for t in g.trajectories}) > 1]
    uniform = tuple(g for g in groups if len({t.reward for t in g.trajectories}) == 1)
    most = config.dynamic_groups or len(informative)
    return tuple(informative[:most]), uniform, tuple(informative[most:])


def check_group(group: Group, config: RunConfig, step: int, vocab_size: int) -> None:
    """Raises BatchError unless the group belongs to this batch and can be trained on."""
    trajectories = group.trajectories

    def refuse(problem: str, kind: type[BatchError] = BatchError) -> None:
        raise kind(f"group {group.group_id} of batch {step}: {problem}; cancel it or correct the run")

    if group.run != config.run:
        refuse(f"belongs to run {group.run!r}, not {config.run!r}")
    if config.batch_of(group.prompt_number) != step:
        refuse(f"prompt {group.prompt_number} belongs to batch {config.batch_of(group.prompt_number)}")
    if not trajectories:
        refuse("has no trajectories")
    prompt = trajectories[0].token_ids[: trajectories[0].num_prompt_tokens]
    for t in trajectories:
        if t.num_prompt_tokens < 1 or not np.array_equal(t.token_ids[: t.num_prompt_tokens], prompt):
            refuse(f"{t.trajectory_id} has another prompt than its siblings, or none")
        if t.loss_mask[: t.num_prompt_tokens].any():
            refuse(f"{t.trajectory_id} marks prompt tokens as trainable")
        if t.token_ids.min() < 0 or t.token_ids.max() >= vocab_size:
            refuse(f"{t.trajectory_id} holds token ids outside [0, {vocab_size})")
        if t.reward is None or not np.isfinite(t.reward):
            refuse(f"{t.trajectory_id} has reward {t.reward}", NonfiniteReward)
        if t.sampling.temperature != config.temperature or t.sampling.is_truncated:
            refuse(
                f"{t.trajectory_id} was sampled with {t.sampling}, the run trains at temperature {config.temperature}"
            )
