"""The run's counts and limits as metrics."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client import generate_latest

from services.gateway.flow import FlowMetrics
from shared.metrics import names
from shared.metrics.server import value
from shared.wire.records import Counts, RunRecord
from shared.wire.run import RunConfig, RunState
from shared.wire.types import DropReason, State


def record(name: str, **config: object) -> RunRecord:
    return RunRecord(
        config=RunConfig(run=name, model="m", **config),  # type: ignore[arg-type]
        state=RunState.RUNNING, reason="", detail="", created=0.0, step=7, durable_step=5, lineage=0, epoch=1,
    )  # fmt: skip


def counts(accepted: int) -> Counts:
    return Counts(
        accepted=accepted, by_state={State.QUEUED: accepted}, dropped={"stale": 2}, rewards_late=0, queue_depth=3,
        eval_accepted=0, eval_by_state={}, replaced=1,
    )  # fmt: skip


@pytest.mark.parametrize(("name", "lag", "expected"), [("fixed", {"lag": 3}, 3), ("opportunistic", {"max_lag": 2}, 2)])
def test_gate_and_lag_are_those_of_the_run(name: str, lag: dict[str, int], expected: int) -> None:
    FlowMetrics().update(record(name, queue_batches=11, **lag), counts(4))
    assert value(names.GATE_STEP, run=name) == 5 + 11
    assert value(names.LAG_LIMIT, run=name) == expected


def test_a_counter_follows_the_stored_count_and_never_goes_back() -> None:
    flow, run = FlowMetrics(), record("counted")
    for accepted, total in ((4, 4), (9, 9), (6, 9), (10, 10)):
        flow.update(run, counts(accepted))
        assert value(names.TRAJECTORIES_ACCEPTED, run="counted") == total
        assert value(names.TRAJECTORIES, run="counted", state="queued") == accepted
    assert value(names.TRAJECTORIES_DROPPED, run="counted", reason="stale") == 2
    assert value(names.REPLACED_GROUPS, run="counted") == 1


@pytest.mark.parametrize("reason", list(DropReason))
def test_every_reason_of_a_drop_is_exported_from_the_start(reason: DropReason) -> None:
    flow, run = FlowMetrics(), record(f"drops-{reason}")
    flow.update(run, replace(counts(4), dropped={}))
    sample = f'timzero_trajectories_dropped_total{{reason="{reason}",run="drops-{reason}"}}'
    assert f"{sample} 0.0" in generate_latest().decode()
    flow.update(run, replace(counts(4), dropped={reason.value: 3}))
    assert f"{sample} 3.0" in generate_latest().decode()
