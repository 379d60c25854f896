"""The embedded Valkey: comes back with its data, refuses to share it, dies with its parent."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from shared.wire import valkey
from shared.wire.embedded import EmbeddedError, EmbeddedValkey
from tests.deadline import DEADLINE_S
from tests.integration.wire_testing import valkey_server

PARENT = """
import sys
from pathlib import Path
from shared.wire.embedded import EmbeddedValkey
server = EmbeddedValkey(Path(sys.argv[1])).start()
print(server.process.pid, server.port, flush=True)
sys.stdin.read()
"""


def write(server: EmbeddedValkey, **values: str) -> None:
    """On disk when it returns: while an fsync runs, an answered write may still be in the server's memory."""
    with redis.Redis.from_url(server.url, single_connection_client=True) as client:
        client.mset(values)
        assert client.execute_command("WAITAOF", 1, 0, 5000) == [1, 0]


def test_it_is_durable_loopback_only_and_accepted_by_the_check(tmp_path: Path):
    with EmbeddedValkey(tmp_path) as server:
        client = redis.Redis.from_url(server.url, decode_responses=True)
        valkey.check(client.info())
        config = client.config_get("*")
        assert config["appendonly"] == "yes"
        assert config["appendfsync"] == "everysec"
        assert config["maxmemory-policy"] == "noeviction"
        assert config["bind"] == "127.0.0.1"


def test_it_restarts_on_the_same_port_and_data_after_sigkill(tmp_path: Path):
    with EmbeddedValkey(tmp_path) as server:
        port = server.port
        write(server, a="1")
        server.process.kill()
        server.process.wait(DEADLINE_S)
        server.start()
        assert server.port == port
        assert redis.Redis.from_url(server.url).get("a") == b"1"


def test_a_truncated_append_only_file_is_read_up_to_the_cut(tmp_path: Path):
    with EmbeddedValkey(tmp_path) as server:
        write(server, a="1")
        write(server, b="2" * 100)
        server.process.kill()
        server.process.wait(DEADLINE_S)
        (log,) = tmp_path.glob("appendonlydir/*.incr.aof")
        os.truncate(log, log.stat().st_size - 50)
        server.start()
        assert redis.Redis.from_url(server.url).mget("a", "b") == [b"1", None]


def test_it_dies_when_its_parent_is_killed_and_the_next_one_waits_for_it(tmp_path: Path):
    root = Path(__file__).parents[2]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
    )  # fmt: skip
    assert parent.stdout is not None
    pid, port = map(int, parent.stdout.readline().split())
    redis.Redis(port=port).set("a", "1")
    server = os.pidfd_open(pid)
    try:
        parent.send_signal(signal.SIGKILL)
        parent.wait(DEADLINE_S)
        # Started while the old server is still writing its file out: it must not read the data too early.
        with EmbeddedValkey(tmp_path) as successor:
            assert redis.Redis.from_url(successor.url).get("a") == b"1"
        assert select.select([server], [], [], DEADLINE_S)[0], "the server outlived its parent"
    finally:
        os.close(server)


def test_two_servers_never_share_a_directory(tmp_path: Path):
    with EmbeddedValkey(tmp_path), pytest.raises(EmbeddedError, match="another server using that directory"):
        EmbeddedValkey(tmp_path, start_timeout_s=1.0).start()


def test_a_taken_port_is_an_error_with_the_end_of_the_log(tmp_path: Path):
    with (
        EmbeddedValkey(tmp_path / "a") as first,
        pytest.raises(EmbeddedError, match="Address already in use"),
    ):
        EmbeddedValkey(tmp_path / "b", port=first.port).start()


@pytest.mark.parametrize(
    ("setting", "value", "text"),
    [("maxmemory-policy", "allkeys-lru", "set it to noeviction"), ("appendonly", "no", "set it to yes")],
)
def test_a_server_that_may_forget_is_refused(tmp_path: Path, setting: str, value: str, text: str):
    with valkey_server(tmp_path) as server:
        client = redis.Redis.from_url(server.url)
        client.config_set(setting, value)
        with pytest.raises(valkey.ValkeyRefused, match=text):
            valkey.check(client.info())


def test_an_old_server_or_a_replica_is_refused():
    info = {"redis_version": "7.0.15", "maxmemory_policy": "noeviction", "aof_enabled": 1, "role": "slave"}
    with pytest.raises(valkey.ValkeyRefused, match=r"7\.0\.15, 7\.2 or newer.*role is slave"):
        valkey.check(info)
    valkey.check(info | {"redis_version": "7.2.4", "role": "master"})
