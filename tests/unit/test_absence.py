"""When a run without a replica is paused and resumed."""

from __future__ import annotations

import pytest

from services.gateway.absence import NO_REPLICA, Absence, Change, describe
from shared.wire.pb import weight_sync_pb2 as ws
from shared.wire.records import RunRecord
from shared.wire.run import RunConfig, RunState

EJECTED = ws.Replica(replica="a", state="ejected", reason="probe of r/0-1: 1 of 9 logprobs differ")


def record(state: RunState = RunState.RUNNING, reason: str = "") -> RunRecord:
    return RunRecord(
        config=RunConfig(run="r", model="m"), state=state, reason=reason, detail="", created=0.0, step=0, durable_step=0,
        lineage=0, epoch=1,
    )  # fmt: skip


PAUSED = record(RunState.PAUSED, NO_REPLICA)


def look(absence, now, replicas=(EJECTED,), run=None, has_work=True, is_known=True):
    return absence.look(run or record(), replicas, has_work=has_work, is_known=is_known, now=now)


def test_a_run_is_paused_after_its_patience_and_goes_on_with_the_first_replica_that_is_not_ejected():
    absence = Absence(30)
    assert look(absence, 100) is None
    assert absence.left_s(110) == 20
    assert look(absence, 129) is None
    assert look(absence, 130) is Change.PAUSE
    assert look(absence, 131, run=PAUSED) is None
    assert look(absence, 132, [EJECTED, ws.Replica(replica="b", state="joining")], PAUSED) is Change.RESUME
    assert absence.left_s(133) is None


def test_none_at_all_is_as_bad_as_ejected_ones():
    absence = Absence(30)
    assert look(absence, 0, []) is None
    assert look(absence, 30, []) is Change.PAUSE


@pytest.mark.parametrize(
    "calm",
    [
        {"has_work": False},
        {"replicas": [EJECTED, ws.Replica(replica="b", state="preparing")]},
        {"run": record(RunState.COMPLETED)},
    ],
    ids=["nothing-to-do", "one-is-coming", "over"],
)
def test_the_clock_starts_anew_after_a_moment_without_need(calm):
    absence = Absence(30)
    assert look(absence, 0) is None
    assert look(absence, 20, **calm) is None
    assert look(absence, 40) is None
    assert look(absence, 69) is None
    assert look(absence, 70) is Change.PAUSE


def test_the_clock_does_not_start_while_weight_sync_is_silent():
    absence = Absence(30)
    assert look(absence, 0, is_known=False) is None
    assert absence.left_s(10) is None


@pytest.mark.parametrize("reason", ["operator", "mismatch"])
def test_a_pause_for_another_reason_is_somebody_elses(reason):
    absence, run = Absence(30), record(RunState.PAUSED, reason)
    assert look(absence, 0, run=run) is None
    assert look(absence, 60, run=run) is None
    assert look(absence, 61, [ws.Replica(state="ready")], run) is None


def test_a_person_is_told_what_is_wrong_with_which_replica():
    assert "a: probe of r/0-1: 1 of 9 logprobs differ" in describe([EJECTED])
    assert "no replica is registered" in describe([])
