"""Every service as a real process: a run ends in the same weights whatever is killed on the way."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shared.process import EXIT_REFUSED
from tests.deadline import DEADLINE_S
from timzero import model
from timzero.client import Client
from timzero.job import load_job
from timzero.local import LocalStack
from timzero.session import train_there
from timzero.supervisor import ProcessState, SupervisionError
from timzero.train import Driver

CONFIG = Path(__file__).parents[2] / "configs" / "sort.toml"
SMALL = [
    "num_steps=6", "prompts_per_step=4", "samples_per_prompt=4", "checkpoint_interval=2", "evaluation.num_tasks=6",
    "environment.num_digits=3", "sampling.max_tokens=8",
]  # fmt: skip


class Recorder:
    """A display that keeps what it is told, and calls back after a step."""

    def __init__(self, after_step=None):
        self.notes, self.steps, self._after_step = [], [], after_step or (lambda step: None)

    def note(self, line):
        self.notes.append(line)

    def plain(self, line):
        self.notes.append(line)

    def step(self, step, num_steps):
        self.steps.append(step.step)
        self._after_step(step.step)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return load_job(CONFIG, SMALL).with_run(
        model=str(model.get("tiny-sort", tmp_path_factory.mktemp("models") / "tiny-sort"))
    )


def test_a_service_gets_the_keys_of_its_tables_within(tmp_path):
    gateway = {"dispatcher": {"max_inflight_samples": 512}, "keys": ["a", "b"]}
    words = LocalStack(tmp_path, gateway=gateway)["gateway"].spec.argv
    assert {"dispatcher.max_inflight_samples=512", 'keys=["a", "b"]'} <= set(words)


def test_ranks_meet_on_loopback_whatever_the_host_is_called(tmp_path):
    launch = list(LocalStack(tmp_path, trainer_world_size=2)["trainer"].spec.argv)
    ranks = [
        *launch[: launch.index("services.trainer") - 1],
        "-c",
        "import os; os.write(1, os.environb[b'MASTER_ADDR'] + b'\\n')",
    ]
    done = subprocess.run(ranks, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert done.stdout.split() == 2 * ["127.0.0.1"]


@pytest.fixture(scope="module")
def undisturbed(job, tmp_path_factory):
    """The outcome of a run to which nothing happens, the stack (stopped), and the process ids that it had."""
    with pytest.MonkeyPatch.context() as patch:
        # Killed is only what hangs, and nothing because the machine is busy.
        patch.setattr("timzero.local.STOP_DEADLINE_S", DEADLINE_S)
        with LocalStack(tmp_path_factory.mktemp("undisturbed")) as stack, Client(stack.base_url) as client:
            outcome = Driver(client, job, Recorder(), check=stack.check).drive()
            pids = {p.name: p.pid for p in stack}
    return outcome, stack, pids


@pytest.fixture(scope="module")
def again(undisturbed):
    """A stack in the directory of the undisturbed one."""
    with LocalStack(undisturbed[1].run_dir) as stack:
        yield stack


def test_a_run_completes_and_every_count_and_bit_agrees(undisturbed, job):
    outcome, _, _ = undisturbed
    assert outcome.problems == []
    assert [s.step for s in outcome.steps] == list(range(6))
    assert outcome.metrics["accepted"] == outcome.metrics["trained"] == 6 * 4 * 4
    assert sum(s.compared_tokens for s in outcome.steps) == sum(s.tokens for s in outcome.steps) > 0
    assert len(outcome.before.rewards) == len(outcome.after.rewards) == 6
    assert outcome.digest == outcome.published_digest != outcome.steps[0].digest


def test_stopping_leaves_no_process_and_every_log(undisturbed):
    _, stack, pids = undisturbed
    assert {p.name for p in stack} == set(pids) == {"valkey", "weight_sync", "trainer", "gateway", "rollout-0"}
    for pid in pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert all(p.state is ProcessState.STOPPED for p in stack)
    assert stack.announcements == []
    assert all(p.log_path.exists() for p in stack if p.name != "valkey")


def test_killing_every_service_in_turn_changes_no_bit(undisturbed, job, tmp_path):
    victims = {0: "rollout-0", 1: "trainer", 2: "gateway", 3: "weight_sync", 4: "valkey"}
    with LocalStack(tmp_path, num_replicas=2) as stack, Client(stack.base_url) as client:
        killed = {}

        def kill(step):
            if step in victims and step not in killed:
                killed[step] = stack[victims[step]].kill(signal.SIGKILL)

        outcome = Driver(client, job, Recorder(kill), check=stack.check).drive()
        for step, generation in killed.items():
            stack[victims[step]].wait_restarted(generation, DEADLINE_S)
    assert len(killed) == len(victims)
    assert outcome.problems == []
    assert outcome.digest == undisturbed[0].digest
    for name in victims.values():
        assert any(line.startswith(f"{name} was killed by SIGKILL; restarting") for line in stack.announcements)


def test_a_stack_goes_on_in_its_directory_and_a_finished_run_is_joined(undisturbed, again, job, tmp_path):
    display = Recorder()
    assert train_there(job, again.base_url, None, tmp_path / "report.html", display) == 0
    assert f"weights digest: {undisturbed[0].digest}" in display.notes
    assert any("joined run sort: completed" in note for note in display.notes)


def test_a_killed_driver_is_started_again_and_goes_on(undisturbed, again, job, tmp_path):
    command = [sys.executable, "-m", "timzero.cli", "train", str(CONFIG), "--runs-dir", str(tmp_path / "runs"),
               "--run", "killed", "--url", again.base_url]  # fmt: skip
    for word in [*SMALL, f"run.model={job.run.model}"]:
        command += ["--set", word]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        for line in driver.stdout:
            if "step 2/6" in line:
                driver.kill()
                break
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-5:]
    assert last[0].startswith("evaluation accuracy: ")
    assert last[1] == f"tokens compared: {sum(s.tokens for s in undisturbed[0].steps)}, differing bits: 0"
    assert last[2] == "accepted 96 = trained 96 + dropped 0 + live 0"
    assert last[3] == f"weights digest: {undisturbed[0].digest}"
    assert last[4] == f"report: {tmp_path / 'runs' / 'killed' / 'report.html'}"
    assert (tmp_path / "runs" / "killed" / "report.html").stat().st_size > 50_000


def test_a_replica_that_may_not_serve_is_given_up_and_said_to_be(again, job):
    def add_one_that_is_too_small():
        refused = again.add_replica(kv_cache_tokens=16)
        # It was up before it was refused, or else is given up already.
        refused.wait_restarted(refused.generation, DEADLINE_S)

    with pytest.raises(SupervisionError, match="max_model_len"):
        add_one_that_is_too_small()
    assert any(f"exit code {EXIT_REFUSED}; given up" in line for line in again.announcements)
    driver = Driver(Client(again.base_url), job.with_run(run="refused"), Recorder(), check=again.check)
    with pytest.raises(SupervisionError, match=r"rollout-1 was given up(.|\n)*max_model_len"):
        driver.drive()


def test_a_wrong_key_stops_the_start_with_its_name(tmp_path):
    with pytest.raises(SupervisionError, match="leese_s"), LocalStack(tmp_path, weight_sync={"leese_s": 5}):
        pass


def test_ctrl_c_stops_everything_in_bounded_time(tmp_path):
    command = [sys.executable, "-m", "timzero.cli", "up", "--dir", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as up:
        line = up.stdout.readline()
        assert "services are up; API at http://127.0.0.1:" in line
        up.send_signal(signal.SIGINT)
        timer = threading.Timer(DEADLINE_S, up.kill)
        timer.start()
        rest = up.stdout.read()
        timer.cancel()
    assert up.returncode == 0, rest
    assert rest.strip().endswith("stopped")
