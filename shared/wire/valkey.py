"""Connections to Valkey (or Redis) as every service makes them, the key names, and the Lua scripts.

RESP2 is pinned so that replies keep one shape over client versions. Commands are retried by redis-py through a restart of
the server (about 30 s), so every script must be idempotent; blocking reads are not retried.
"""

from __future__ import annotations

import asyncio
import builtins
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import BusyLoadingError, ConnectionError, TimeoutError
from redis.retry import Retry

Client = Any
"""redis.asyncio.Redis. Its reply types are unions over every protocol and decoding; here they are RESP2 and bytes."""
SyncClient = Any
"""redis.Redis, likewise."""

MIN_VERSION = (7, 2)
SOCKET_TIMEOUT_S = 15.0
MAX_BLOCK_S = 10.0
"""Longest blocking read, below the socket timeout."""

MAX_CONNECTIONS = 64
"""Of one process."""

RETRIES = 35
"""Of one command, some 30 s through a restart of the server."""
_RETRIED = (ConnectionError, TimeoutError, BusyLoadingError)
_SCRIPTS = Path(__file__).parent / "lua"


class ValkeyRefused(RuntimeError):
    """The server can't keep this system's promises; the text says what to change."""


def key(run: str, name: str = "") -> str:
    """`tz:{run}:name`, the run name being the hash tag; without a name the prefix that the scripts take as KEYS[1]."""
    return f"tz:{{{run}}}:{name}" if name else f"tz:{{{run}}}"


def trajectory_key(run: str, trajectory_id: str) -> str:
    return key(run, f"t:{trajectory_id}")


RUNS = "tz:runs"
CREATED = "tz:created"


class _Bounded:
    """Deadlines of redis-py's asyncio connections, kept here instead of there.

    With a `socket_timeout` it sends through asyncio.wait_for, which on Python 3.11 loses a cancellation that arrives in the
    turn in which the send completes (python/cpython#86296): a task that was cancelled would go on for ever.
    """

    async def send_packed_command(self, *args: Any, **kwargs: Any) -> None:
        async with _deadline(self):
            await super().send_packed_command(*args, **kwargs)  # type: ignore[misc]

    async def read_response(self, *args: Any, **kwargs: Any) -> Any:
        async with _deadline(self):
            return await super().read_response(*args, **kwargs)  # type: ignore[misc]


@asynccontextmanager
async def _deadline(connection: Any) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(SOCKET_TIMEOUT_S):
            yield
    except builtins.TimeoutError as error:
        await connection.disconnect(nowait=True)
        raise TimeoutError(f"Valkey did not answer within {SOCKET_TIMEOUT_S:g} s") from error


def connect_async(url: str, *, retries: int = RETRIES) -> Client:
    # Whoever finds all connections taken waits for one: as many groups may be generated at once as there are.
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        url,
        max_connections=MAX_CONNECTIONS,
        timeout=SOCKET_TIMEOUT_S,
        protocol=2,
        socket_timeout=None,
        socket_connect_timeout=5.0,
        retry=AsyncRetry(ExponentialWithJitterBackoff(base=0.05, cap=1.0), retries, supported_errors=_RETRIED),
    )
    plain = pool.connection_class
    pool.connection_class = type(f"Bounded{plain.__name__}", (_Bounded, plain), {})
    return redis.asyncio.Redis.from_pool(pool)


def connect_sync(url: str, *, retries: int = RETRIES) -> SyncClient:
    return redis.Redis.from_url(
        url,
        protocol=2,
        socket_timeout=SOCKET_TIMEOUT_S,
        socket_connect_timeout=5.0,
        retry=Retry(ExponentialWithJitterBackoff(base=0.05, cap=1.0), retries, supported_errors=_RETRIED),
    )


def check(info: dict[str, Any]) -> None:
    """Args: info: the reply of INFO. Raises ValkeyRefused naming everything that must change."""
    problems = []
    version = str(info.get("valkey_version") or info["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
        problems.append(f"its version is {version}, 7.2 or newer is needed")
    if info["maxmemory_policy"] != "noeviction":
        problems.append(f"maxmemory-policy is {info['maxmemory_policy']}, set it to noeviction")
    if not int(info["aof_enabled"]):
        problems.append("appendonly is off, set it to yes")
    if info["role"] != "master":
        problems.append(f"its role is {info['role']}, give the primary's address")
    if problems:
        raise ValkeyRefused("Valkey can't be used: " + "; ".join(problems))


@cache
def script(name: str) -> tuple[str, str]:
    """(source, sha1) of lua/{name}.lua behind the prelude that all scripts share."""
    source = (_SCRIPTS / "prelude.lua").read_text() + (_SCRIPTS / f"{name}.lua").read_text()
    return source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


async def call(client: Client, name: str, run: str, *args: Any) -> Any:
    """Runs a script on a run's keys. A server that lost its script cache gets the source again."""
    source, sha = script(name)
    try:
        return await client.evalsha(sha, 1, key(run), *args)
    except redis.exceptions.NoScriptError:
        return await client.eval(source, 1, key(run), *args)


def call_sync(client: SyncClient, name: str, run: str, *args: Any) -> Any:
    """As `call`, for the synchronous client."""
    source, sha = script(name)
    try:
        return client.evalsha(sha, 1, key(run), *args)
    except redis.exceptions.NoScriptError:
        return client.eval(source, 1, key(run), *args)


async def call_many(client: Client, name: str, run: str, calls: list[list[Any]]) -> list[Any]:
    """One script call per argument list, pipelined; each is atomic by itself."""
    if len(calls) == 1:
        return [await call(client, name, run, *calls[0])]
    source, sha = script(name)
    replies: list[Any] = []
    # Slices bound both the server's reply buffer and the time that other clients wait.
    for start in range(0, len(calls), 64):
        pipe = client.pipeline(transaction=False)
        pipe.script_load(source)
        for args in calls[start : start + 64]:
            pipe.evalsha(sha, 1, key(run), *args)
        replies += (await pipe.execute())[1:]
    return replies
