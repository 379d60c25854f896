"""What the engine computes: samples that grow, and sequences that are only scored."""

from __future__ import annotations

from array import array
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from services.rollout.sequence import Sequence
from services.rollout.stopping import StopRule
from shared.wire.types import FinishReason, Kv, SamplingParams


class Refused(Exception):
    """The engine can't take this request now, or ever; the text says why."""


class InvalidRequest(Refused):
    """The request can be served by no replica of this run."""


class OtherVersion(Refused):
    """The replica does not hold the version asked for, or is about to leave it."""


class InDoubt(Refused):
    """The replica failed its proof while it sampled: nothing that it sampled here is to be believed."""


class Full(Refused):
    """The waiting line has no room."""


class BadManifest(Refused):
    """The manifest contradicts itself, or describes a model or a run that this build does not know."""


class UnservableRun(Refused):
    """This process may not serve the run: its cache, its kernels or its build don't fit. Another one may."""


class GivenUp(Refused):
    """A version was given up on its way in: AbortWeights, or another Commit, came first."""


class ShuttingDown(Refused):
    """The replica ends; what was streamed stays true."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupRequest:
    """What all samples of one Generate call have in common."""

    seed: int
    prompt_number: int
    sampling: SamplingParams
    stream: Any
    """Where the chunks go; the engine only passes it on."""


@dataclass(slots=True, eq=False, kw_only=True)
class Sample(Sequence):
    """One trajectory that is being sampled."""

    request: GroupRequest
    trajectory_id: str
    sample_index: int
    num_prompt_tokens: int
    num_continued_tokens: int
    """Sampled elsewhere and given with the request."""
    stop_rule: StopRule
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    """float32, of the tokens sampled since the last chunk. As up to date as `token_ids`."""
    top1: array[int] = field(default_factory=lambda: array("i"))
    """int32"""

    @property
    def num_sampled_tokens(self) -> int:
        """Continued ones included: the index of the next token to sample."""
        return len(self.token_ids) - self.num_prompt_tokens

    def begin_chunk(self) -> None:
        """What was sampled since the last one belongs to another now."""
        self.logprobs, self.top1 = array("f"), array("i")


def _running() -> Future[np.ndarray]:
    future: Future[np.ndarray] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(slots=True, eq=False, kw_only=True)
class Scoring(Sequence):
    """A sequence whose tokens are given; every row's log-probability of its next token is wanted."""

    targets: list[int]
    """targets[i] follows token_ids[i]."""
    temperature: float
    logprobs: np.ndarray
    """[len(targets)] float32, filled as chunks complete."""
    done: Future[np.ndarray] = field(default_factory=_running)
    """Resolves to `logprobs`. Can't be cancelled: abort the scoring instead."""

    @classmethod
    def of(cls, ids: array[int] | list[int], temperature: float) -> Scoring:
        """One logprob per token from the second on; reads no cached page, since every row is wanted."""
        return cls(
            arrival=0,
            token_ids=array("i", ids[:-1]),
            shares_pages=False,
            targets=list(ids[1:]),
            temperature=temperature,
            logprobs=np.full(len(ids) - 1, np.nan, np.float32),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """Full name of the weights, as stamped on every token."""

    lineage: int
    step: int
    digest: str


class SampleChunk(NamedTuple):
    """Tokens of one sample, all from one version."""

    sample: Sample
    start: int
    """Index of the first one among the sampled tokens."""
    token_ids: array[int]
    logprobs: array[float]
    top1: array[int]
    version: Version
    kv: Kv
    """Whether every one was sampled behind keys and values of this version alone."""
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFailed:
    """The sample can't go on here; what was streamed of it stays true, unless the replica is in doubt."""

    sample: Sample
    reason: str
    is_in_doubt: bool = False
