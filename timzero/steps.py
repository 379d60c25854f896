"""A trained step as the trainer records it, in the few numbers that a person looks at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSummary:
    step: int
    epoch: int
    """Of the trainer that recorded it; a step that was trained again after a crash has a newer one."""
    metrics: Mapping[str, Any]

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> StepSummary:
        """Args: record: one element of `GET /v1/runs/{run}/steps`."""
        return cls(step=record["step"], epoch=record["epoch"], metrics=record["metrics"])

    @property
    def tokens(self) -> int:
        """Sampled tokens trained on."""
        return int(self.metrics["tokens"])

    @property
    def reward(self) -> float:
        return float(self.metrics["reward_mean"])

    @property
    def lag(self) -> float:
        """Mean over tokens of the step minus the version that sampled the token."""
        return float(self.metrics["lag"])

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens trained on, per second of the step's wall time."""
        return float(self.metrics["tokens_per_s"])

    @property
    def digest(self) -> str:
        """Of the weights after the step."""
        return str(self.metrics["weights_digest"])

    @property
    def tim(self) -> Mapping[str, float]:
        return self.metrics["tim"]

    @property
    def compared_tokens(self) -> int:
        return int(self.tim["compared_tokens"])

    @property
    def ingested_tokens(self) -> int:
        """Of `tokens`, those that another engine sampled; they are not compared."""
        return int(self.metrics.get("ingested_tokens", 0))

    @property
    def differing_bits(self) -> int:
        return int(self.tim["differing_bits"])

    @property
    def flips(self) -> int:
        """Compared tokens whose argmax differs."""
        return int(self.tim["top1_flips"])


def by_step(records: Iterable[Mapping[str, Any]]) -> list[StepSummary]:
    """One summary per step, in order; of a step that was trained again the newest."""
    newest: dict[int, StepSummary] = {}
    for record in records:
        step = StepSummary.from_record(record)
        if step.step not in newest or step.epoch >= newest[step.step].epoch:
            newest[step.step] = step
    return [newest[s] for s in sorted(newest)]
