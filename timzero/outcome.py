"""What a run came to, and whether anything is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.wire.run import RunState
from timzero.steps import StepSummary


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Grades of one evaluation."""

    rewards: tuple[float, ...]

    @property
    def accuracy(self) -> float:
        """Share of tasks solved: reward 1 or more."""
        return sum(r >= 1.0 for r in self.rewards) / len(self.rewards)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a run came to."""

    run: Mapping[str, Any]
    steps: tuple[StepSummary, ...]
    metrics: Mapping[str, Any]
    before: Evaluation | None
    after: Evaluation | None
    published_digest: str
    """Of the newest version that weight_sync holds; empty when there is none."""

    @property
    def digest(self) -> str:
        """Of the weights after the last step."""
        return self.steps[-1].digest if self.steps else self.published_digest

    @property
    def problems(self) -> list[str]:
        """Why the exit code is not 0."""
        found = []
        if self.run["state"] != RunState.COMPLETED:
            reason = f" ({self.run['reason']}: {self.run['detail']})" if self.run["reason"] else ""
            found.append(f"the run is {self.run['state']}{reason}")
        m = self.metrics
        dropped = sum(m["dropped"].values())
        if m["accepted"] != m["trained"] + dropped + m["live"]:
            found.append("accepted is not trained + dropped + live: trajectories were lost or counted twice")
        if self.run["config"]["numerics"] == "exact":
            differing = sum(s.differing_bits for s in self.steps)
            missing = sum(s.tokens - s.ingested_tokens - s.compared_tokens for s in self.steps)
            if differing:
                found.append(f"{differing} bits of logprobs differ between engine and trainer")
            if missing:
                found.append(f"{missing} trained tokens could not be compared")
        if self.published_digest != self.digest:
            found.append(f"the trainer's last digest is {self.digest}, weight_sync's {self.published_digest or 'none'}")
        return found
