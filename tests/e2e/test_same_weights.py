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
NARROW = {"kv_cache_tokens": 64, "page_size": 4, "stream_tokens": 1}
"""A cache for two sequences: with six groups at once somebody is always preempted."""


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


def train(directory, tiny, *, num_replicas=1, rollout=None, during=lambda stack: None, seed=0):
    """Runs the job. Returns its outcome, the final engine counters of every replica and what a report would hold."""
    job = load_job(CONFIG, [*JOB, f"seed={seed}"]).with_run(model=tiny)
    with LocalStack(directory, num_replicas=num_replicas, rollout=rollout) as stack, Client(stack.base_url) as client:
        disturber = threading.Thread(target=during, args=(stack,), daemon=True)
        disturber.start()
        outcome = Driver(client, job, Quiet(), check=stack.check).drive()
        disturber.join(DEADLINE_S)
        assert not disturber.is_alive()
        counters = [status(stack[f"rollout-{i}"]) for i in range(num_replicas)]
        data = collect(client, job.run.run)
    assert outcome.problems == []
    assert outcome.metrics["trained"] == 8 * 6 * 4
    return outcome, counters, data


@pytest.fixture(scope="module")
def undisturbed(tiny, tmp_path_factory):
    return train(tmp_path_factory.mktemp("undisturbed"), tiny)


def test_training_changes_the_weights_while_the_next_batch_is_generated(undisturbed):
    outcome, _, data = undisturbed
    digests = [s.digest for s in outcome.steps]
    assert len(set(digests)) == len(digests) == 8
    phases = {s.step: s.metrics["phases"] for s in outcome.steps}
    ahead = {s.number for s in data.samples if s.number >= 6 and s.began < phases[s.number // 6 - 1]["train"][1]}
    assert ahead, "no sample was begun before the training step of the batch before it had ended"
    assert {s.lag for s in outcome.steps[1:]} == {1.0}


def test_three_replicas_with_a_narrow_cache_and_one_killed_in_mid_generation_give_the_same_weights(
    undisturbed, tiny, tmp_path
):
    def kill_in_mid_generation(stack):
        """Once more if its samples ended between the look and the kill, so that nothing had to be continued."""
        victim, others = stack["rollout-1"], [stack["rollout-0"], stack["rollout-2"]]
        while not any(status(r).num_continued_tokens for r in others):
            while not ((found := status(victim)).num_running and found.num_sampled_tokens >= 4):
                pass
            victim.wait_restarted(victim.kill(signal.SIGKILL), DEADLINE_S)

    outcome, counters, data = train(
        tmp_path, tiny, num_replicas=3, rollout={**NARROW, "max_chunk_tokens": 1}, during=kill_in_mid_generation
    )
    assert outcome.digest == undisturbed[0].digest
    assert sum(c.num_preemptions for c in counters) > 0
    assert sum(c.num_continued_tokens for c in counters) > 0
    assert any(len(set(s.replicas)) > 1 for s in data.samples)
    assert {r for s in data.samples for r in s.replicas} == {"rollout-0", "rollout-1", "rollout-2"}


@pytest.mark.parametrize(
    "rollout",
    [
        {**NARROW, "max_chunk_tokens": 7},
        {"max_chunk_tokens": 64, "page_size": 64, "max_running": 5, "stream_tokens": 1000},
        {"max_step_tokens": 3, "max_chunk_tokens": 2, "page_size": 1},
    ],
    ids=["narrow", "wide-pages", "three-tokens-a-step"],
)
def test_chunks_pages_and_batch_limits_change_no_bit(undisturbed, tiny, tmp_path, rollout):
    outcome, counters, _ = train(tmp_path, tiny, rollout=rollout)
    assert outcome.digest == undisturbed[0].digest
    assert (counters[0].num_preemptions > 0) == (rollout.get("kv_cache_tokens") == 64)


def test_another_seed_gives_other_weights(undisturbed, tiny, tmp_path):
    outcome, _, _ = train(tmp_path, tiny, seed=1)
    assert outcome.digest != undisturbed[0].digest
