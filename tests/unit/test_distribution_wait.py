"""What a replica's task in weight_sync waits with."""

from __future__ import annotations

import asyncio
import time

import pytest

from services.weight_sync.distribute import _wait


@pytest.mark.parametrize("num_turns", range(6))
def test_a_wait_that_is_cancelled_while_it_ends_is_cancelled(num_turns: int) -> None:
    """The registry changes and the service goes down in the same moment: the task must not wait once more, for ever."""

    async def test() -> None:
        changed = asyncio.Event()
        waiting = asyncio.create_task(_wait(changed, until=time.monotonic() + 60))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        changed.set()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        if waiting.cancel():
            with pytest.raises(asyncio.CancelledError):
                await waiting

    asyncio.run(test())
