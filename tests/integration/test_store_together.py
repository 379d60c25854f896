"""What the dispatcher does to many groups and samples at once: it shares pipelines, and each is answered by itself."""

from __future__ import annotations

import asyncio

from shared.wire.lifecycle import Closed, Lifecycle
from shared.wire.types import State
from tests.deadline import DEADLINE_S
from tests.integration.wire_testing import checked_counts, fill, prompt, run_config, trajectory, with_store

pytest_plugins = ("tests.integration.valkey_fixtures",)


def test_groups_that_are_closed_together_each_get_their_own_answer(url, queue):
    async def act(store):
        await store.create_run(run_config())
        lifecycle = Lifecycle(store)
        await fill(store, range(3), close=False)
        await store.accept_prompts("r", [prompt(3)])
        assert await lifecycle.closable("r") == [0, 1, 2]
        await lifecycle.close_group("r", 1)
        return await lifecycle.close_groups("r", [2, 1, 7, 3, 0])

    closed = with_store(url, act)
    assert [answer for answer, _ in closed] == [
        Closed.QUEUED, Closed.NOT_READY, Closed.NOT_READY, Closed.NOT_READY, Closed.QUEUED,
    ]  # fmt: skip
    assert [group and (group.group_id, [t.reward for t in group.trajectories]) for _, group in closed] == [
        ("r.2", [0.0, 1.0]), None, None, None, ("r.0", [0.0, 1.0]),
    ]  # fmt: skip
    epoch = queue.take_over("r", next_step=0)
    assert [g.prompt_number for g in queue.lease("r", 0, epoch=epoch, deadline_s=DEADLINE_S)] == [0, 1]


def test_samples_that_end_at_once_are_all_stored_with_their_own_state(url):
    """They share a pipeline; one of an unknown group, of another run, or told twice is answered as if it had come alone."""

    async def act(store):
        await store.create_run(run_config())
        lifecycle = Lifecycle(store)
        await store.accept_prompts("r", [prompt(n) for n in range(8)])
        await store.put_reward("r", "r.5.1", "default", 1.0)
        ids = [(n, s) for n in range(8) for s in range(2)]
        started = await asyncio.gather(*(lifecycle.start_generating("r", [f"r.{n}.{s}"]) for n, s in ids))
        assert started == [{f"r.{n}.{s}"} for n, s in ids]
        calls = [("r", trajectory(n, s)) for n, s in [*ids, (99, 0), (3, 1)]]
        calls.insert(4, ("other", trajectory(0, 0, run="other")))
        states = await asyncio.gather(*(lifecycle.store_generated(run, t) for run, t in calls))
        expected = {t.trajectory_id: State.AWAITING_REWARD for _, t in calls}
        expected |= {"r.5.1": State.REWARDED, "r.99.0": None, "other.0.0": None}
        assert states == [expected[t.trajectory_id] for _, t in calls]
        for n, s in ids:
            stored = (await store.get_trajectory("r", f"r.{n}.{s}")).trajectory
            assert stored.token_ids.tolist() == trajectory(n, s).token_ids.tolist()
        assert await lifecycle.pending_prompts("r", first=0, end=8) == []
        await checked_counts(store)

    with_store(url, act)


def test_prompts_that_are_known_already_are_not_looked_at(url):
    async def act(store):
        await store.create_run(run_config())
        await store.accept_prompts("r", [prompt(n) for n in range(4)])
        return await Lifecycle(store).pending_prompts("r", first=1, end=4, besides={0, 2})

    assert [group.number for group in with_store(url, act)] == [1, 3]
