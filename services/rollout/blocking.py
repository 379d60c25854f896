"""Calls that block for long, away from the event loop and from the end of the process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Runs `function` in a daemon thread of its own: unlike an executor's, it can't keep the process from ending.

    The future may be cancelled, or given an exception; what the thread comes to is then dropped.
    """
    event_loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = event_loop.create_future()

    def hand_over(setter: Callable[[Any], None], outcome: Any) -> None:
        def settle() -> None:
            if not future.done():
                setter(outcome)

        # The event loop may be gone by now, and nobody waits.
        with contextlib.suppress(RuntimeError):
            event_loop.call_soon_threadsafe(settle)

    def run() -> None:
        try:
            result = function()
        except BaseException as error:  # handed over whatever it is, as an executor does
            hand_over(future.set_exception, error)
        else:
            hand_over(future.set_result, result)

    threading.Thread(target=run, daemon=True).start()
    return future
