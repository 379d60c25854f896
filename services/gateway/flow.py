"""The run's counts as metrics. Valkey holds the truth; a counter is moved by what it lacks to it."""

from __future__ import annotations

from prometheus_client import Counter

from shared.metrics import names
from shared.metrics.server import metric
from shared.wire.records import Counts, RunRecord
from shared.wire.types import DropReason, State


class FlowMetrics:
    def __init__(self) -> None:
        self._seen: dict[tuple[str, ...], int] = {}

    def update(self, record: RunRecord, counts: Counts) -> None:
        run = record.run
        metric(names.GATE_STEP).labels(run=run).set(record.gate_step)
        metric(names.LAG_LIMIT).labels(run=run).set(record.config.oldest_lag)
        for state in State:
            metric(names.TRAJECTORIES).labels(run=run, state=state.value).set(counts.by_state.get(state, 0))
        metric(names.QUEUE_DEPTH).labels(run=run).set(counts.queue_depth)
        self._count(metric(names.TRAJECTORIES_ACCEPTED).labels(run=run), ("accepted", run), counts.accepted)
        self._count(metric(names.TRAJECTORIES_INGESTED).labels(run=run), ("ingested", run), counts.ingested)
        self._count(metric(names.REWARD_LATE).labels(run=run), ("late", run), counts.rewards_late)
        self._count(metric(names.REPLACED_GROUPS).labels(run=run), ("replaced", run), counts.replaced)
        # Every reason from the start, so that the first drop is a rise.
        for reason in DropReason:
            counter = metric(names.TRAJECTORIES_DROPPED).labels(run=run, reason=reason.value)
            self._count(counter, ("dropped", run, reason), counts.dropped.get(reason, 0))

    def _count(self, counter: Counter, name: tuple[str, ...], total: int) -> None:
        # After a power cut of Valkey, or a late checkpoint, a total may be lower than before; a counter can't be.
        counter.inc(max(0, total - self._seen.get(name, 0)))
        self._seen[name] = max(total, self._seen.get(name, 0))
