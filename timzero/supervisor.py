"""Processes that are watched: each has a log file, is restarted when it dies (bounded), and dies with this process.

Spec ──▶ Process (one thread: start, wait for its end, announce, back off, start again) ──▶ announcements
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

MAX_RESTARTS = 5
"""Restarts of one process within RESTART_WINDOW_S; one more and it is given up."""
RESTART_WINDOW_S = 60.0
BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 4.0)
TAIL_BYTES = 3000


class ProcessState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPED = "stopped"
    FAILED = "failed"


class SupervisionError(RuntimeError):
    """A process that can't be kept running; the message holds the end of its log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """What to run and how to know that it serves."""

    name: str
    argv: Sequence[str] = ()
    launch: Callable[[], subprocess.Popen[bytes]] | None = None
    """Starts it in another way than as `argv`; called in the thread that then waits for its end. May raise OSError or
    RuntimeError, which counts as a death."""
    is_ready: Callable[[float], bool]
    """Waits up to the given seconds until the process serves; False when it does not yet."""
    address: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    ready_deadline_s: float = 300.0
    fatal_exit_codes: frozenset[int] = frozenset()
    """Exit codes after which another start can't help."""


class Process:
    """One supervised process. `start` returns at once; `wait_ready` waits."""

    def __init__(self, spec: Spec, log_path: Path, announce: Callable[[str], None]) -> None:
        self.spec = spec
        self.name = spec.name
        self.log_path = log_path
        self.generation = 0
        """Number of starts so far."""
        self.state = ProcessState.STARTING
        self.started_at = 0.0
        self._announce = announce
        self._popen: subprocess.Popen[bytes] | None = None
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name=f"supervise-{spec.name}", daemon=True)

    @property
    def pid(self) -> int:
        """Process id of the running incarnation. Raises SupervisionError when none runs."""
        popen = self._popen
        if popen is None or popen.poll() is not None:
            raise SupervisionError(f"{self.name} is not running ({self.state})")
        return popen.pid

    @property
    def num_restarts(self) -> int:
        return max(0, self.generation - 1)

    def start(self) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._thread.start()

    def kill(self, sig: int = signal.SIGKILL) -> int:
        """Sends a signal. Returns the generation that got it, for `wait_restarted`."""
        generation = self.generation
        os.kill(self.pid, sig)
        return generation

    def wait_restarted(self, after: int, deadline_s: float = 60.0) -> None:
        """Waits until a generation newer than `after` is ready. Raises SupervisionError."""
        self._wait(lambda: self.state is ProcessState.READY and self.generation > after, deadline_s, "be ready again")

    def wait_ready(self, deadline_s: float | None = None) -> None:
        """Waits until the process serves. Raises SupervisionError."""
        deadline_s = self.spec.ready_deadline_s if deadline_s is None else deadline_s
        self._wait(lambda: self.state is ProcessState.READY, deadline_s, "be ready")

    def terminate(self) -> None:
        """Asks the process to end and stops restarting it. Returns at once."""
        self._stopping.set()
        popen = self._popen
        if popen is not None and popen.poll() is None:
            popen.send_signal(signal.SIGCONT)
            popen.terminate()

    def join(self, deadline_s: float) -> bool:
        """Waits for the end after `terminate`, then kills. Returns True when the process ended by itself."""
        self._thread.join(max(0.0, deadline_s))
        if not self._thread.is_alive():
            return True
        popen = self._popen
        if popen is not None:
            popen.kill()
        self._thread.join(5.0)
        return False

    def tail(self) -> str:
        """The end of the log."""
        try:
            with self.log_path.open("rb") as file:
                file.seek(max(0, self.log_path.stat().st_size - TAIL_BYTES))
                return file.read().decode("utf-8", "replace").strip()
        except OSError:
            return ""

    def _wait(self, condition: Callable[[], bool], deadline_s: float, what: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: condition() or self.state is ProcessState.FAILED, deadline_s)
            if condition():
                return
        raise SupervisionError(
            f"{self.name} did not {what} within {deadline_s:.0f} s (state {self.state}); end of {self.log_path}:\n{self.tail()}"
        )

    def _set(self, state: ProcessState) -> None:
        with self._changed:
            self.state = state
            self._changed.notify_all()

    def _supervise(self) -> None:
        """Consumes: the end of the process. Produces: its next start, announcements. Waits for: the process, or the backoff.
        Unblocked by: the kernel when the process ends; `terminate`."""
        restarts: deque[float] = deque()
        while not self._stopping.is_set():
            code = self._run_once()
            if self._stopping.is_set():
                break
            now = time.monotonic()
            while restarts and now - restarts[0] > RESTART_WINDOW_S:
                restarts.popleft()
            end = _how_it_ended(code)
            if code in self.spec.fatal_exit_codes or len(restarts) >= MAX_RESTARTS:
                why = "starting it again can't help" if code in self.spec.fatal_exit_codes else (
                    f"{len(restarts)} restarts within {RESTART_WINDOW_S:.0f} s"
                )  # fmt: skip
                self._announce(f"{self.name} {end}; given up ({why}); see {self.log_path}")
                self._set(ProcessState.FAILED)
                return
            backoff_s = BACKOFF_S[min(len(restarts), len(BACKOFF_S) - 1)]
            restarts.append(now)
            self._announce(
                f"{self.name} {end}; restarting it in {backoff_s} s (restart {len(restarts)} of {MAX_RESTARTS})"
            )
            self._set(ProcessState.RESTARTING)
            self._stopping.wait(backoff_s)
        self._set(ProcessState.STOPPED)

    def _run_once(self) -> str | int:
        """Starts the process, reports when it is ready, and returns its exit code (negative: signal), or why it didn't start."""
        try:
            popen = self.spec.launch() if self.spec.launch else self._spawn()
        except (OSError, RuntimeError) as error:
            with self._changed:
                self.generation += 1
            return f"did not start: {error}"
        with self._changed:
            self._popen, self.state, self.started_at = popen, ProcessState.STARTING, time.time()
            self.generation += 1
            self._changed.notify_all()
        if self._stopping.is_set():
            popen.terminate()
        deadline = time.monotonic() + self.spec.ready_deadline_s
        while popen.poll() is None and not self._stopping.is_set():
            if self.spec.is_ready(0.5):
                if self.num_restarts:
                    self._announce(f"{self.name} is ready again (pid {popen.pid})")
                self._set(ProcessState.READY)
                break
            if time.monotonic() > deadline:
                self._announce(f"{self.name} is not ready after {self.spec.ready_deadline_s:.0f} s; killing it")
                popen.kill()
                break
        return popen.wait()

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "timzero.child", str(os.getpid()), *self.spec.argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.spec.env},
                # A ctrl-C in the terminal reaches this process only, which then stops the others in order.
                start_new_session=True,
            )


def _how_it_ended(end: str | int) -> str:
    if isinstance(end, str):
        return end
    if end >= 0:
        return f"ended with exit code {end}"
    try:
        return f"was killed by {signal.Signals(-end).name}"
    except ValueError:
        return f"was killed by signal {-end}"
