"""One signal for everything that waits for the registry to change. A waiter that is slow sees the newest state, once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


class Changes:
    """
    >>> with changes.subscribe() as changed:
    ...     while not changes.is_closed:
    ...         changed.clear()
    ...         ...  # look at the registry
    ...         await changed.wait()
    """

    def __init__(self) -> None:
        self._subscribers: set[asyncio.Event] = set()
        self.is_closed = False

    @contextlib.contextmanager
    def subscribe(self) -> Iterator[asyncio.Event]:
        event = asyncio.Event()
        self._subscribers.add(event)
        try:
            yield event
        finally:
            self._subscribers.discard(event)

    def fire(self) -> None:
        for event in self._subscribers:
            event.set()

    def close(self) -> None:
        """The service is going down: everybody looks up and leaves."""
        self.is_closed = True
        self.fire()
