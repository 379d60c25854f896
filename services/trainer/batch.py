"""From groups to what the model runs: one flat list of trainable tokens, and micro-batches of packed rows.

A group's prompt is packed once and every completion attends to it; the row contract makes the bits the same as if each
sequence stood alone. What is cut where follows from the complete ordered batch and the configuration alone.

    groups (prompt order) -> mini-steps (one optimizer step each) -> micro-batches (one forward and backward each)

Groups, trajectories and tokens keep one order throughout, so every part is a slice.

Legend: T trainable tokens, N trajectories, R packed rows of a micro-batch, H its scored rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.kernels import AttentionLayout
from shared.models import packed_layout, prefix_shared_layout
from shared.wire.run import RunConfig
from shared.wire.types import Group, Kv, Span, SpanKind, Trajectory


class BatchError(ValueError):
    """A leased group contradicts the run; the text names it and says what is wrong."""


@dataclass(frozen=True, slots=True, order=True)
class PolicyVersion:
    """A version's full name."""

    lineage: int
    step: int
    digest: str


@dataclass(frozen=True)
class MicroBatch:
    """Packed rows of one forward."""

    token_ids: Tensor
    """[R] int64."""
    layout: AttentionLayout
    rows: Tensor
    """[H] int64: the row whose hidden state predicts each trainable token."""
    targets: Tensor
    """[H] int64."""
    temperature: Tensor
    """[H] float32."""
    tokens: slice
    """Of the batch's trainable tokens."""

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)


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

    @property
    def num_tokens(self) -> int:
        return len(self.rollout_T)

    @property
    def num_sequences(self) -> int:
        return len(self.reward_N)


def build_batch(groups: Sequence[Group], config: RunConfig, *, step: int, vocab_size: int) -> Batch:
    """Validate and pack one leased batch.

    Args:
        groups: complete groups of batch `step`, in any order; none when an operator dropped them all, which makes a batch
            that changes nothing.
        config: of the run.
        step: that consumes them.
        vocab_size: ids must lie below it.

    Raises:
        BatchError: a group does not belong here or contradicts itself.
    """
    groups = tuple(sorted(groups, key=lambda g: g.prompt_number))
    members = [sorted(g.trajectories, key=lambda t: t.sample_index) for g in groups]
    for group, trajectories in zip(groups, members, strict=True):
        _check_group(group, trajectories, config, step, vocab_size)
    trajectories = [t for ts in members for t in ts]
    masks = [_trainable(t) for t in trajectories]
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
                micro_batches=_cut(members, first_token, part, config.micro_batch_tokens),
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
    )


def empty_micro_batch() -> MicroBatch:
    """One row through the layers and none through the head: a zero loss that is connected to every parameter."""
    return MicroBatch(
        token_ids=torch.zeros(1, dtype=torch.int64),
        layout=packed_layout([1]),
        rows=torch.zeros(0, dtype=torch.int64),
        targets=torch.zeros(0, dtype=torch.int64),
        temperature=torch.zeros(0),
        tokens=slice(0, 0),
    )


def pack(groups: Sequence[Sequence[Trajectory]], first_token: int) -> MicroBatch:
    """Prompts once, completions behind them, each as far as its last trainable token needs.

    Args:
        groups: trajectories of each group; siblings share their prompt.
        first_token: place in the batch of the first trainable token.
    """
    token_ids: list[np.ndarray] = []
    rows: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    temperature: list[np.ndarray] = []
    completion_lens: list[list[int]] = []
    begin = 0
    for trajectories in groups:
        prompt_len = trajectories[0].num_prompt_tokens
        token_ids.append(trajectories[0].token_ids[:prompt_len])
        last_of_prompt = begin + prompt_len - 1
        begin += prompt_len
        completion_lens.append([])
        for t in trajectories:
            places = np.flatnonzero(_trainable(t))
            # The hidden state before a token predicts it, so the last trainable token needs no row of its own.
            length = int(places[-1]) if len(places) else 0
            token_ids.append(t.token_ids[prompt_len : prompt_len + length])
            rows.append(np.where(places == 0, last_of_prompt, begin + places - 1))
            targets.append(t.token_ids[prompt_len + places])
            temperature.append(np.full(len(places), t.sampling.temperature, np.float32))
            if length:
                completion_lens[-1].append(length)
            begin += length
    flat_targets = torch.from_numpy(np.concatenate(targets).astype(np.int64))
    return MicroBatch(
        token_ids=torch.from_numpy(np.concatenate(token_ids).astype(np.int64)),
        layout=prefix_shared_layout([ts[0].num_prompt_tokens for ts in groups], completion_lens),
        rows=torch.from_numpy(np.concatenate(rows).astype(np.int64)),
        targets=flat_targets,
        temperature=torch.from_numpy(np.concatenate(temperature)),
        tokens=slice(first_token, first_token + len(flat_targets)),
    )


def _cut(
    members: Sequence[Sequence[Trajectory]], first_token: np.ndarray, part: np.ndarray, micro_batch_tokens: int
) -> tuple[MicroBatch, ...]:
    """Consecutive groups of one mini-step until the next one would exceed `micro_batch_tokens` rows."""
    cuts: list[list[int]] = []
    rows = 0
    for index in part.tolist():
        size = _num_rows(members[index])
        if not cuts or rows + size > micro_batch_tokens:
            cuts.append([])
            rows = 0
        cuts[-1].append(index)
        rows += size
    return tuple(pack([members[i] for i in cut], int(first_token[cut[0]])) for cut in cuts)


def _num_rows(trajectories: Sequence[Trajectory]) -> int:
    return trajectories[0].num_prompt_tokens + sum(len(t.logprobs) for t in trajectories)


def _trainable(trajectory: Trajectory) -> np.ndarray:
    """[S] bool over the tokens behind the prompt."""
    return trajectory.loss_mask[trajectory.num_prompt_tokens :] != 0


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


def _check_group(
    group: Group, trajectories: Sequence[Trajectory], config: RunConfig, step: int, vocab_size: int
) -> None:
    def refuse(problem: str) -> None:
        raise BatchError(f"group {group.group_id} of batch {step}: {problem}; cancel it or correct the run")

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
            refuse(f"{t.trajectory_id} has reward {t.reward}")
        if t.sampling.temperature != config.temperature or t.sampling.is_truncated:
            refuse(
                f"{t.trajectory_id} was sampled with {t.sampling}, the run trains at temperature {config.temperature}"
            )
