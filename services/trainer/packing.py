"""Packed rows: what one forward runs.

A group's prompt is packed once and every completion attends to it; the row contract makes the bits the same as if each
sequence stood alone.

Legend: S tokens behind a prompt, R packed rows of a micro-batch, H its scored rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.kernels import AttentionLayout
from shared.models import packed_layout, prefix_shared_layout
from shared.wire.types import Trajectory


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
            places = np.flatnonzero(trainable(t))
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


def cut(
    members: Sequence[Sequence[Trajectory]], first_token: np.ndarray, part: np.ndarray, micro_batch_tokens: int
) -> tuple[MicroBatch, ...]:
    """Consecutive groups of one mini-step in as few micro-batches of at most `micro_batch_tokens` rows as their order allows,
    and these as even as it allows, so that ranks wait little for one another.

    A group that alone exceeds the bound is cut between its trajectories, each part with the prompt: only a single trajectory
    may exceed it.
    """
    units: list[tuple[Sequence[Trajectory], int]] = []
    for index in part.tolist():
        group, begin = members[index], int(first_token[index])
        prompt = group[0].num_prompt_tokens
        for run in even_runs([len(t.logprobs) for t in group], micro_batch_tokens, each=prompt):
            units.append((group[run], begin))
            begin += sum(int(trainable(t).sum()) for t in group[run])
    runs = even_runs([_num_rows(trajectories) for trajectories, _ in units], micro_batch_tokens)
    return tuple(pack([trajectories for trajectories, _ in units[run]], units[run.start][1]) for run in runs)


def even_runs(sizes: Sequence[int], bound: int, *, each: int = 0) -> list[slice]:
    """Consecutive runs whose sizes add up to at most `bound`: as few as possible, the largest as small as that allows.

    Args:
        sizes: in order; one that exceeds the bound makes a run of its own.
        each: what every run costs besides.
    """
    num_runs = len(_filled(sizes, bound, each))
    low, high = 0, bound
    while low < high:
        middle = (low + high) // 2
        if len(_filled(sizes, middle, each)) == num_runs:
            high = middle
        else:
            low = middle + 1
    return _filled(sizes, high, each)


def _filled(sizes: Sequence[int], bound: int, each: int) -> list[slice]:
    """Runs that take what still fits."""
    begins: list[int] = []
    total = 0
    for index, size in enumerate(sizes):
        if not begins or total + size > bound:
            begins.append(index)
            total = each
        total += size
    return [slice(a, b) for a, b in zip(begins, [*begins[1:], len(sizes)], strict=False)]


def _num_rows(trajectories: Sequence[Trajectory]) -> int:
    return trajectories[0].num_prompt_tokens + sum(len(t.logprobs) for t in trajectories)


def trainable(trajectory: Trajectory) -> np.ndarray:
    """[S] bool over the tokens behind the prompt."""
    return trajectory.loss_mask[trajectory.num_prompt_tokens :] != 0
