"""Every mismatch metric, for every set of tokens worth telling apart; before anything is rejected.

    same_version                 trainer and our engine under the version that sampled the token: the mismatch alone
    same_version_by_staleness    the same by steps of staleness; bucket 0 are the fresh tokens
    ingested                     the same for tokens that another engine sampled
    correction                   trainer before the step against the sampler: what a weight sees, mismatch and staleness
    correction_by_staleness
Fields of every table are described in mismatch_metrics.py; those of one version also say how many bits are equal and
whether both would have picked the same token:
    equal_fraction, ulp_max      equal bits among the finite; most representable float32 values between two of them
    top1_flip                    share of tokens where the two most probable tokens are different ones
    top1_lost                    share where the sampled token was the sampler's most probable one and is not the trainer's
and those of a correction what the clip makes of it:
    clip_caused, clip_missed     see mismatch_metrics.clips_by_tim

Legend: T trainable tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.trainer.correction import finite_delta
from services.trainer.mismatch import ulp_distance
from services.trainer.mismatch_metrics import by_staleness, clips_by_tim, describe


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What is known of every trained token when its step is done; logprobs are float32 on the CPU."""

    rollout_T: Tensor
    sampled_T: Tensor
    """Trainer under the version that sampled the token, where `is_comparable_T`."""
    proximal_T: Tensor
    """Trainer before the step."""
    trained_T: Tensor
    """Trainer while the token was trained on."""
    target_T: Tensor
    """int64: the token."""
    top1_T: Tensor
    """int32: most probable by `sampled_T`'s forward."""
    rollout_top1_T: Tensor
    """int32 as recorded; -1 where the sampler gave none."""
    weight_T: Tensor
    """Applied."""
    advantage_T: Tensor
    sequence_T: Tensor
    """int64, ascending."""
    staleness_T: Tensor
    is_comparable_T: Tensor
    is_ingested_T: Tensor


def tables(seen: Observed, clip_low: float, clip_high: float) -> dict[str, Any]:
    """JSON-ready; a bucket of staleness appears when it holds a token."""
    own_T = seen.is_comparable_T & ~seen.is_ingested_T
    buckets = list(by_staleness(seen.staleness_T))
    same_version = _same_version(seen, own_T)
    correction = _correction(seen, torch.ones_like(own_T), clip_low, clip_high)
    if len(buckets) == 1:
        # Under a fixed lag: all tokens are of one bucket.
        ((name, _),) = buckets
        by_bucket = {name: same_version}, {name: correction}
    else:
        by_bucket = (
            {n: _same_version(seen, own_T & of_T) for n, of_T in buckets},
            {n: _correction(seen, of_T, clip_low, clip_high) for n, of_T in buckets},
        )
    return {
        "same_version": same_version,
        "same_version_by_staleness": by_bucket[0],
        "ingested": _same_version(seen, seen.is_comparable_T & seen.is_ingested_T),
        "correction": correction,
        "correction_by_staleness": by_bucket[1],
    }


def _same_version(seen: Observed, of_T: Tensor) -> dict[str, Any]:
    table = _table(seen, seen.sampled_T, of_T)
    if not bool(of_T.any()):
        return table
    train_T, rollout_T = seen.sampled_T[of_T], seen.rollout_T[of_T]
    _, bad_T = finite_delta(train_T, rollout_T)
    top1_T, rollout_top1_T = seen.top1_T[of_T], seen.rollout_top1_T[of_T]
    is_flipped_T = (top1_T != rollout_top1_T) & (rollout_top1_T >= 0)
    return {
        **table,
        "equal_fraction": _share(train_T.view(torch.int32) == rollout_T.view(torch.int32)),
        "ulp_max": ulp_distance(train_T[~bad_T], rollout_T[~bad_T]),
        "top1_flip": _share(is_flipped_T),
        "top1_lost": _share(is_flipped_T & (rollout_top1_T == seen.target_T[of_T])),
    }


def _correction(seen: Observed, of_T: Tensor, clip_low: float, clip_high: float) -> dict[str, Any]:
    clips = clips_by_tim(
        seen.trained_T[of_T], seen.proximal_T[of_T], seen.rollout_T[of_T], seen.advantage_T[of_T], clip_low, clip_high
    )
    return {**_table(seen, seen.proximal_T, of_T), **clips}


def _table(seen: Observed, train_T: Tensor, of_T: Tensor) -> dict[str, Any]:
    others = (x[of_T] for x in (seen.rollout_T, seen.weight_T, seen.advantage_T, seen.sequence_T))
    return describe(train_T[of_T], *others)


def _share(of: Tensor) -> float:
    return float(of.double().mean())
