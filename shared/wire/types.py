"""The records that travel: trajectories, groups, and the states they pass through.

A trajectory is token ids in and token ids out; text is derived from it and never the other way round. Arrays are numpy
here so that nothing below needs torch. Everything is encoded by `shared.wire.codec`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np


class State(StrEnum):
    """Life of a trajectory. At every moment: accepted = trained + dropped + live."""

    ACCEPTED = "accepted"
    GENERATING = "generating"
    AWAITING_REWARD = "awaiting_reward"
    REWARDED = "rewarded"
    QUEUED = "queued"
    LEASED = "leased"
    TRAINED = "trained"
    DROPPED = "dropped"
    EVALUATED = "evaluated"
    """End of an evaluation sample. The evaluation lane has counts of its own and is never trained."""

    @property
    def is_final(self) -> bool:
        return self in (State.TRAINED, State.DROPPED, State.EVALUATED)


class DropReason(StrEnum):
    STALE = "stale"
    ORPHAN_LINEAGE = "orphan_lineage"
    INFRA_ERROR = "infra_error"
    REWARD_TIMEOUT = "reward_timeout"
    """max_lag: its reward did not come within its deadline."""
    SMALL_GROUP = "small_group"
    """max_lag: nothing is wrong with it, but too few of its siblings are left to be compared with."""
    POISON = "poison"
    CANCELLED = "cancelled"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


class SpanKind(StrEnum):
    PROMPT = "prompt"
    SAMPLED = "sampled"
    TOOL = "tool"


class Kv(StrEnum):
    FRESH = "fresh"
    """The whole prefix was computed under this span's version: a trainer at that version can reproduce it."""
    MIXED = "mixed"
    """Some of the prefix was computed under older weights; never counted as exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Run-length of tokens of one kind from one policy version, as stamped inside the engine's step loop."""

    start: int
    """First token, counted from the start of the trajectory (prompt included)."""
    end: int
    kind: SpanKind
    lineage: int = 0
    policy_step: int = 0
    manifest_digest: str = ""
    kv: Kv = Kv.FRESH


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    temperature: float = 1.0
    """0 is greedy, allowed in the evaluation lane only."""
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def is_truncated(self) -> bool:
        return self.top_p not in (0.0, 1.0) or self.top_k != 0 or self.min_p != 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One finished sample.

    Shapes, with P prompt tokens and S sampled ones: token_ids int32 [P + S]; logprobs float32 [S], of the distribution
    sampled from (after temperature); top1 int32 [S], -1 where the argmax is not known; loss_mask uint8 [P + S], 1 = trainable.
    """

    trajectory_id: str
    group_id: str
    prompt_id: str
    sample_index: int
    run: str
    seed: int
    sampling: SamplingParams
    token_ids: np.ndarray
    logprobs: np.ndarray
    top1: np.ndarray
    loss_mask: np.ndarray
    spans: tuple[Span, ...]
    finish_reason: FinishReason
    fingerprint: str
    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    """Reward by source; `reward` is their sum once the trajectory is sealed."""
    replicas: tuple[str, ...] = ()
    """Who sampled it, in order; more than one after a continuation."""
    sampler: str = ""
    """Name of an engine that is not ours, where one sampled it. Its logprobs are measured apart and never asked to be exact."""
    timestamps: dict[str, float] = field(default_factory=dict)
    """Unix seconds: accepted, generating, generated, rewarded, queued. Never an input of training."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids) - len(self.logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All surviving samples of one prompt: one entry of the training queue."""

    run: str
    group_id: str
    prompt_number: int
    trajectories: tuple[Trajectory, ...]


def int32_bytes(values: np.ndarray | list[int] | tuple[int, ...]) -> bytes:
    """Token ids as they travel: little-endian int32."""
    return np.asarray(values, dtype="<i4").tobytes()


def int32_array(data: bytes) -> np.ndarray:
    """The inverse of `int32_bytes`: int32 [N]."""
    return np.frombuffer(data, dtype="<i4").astype(np.int32)


def float32_bytes(values: np.ndarray) -> bytes:
    """Logprobs as they travel: little-endian float32."""
    return np.asarray(values, dtype="<f4").tobytes()


def float32_array(data: bytes) -> np.ndarray:
    """The inverse of `float32_bytes`: float32 [N]."""
    return np.frombuffer(data, dtype="<f4").astype(np.float32)
