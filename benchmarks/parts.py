"""Processes that are parts of a benchmark: with a deadline, and with what they said where one fails."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import IO

TAIL_BYTES = 8000


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
        [sys.executable, "-m", "timzero.child", str(os.getpid()), sys.executable, *part.words],
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


def _tail(log: IO[bytes]) -> str:
    log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
    return log.read().decode("utf-8", "replace")
