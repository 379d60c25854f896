"""What a report is made from, as one JSON-ready value: read from a gateway, kept beside the HTML, read back from there."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from timzero.client import Client
from timzero.steps import StepSummary, by_step

MAX_FULL_TRAJECTORIES = 4000
"""Of larger runs only summaries are read, whole records of about this many, and staleness as the steps' means (which is
exact under fixed lag)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """What a report needs of one trajectory. Times are unix seconds, None where it did not get that far."""

    number: int
    state: str
    reason: str = ""
    step: int | None = None
    replicas: list[str] = field(default_factory=list)
    began: float | None = None
    ended: float | None = None
    rewarded: float | None = None
    versions: list[list[int]] = field(default_factory=list)
    """[policy step, sampled tokens] per span."""
    reward: float | None = None

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Sample:
        """Args: record: a trajectory as `Client.trajectories` gives it, full or summary."""
        times = record["timestamps"]
        spans = record.get("spans") or []
        return cls(
            number=record["number"],
            state=record["state"],
            reason=record["reason"],
            step=record["step"],
            replicas=list(record.get("replicas") or []),
            began=times.get("generating"),
            ended=times.get("awaiting_reward", times.get("evaluated")),
            rewarded=times.get("rewarded"),
            versions=[[s["policy_step"], s["end"] - s["start"]] for s in spans if s["kind"] == "sampled"],
            reward=record["reward"],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportData:
    run: dict[str, Any]
    metrics: dict[str, Any]
    steps: list[dict[str, Any]]
    samples: list[Sample]
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """[{name, step, accuracy, mean_reward, num_tasks}], as graded by the driver; empty for a report of its own."""

    @property
    def summaries(self) -> list[StepSummary]:
        """One per step, of a step that was trained again the newest."""
        return by_step(self.steps)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> ReportData:
        """Raises ValueError naming the file when it is no such data."""
        try:
            values = json.loads(path.read_text())
            return cls(**{**values, "samples": [Sample(**s) for s in values["samples"]]})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} holds no report data: {error}") from error


def collect(client: Client, run: str, evaluations: Iterable[Mapping[str, Any]] = ()) -> ReportData:
    """Reads everything from the gateway. Raises ApiError."""
    metrics = client.metrics(run)
    if metrics["accepted"] <= MAX_FULL_TRAJECTORIES:
        samples = [Sample.from_record(t) for t in client.trajectories(run, full=True)]
    else:
        samples = _many_samples(client, run)
    return ReportData(
        run=client.get_run(run),
        metrics=metrics,
        steps=list(client.steps(run)),
        samples=samples,
        evaluations=[dict(e) for e in evaluations],
    )


def _many_samples(client: Client, run: str) -> list[Sample]:
    """Summaries, with the replicas that the first sample of every group, or of every few groups, was on."""
    summaries = list(client.trajectories(run))
    firsts = [t for t in summaries if t["sample_index"] == 0 and t["timestamps"].get("generating")]
    firsts = firsts[:: 1 + len(firsts) // MAX_FULL_TRAJECTORIES]
    replicas: dict[str, list[str]] = {}
    for start in range(0, len(firsts), 128):
        ids = [t["trajectory_id"] for t in firsts[start : start + 128]]
        replicas |= {t["group_id"]: t.get("replicas") or [] for t in client.trajectories(run, ids=ids, full=True)}
    return [Sample.from_record(t | {"replicas": replicas.get(t["group_id"], [])}) for t in summaries]
