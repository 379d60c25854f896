"""A run, a fleet of protocol-speaking peers and a dispatcher between them, for its tests."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import grpc

from services.gateway.dispatcher import Dispatcher
from shared.wire.records import RunRecord
from shared.wire.run import RunState
from shared.wire.store import RunStore
from tests.integration.fleet_testing import Engine, WeightSync, expected_tokens, serving
from tests.integration.wire_testing import empty, open_store, run_config


@dataclass
class Rig:
    url: str
    store: RunStore
    sync: WeightSync
    engines: list[Engine]
    stack: AsyncExitStack
    stop: asyncio.Event
    dispatcher: Dispatcher
    servers: dict[str, grpc.aio.Server]

    async def until(
        self, condition: Callable[[], Awaitable[object]], run: str = "r", *, deadline_s: float = math.inf
    ) -> None:
        """Looks again after every event of the run, until the condition holds or the deadline passes."""
        cursor, deadline = "0-0", time.monotonic() + deadline_s
        while not await condition() and time.monotonic() < deadline:
            events = await self.store.events(run, after=cursor, block_s=0.2)
            cursor = events[-1].cursor if events else cursor

    async def states(self, **expected: int) -> None:
        async def reached() -> bool:
            counts = await self.store.counts("r")
            return {s.value: n for s, n in counts.by_state.items()} == expected

        await self.until(reached)

    async def add_engine(self, engine: Engine) -> Engine:
        self.servers[engine.name] = await self.stack.enter_async_context(serving(engine))
        self.engines.append(engine)
        await self.sync.change()
        return engine

    async def kill(self, engine: Engine) -> None:
        """Ends the server at once, as the end of its process would."""
        await self.servers[engine.name].stop(None)

    async def reward(self, numbers: range) -> None:
        for n in numbers:
            for sample in range(2):
                await self.store.put_reward("r", f"r.{n}.{sample}", "default", float(sample))


@asynccontextmanager
async def rig(url: str, *, num_engines: int = 1, config=None, published=(0,), **settings) -> AsyncIterator[Rig]:
    """A run, a fleet, and a dispatcher that runs until the block ends; a fault in it fails the test."""
    empty(url)
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(open_store(url))
        await store.create_run(config or run_config())
        sync = WeightSync()
        servers = {"weight_sync": await stack.enter_async_context(serving(sync))}
        for step in published:
            await sync.publish(step)
        stop = asyncio.Event()
        dispatcher = Dispatcher(store, sync.address, **settings)
        r = Rig(url, store, sync, sync.engines, stack, stop, dispatcher, servers)
        for i in range(num_engines):
            await r.add_engine(Engine(f"replica-{i}"))
        task = asyncio.create_task(dispatcher.run(stop))
        yield r
        stop.set()
        await task
        assert not sync.swapped_while_running


async def assert_exact(store: RunStore, number: int, *, step: int, replicas: set[str] | None = None) -> None:
    """The stored samples are what the key says, whole, in one span of the right version."""
    for sample in range(2):
        record = await store.get_trajectory("r", f"r.{number}.{sample}")
        t = record.trajectory
        assert t is not None
        assert t.token_ids[3:].tolist() == expected_tokens(11, number, sample, step, 8)
        assert t.logprobs.tolist() == [-x / 256 for x in t.token_ids[3:].tolist()]
        assert [(s.kind, s.start, s.end, s.policy_step, s.manifest_digest) for s in t.spans[1:]] == [
            ("sampled", 3, 11, step, f"digest-{step}")
        ]
        if replicas is not None:
            assert set(t.replicas) == replicas


async def is_state(store: RunStore, state: RunState) -> RunRecord | None:
    run = await store.get_run("r")
    return run if run.state is state else None


async def finished(store: RunStore, eval_id: int) -> bool:
    return (await store.get_eval("r", eval_id)).is_finished
