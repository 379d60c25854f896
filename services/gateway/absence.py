"""A run that nobody can generate for is paused, with the reason, and goes on when somebody can. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from shared.wire.pb import weight_sync_pb2 as ws
from shared.wire.records import RunRecord
from shared.wire.run import RunState

NO_REPLICA = "no_replica"
"""Reason of the pause."""


class Change(StrEnum):
    PAUSE = "pause"
    RESUME = "resume"


class Absence:
    """Since when a run is without a replica.

    Args:
        patience_s: a restart takes seconds, and an ejected replica may heal with the next call; longer than this is told.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since: float | None = None

    def look(
        self, run: RunRecord, replicas: Sequence[ws.Replica], *, has_work: bool, is_known: bool, now: float
    ) -> Change | None:
        """What is to be done with the run.

        Args:
            has_work: whether prompts wait to be generated.
            is_known: whether weight_sync says so now.
            now: seconds of a monotonic clock.
        """
        is_absent = has_work and all(r.state == "ejected" for r in replicas)
        if not is_absent or run.state.is_over:
            self._since = None
        elif self._since is None and is_known:
            self._since = now
        if run.state is RunState.PAUSED and run.reason == NO_REPLICA:
            return None if is_absent else Change.RESUME
        left_s = self.left_s(now)
        return Change.PAUSE if run.state is RunState.RUNNING and left_s is not None and left_s <= 0 else None

    def left_s(self, now: float) -> float | None:
        """Seconds until the run is to be paused; None while it has a replica."""
        return None if self._since is None else self._since + self._patience_s - now


def describe(replicas: Sequence[ws.Replica]) -> str:
    """What a person has to know about the absence."""
    if not replicas:
        return "no replica is registered at weight_sync; start one. The run goes on by itself when it is there"
    reasons = "; ".join(f"{r.replica}: {r.reason}" for r in replicas)
    return f"every replica is ejected ({reasons}); mend or replace one. The run goes on by itself when it is ready"
