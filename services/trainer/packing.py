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


def trainable(trajectory: Trajectory) -> np.ndarray:
    """[S] bool over the tokens behind the prompt."""
    return trajectory.loss_mask[trajectory.num_prompt_tokens :] != 0
