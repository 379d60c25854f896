"""Processes that die or stand still at a moment that a proxy sees: the run ends, nothing is lost, and no bit differs."""

from __future__ import annotations

import signal
import threading

import pytest

from tests.chaos.chaos_testing import Chaos, Churn, Killer
from tests.chaos.proxy import DEADLINE_S, answers, full, requests, sends

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_replica_that_dies_while_it_fetches_a_version(rig: Chaos, undisturbed: str) -> None:
    kill = Killer(rig, "rollout-1")
    rig.fetch.once(full(answers("Fetch")), kill, skip=30)
    assert rig.run("in-prepare").digest == undisturbed
    kill.wait_restarted()


def test_a_replica_that_dies_between_prepare_and_commit(rig: Chaos, undisturbed: str) -> None:
    kill = Killer(rig, "rollout-1")
    rig.front.once(requests("CommitWeights"), kill, skip=2)
    assert rig.run("before-commit").digest == undisturbed
    kill.wait_restarted()


def test_a_replica_that_dies_while_it_samples(rig: Chaos, undisturbed: str) -> None:
    kill = Killer(rig, "rollout-1")
    rig.front.once(answers("Generate"), kill, skip=40)
    assert rig.run("in-generation").digest == undisturbed
    kill.wait_restarted()


def test_weight_sync_that_dies_in_the_middle_of_a_publish_comes_back_with_its_store(
    rig: Chaos, undisturbed: str
) -> None:
    kill = Killer(rig, "weight_sync")
    rig.publish.once(full(sends("Publish")), kill, skip=50)
    assert rig.run("in-publish").digest == undisturbed
    kill.wait_restarted()


def test_weight_sync_that_dies_while_a_replica_fetches(rig: Chaos, undisturbed: str) -> None:
    kill = Killer(rig, "weight_sync")
    rig.fetch.once(full(answers("Fetch")), kill, skip=30)
    assert rig.run("in-fetch").digest == undisturbed
    kill.wait_restarted()


def test_a_trainer_that_dies_while_it_publishes(rig: Chaos, undisturbed: str) -> None:
    kill = Killer(rig, "trainer")
    rig.publish.once(full(sends("Publish")), kill, skip=70)
    assert rig.run("trainer-in-publish").digest == undisturbed
    kill.wait_restarted()


@pytest.mark.parametrize("moment", ["Generate", "PrepareWeights", "CommitWeights"])
def test_a_replica_that_stands_still_holds_up_nobody(rig: Chaos, undisturbed: str, moment: str) -> None:
    process = rig.stack["rollout-1"]
    stopped = rig.front.once(answers(moment), lambda frame: process.kill(signal.SIGSTOP) and None, skip=2)
    try:
        assert rig.run(f"stopped-in-{moment}").digest == undisturbed
        assert stopped.happened.is_set()
    finally:
        process.kill(signal.SIGCONT)
    # It is taken in again as if nothing had been.
    again = rig.front.once(answers("CommitWeights"))
    assert rig.run(f"after-{moment}").digest == undisturbed
    again.wait()


def test_a_trainer_that_stands_still_until_the_gate_closes(rig: Chaos) -> None:
    job = {"num_steps": 12, "checkpoint_interval": 1}
    expected = rig.run("gate-undisturbed", **job).digest
    trainer = rig.stack["trainer"]
    num_samples = rig.job.run.prompts_per_step * rig.job.run.samples_per_prompt
    seen = {}

    def stand_still() -> None:
        trainer.kill(signal.SIGSTOP)
        limit = rig.client.metrics("gate")["gate"]["limit"] * rig.job.run.samples_per_prompt
        rig.wait_for_events("gate", "trajectory.accepted", limit)
        seen.update(rig.client.metrics("gate"), refused=rig.post("gate", limit // rig.job.run.samples_per_prompt))
        trainer.kill(signal.SIGCONT)

    stopper = threading.Thread(target=stand_still, daemon=True)
    outcome = rig.run("gate", after_step=lambda step: stopper.start() if step == 1 else None, **job)
    stopper.join(DEADLINE_S)
    assert seen["refused"] == 429
    assert seen["gate"]["limit"] * num_samples == seen["accepted"] * rig.job.run.prompts_per_step
    assert outcome.digest == expected


def test_replicas_that_come_and_go_at_random_for_thirty_steps(rig: Chaos) -> None:
    job = {"num_steps": 30, "checkpoint_interval": 4}
    expected = rig.run("elastic-undisturbed", **job).digest
    churn = Churn(rig, seed=20)
    assert rig.run("elastic", after_step=churn, **job).digest == expected
    assert set(churn.changes) == {"joins", "leaves", "dies"}
