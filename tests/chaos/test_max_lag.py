"""Weights that change under running samples, by the step, while things die: every span is its version's, and nothing is lost."""

from __future__ import annotations

import signal
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

from tests.chaos.chaos_testing import SMALL, Chaos, Churn, Killer, chaos, status
from tests.chaos.http2 import Frame
from tests.chaos.proxy import CUT, Verdict, answers, full, sends

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


LONG = ["sampling.max_tokens=48", "max_model_len=80", "prompts_per_step=12", "num_steps=20", "checkpoint_interval=5"]
"""With two batches ahead 144 samples, each of which takes longer than a step."""


def test_every_span_is_its_versions_while_a_hundred_samples_meet_a_version_a_step(tmp_path: Path) -> None:
    # All of a replica's samples go on in every step, so that each is under way while several versions come.
    longer = ["sampling.max_tokens=112", "max_model_len=128"]
    with chaos(tmp_path, [*SMALL, *LONG, *longer], rollout={"max_step_tokens": 96}) as rig:
        sampled = rig.opportunistic("hundred", max_lag=2)
        changes = []
        for t in rig.client.trajectories("hundred"):
            changes += [(t["timestamps"]["generating"], 1), (t["timestamps"]["awaiting_reward"], -1)]
        commits = [e["step"] for e in rig.events("rollout-0", "committed")]
    assert len(sampled) == 20 * 12 * 4
    assert max(len(s.steps) for s in sampled) > 2
    assert sum(len(s.steps) > 1 for s in sampled) > 50
    assert max(accumulate(change for _, change in sorted(changes))) >= 100
    # A version was published by every step, and a replica took most of them on, in order.
    assert all(a <= b for a, b in pairwise(commits))
    assert len(set(commits)) > 10


def test_a_replica_that_dies_while_it_computes_running_samples_again(tmp_path: Path) -> None:
    with chaos(tmp_path, [*SMALL, *LONG], rollout={"max_step_tokens": 8}) as rig:
        kill = Killer(rig, "rollout-1")

        def kill_if_busy(frame: Frame) -> Verdict | None:
            """The answer to a Commit: what ran is in line, to be computed again under the new weights."""
            if status(kill.process.spec.address).num_waiting:
                return kill(frame)
            rig.front.once(answers("CommitWeights"), kill_if_busy)
            return None

        rig.front.once(answers("CommitWeights"), kill_if_busy, skip=1)
        rig.opportunistic("in-reprefill", max_lag=2, num_steps=12)
        kill.wait_restarted()


def test_a_lost_acknowledgement_of_a_commit_and_a_stream_that_breaks_off(rig: Chaos) -> None:
    lost = rig.front.once(answers("CommitWeights"), lambda frame: CUT, skip=3)
    cut = rig.front.once(answers("Generate"), lambda frame: CUT, skip=60)
    rig.opportunistic("lost-commit", max_lag=1, num_steps=8)
    assert lost.happened.is_set()
    assert cut.happened.is_set()


@pytest.mark.parametrize("moment", ["Generate", "PrepareWeights", "CommitWeights"])
def test_a_replica_that_stands_still_holds_up_nobody(rig: Chaos, moment: str) -> None:
    process = rig.stack["rollout-1"]
    stopped = rig.front.once(answers(moment), lambda frame: process.kill(signal.SIGSTOP) and None, skip=3)
    try:
        rig.opportunistic(f"stopped-in-{moment}", max_lag=2, num_steps=8)
        assert stopped.happened.is_set()
    finally:
        process.kill(signal.SIGCONT)


def test_trainer_and_weight_sync_die_in_the_middle_of_a_publish(rig: Chaos) -> None:
    kills = [Killer(rig, "trainer"), Killer(rig, "weight_sync")]
    for kill, skip in zip(kills, (50, 110), strict=True):
        rig.publish.once(full(sends("Publish")), kill, skip=skip)
    rig.opportunistic("in-publish", max_lag=2, num_steps=8)
    for kill in kills:
        kill.wait_restarted()


def test_replicas_that_come_and_go_at_random(rig: Chaos) -> None:
    churn = Churn(rig, seed=3)
    rig.opportunistic("elastic", max_lag=2, num_steps=20, after_step=churn)
    assert len(set(churn.changes)) > 1
