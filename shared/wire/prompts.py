"""What is asked for: a training prompt, an evaluation item, and how their samples are rewarded.

They are stored as msgpack in Valkey; `fingerprint` is what makes a repeated post equal or a conflict.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

import msgpack

from shared.wire.types import SamplingParams, int32_array, int32_bytes

EXACT_MATCH = "exact_match"
"""The source under which the gateway's own grade is stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """Where the rewards of a prompt's samples come from; the reward is the sum over `sources`."""

    mode: Literal["external", "exact_match"] = "external"
    """external: clients PUT them. exact_match: the gateway compares the stripped sampled text with `answer` (1 or 0)."""
    deadline_s: float = 3600.0
    """From generated until every source must have answered. After it the run pauses or, under max_lag, the sample is dropped;
    nothing becomes a zero."""
    sources: tuple[str, ...] = ("default",)
    answer: str | None = None

    def __post_init__(self) -> None:
        if not (self.deadline_s > 0 and math.isfinite(self.deadline_s)):
            raise ValueError(f"reward.deadline_s must be above 0, got {self.deadline_s}")
        if not self.sources or len(set(self.sources)) != len(self.sources):
            raise ValueError(f"reward.sources must be distinct and not empty, got {list(self.sources)}")
        if self.mode == "exact_match":
            if self.answer is None:
                raise ValueError("reward.mode exact_match needs reward.answer")
            if self.sources not in (("default",), (EXACT_MATCH,)):
                raise ValueError(f"reward.mode exact_match has one source of its own, got {list(self.sources)}")
            object.__setattr__(self, "sources", (EXACT_MATCH,))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptItem:
    """One training prompt. `number` fixes its batch; it becomes the group `{run}.{number}`."""

    number: int
    token_ids: tuple[int, ...]
    n: int
    sampling: SamplingParams
    reward: RewardSpec = field(default_factory=RewardSpec)
    prompt_id: str = ""
    """The client's own name for it, unique in the run; empty: the group id."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """JSON-able; handed back with the trajectory, never read."""

    def __post_init__(self) -> None:
        if self.number < 0:
            raise ValueError(f"number must be >= 0, got {self.number}")
        _check(self.token_ids, self.n)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalItem:
    """One evaluation prompt; its place in the evaluation is its number."""

    token_ids: tuple[int, ...]
    n: int = 1
    sampling: SamplingParams
    answer: str | None = None
    """Set: the gateway grades by exact match, source `exact_match`."""
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self.token_ids, self.n)


def _check(token_ids: tuple[int, ...], n: int) -> None:
    if not token_ids:
        raise ValueError("the prompt has no tokens")
    if n < 1:
        raise ValueError(f"n must be >= 1, got {n}")


def fingerprint(item: PromptItem) -> str:
    """Equal for equal bodies, whatever the order of keys in the metadata."""
    body = _values(item) | {"token_ids": int32_bytes(item.token_ids).hex()}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:32]


def encode_prompt(item: PromptItem | EvalItem) -> bytes:
    return msgpack.packb(_values(item) | {"token_ids": int32_bytes(item.token_ids)}, use_bin_type=True)


def _values(item: PromptItem | EvalItem) -> dict[str, Any]:
    """`asdict` without a visit to every token."""
    values = {f.name: getattr(item, f.name) for f in fields(item)} | {"sampling": asdict(item.sampling)}
    if isinstance(item, PromptItem):
        values["reward"] = asdict(item.reward)
    return values


def decode_prompt(data: bytes) -> PromptItem:
    record = _decode(data)
    reward = record["reward"]
    record["reward"] = RewardSpec(**reward | {"sources": tuple(reward["sources"])})
    return PromptItem(**record)


def decode_eval_item(data: bytes) -> EvalItem:
    return EvalItem(**_decode(data))


def _decode(data: bytes) -> dict[str, Any]:
    record = msgpack.unpackb(data, raw=False)
    record["token_ids"] = tuple(int32_array(record["token_ids"]).tolist())
    sampling = record["sampling"]
    for name in ("stop", "stop_token_ids"):
        sampling[name] = tuple(sampling[name])
    record["sampling"] = SamplingParams(**sampling)
    return record
