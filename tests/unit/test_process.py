"""Process habits: one JSON object a line, no credential in any of them, and SIGTERM as an event."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.masking import MASK, is_credential, masked, masked_text
from shared.process import settle_heap
from tests.deadline import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]


def lines_of(program: str) -> tuple[list[dict], int]:
    """Log lines and exit code of a process of its own: logging is configured once per process."""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.stdout == ""
    return [json.loads(line) for line in done.stderr.splitlines()], done.returncode


@pytest.mark.parametrize(
    "name",
    ["api_key", "key", "API-KEY", "apikey", "admin_token", "token", "api_tokens", "Authorization", "valkey_password",
     "client_secret", "secret_name", "basic_auth", "keys", "set-cookie"],
)  # fmt: skip
def test_names_of_credentials(name: str) -> None:
    assert is_credential(name)


@pytest.mark.parametrize(
    "name",
    ["num_tokens", "tokens", "tokens_per_s", "token_ids", "stop_token_ids", "max_tokens", "valkey_url", "key_id", "",
     "idempotency_key", "keyed", "author", "monkey", "prompt_tokens"],
)  # fmt: skip
def test_names_that_only_look_like_credentials(name: str) -> None:
    assert not is_credential(name)


@given(
    st.recursive(st.integers() | st.text(max_size=5), lambda s: st.lists(s) | st.dictionaries(st.text(max_size=5), s))
)
def test_a_credential_is_masked_at_any_depth(inside: object) -> None:
    secret = "hush-hush-hush"
    value = {"a": [inside, {"b": ({"api_key": secret, "rest": inside},)}], "url": f"redis://user:{secret}@host:1/0"}
    assert secret not in repr(masked(value))


def test_urls_and_bearer_tokens_lose_their_secret_and_nothing_else() -> None:
    assert masked_text("rediss://:pw@host:6379/0 down") == f"rediss://:{MASK}@host:6379/0 down"
    assert masked_text("GET with Authorization: Bearer abc.def, 401") == f"GET with Authorization: Bearer {MASK}, 401"
    for untouched in ("redis://host:6379/0", "http://[::1]:80/a@b", "a bearer of news"[:8], "step 3: 12 tokens"):
        assert masked_text(untouched) == untouched


LOGS = """
import logging, threading, warnings
from dataclasses import dataclass
import structlog
from shared.process import setup_logging

@dataclass
class Config:
    host: str = "h"
    api_key: str = "hush"

setup_logging("demo")
log = structlog.get_logger()
log.info("ready", port=1, num_tokens=2, api_key="hush", config=Config(), url="redis://:hush@h")
log.debug("not at this level")
logging.getLogger("some.library").warning("refused %s", "Bearer hush")
logging.getLogger("some.library").info("chatter")
warnings.warn("careful")
thread = threading.Thread(target=lambda: log.info("from a thread"))
thread.start(); thread.join()
try:
    raise ValueError("redis://:hush@h")
except ValueError:
    log.exception("failed")
"""


def test_every_line_is_json_from_every_library_and_thread_without_credentials() -> None:
    lines, code = lines_of(LOGS)
    assert code == 0
    assert [line["event"].strip() for line in lines if "careful" not in line["event"]] == [
        "ready", f"refused Bearer {MASK}", "from a thread", "failed",
    ]  # fmt: skip
    assert all(line["service"] == "demo" and line["timestamp"].endswith("Z") for line in lines)
    assert "hush" not in json.dumps(lines)
    ready, failed = lines[0], lines[-1]
    assert (ready["port"], ready["num_tokens"], ready["config"]) == (1, 2, {"host": "h", "api_key": MASK})
    assert "ValueError" in failed["exception"]


STOPS = """
import asyncio, os, signal
from shared.process import stop_event

async def main():
    event = stop_event()
    assert not event.is_set()
    os.kill(os.getpid(), signal.{signal})
    await asyncio.wait_for(event.wait(), 10)

asyncio.run(main())
"""


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGINT"])
def test_signals_set_the_stop_event(signal: str) -> None:
    lines, code = lines_of(STOPS.format(signal=signal))
    assert (lines, code) == ([], 0)


def test_a_heap_that_is_settled_again_keeps_nothing_that_died_since() -> None:
    class Node:
        itself: object

    node = Node()
    node.itself = node
    died = weakref.ref(node)
    try:
        settle_heap()
        del node
        gc.collect()
        assert died() is not None, "what is settled is walked by no collection"
        settle_heap()
        assert died() is None
    finally:
        gc.unfreeze()
