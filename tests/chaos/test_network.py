"""Faults on the wire between real processes: the run ends, nothing is lost, and not a bit of the weights differs."""

from __future__ import annotations

import threading

import pytest

from tests.chaos.chaos_testing import Chaos
from tests.chaos.http2 import Frame
from tests.chaos.proxy import CUT, DEADLINE_S, Verdict, answers, flip_one_bit, full, requests, sends


def test_a_lost_acknowledgement_of_a_commit_and_damaged_bytes_on_the_way_to_weight_sync_and_to_a_replica(
    rig: Chaos, undisturbed: str
) -> None:
    asked_again = []

    def lose(frame: Frame) -> Verdict:
        asked_again.append(rig.front.once(answers("CommitWeights")))
        return CUT

    lost = rig.front.once(answers("CommitWeights"), lose, skip=1)
    there = rig.publish.once(full(sends("Publish")), flip_one_bit, skip=20)
    here = rig.fetch.once(full(answers("Fetch")), flip_one_bit, skip=5)
    assert rig.run("disturbed").digest == undisturbed
    for fault in (lost, there, here, *asked_again):
        fault.wait()
    assert "DATA_LOSS" in {e["code"] for e in rig.events("weight_sync", "refused")}


def test_versions_that_change_under_running_samples(rig: Chaos) -> None:
    # Whether a version comes while something runs is the machine's business: mostly in the first run.
    found = (max(len(s.steps) for s in rig.opportunistic(f"moving-{i}", max_lag=2)) for i in range(5))
    assert any(num_spans > 1 for num_spans in found)


@pytest.mark.slow
def test_a_publish_that_breaks_off(rig: Chaos, undisturbed: str) -> None:
    cut = rig.publish.once(full(sends("Publish")), lambda frame: CUT, skip=30)
    assert rig.run("broken-publish").digest == undisturbed
    assert cut.happened.is_set()


@pytest.mark.slow
def test_a_lost_acknowledgement_of_a_publish(rig: Chaos, undisturbed: str) -> None:
    lost = rig.publish.once(answers("Publish"), lambda frame: CUT, skip=2)
    assert rig.run("lost-publish").digest == undisturbed
    assert lost.happened.is_set()


@pytest.mark.slow
def test_streams_of_tokens_that_break_off_are_continued(rig: Chaos, undisturbed: str) -> None:
    # Few, and early: with every cut more of the samples go to the replica that no proxy stands before.
    cuts = [rig.front.once(answers("Generate"), lambda frame: CUT, skip=skip) for skip in (1, 3)]
    assert rig.run("broken-streams").digest == undisturbed
    assert all(cut.happened.is_set() for cut in cuts)


@pytest.mark.slow
def test_the_gateway_loses_sight_of_weight_sync(rig: Chaos, undisturbed: str) -> None:
    cuts = [rig.watch.once(answers("Watch"), lambda frame: CUT, skip=skip) for skip in (3, 8)]
    cuts.append(rig.watch.once(requests("SetNeeded"), lambda frame: CUT, skip=1))
    cuts.append(rig.watch.once(answers("SetNeeded"), lambda frame: CUT, skip=2))
    assert rig.run("blind-gateway").digest == undisturbed
    assert all(cut.happened.is_set() for cut in cuts)


@pytest.mark.slow
def test_a_transfer_that_stands_still_holds_up_nobody(rig: Chaos, undisturbed: str) -> None:
    is_over = threading.Event()
    held = rig.fetch.once(full(answers("Fetch")), lambda frame: None if is_over.wait(DEADLINE_S) else CUT, skip=20)
    outcome = rig.run("slow-transfer")
    assert not held.happened.is_set()
    is_over.set()
    held.wait()
    assert outcome.digest == undisturbed


@pytest.mark.slow
def test_a_lost_preparation_and_a_lost_abort(rig: Chaos, undisturbed: str) -> None:
    lost = rig.front.once(answers("PrepareWeights"), lambda frame: CUT, skip=1)
    rig.front.once(requests("AbortWeights"), lambda frame: CUT)
    assert rig.run("lost-prepare").digest == undisturbed
    assert lost.happened.is_set()
