"""A run is a function of its configuration, prompts and rewards: replicas, batching, preemption and deaths change no bit."""

import signal
import threading
from pathlib import Path

import pytest

from shared.wire.pb import rollout_pb2, rollout_pb2_grpc
from shared.wire.rpc import channel
from tests.deadline import DEADLINE_S
from timzero import model
from timzero.client import Client
from timzero.job import load_job
from timzero.local import LocalStack
from timzero.report.data import collect
from timzero.train import Driver

CONFIG = Path(__file__).parents[2] / "configs" / "sort.toml"
JOB = [
    "num_steps=8", "prompts_per_step=6", "samples_per_prompt=4", "checkpoint_interval=3", "evaluation.num_tasks=0",
    "environment.num_digits=4", "sampling.max_tokens=24", "max_model_len=48",
]  # fmt: skip
NARROW = {"kv_cache_tokens": 64, "page_size": 4, "stream_tokens": 1, "max_chunk_tokens": 7}
"""A cache for two sequences: with several groups at once somebody is always preempted."""
SLOW = {"kv_cache_tokens": 4096, "max_step_tokens": 3, "max_chunk_tokens": 2, "page_size": 1, "stream_tokens": 1}
WIDE = {"kv_cache_tokens": 4096, "max_chunk_tokens": 64, "page_size": 64, "max_running": 5, "stream_tokens": 1000}


class Quiet:
    def note(self, line):
        pass

    def step(self, step, num_steps):
        pass


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(model.get("tiny-sort", tmp_path_factory.mktemp("models") / "tiny-sort"))


def status(process):
    """The engine's own counters."""
    with channel(process.spec.address) as connection:
        stub = rollout_pb2_grpc.RolloutEngineStub(connection)
        return stub.Status(rollout_pb2.StatusRequest(), timeout=DEADLINE_S, wait_for_ready=True)


def drive(stack, client, job):
    """Runs the job. Returns its outcome and what a report would hold."""
    outcome = Driver(client, job, Quiet(), check=stack.check).drive()
    assert outcome.problems == []
    assert outcome.metrics["trained"] == 8 * 6 * 4
    return outcome, collect(client, job.run.run)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    path = model.get("tiny-sort", tmp_path_factory.mktemp("models") / "tiny-sort")
    return load_job(CONFIG, JOB).with_run(model=str(path))


@pytest.fixture(scope="module")
def undisturbed(job, tmp_path_factory):
    """Outcome and data of the job on one replica, and then of the same one with another seed."""
    with LocalStack(tmp_path_factory.mktemp("undisturbed")) as stack, Client(stack.base_url) as client:
        return drive(stack, client, job), drive(stack, client, job.with_run(run="another-seed", seed=1))


def test_training_changes_the_weights_while_the_next_batch_is_generated(undisturbed):
    (outcome, data), _ = undisturbed
    digests = [s.digest for s in outcome.steps]
    assert len(set(digests)) == len(digests) == 8
    phases = {s.step: s.metrics["phases"] for s in outcome.steps}
    ahead = {s.number for s in data.samples if s.number >= 6 and s.began < phases[s.number // 6 - 1]["train"][1]}
    assert ahead, "no sample was begun before the training step of the batch before it had ended"
    assert {s.lag for s in outcome.steps[1:]} == {1.0}


def test_three_unlike_replicas_one_of_them_killed_in_mid_generation_give_the_same_weights(undisturbed, job, tmp_path):
    """Pages, chunks, batch limits, preemption, the choice of replica and a death: none of them changes a bit."""
    with LocalStack(tmp_path, rollout=NARROW) as stack, Client(stack.base_url) as client:
        victim = stack.add_replica(**SLOW)
        stack.add_replica(**WIDE)

        def kill_in_mid_generation():
            """Once more if its samples ended between the look and the kill, so that nothing had to be continued."""
            while not any(status(stack[name]).num_continued_tokens for name in ("rollout-0", "rollout-2")):
                while not ((found := status(victim)).num_running and found.num_sampled_tokens >= 4):
                    pass
                victim.wait_restarted(victim.kill(signal.SIGKILL), DEADLINE_S)

        killer = threading.Thread(target=kill_in_mid_generation, daemon=True)
        killer.start()
        outcome, data = drive(stack, client, job)
        killer.join(DEADLINE_S)
        assert not killer.is_alive()
        assert status(stack["rollout-0"]).num_preemptions > 0
    assert outcome.digest == undisturbed[0][0].digest
    assert any(len(set(s.replicas)) > 1 for s in data.samples)
    assert {r for s in data.samples for r in s.replicas} == {"rollout-0", "rollout-1", "rollout-2"}


def test_another_seed_gives_other_weights(undisturbed):
    (outcome, _), (other, _) = undisturbed
    assert outcome.digest != other.digest
