"""Which version is needed, which evaluation is lost, which replica gets a group."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway import plan
from shared.wire.pb import weight_sync_pb2 as ws
from shared.wire.records import EvalRecord
from shared.wire.run import RunConfig
from shared.wire.types import DropReason


def config(**values) -> RunConfig:
    return RunConfig(**{"run": "r", "model": "m", "num_steps": 6, "prompts_per_step": 4, "lag": 1} | values)


def evaluation(step: int, digest: str = "") -> EvalRecord:
    return EvalRecord(
        run="r", eval=0, created=0.0, step=step, digest=digest, seed=0, num_items=1, num_trajectories=1,
        num_finished=0, metadata={},
    )  # fmt: skip


def version(step: int, lineage: int = 0) -> ws.Version:
    return ws.Version(lineage=lineage, step=step, digest=f"digest-{lineage}-{step}")


def replica(name: str, step: int | None, state: str = "ready") -> ws.Replica:
    return ws.Replica(
        replica=name, incarnation="1", address="", state=state, version=None if step is None else version(step)
    )


@pytest.mark.parametrize(
    ("first_open", "needed"),
    [(0, 0), (3, 0), (4, 0), (7, 0), (8, 1), (12, 2), (23, 4)],
)
def test_needed_is_the_version_of_the_first_batch_that_is_not_generated(first_open, needed):
    assert plan.needed_step(config(), is_over=False, first_open=first_open, pinned=(), published=(0, 1)) == needed


def test_an_unfinished_evaluation_holds_the_version_back_and_a_newer_one_does_not():
    assert plan.needed_step(config(), is_over=False, first_open=12, pinned=(1,), published=(0, 1, 2)) == 1
    assert plan.needed_step(config(), is_over=False, first_open=12, pinned=(3,), published=(0, 1, 2, 3)) == 2


def test_after_the_last_batch_evaluations_come_oldest_first_and_then_the_newest_version():
    assert plan.needed_step(config(), is_over=False, first_open=24, pinned=(6, 2), published=(2, 6)) == 2
    assert plan.needed_step(config(), is_over=False, first_open=24, pinned=(), published=(5, 6)) == 6
    assert plan.needed_step(config(), is_over=True, first_open=0, pinned=(), published=(3,)) == 3
    assert plan.needed_step(config(), is_over=True, first_open=0, pinned=(), published=()) is None


@given(lag=st.integers(0, 4), num_steps=st.integers(1, 9), size=st.integers(1, 5))
def test_versions_share_out_every_prompt_exactly_once_and_only_to_its_own_version(lag, num_steps, size):
    run = config(lag=lag, num_steps=num_steps, prompts_per_step=size, samples_per_prompt=2)
    owner = {n: step for step in range(num_steps + 1) for n in plan.prompts_of(run, step)}
    assert sum(len(plan.prompts_of(run, step)) for step in range(num_steps + 1)) == len(owner)
    assert owner == {n: run.version_for(run.batch_of(n)) for n in range(num_steps * size)}


def test_an_evaluation_is_lost_when_its_version_was_retired_or_replaced_but_not_before_it_is_seen():
    versions = [version(3), version(4)]
    assert plan.lost(evaluation(2), versions) is DropReason.STALE
    assert plan.lost(evaluation(3), versions) is None
    assert plan.lost(evaluation(3, "digest-0-3"), versions) is None
    assert plan.lost(evaluation(3, "another"), versions) is DropReason.ORPHAN_LINEAGE
    assert plan.lost(evaluation(5), versions) is None
    assert plan.lost(evaluation(0), []) is None


def choose(replicas, **values):
    arguments = {"versions": [version(1)], "load": {}, "num_samples": 8, "max_inflight_samples": 16} | values
    found = plan.choose_replica(replicas, **arguments)
    return found and found.replica


def test_the_least_loaded_ready_replica_of_the_version_gets_the_group():
    fleet = [replica("a", 1), replica("b", 1), replica("c", 0), replica("d", 1, "ejected"), replica("e", None)]
    assert choose(fleet) == "a"
    assert choose(fleet, load={("a", "1"): 8}) == "b"
    assert choose(fleet, load={("a", "1"): 8}, avoid={("b", "1")}) == "a"
    assert choose(fleet, versions=[version(2)]) is None


def test_a_version_of_equal_weights_but_another_step_is_another_version():
    other = ws.Version(lineage=0, step=2, digest=version(1).digest)
    assert choose([replica("a", 1)], versions=[other]) is None


def test_a_full_replica_gets_nothing_and_a_group_above_the_bound_waits_for_an_idle_one():
    fleet = [replica("a", 1)]
    assert choose(fleet, load={("a", "1"): 9}) is None
    assert choose(fleet, load={("a", "1"): 8}) == "a"
    assert choose(fleet, num_samples=99) == "a"
    assert choose(fleet, num_samples=99, load={("a", "1"): 1}) is None


def test_load_belongs_to_an_incarnation():
    assert choose([replica("a", 1)], load={("a", "0"): 16}) == "a"


def test_a_share_is_an_equal_part_of_the_groups_over_the_replicas_that_live():
    fleet = [
        ws.Replica(replica=f"r{i}", state=state) for i, state in enumerate(["ready", "preparing", "ejected", "joining"])
    ]
    assert plan.fair_share(fleet, [8] * 8) == 24
    assert plan.fair_share(fleet[:1], [8] * 8) == 64
    assert plan.fair_share(fleet, [8]) == 8
    assert plan.fair_share([], [4, 4]) == 8
    assert plan.fair_share(fleet, []) == 0


def needed(config, first_open, published, **values):
    return plan.needed_step(
        config, is_over=False, first_open=first_open, pinned=values.pop("pinned", ()), published=published, **values
    )


def test_under_max_lag_the_newest_version_is_needed_and_before_the_first_publish_the_oldest_allowed():
    run = config(max_lag=2)
    assert needed(run, 0, ()) == 0
    assert needed(run, 13, ()) == 1
    assert needed(run, 13, (0, 1, 2)) == 2
    assert needed(run, 13, (0, 1, 2), pinned=(1,)) == 1


def test_no_version_is_used_for_a_batch_that_it_was_trained_on():
    assert needed(config(max_lag=2), 9, (0, 1, 2, 3)) == 2


def test_a_version_is_replaced_when_every_replica_has_taken_it_on_or_it_is_too_old():
    run = config(max_lag=2)
    assert needed(run, 8, (0, 1, 2), current=1, is_moving=True) == 1
    assert needed(run, 8, (0, 1, 2), current=1, is_moving=False) == 2
    assert needed(run, 16, (0, 1, 2, 3), current=1, is_moving=True) == 3


def test_a_replica_is_moving_until_it_serves_the_version():
    assert plan.is_moving([replica("a", 1), replica("b", 0, "preparing")], 1)
    assert plan.is_moving([replica("a", None, "staged")], 1)
    assert not plan.is_moving([replica("a", 1), replica("b", None, "ejected"), replica("c", None, "joining")], 1)
    assert not plan.is_moving([replica("a", 1, "preparing")], 1)


def test_running_samples_take_newer_versions_on_but_pinned_ones_and_older_versions_wait():
    assert plan.may_change(1, 2, num_samples=8, num_pinned=0)
    assert not plan.may_change(1, 2, num_samples=8, num_pinned=4)
    assert not plan.may_change(2, 1, num_samples=8, num_pinned=0)
    assert plan.may_change(2, 1, num_samples=0, num_pinned=0)
    assert plan.may_change(1, 1, num_samples=8, num_pinned=8)
    assert not plan.may_change(None, 1, num_samples=8, num_pinned=0)


@given(max_lag=st.integers(0, 4), num_steps=st.integers(1, 9), size=st.integers(1, 5))
def test_under_max_lag_a_version_generates_its_own_batch_and_those_after_it_that_it_is_not_too_old_for(
    max_lag, num_steps, size
):
    run = config(lag=1, max_lag=max_lag, num_steps=num_steps, prompts_per_step=size)
    for step in range(num_steps + 1):
        batches = {run.batch_of(n) for n in plan.prompts_of(run, step)}
        assert batches == {b for b in range(num_steps) if step <= b <= step + max_lag}


def test_a_prompt_is_sampled_by_versions_that_are_new_enough_and_never_by_one_before_its_last_token():
    run, versions = config(max_lag=2), [version(s) for s in range(5)]
    usable = lambda newest, begun_by: [  # noqa: E731
        v.step
        for v in plan.usable_versions(run, 13, versions, newest=version(newest), begun_by=begun_by)
    ]  # fmt: skip
    assert usable(3, -1) == [1, 2, 3]
    assert usable(2, -1) == [1, 2]
    assert usable(3, 2) == [2, 3]
    assert usable(2, 3) == []


def test_a_replica_on_its_way_still_samples_with_what_it_serves():
    fleet = [replica("a", 1, "preparing"), replica("b", 0, "staged"), replica("c", None, "preparing")]
    versions = [version(0), version(1)]
    assert choose(fleet, versions=versions) is None
    assert choose(fleet, versions=versions, states=plan.SERVING) == "a"
    assert choose(fleet, versions=versions[:1], states=plan.SERVING) == "b"
