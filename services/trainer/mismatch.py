"""Training-inference mismatch, measured: the same token under the same weights, by two paths, compared by their bits.

Three series that are never mixed, each trainer - other:
    TIM        trainer at the sampling version - engine at the sampling version      (exact mode: no bit may differ)
    staleness  trainer at the version before the step - trainer at the sampling version
    drift      trainer while optimising - trainer at the version before the step

Legend: T tokens.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from services.trainer.correction import finite_delta, k3


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """How far two logprob series lie apart; all zeros when they are equal or there are no tokens."""

    abs_mean: float = 0.0
    abs_p50: float = 0.0
    abs_p95: float = 0.0
    abs_p99: float = 0.0
    abs_max: float = 0.0
    k1: float = 0.0
    """mean(other - trainer), estimates KL(other || trainer); may be negative."""
    k3: float = 0.0
    """mean(exp(delta) - 1 - delta), the same expectation, never negative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """The TIM of one step."""

    compared_tokens: int
    uncompared_tokens: int
    """Trained tokens that no held version can reproduce (unknown version, mixed KV)."""
    differing_tokens: int
    differing_bits: int
    """Set bits of the XOR of the two float32 patterns, over all tokens."""
    ulp_max: int
    top1_flips: int
    nonfinite: int
    delta: Divergence

    @property
    def is_exact(self) -> bool:
        """Every token was compared and no bit differs."""
        return self.differing_tokens == 0 and self.uncompared_tokens == 0

    @property
    def equal_fraction(self) -> float:
        """Share of the compared tokens with equal bits; the service level of exact mode is 1."""
        return 1 - self.differing_tokens / self.compared_tokens if self.compared_tokens else 1.0

    def as_dict(self) -> dict[str, float | int]:
        """One flat JSON-ready block."""
        values = asdict(self)
        return {
            **{k: v for k, v in values.items() if k != "delta"},
            "equal_fraction": self.equal_fraction,
            **values["delta"],
        }


def measure(
    train_T: Tensor, rollout_T: Tensor, train_top1_T: Tensor, rollout_top1_T: Tensor, is_comparable_T: Tensor
) -> Mismatch:
    """Compare trainer and engine on the same version.

    Args:
        train_T, rollout_T: [T] float32 logprobs of the sampled tokens.
        train_top1_T, rollout_top1_T: [T] int32 argmax of each path; -1 where the sampler gave none.
        is_comparable_T: [T] bool: the trainer's number is from the token's own version.
    """
    train, rollout = train_T[is_comparable_T], rollout_T[is_comparable_T]
    _, bad = finite_delta(train, rollout)
    pattern = train.view(torch.int32) ^ rollout.view(torch.int32)
    return Mismatch(
        compared_tokens=len(train),
        uncompared_tokens=int((~is_comparable_T).sum()),
        differing_tokens=int((pattern != 0).sum()),
        differing_bits=sum(word.bit_count() for word in pattern[pattern != 0].numpy().view(np.uint32).tolist()),
        ulp_max=ulp_distance(train[~bad], rollout[~bad]),
        top1_flips=int(((train_top1_T != rollout_top1_T) & (rollout_top1_T >= 0) & is_comparable_T).sum()),
        nonfinite=int(bad.sum()),
        delta=divergence(train, rollout),
    )


def divergence(new_T: Tensor, old_T: Tensor) -> Divergence:
    """Distances of two [T] float32 series, over the tokens where both are finite."""
    delta_T, bad_T = finite_delta(new_T, old_T)
    delta_T = delta_T[~bad_T].double()
    if not len(delta_T):
        return Divergence()
    size_T = delta_T.abs().numpy()
    p50, p95, p99 = np.quantile(size_T, (0.5, 0.95, 0.99)).tolist()
    return Divergence(
        abs_mean=float(size_T.mean()),
        abs_p50=p50,
        abs_p95=p95,
        abs_p99=p99,
        abs_max=float(size_T.max()),
        k1=float(-delta_T.mean()),
        k3=float(k3(delta_T).mean()),
    )


def ulp_distance(a_T: Tensor, b_T: Tensor) -> int:
    """Most representable float32 values between two finite series."""

    def rank(x: Tensor) -> Tensor:
        bits = x.view(torch.int32).long()
        return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)

    return int((rank(a_T) - rank(b_T)).abs().max()) if len(a_T) else 0
