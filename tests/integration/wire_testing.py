"""What the tests of store, queue and dispatcher share: a real Valkey, records, and the invariant."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
import redis
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from shared.wire.embedded import EmbeddedValkey
from shared.wire.lifecycle import Lifecycle
from shared.wire.prompts import PromptItem, RewardSpec
from shared.wire.records import Counts
from shared.wire.run import RunConfig
from shared.wire.store import RunStore
from shared.wire.types import FinishReason, SamplingParams, Span, SpanKind, State, Trajectory
from shared.wire.valkey import key
from tests.deadline import DEADLINE_S

T = TypeVar("T")


def run_async(test: Callable[[], Awaitable[T]]) -> T:
    """Runs an async test with a deadline."""

    async def within_deadline() -> T:
        async with asyncio.timeout(DEADLINE_S):
            return await test()

    return asyncio.run(within_deadline())


@contextmanager
def valkey_server(data_dir: Path, *, fsync: str = "always") -> Iterator[EmbeddedValkey]:
    """`always` makes acknowledgements instant, for tests that are not about them."""
    with EmbeddedValkey(data_dir) as server:
        redis.Redis.from_url(server.url).config_set("appendfsync", fsync)
        yield server


def check_histories(
    machine: type[RuleBasedStateMachine], directory: Path, *, max_examples: int, step_count: int
) -> None:
    """Runs a state machine against a server of its own, whose address it finds in `machine.url`."""
    with valkey_server(directory) as server:
        machine.url = server.url  # type: ignore[attr-defined]
        every = list(HealthCheck)
        chosen = settings(
            max_examples=max_examples, stateful_step_count=step_count, deadline=None, suppress_health_check=every
        )
        run_state_machine_as_test(machine, settings=chosen)


@asynccontextmanager
async def open_store(url: str, *, durable_timeout_s: float = 10.0) -> AsyncIterator[RunStore]:
    store = await RunStore.connect(url, durable_timeout_s=durable_timeout_s)
    try:
        yield store
    finally:
        await store.close()


def with_store(url: str, act: Callable[[RunStore], Awaitable[T]]) -> T:
    """Runs `act(store)` as the gateway would, from the outside of the trainer's thread."""

    async def go() -> T:
        async with open_store(url) as store:
            return await act(store)

    return run_async(go)


def empty(url: str) -> None:
    redis.Redis.from_url(url).flushall()


def run_config(**values) -> RunConfig:
    defaults = {"run": "r", "model": "m", "num_steps": 4, "prompts_per_step": 2, "samples_per_prompt": 2, "lag": 1}
    return RunConfig(**defaults | {"checkpoint_interval": 1, "seed": 11} | values)


def prompt(number: int, *, n: int = 2, **values) -> PromptItem:
    reward = RewardSpec(**{k: values.pop(k) for k in ("mode", "deadline_s", "sources", "answer") if k in values})
    defaults = {"token_ids": (5, 6, number + 1), "sampling": SamplingParams(max_tokens=8)}
    return PromptItem(number=number, n=n, reward=reward, **defaults | values)


def trajectory(number: int, sample: int, *, step: int = 0, run: str = "r", group: str = "") -> Trajectory:
    tokens = np.array([5, 6, number + 1, 9, sample], dtype=np.int32)
    return Trajectory(
        trajectory_id=f"{run}.{group or number}.{sample}",
        group_id=f"{run}.{group or number}",
        prompt_id="",
        sample_index=sample,
        run=run,
        seed=11,
        sampling=SamplingParams(max_tokens=8),
        token_ids=tokens,
        logprobs=np.array([-0.5, -0.25], dtype=np.float32),
        top1=np.array([9, 9], dtype=np.int32),
        loss_mask=np.array([0, 0, 0, 1, 1], dtype=np.uint8),
        spans=(
            Span(start=0, end=3, kind=SpanKind.PROMPT),
            Span(start=3, end=5, kind=SpanKind.SAMPLED, policy_step=step, manifest_digest=f"d{step}"),
        ),
        finish_reason=FinishReason.LENGTH,
        fingerprint="f",
    )


async def fill(store: RunStore, numbers: range, *, config: RunConfig | None = None, close: bool = True) -> None:
    """Accepts, generates and rewards prompts, and closes their groups, as gateway and clients do."""
    config = config or run_config()
    lifecycle = Lifecycle(store)
    await store.accept_prompts(config.run, [prompt(n) for n in numbers])
    for n in numbers:
        step = config.version_for(config.batch_of(n))
        for sample in range(2):
            await lifecycle.store_generated(config.run, trajectory(n, sample, step=step, run=config.run))
            await store.put_reward(config.run, f"{config.run}.{n}.{sample}", "default", float(sample))
        if close:
            await lifecycle.close_group(config.run, n)


async def checked_counts(store: RunStore, run: str = "r") -> Counts:
    """The run's counts, after comparing them with the states of all its trajectories."""
    counts = await store.counts(run)
    assert counts.accepted == counts.trained + counts.num_dropped + counts.live, counts
    assert counts.num_dropped == sum(counts.dropped.values()), counts
    states: Counter[State] = Counter()
    cursor: str | None = ""
    while cursor is not None:
        page = await store.list_trajectories(run, cursor=cursor, limit=1000)
        states.update(t.state for t in page.items)
        cursor = page.next_cursor
    assert dict(states) == dict(counts.by_state)
    assert sum(states.values()) == counts.accepted
    queued = await store.client.hlen(key(run, "queued"))
    assert queued == counts.queue_depth, "an entry that is not known, or the other way round"
    return counts
