"""Watched processes: restarted when they die, given up when that can't help, gone when their parent is."""

import os
import select
import signal
import subprocess
import sys
import threading

import pytest

from tests.deadline import DEADLINE_S
from timzero import supervisor
from timzero.supervisor import Process, ProcessState, Spec, SupervisionError

SLEEP = "import time; print('up', flush=True); time.sleep(1000)"


def wait_gone(pid: int, deadline_s: float = DEADLINE_S) -> None:
    """Waits for the end of a process that is not our child."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], deadline_s)[0], f"process {pid} still runs"
    finally:
        os.close(descriptor)


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "BACKOFF_S", (0.01,))
    started, said = [], []

    def _start(code, is_ready=None, **spec):
        log = tmp_path / f"{len(started)}.log"
        is_ready = is_ready or (lambda _: b"up" in log.read_bytes() if log.exists() else False)
        process = Process(
            Spec(name="p", argv=[sys.executable, "-c", code], is_ready=is_ready, **spec), log, said.append
        )
        process.said = said
        process.start()
        started.append(process)
        return process

    yield _start
    for process in started:
        process.terminate()
        process.join(DEADLINE_S)


def test_a_process_that_dies_is_restarted_and_said_to_be(start):
    p = start(SLEEP)
    p.wait_ready(DEADLINE_S)
    first = p.pid
    p.wait_restarted(p.kill(signal.SIGKILL), DEADLINE_S)
    assert p.pid != first
    assert p.num_restarts == 1
    assert "p was killed by SIGKILL; restarting it in 0.01 s (restart 1 of 5)" in p.said
    assert any("p is ready again" in line for line in p.said)


def test_restarts_are_bounded(start):
    p = start("raise SystemExit(7)", ready_deadline_s=DEADLINE_S)
    with pytest.raises(SupervisionError, match="state failed"):
        p.wait_ready(DEADLINE_S)
    assert p.state is ProcessState.FAILED
    assert p.generation == 1 + supervisor.MAX_RESTARTS
    assert "given up (5 restarts within 60 s)" in p.said[-1]


def test_an_exit_code_that_a_restart_cannot_help_ends_it_at_once(start):
    p = start(
        "import sys; print('unknown key x', flush=True); sys.exit(2)",
        is_ready=lambda _: False,
        fatal_exit_codes=frozenset({2}),
    )
    with pytest.raises(SupervisionError, match="unknown key x"):
        p.wait_ready(DEADLINE_S)
    assert p.generation == 1
    assert "starting it again can't help" in p.said[-1]


def test_a_process_that_never_serves_is_killed_and_tried_again(start):
    p = start(SLEEP, is_ready=threading.Event().wait, ready_deadline_s=0.2)
    with pytest.raises(SupervisionError):
        p.wait_ready(DEADLINE_S)
    assert p.said[0] == "p is not ready after 0 s; killing it"
    assert p.state is ProcessState.FAILED


def test_terminate_ends_a_process_and_restarts_nothing(start):
    p = start(SLEEP)
    p.wait_ready(DEADLINE_S)
    pid = p.pid
    p.terminate()
    assert p.join(DEADLINE_S)
    wait_gone(pid)
    assert p.state is ProcessState.STOPPED
    assert p.generation == 1
    with pytest.raises(SupervisionError, match="is not running"):
        _ = p.pid


def test_a_process_that_ignores_sigterm_is_killed_in_time(start):
    p = start("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP)
    p.wait_ready(DEADLINE_S)
    pid = p.pid
    p.terminate()
    assert not p.join(0.3)
    wait_gone(pid)


def test_a_stopped_process_can_be_terminated(start):
    p = start(SLEEP)
    p.wait_ready(DEADLINE_S)
    p.kill(signal.SIGSTOP)
    p.terminate()
    assert p.join(DEADLINE_S)


def test_what_does_not_start_counts_as_a_death(start, tmp_path):
    said = []

    def launch():
        raise RuntimeError("no such data directory")

    p = Process(Spec(name="v", launch=launch, is_ready=lambda _: True), tmp_path / "v.log", said.append)
    p.start()
    with pytest.raises(SupervisionError):
        p.wait_ready(DEADLINE_S)
    assert "did not start: no such data directory" in said[0]


def test_children_die_with_their_parent(tmp_path):
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from timzero.supervisor import Process, Spec\n"
        f"log = Path({str(tmp_path / 'child.log')!r})\n"
        f"p = Process(Spec(name='p', argv=[sys.executable, '-c', {SLEEP!r}],\n"
        "            is_ready=lambda _: log.exists() and b'up' in log.read_bytes()), log, print)\n"
        f"p.start(); p.wait_ready({DEADLINE_S}); print(p.pid, flush=True); time.sleep(1000)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        parent.kill()
        parent.wait(DEADLINE_S)
        wait_gone(child)
