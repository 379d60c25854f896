"""The driver against real services: what it does when graders fail, runs pause, names clash, or people use other commands."""

import json
import math
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.deadline import DEADLINE_S
from timzero import model
from timzero.client import ApiError, Client
from timzero.job import Job, load_job
from timzero.local import LocalStack
from timzero.train import Driver, DriverError

CONFIG = Path(__file__).parents[2] / "configs" / "sort.toml"
SMALL = [
    "num_steps=2", "prompts_per_step=2", "samples_per_prompt=2", "checkpoint_interval=1", "evaluation.num_tasks=0",
    "sampling.max_tokens=2",
]  # fmt: skip

GRADER = """
import math
from pathlib import Path

def task(number, seed):
    return {"prompt": f"sort {number % 10} {(3 * number) % 10} ="}

def grade(task, completion):
    return float(Path("grade.txt").read_text())

def broken(task, completion):
    raise RuntimeError("the grader broke")
"""


class Quiet:
    def __init__(self):
        self.notes = []

    def note(self, line):
        self.notes.append(line)

    def step(self, step, num_steps):
        pass


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    with LocalStack(tmp_path_factory.mktemp("stack")) as stack:
        yield stack


@pytest.fixture
def client(stack):
    with Client(stack.base_url) as client:
        yield client
        for record in client.runs():
            if record["state"] in ("running", "paused"):
                client.stop(record["run"])


@pytest.fixture
def job(request, tmp_path, monkeypatch, stack) -> Job:
    (tmp_path / "user_grader.py").write_text(GRADER)
    (tmp_path / "grade.txt").write_text("0.5")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "user_grader", raising=False)
    name = request.node.name.removeprefix("test_")[:60]
    path = model.get("tiny-sort", stack.run_dir / "tiny-sort")
    return load_job(CONFIG, [*SMALL, f"run.run={name}", f"run.model={path}"])


def with_grader(job: Job, grade: str) -> Job:
    table = {"type": "callable", "task": "user_grader:task", "grade": f"user_grader:{grade}"}
    return Job(run=job.run, environment=table, sampling=job.sampling, evaluation=job.evaluation)


def test_a_fault_of_the_grader_is_no_reward_and_a_mended_one_goes_on(client, job):
    with pytest.raises(RuntimeError, match="the grader broke"):
        Driver(client, with_grader(job, "broken"), Quiet()).drive()
    rewards = [t["rewards"] for t in client.trajectories(job.run.run)]
    assert rewards
    assert not any(rewards)
    outcome = Driver(client, with_grader(job, "grade"), Quiet()).drive()
    assert outcome.problems == []
    assert {s.reward for s in outcome.steps} == {0.5}


def test_a_reward_that_is_not_finite_is_refused(client, job):
    Path("grade.txt").write_text(str(math.nan))
    with pytest.raises(DriverError, match="the grader gave nan for"):
        Driver(client, with_grader(job, "grade"), Quiet()).drive()


def test_a_run_paused_for_missing_rewards_is_served_and_resumed(client, job):
    job = job.with_run(reward_deadline_s=0.3)
    name = job.run.run
    driver = Driver(client, job, Quiet())
    driver._join()
    client.post_prompts(name, [driver._item(n) for n in range(2)])
    paused = (e for e in client.stream_events(name, deadline_s=DEADLINE_S) if e.type == "run.paused")
    assert next(paused, None) is not None
    assert client.get_run(name)["reason"] == "missing_reward"
    display = Quiet()
    outcome = Driver(client, job, display).drive()
    assert any("paused for missing rewards" in note for note in display.notes)
    assert outcome.metrics["trained"] == outcome.metrics["accepted"] == 8


def test_under_max_lag_a_lost_reward_costs_one_sample_and_a_lost_group_is_sampled_again(client, job):
    lost = {f"{job.run.run}.{n}" for n in ("0.1", "1.0", "1.1", "1.2")}

    class Forgetful(Driver):
        def _reward(self, trajectory_ids):
            super()._reward([i for i in trajectory_ids if i not in lost])

    job = job.with_run(max_lag=1, samples_per_prompt=4, reward_deadline_s=3.0)
    outcome = Forgetful(client, job, Quiet()).drive()
    assert outcome.problems == []
    m = outcome.metrics
    assert m["replaced"] >= 1
    # On a slow machine more may be overdue; what was lost in any case is counted as what it is.
    assert m["dropped"]["reward_timeout"] >= len(lost)
    assert m["accepted"] == m["trained"] + sum(m["dropped"].values())
    assert sum(s.metrics["trajectories"] for s in outcome.steps) == m["trained"]
    for step in outcome.steps:
        assert step.metrics["missing_trajectories"] == 4 * step.metrics["groups"] - step.metrics["trajectories"]
    dropped = [t for t in client.trajectories(job.run.run) if t["state"] == "dropped"]
    assert {t["trajectory_id"] for t in dropped if t["reason"] == "reward_timeout"} >= lost
    assert all(t["reward"] is None for t in dropped if t["reason"] == "reward_timeout")


def test_a_run_paused_by_an_operator_is_waited_for(client, job):
    name, noted = job.run.run, threading.Event()

    class Display(Quiet):
        def note(self, line):
            if "is paused (operator)" in line:
                noted.set()

    driver = Driver(client, job, Display())
    driver._join()
    client.pause(name)
    thread = threading.Thread(target=lambda: noted.wait(DEADLINE_S) and client.resume(name))
    thread.start()
    assert driver.drive().problems == []
    thread.join(DEADLINE_S)


def test_a_run_stopped_by_an_operator_ends_the_driver(client, job):
    class Display(Quiet):
        def step(self, step, num_steps):
            client.stop(job.run.run)

    outcome = Driver(client, job.with_run(num_steps=50), Display()).drive()
    assert outcome.problems[0].startswith("the run is stopped (operator")
    m = outcome.metrics
    assert m["accepted"] == m["trained"] + sum(m["dropped"].values()) + m["live"]
    assert m["live"] == 0


def test_a_name_taken_by_another_run_is_refused(client, job):
    Driver(client, job, Quiet()).drive()
    with pytest.raises(DriverError, match="another name with --run"):
        Driver(client, job.with_run(seed=5), Quiet()).drive()


def test_tasks_that_changed_under_the_same_numbers_are_refused(client, job):
    driver = Driver(client, job, Quiet())
    driver._join()
    client.post_prompts(job.run.run, [driver._item(0)])
    changed = Job(
        run=job.run,
        environment={"type": "sort_digits", "num_digits": 4},
        sampling=job.sampling,
        evaluation=job.evaluation,
    )
    with pytest.raises(DriverError, match="prompt 0 was refused: prompt-conflict"):
        Driver(client, changed, Quiet()).drive()


def test_a_driver_gives_up_when_nothing_happens(client, job, stack):
    job = with_grader(job, "grade")
    client.create_run(
        {**json.loads(json.dumps({"run": job.run.run, "model": job.run.model})), "num_steps": 1, "prompts_per_step": 1}
    )
    driver = Driver(client, job, Quiet(), stall_s=1.0)
    driver._is_over = False
    with pytest.raises(DriverError, match=r"nothing happened for 1 s: run running, next step 0"):
        driver._serve(set())


def timzero(stack, *words):
    command = [sys.executable, "-m", "timzero.cli", *words, "--url", stack.base_url]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def test_submit_watch_and_report_work_on_a_run(client, job, stack, tmp_path, monkeypatch):
    name = job.run.run
    Driver(client, job, Quiet())._join()
    lines = [{"prompt": f"sort {n} 1 =", "n": 2, "sampling": {"max_tokens": 2},
              "reward": {"mode": "exact_match", "answer": "1 2"}} for n in range(4)]  # fmt: skip
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setenv("PYTHONPATH", str(CONFIG.parents[1]))

    posted = timzero(stack, "submit", name, "p.jsonl")
    assert (posted.returncode, posted.stdout.strip()) == (0, "accepted 4, accepted before 0, refused 0"), posted.stderr
    assert timzero(stack, "submit", name, "p.jsonl").stdout.strip() == "accepted 0, accepted before 4, refused 0"

    watched = timzero(stack, "watch", name)
    assert watched.returncode == 0, watched.stderr
    assert f"run {name} is completed" in watched.stdout
    assert "step 2/2" in watched.stdout

    reported = timzero(stack, "report", name, "--out", "r.html")
    assert reported.stdout.strip() == f"report: {tmp_path / 'r.html'}"
    assert "8 = 8 + 0 + 0" in (tmp_path / "r.html").read_text()

    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "sort 1 2 =", "number": 99}))
    refused = timzero(stack, "submit", name, "p.jsonl")
    assert refused.returncode == 1
    assert "prompt 99: " in refused.stdout
    assert timzero(stack, "watch", "no-such-run").returncode == 1


def test_an_unknown_run_is_an_api_error(stack, client):
    with pytest.raises(ApiError, match="404"):
        client.get_run("no-such-run")
