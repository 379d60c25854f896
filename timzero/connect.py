"""A client of a gateway that is there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from timzero.client import Client

PROBE_DEADLINE_S = 5.0
CALL_DEADLINE_S = 120.0
"""Of one call: longer than a gateway that died takes to come back on a busy machine."""


@contextmanager
def connect(url: str, api_key: str | None = None) -> Iterator[Client]:
    """Whoever gave a wrong address hears of it at once, without the retries that a busy gateway deserves.

    Raises: httpx.TransportError when nothing answers, ApiError for a wrong key.
    """
    with Client(url, api_key=api_key, timeout_s=CALL_DEADLINE_S) as client:
        next(client.runs(deadline_s=PROBE_DEADLINE_S), None)
        yield client
