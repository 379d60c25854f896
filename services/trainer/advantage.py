"""Advantages: how much better a trajectory did than what it is compared with.

One scalar per trajectory; each of its trainable tokens gets it. Everything runs in float64 on the CPU and in the order of
the batch, so the numbers depend on nothing but the rewards.

Legend: N trajectories of the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

GRPO_EPSILON = 1e-6
WHITEN_EPSILON = 1e-8


def grpo(reward_N: Tensor, group_N: Tensor, num_tokens_N: Tensor, accepted_N: Tensor) -> Tensor:
    """Group-relative: A = (R - mean) / (std + 1e-6), sample deviation, over the accepted siblings.

    A group with one survivor, or whose survivors scored alike, teaches nothing: exactly 0. DeepSeekMath,
    https://arxiv.org/abs/2402.03300.
    """
    return _by_group(reward_N, group_N, accepted_N, lambda r: (r - r.mean()) / (r.std() + GRPO_EPSILON))


def dr_grpo(reward_N: Tensor, group_N: Tensor, num_tokens_N: Tensor, accepted_N: Tensor) -> Tensor:
    """A = R - mean of the accepted siblings. https://arxiv.org/abs/2503.20783."""
    return _by_group(reward_N, group_N, accepted_N, lambda r: r - r.mean())


def rloo(reward_N: Tensor, group_N: Tensor, num_tokens_N: Tensor, accepted_N: Tensor) -> Tensor:
    """Leave one out: A = R - mean of the others = (R - mean) G / (G - 1). https://arxiv.org/abs/2402.14740."""
    return _by_group(reward_N, group_N, accepted_N, lambda r: (r - r.mean()) * len(r) / (len(r) - 1))


def maxrl(reward_N: Tensor, group_N: Tensor, num_tokens_N: Tensor, accepted_N: Tensor) -> Tensor:
    """A = (R - mean) / mean, for rewards >= 0; a group whose mean is not above 0 teaches nothing. As in prime-rl."""
    return _by_group(
        reward_N, group_N, accepted_N, lambda r: (r - r.mean()) / r.mean() if r.mean() > 0 else torch.zeros_like(r)
    )


def reinforce_whitened(reward_N: Tensor, group_N: Tensor, num_tokens_N: Tensor, accepted_N: Tensor) -> Tensor:
    """Batch-whitened return: A = (R - mean) * rsqrt(var + 1e-8) over the accepted tokens of the whole batch.

    The reward comes at the end and is not discounted, so every token of a trajectory has the same return; moments
    are over tokens, with the unbiased variance. REINFORCE++, https://arxiv.org/abs/2501.03262.
    """
    weight_N = torch.where(accepted_N, num_tokens_N, 0).double()
    num_tokens = weight_N.sum()
    if num_tokens < 2:
        return torch.zeros_like(reward_N)
    mean = (weight_N * reward_N).sum() / num_tokens
    variance = (weight_N * (reward_N - mean).square()).sum() / (num_tokens - 1)
    return torch.where(accepted_N, (reward_N - mean) * torch.rsqrt(variance + WHITEN_EPSILON), 0.0)


def reinforce_baseline(reward_N: Tensor, group_N: Tensor, num_tokens_N: Tensor, accepted_N: Tensor) -> Tensor:
    """REINFORCE++-baseline: R - mean of the accepted siblings, then whitened over the batch. https://arxiv.org/abs/2501.03262."""
    centred_N = dr_grpo(reward_N, group_N, num_tokens_N, accepted_N)
    return reinforce_whitened(centred_N, group_N, num_tokens_N, accepted_N)


def _by_group(reward_N: Tensor, group_N: Tensor, accepted_N: Tensor, formula: Callable[[Tensor], Tensor]) -> Tensor:
    """`formula` over the accepted of each group; 0 for the rejected, a lone survivor, and equal rewards."""
    advantage_N = torch.zeros_like(reward_N)
    for group in group_N.unique().tolist():
        members = (group_N == group) & accepted_N
        reward = reward_N[members]
        if len(reward) < 2 or bool(reward.min() == reward.max()):
            continue
        advantage_N[members] = formula(reward)
    return advantage_N


def shape_overlong(reward_N: Tensor, num_tokens_N: Tensor, *, limit: int, buffer: int, factor: float) -> Tensor:
    """R + min(-(length - (limit - buffer)) / buffer * factor, 0): the last `buffer` tokens cost up to `factor`, as in DAPO.

    https://arxiv.org/abs/2503.14476, as verl reads it. `num_tokens_N`: sampled tokens of each trajectory.
    """
    over_N = num_tokens_N.double() - (limit - buffer)
    return reward_N + (-over_N / buffer * factor).clamp(max=0.0)


ADVANTAGES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "maxrl": maxrl,
    "reinforce_baseline": reinforce_baseline,
    "reinforce_whitened": reinforce_whitened,
    "reinforce_plus_plus": reinforce_whitened,
}


def advantages(name: str, *, reward_N: Tensor, group_N: Tensor, num_tokens_N: Tensor, accepted_N: Tensor) -> Tensor:
    """Args:
        name: key of ADVANTAGES.
        reward_N: [N] float64, finite.
        group_N: [N] int64, the prompt that each trajectory answers.
        num_tokens_N: [N] int64, trainable tokens.
        accepted_N: [N] bool; what was rejected takes part in no statistic and gets 0.

    Returns:
        [N] float64.
    """
    if reward_N.dtype != torch.float64 or accepted_N.dtype != torch.bool:
        raise ValueError(
            f"advantages need float64 rewards and a bool mask, got {reward_N.dtype} and {accepted_N.dtype}"
        )
    if not reward_N.shape == group_N.shape == num_tokens_N.shape == accepted_N.shape:
        raise ValueError(
            f"advantages need one reward, group, token count and mask per trajectory, got shapes {list(reward_N.shape)}, "
            f"{list(group_N.shape)}, {list(num_tokens_N.shape)}, {list(accepted_N.shape)}"
        )
    return ADVANTAGES[name](reward_N, group_N, num_tokens_N, accepted_N)
