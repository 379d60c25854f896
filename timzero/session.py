"""`timzero train --local`: pick the run's directory, start everything, drive the run, write the report, stop everything."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from shared.config import unstructure
from timzero import model, report
from timzero.client import ApiError, Client
from timzero.connect import connect
from timzero.display import TerminalDisplay, summary_lines
from timzero.job import Job
from timzero.local import stack_of
from timzero.outcome import Evaluation, Outcome
from timzero.report.command import REPORT_FILE
from timzero.train import Driver

JOB_FILE, RESULT_FILE = "job.json", "result.json"


def train_here(job: Job, runs_dir: Path, display: TerminalDisplay) -> int:
    """Runs the whole job on this machine. Returns the exit code.

    A run that was interrupted goes on where it was; a run that ended, or another configuration, gets the next free number.
    """
    job = job.with_run(model=str(model.get(job.run.model)))
    job, run_dir = claim_directory(job, runs_dir, display.note)
    display.note(f"run {job.run.run} in {run_dir}; starting services")
    with stack_of(job.local, run_dir, announce=display.note) as stack:
        display.note(f"services are up; API at {stack.base_url}, logs in {run_dir / 'logs'}")
        with connect(stack.base_url) as client:
            try:
                outcome = Driver(client, job, display, check=stack.check).drive()
                path = write_report(client, outcome, run_dir / REPORT_FILE)
            except (ApiError, httpx.TransportError):
                # A gateway that was given up is the better explanation.
                stack.check()
                raise
    code = finish(outcome, path, display)
    (run_dir / RESULT_FILE).write_text(json.dumps({"exit_code": code, "digest": outcome.digest}) + "\n")
    return code


def train_there(job: Job, url: str, api_key: str | None, report_path: Path, display: TerminalDisplay) -> int:
    """Drives the job on services that run already. Returns the exit code."""
    # A packaged model or a directory is a path of this machine, which remote services would look for on theirs.
    if _is_loopback(url) and (job.run.model in model.PACKAGED or Path(job.run.model).is_dir()):
        job = job.with_run(model=str(model.get(job.run.model)))
    with connect(url, api_key) as client:
        outcome = Driver(client, job, display).drive()
        path = write_report(client, outcome, report_path)
    return finish(outcome, path, display)


def finish(outcome: Outcome, report_path: Path, display: TerminalDisplay) -> int:
    """Prints the last lines. Returns 1 when something is wrong with the run, and says what."""
    for line in summary_lines(outcome, str(report_path)):
        display.plain(line)
    for problem in outcome.problems:
        display.plain(f"error: {problem}")
    return 1 if outcome.problems else 0


def write_report(client: Client, outcome: Outcome, path: Path) -> Path:
    evaluations = [
        _evaluation("before", 0, outcome.before),
        _evaluation("after", int(outcome.run["config"]["num_steps"]), outcome.after),
    ]
    data = report.collect(client, str(outcome.run["run"]), [e for e in evaluations if e is not None])
    return report.write(data, path)


def _evaluation(name: str, step: int, evaluation: Evaluation | None) -> dict[str, object] | None:
    if evaluation is None:
        return None
    rewards = evaluation.rewards
    return {
        "name": name,
        "step": step,
        "accuracy": evaluation.accuracy,
        "mean_reward": sum(rewards) / len(rewards),
        "num_tasks": len(rewards),
    }


def claim_directory(job: Job, runs_dir: Path, note: Callable[[str], None]) -> tuple[Job, Path]:
    """The directory `runs_dir/NAME`, NAME being the run's name or, where that is taken, the next of NAME-2, NAME-3, ...

    Taken is a directory whose run ended or was described otherwise; an interrupted run with this description goes on.
    """
    base, number = job.run.run, 1
    while True:
        name = base if number == 1 else f"{base}-{number}"
        named, directory = job.with_run(run=name), runs_dir / name
        description = json.dumps({"run": unstructure(named.run), "environment": named.environment}, sort_keys=True)
        job_file = directory / JOB_FILE
        if not job_file.exists():
            directory.mkdir(parents=True, exist_ok=True)
            job_file.write_text(description + "\n")
            return named, directory
        if not (directory / RESULT_FILE).exists() and job_file.read_text().strip() == description:
            note(f"run {name} was interrupted; it goes on")
            return named, directory
        number += 1


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
