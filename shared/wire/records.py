"""What the store answers with. Plain values: the gateway turns them into JSON, the tests compare them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeVar

from shared.wire.prompts import EvalItem
from shared.wire.run import RunConfig, RunState
from shared.wire.types import State, Trajectory

T = TypeVar("T")


class StoreError(RuntimeError):
    """The store refused; the subclass says why and the text what to do."""


class UnknownRun(StoreError):
    """404."""


class UnknownTrajectory(StoreError):
    """404."""


class UnknownEvaluation(StoreError):
    """404."""


class RunExists(StoreError):
    """409: the name is taken."""


class RunActive(StoreError):
    """409: another run is not over yet; a deployment trains one at a time."""


class IllegalTransition(StoreError):
    """409: the run's state does not allow it (it is over, usually)."""


class GroupSealed(StoreError):
    """409: the group can't be dropped any more."""


class NotDurable(StoreError):
    """503: done in memory but not known to be on disk before the deadline. Repeat the request: it is idempotent."""


class Fenced(StoreError):
    """A newer trainer has taken the run over; this one must stop."""


class RunOver(StoreError):
    """The run ended while it was being worked on."""

    def __init__(self, run: str, state: RunState) -> None:
        super().__init__(f"run {run} is {state}")
        self.state = state


class AcceptStatus(StrEnum):
    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    """Equal body was accepted before: same ids."""
    CONFLICT = "conflict"
    """The number or the prompt_id is taken by another body (409)."""
    GATE_CLOSED = "gate_closed"
    """The number is too far ahead of the durable checkpoint (429, post it again later)."""
    OUT_OF_RANGE = "out_of_range"
    """The number is beyond the run's last batch (422)."""
    RUN_OVER = "run_over"
    """409."""


class RewardStatus(StrEnum):
    APPLIED = "applied"
    UNCHANGED = "unchanged"
    """The same revision with the same value was applied before."""
    CONFLICT = "conflict"
    """A lower revision than the stored one, or the same with another value (409)."""
    LATE = "late"
    """The trajectory is sealed: its group is queued, or it ended. Counted (409)."""
    UNKNOWN = "unknown"
    """No such trajectory (404)."""
    UNEXPECTED_SOURCE = "unexpected_source"
    """The prompt does not list this source (422)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    config: RunConfig
    state: RunState
    reason: str
    """Why paused, stopped or failed: one word (operator, missing_reward, infra_error, mismatch, poison, ...)."""
    detail: str
    """What exactly, for a person."""
    created: float
    step: int
    """Next step to train."""
    durable_step: int
    """Batches below it are covered by a durable checkpoint."""
    lineage: int
    epoch: int

    @property
    def run(self) -> str:
        return self.config.run

    @property
    def gate_step(self) -> int:
        """First batch that is not admitted before a later checkpoint is durable."""
        return self.durable_step + self.config.queue_bound_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptResult:
    status: AcceptStatus
    number: int
    prompt_id: str
    group_id: str
    trajectory_ids: tuple[str, ...] = ()
    """Empty unless accepted or duplicate."""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardItem:
    trajectory_id: str
    value: float
    source: str = "default"
    revision: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    status: RewardStatus
    trajectory_id: str
    source: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredReward:
    value: float
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryRecord:
    trajectory_id: str
    group_id: str
    prompt_id: str
    number: int
    """Prompt number; of an evaluation the item's place."""
    sample_index: int
    state: State
    reason: str = ""
    """Why dropped."""
    step: int | None = None
    """Step that leased or trained it."""
    rewards: Mapping[str, StoredReward] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    deadline: float | None = None
    """Unix time at which the missing reward pauses the run or, under max_lag, drops the sample; while awaiting one."""
    timestamps: Mapping[str, float] = field(default_factory=dict)
    """Unix seconds at which each state was entered."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    sampler: str = ""
    """Engine that sampled it, where it was not ours."""
    trajectory: Trajectory | None = None
    """Token ids and logprobs once generated; None in listings unless asked for."""

    @property
    def reward(self) -> float | None:
        """The sum over the sources, once all are there."""
        if not self.sources or any(s not in self.rewards for s in self.sources):
            return None
        return sum(self.rewards[s].value for s in self.sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    cursor: str
    """Monotone; resume behind it (`Last-Event-ID`)."""
    type: str
    """`trajectory.<state>` or `run.<state>`."""
    trajectory_id: str = ""
    group_id: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    cursor: str
    step: int
    epoch: int
    metrics: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(Generic[T]):
    items: tuple[T, ...]
    next_cursor: str | None
    """None: that was the last page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """accepted = trained + dropped + live, always; the evaluation lane is counted apart."""

    accepted: int
    by_state: Mapping[State, int]
    dropped: Mapping[str, int]
    """By reason."""
    rewards_late: int
    queue_depth: int
    """Groups in the training queue, leased ones included."""
    eval_accepted: int
    eval_by_state: Mapping[State, int]
    ingested: int = 0
    """Of those accepted, the ones that were sampled elsewhere."""
    replaced: int = 0
    """Groups that were sampled again because too few of their samples were left."""

    @property
    def trained(self) -> int:
        return self.by_state.get(State.TRAINED, 0)

    @property
    def num_dropped(self) -> int:
        return self.by_state.get(State.DROPPED, 0)

    @property
    def live(self) -> int:
        return sum(n for state, n in self.by_state.items() if not state.is_final)

    @property
    def to_generate(self) -> int:
        """Samples of prompts and evaluations that are not entirely generated."""
        lanes = (self.by_state, self.eval_by_state)
        return sum(lane.get(state, 0) for lane in lanes for state in (State.ACCEPTED, State.GENERATING))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRecord:
    run: str
    eval: int
    created: float
    step: int
    """Policy step that it is pinned to."""
    digest: str
    """Manifest digest of that version; empty: whatever is published as that step."""
    seed: int
    num_items: int
    num_trajectories: int
    num_finished: int
    """Evaluated or dropped."""
    metadata: Mapping[str, Any]
    items: tuple[EvalItem, ...] = ()
    trajectories: tuple[TrajectoryRecord, ...] = ()
    """Item order; filled by `get_eval`, empty in listings."""

    @property
    def is_finished(self) -> bool:
        return self.num_finished == self.num_trajectories


@dataclass(frozen=True, slots=True, kw_only=True)
class IdempotencyRecord:
    """What is known about an `Idempotency-Key`."""

    fingerprint: str
    """Of the request that used the key first; another one answers 422."""
    response: bytes | None
    """None: in progress (409, retry)."""
