"""Calls that are made at the same time, as one."""

from __future__ import annotations

import asyncio

import pytest

from shared.wire.gathered import Gathered


class Doubled:
    """Doubles numbers once it is let go; notes what each call was given."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.go = asyncio.Event()

    async def __call__(self, items):
        self.calls.append(list(items))
        await self.go.wait()
        if 13 in items:
            raise OSError("13")
        return [2 * i for i in items]


async def until_waiting() -> None:
    """Everything that can run without the event has run."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_what_comes_while_a_call_is_under_way_goes_together_in_the_next_one():
    async def test():
        doubled = Doubled()
        call = Gathered(doubled)
        first = [asyncio.create_task(call(i)) for i in (1, 2)]
        await until_waiting()
        later = [asyncio.create_task(call(i)) for i in (3, 4, 5)]
        await until_waiting()
        assert doubled.calls == [[1, 2]]
        doubled.go.set()
        assert await asyncio.gather(*first, *later) == [2, 4, 6, 8, 10]
        assert doubled.calls == [[1, 2], [3, 4, 5]]
        assert await call(6) == 12

    asyncio.run(test())


def test_a_call_that_fails_fails_for_those_that_made_it_and_nobody_else():
    async def test():
        doubled = Doubled()
        call = Gathered(doubled)
        failing = [asyncio.create_task(call(i)) for i in (12, 13)]
        await until_waiting()
        other = asyncio.create_task(call(1))
        doubled.go.set()
        assert await other == 2
        for task in failing:
            with pytest.raises(OSError, match="13"):
                await task

    asyncio.run(test())


def test_a_caller_that_is_cancelled_does_not_take_the_call_with_it():
    async def test():
        doubled = Doubled()
        call = Gathered(doubled)
        tasks = [asyncio.create_task(call(i)) for i in (1, 2)]
        await until_waiting()
        tasks[0].cancel()
        doubled.go.set()
        assert await tasks[1] == 4
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        assert doubled.calls == [[1, 2]]

    asyncio.run(test())


def test_closing_gives_up_what_is_under_way():
    async def test():
        doubled = Doubled()
        call = Gathered(doubled)
        tasks = [asyncio.create_task(call(1))]
        await until_waiting()
        tasks.append(asyncio.create_task(call(2)))
        await until_waiting()
        for task in tasks:
            task.cancel()
        await call.close()
        assert doubled.calls == [[1]]
        assert all(task.done() for task in asyncio.all_tasks() - {asyncio.current_task()})

    asyncio.run(test())
