"""Processes that are parts of a benchmark: with a deadline, and with what they said where one fails."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import IO, Any

TAIL_BYTES = 8000
START_S = 300.0
"""Until a service is ready, and until a replica serves its first version: its kernels are certified, its graphs captured."""
END_S = 20.0
"""From SIGTERM to SIGKILL of a service."""


@dataclass(frozen=True)
class Part:
    name: str
    words: Sequence[str]
    """Of Python's command line."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Beside that of this process."""


def run_parts(parts: Sequence[Part], *, deadline_s: float) -> None:
    """Runs them at the same time, and none beyond the deadline or the end of this process.

    Raises:
        RuntimeError: with the end of what a part said that failed or was not over in time.
    """
    end = time.monotonic() + deadline_s
    with ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile()) for _ in parts]
        started = [_start(part, log, stack) for part, log in zip(parts, logs, strict=True)]
        for part, log, process in zip(parts, logs, started, strict=True):
            try:
                how = f"ended with {process.wait(max(0.0, end - time.monotonic()))}"
            except subprocess.TimeoutExpired:
                how = f"was not over after {deadline_s:.0f} s"
            if how != "ended with 0":
                raise RuntimeError(f"{part.name} {how}:\n{_tail(log)}")


def _start(part: Part, log: IO[bytes], stack: ExitStack) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        _child(*part.words),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, **part.env},
    )

    def end() -> None:
        process.kill()
        process.wait()

    stack.callback(end)
    return process


def _child(*words: str) -> list[str]:
    """The command of a Python that dies with this process."""
    return [sys.executable, "-m", "timzero.child", str(os.getpid()), sys.executable, *words]


def _tail(log: IO[bytes]) -> str:
    log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
    return log.read().decode("utf-8", "replace")


@contextlib.contextmanager
def service(name: str, *words: str) -> Iterator[Callable[[], dict[str, Any]]]:
    """A process that dies with this one; call what is yielded for what it said when it was ready, which is waited for then.

    Its log is read to the end, so that it never blocks on it; warnings are shown, and how it ends if the block fails.
    """
    process = subprocess.Popen(_child("-m", f"services.{name}", *words), stderr=subprocess.PIPE, text=True)
    lines: list[str] = []
    is_ready = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if '"ready"' in line:
                is_ready.set()
            if '"level": "warning"' in line or '"level": "error"' in line:
                print(f"{name}: {line.rstrip()}", file=sys.stderr, flush=True)
        is_ready.set()

    def said() -> dict[str, Any]:
        is_ready.wait(START_S)
        found = [line for line in lines if '"ready"' in line]
        if not found:
            raise RuntimeError(f"{name} did not start")
        return json.loads(found[0])

    threading.Thread(target=read, daemon=True).start()
    try:
        yield said
    except Exception:
        print(f"--- end of the log of {name}\n{''.join(lines[-20:])}", file=sys.stderr)
        raise
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
