"""From groups to what the model runs: one flat list of trainable tokens, and micro-batches of packed rows.

What is cut where follows from the complete ordered batch and the configuration alone.

    groups (prompt order) -> mini-steps (one optimizer step each) -> micro-batches (one forward and backward each)

Groups, trajectories and tokens keep one order throughout, so every part is a slice.

Legend: T trainable tokens, N trajectories, S tokens behind a prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.trainer.admission import BatchError, check_group, choose
from services.trainer.packing import MicroBatch, cut, empty_micro_batch, trainable
from shared.wire.run import RunConfig
from shared.wire.types import Group, Kv, Span, SpanKind, Trajectory

__all__ = [
    "Batch", "BatchError", "MicroBatch", "MiniStep", "PolicyVersion", "build_batch", "empty_micro_batch", "part_of",
]  # fmt: skip


@dataclass(frozen=True, slots=True, order=True)
class PolicyVersion:
    """A version's full name."""

    lineage: int
    step: int
    digest: str


@dataclass(frozen=True)
class MiniStep:
    """The part of a batch that one optimizer step sees."""

    micro_batches: tuple[MicroBatch, ...]
    tokens: slice
    sequences: slice

    def of_rank(self, rank: int, world_size: int) -> Iterator[MicroBatch]:
        """Every `world_size`-th micro-batch, the same number on every rank; empty ones fill up."""
        for begin in range(0, len(self.micro_batches), world_size):
            index = begin + rank
            yield self.micro_batches[index] if index < len(self.micro_batches) else empty_micro_batch()


@dataclass(frozen=True)
class Batch:
    """One step's data, in prompt order."""

    step: int
    groups: tuple[Group, ...]
    mini_steps: tuple[MiniStep, ...]
    reward_N: Tensor
    """[N] float64."""
    group_N: Tensor
    """[N] int64: place of the group in the batch."""
    num_tokens_N: Tensor
    """[N] int64 trainable tokens."""
    sequence_T: Tensor
    """[T] int64: trajectory of each token."""
    segment_T: Tensor
    """[T] int64: turn of each token, numbered over the batch; the trainable tokens of a turn follow one another."""
    rollout_T: Tensor
    """[T] float32 logprobs as the engine recorded them."""
    top1_T: Tensor
    """[T] int32 argmax as the engine recorded it."""
    version_T: Tensor
    """[T] int64 index into `versions`; -1 where no version can reproduce the token (mixed KV)."""
    is_ingested_T: Tensor
    """[T] bool: sampled by an engine that is not ours; its logprobs are expected to differ."""
    versions: tuple[PolicyVersion, ...]
    uniform: tuple[Group, ...] = ()
    """Leased and not trained on: every sibling has the same reward."""
    surplus: tuple[Group, ...] = ()
    """Leased and not trained on: enough groups came before them."""
    num_missing: int = 0
    """Siblings of the leased trajectories that were dropped before (max_lag)."""

    @property
    def leased(self) -> tuple[Group, ...]:
        """Everything that this step consumes, in prompt order."""
        return tuple(sorted((*self.groups, *self.uniform, *self.surplus), key=lambda g: g.prompt_number))

    @property
    def targets_T(self) -> Tensor:
        """[T] int64: the trainable tokens themselves."""
        targets = [micro.targets for mini_step in self.mini_steps for micro in mini_step.micro_batches]
        return torch.cat([torch.zeros(0, dtype=torch.int64), *targets])

    @property
    def num_tokens(self) -> int:
        return len(self.rollout_T)

    @property
    def num_sequences(self) -> int:
        return len(self.reward_N)


def build_batch(groups: Sequence[Group], config: RunConfig, *, step: int, vocab_size: int) -> Batch:
    """Validate and pack one leased batch.

    Args:
        groups: of batch `step`, in any order, under max_lag as much as is left of each; none when an operator dropped them
            all, which makes a batch that changes nothing.
        config: of the run.
        step: that consumes them.
        vocab_size: ids must lie below it.

    Raises:
        BatchError: a group does not belong here or contradicts itself.
    """
    in_order = sorted(groups, key=lambda g: g.prompt_number)
    for group in in_order:
        check_group(group, config, step, vocab_size)
    groups, uniform, surplus = choose(in_order, config.algorithm)
    members = [sorted(g.trajectories, key=lambda t: t.sample_index) for g in groups]
    trajectories = [t for ts in members for t in ts]
    masks = [trainable(t) for t in trajectories]
    num_tokens_N = torch.tensor([int(m.sum()) for m in masks], dtype=torch.int64)
    versions = sorted({_version(s) for t in trajectories for s in t.spans if _is_reproducible(s)})
    group_sizes = [len(ts) for ts in members]
    first_sequence = np.cumsum([0, *group_sizes])
    first_token = np.cumsum([0, *num_tokens_N.tolist()])[first_sequence]
    num_mini_steps = max(1, min(config.algorithm.mini_steps, len(groups)))
    return Batch(
        step=step,
        groups=groups,
        mini_steps=tuple(
            MiniStep(
                micro_batches=cut(members, first_token, part, config.micro_batch_tokens),
                tokens=slice(int(first_token[part[0]]), int(first_token[part[-1] + 1])),
                sequences=slice(int(first_sequence[part[0]]), int(first_sequence[part[-1] + 1])),
            )
            for part in np.array_split(np.arange(len(groups)), num_mini_steps)
            if len(part)
        ),
        reward_N=torch.tensor([t.reward for t in trajectories], dtype=torch.float64),
        group_N=torch.repeat_interleave(torch.arange(len(groups)), torch.tensor(group_sizes, dtype=torch.int64)),
        num_tokens_N=num_tokens_N,
        sequence_T=torch.repeat_interleave(torch.arange(len(trajectories)), num_tokens_N),
        segment_T=_segments(masks),
        rollout_T=_flat([t.logprobs for t in trajectories], masks, np.float32),
        top1_T=_flat([t.top1 for t in trajectories], masks, np.int32),
        version_T=_flat([_version_index(t, versions) for t in trajectories], masks, np.int64),
        is_ingested_T=torch.repeat_interleave(
            torch.tensor([t.sampler != "" for t in trajectories], dtype=torch.bool), num_tokens_N
        ),
        versions=tuple(versions),
        uniform=uniform,
        surplus=surplus,
        num_missing=sum(max(0, config.samples_per_prompt - len(g.trajectories)) for g in in_order),
    )


def part_of(batch: Batch, places: Sequence[int], micro_batch_tokens: int) -> MiniStep:
    """Some groups of a batch, packed to be scored alone.

    Args:
        places: of the groups in the batch, ascending; neighbours share micro-batches.
    """
    members = [sorted(g.trajectories, key=lambda t: t.sample_index) for g in batch.groups]
    num_tokens_G = torch.bincount(batch.group_N, weights=batch.num_tokens_N.double(), minlength=len(members)).long()
    first_token = np.cumsum([0, *num_tokens_G.tolist()])
    runs = np.split(np.array(places), np.flatnonzero(np.diff(places) > 1) + 1)
    return MiniStep(
        micro_batches=tuple(m for run in runs for m in cut(members, first_token, run, micro_batch_tokens)),
        tokens=slice(0, batch.num_tokens),
        sequences=slice(0, batch.num_sequences),
    )


def _segments(masks: Sequence[np.ndarray]) -> Tensor:
    """[T] int64: runs of trainable tokens, counted up."""
    flat = [np.concatenate([[0], m]) for m in masks]
    begins = np.concatenate([np.zeros(0, np.int64), *[np.diff(m.astype(np.int64))[m[1:] != 0] for m in flat]])
    return torch.from_numpy(np.cumsum(begins) - 1)


def _is_reproducible(span: Span) -> bool:
    return span.kind is SpanKind.SAMPLED and span.kv is Kv.FRESH


def _version(span: Span) -> PolicyVersion:
    return PolicyVersion(span.lineage, span.policy_step, span.manifest_digest)


def _version_index(trajectory: Trajectory, versions: Sequence[PolicyVersion]) -> np.ndarray:
    """[S] int64."""
    index = np.full(len(trajectory.token_ids), -1, np.int64)
    for span in trajectory.spans:
        if _is_reproducible(span):
            index[span.start : span.end] = versions.index(_version(span))
    return index[trajectory.num_prompt_tokens :]


def _flat(values: Sequence[np.ndarray], masks: Sequence[np.ndarray], dtype: type) -> Tensor:
    kept = [v[m].astype(dtype) for v, m in zip(values, masks, strict=True)]
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *kept]))
