"""Under max_lag a lost sample costs its siblings nothing: they are trained or, where too few are left, others are sampled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import pytest
from structlog.testing import capture_logs

from services.gateway.rewards import RewardJoin
from shared.wire.codec import decode_group
from shared.wire.ingest import IngestedGroup
from shared.wire.lifecycle import Closed, Lifecycle
from shared.wire.pb import rollout_pb2 as pb
from shared.wire.records import RewardStatus
from shared.wire.run import RunState
from shared.wire.types import Group
from shared.wire.valkey import key
from tests.integration.dispatcher_testing import Rig, is_state, rig
from tests.integration.fleet_testing import Engine, expected_tokens
from tests.integration.wire_testing import (
    checked_counts,
    open_store,
    prompt,
    run_async,
    run_config,
    trajectory,
)

pytest_plugins = ("tests.integration.valkey_fixtures",)

SOON_S = 0.2


def soon(**values):
    """A run whose rewards are overdue at once."""
    return run_config(**{"max_lag": 1, "reward_deadline_s": SOON_S} | values)


async def queued_groups(r: Rig) -> list[Group]:
    return [decode_group(fields[b"group"]) for _, fields in await r.store.client.xrange(key("r", "queue"))]


async def reward(r: Rig, *trajectory_ids: str) -> list[RewardStatus]:
    """A reward may come before its sample, so these are there in time however slow the machine is."""
    return [(await r.store.put_reward("r", i, "default", float(i[-1]))).status for i in trajectory_ids]


def test_a_missing_reward_costs_one_sample_and_the_group_is_trained_with_the_others(url):
    async def test():
        async with rig(url, config=soon(samples_per_prompt=3)) as r:
            (engine,) = r.engines
            engine.hold_at = 4
            await r.store.accept_prompts("r", [prompt(0, n=3, deadline_s=SOON_S)])
            await engine.held.wait()
            await reward(r, "r.0.0", "r.0.2")
            engine.go.set()
            await r.states(queued=2, dropped=1)
            (group,) = await queued_groups(r)
            assert [(t.sample_index, t.reward) for t in group.trajectories] == [(0, 0.0), (2, 2.0)]
            assert await reward(r, "r.0.1", "r.0.2") == [RewardStatus.LATE, RewardStatus.UNCHANGED]
            counts = await checked_counts(r.store)
            assert (counts.dropped, counts.rewards_late, counts.replaced) == ({"reward_timeout": 1}, 1, 0)
            lost = await r.store.get_trajectory("r", "r.0.1")
            assert (lost.reason, lost.reward, lost.rewards) == ("reward_timeout", None, {})
            assert (await r.store.get_run("r")).state is RunState.RUNNING

    run_async(test)


def test_a_group_with_too_few_samples_is_sampled_again_once_and_then_its_batch_does_without_it(url):
    async def test():
        async with rig(url, config=soon()) as r:
            (engine,) = r.engines
            engine.hold_at = 4
            await r.store.accept_prompts("r", [prompt(n, deadline_s=SOON_S) for n in range(2)])
            await engine.held.wait()
            await reward(r, "r.0.0", "r.1.0", "r.1.1")
            engine.go.set()
            lifecycle = Lifecycle(r.store)
            await r.until(lambda: lifecycle.dropped("r", [0]))
            await r.states(queued=2, dropped=4)
            assert await lifecycle.dropped("r", [0, 1]) == {0}
            counts = await checked_counts(r.store)
            assert (counts.accepted, counts.replaced) == (6, 1)
            assert counts.dropped == {"reward_timeout": 3, "small_group": 1}
            # A new draw has samples of its own, which are a function of their index as ever.
            for sample in (2, 3):
                t = (await r.store.get_trajectory("r", f"r.0.{sample}")).trajectory
                assert t.token_ids[3:].tolist() == expected_tokens(11, 0, sample, 0, 8)
            assert (await r.store.get_run("r")).state is RunState.RUNNING

    run_async(test)


def test_the_last_group_of_a_batch_is_never_given_up_but_the_run_waits_for_its_grader(url):
    async def test():
        async with rig(url, config=soon(prompts_per_step=1)) as r:
            await r.store.accept_prompts("r", [prompt(0, deadline_s=SOON_S)])
            await r.until(lambda: is_state(r.store, RunState.PAUSED))
            run = await r.store.get_run("r")
            assert run.reason == "missing_reward"
            assert "too few samples of group r.0 are left (reward_timeout)" in run.detail
            counts = await checked_counts(r.store)
            assert (counts.by_state, counts.replaced) == ({"dropped": 4, "accepted": 2}, 2)
            await reward(r, "r.0.4", "r.0.5")
            await r.store.set_run_state("r", RunState.RUNNING)
            await r.states(queued=2, dropped=4)

    run_async(test)


class Halting(Engine):
    """Finishes the first two samples and breaks."""

    async def _sample(self, request: pb.GenerateRequest, context) -> AsyncIterator[pb.GenerateReply]:
        for s in request.samples[:2]:
            tokens = expected_tokens(request.seed, request.prompt_number, s.sample_index, self.version.step, 8)
            for i, token in enumerate(tokens):
                yield self._reply({s.trajectory_id: token}, i, self.version, is_last=i == 7)
        await context.abort(grpc.StatusCode.INTERNAL, "broken by the test")


def test_a_group_that_keeps_failing_goes_on_with_what_is_finished_of_it(url):
    async def test():
        config = run_config(max_lag=1, samples_per_prompt=3)
        async with rig(url, num_engines=0, config=config, max_group_failures=1) as r:
            await r.add_engine(Halting("replica-0"))
            await r.store.accept_prompts("r", [prompt(0, n=3)])
            await r.states(awaiting_reward=2, dropped=1)
            await r.reward(range(1))
            await r.states(queued=2, dropped=1)
            (group,) = await queued_groups(r)
            assert [t.reward for t in group.trajectories] == [0.0, 1.0]
            assert (await checked_counts(r.store)).dropped == {"infra_error": 1}
            assert (await r.store.get_run("r")).state is RunState.RUNNING

    run_async(test)


def test_replicas_that_fail_every_group_of_a_batch_pause_the_run(url):
    async def test():
        config = run_config(max_lag=1)
        async with rig(url, config=config, max_group_failures=1) as r:
            (engine,) = r.engines
            engine.refuse = [grpc.StatusCode.INVALID_ARGUMENT] * 4
            await r.store.accept_prompts("r", [prompt(0), prompt(1)])
            await r.until(lambda: is_state(r.store, RunState.PAUSED))
            assert (await r.store.get_run("r")).reason == "infra_error"
            counts = await checked_counts(r.store)
            assert counts.dropped == {"infra_error": 8}
            await r.store.set_run_state("r", RunState.RUNNING)
            await r.states(awaiting_reward=2, dropped=8)

    run_async(test)


def test_a_group_that_was_sampled_elsewhere_is_not_sampled_again_and_a_batch_of_it_alone_pauses_the_run(url):
    async def test():
        async with open_store(url) as store:
            await store.create_run(run_config(max_lag=1))
            for number in range(2):
                group = IngestedGroup(
                    prompt=prompt(number, deadline_s=1e-9),
                    trajectories=tuple(replace(trajectory(number, s), sampler="elsewhere") for s in range(2)),
                    rewards=({"default": 1.0}, {}),
                )
                await store.accept_groups("r", [(group.fingerprint, group)])
            lifecycle = Lifecycle(store)
            assert await lifecycle.expire("r") == 2
            assert (await lifecycle.close_group("r", 0))[0] is Closed.DROPPED
            assert (await store.get_run("r")).state is RunState.RUNNING
            assert (await lifecycle.close_group("r", 1))[0] is Closed.DROPPED
            run = await store.get_run("r")
            assert (run.state, run.reason) == (RunState.PAUSED, "missing_reward")
            assert "the batch is trained without it when the run is resumed" in run.detail
            counts = await checked_counts(store)
            assert (counts.dropped, counts.replaced) == ({"reward_timeout": 2, "small_group": 2}, 0)

    run_async(test)


@pytest.mark.parametrize("pause", [False, True])
def test_time_in_which_no_reward_could_be_put_counts_for_no_deadline(url, pause: bool):
    """A gateway that was down, or a run that was paused, is no reason to throw everything away."""

    async def test():
        async with open_store(url) as store:
            await store.create_run(run_config(max_lag=1, reward_deadline_s=500.0))
            await store.accept_prompts("r", [prompt(0, deadline_s=1e-9)])
            for sample in range(2):
                await Lifecycle(store).store_generated("r", trajectory(0, sample))
            join = RewardJoin(store)
            if pause:
                await join._watch_deadlines(await store.get_run("r"))
                join._running = "r", 0.0
                await join._watch_deadlines(await store.set_run_state("r", RunState.PAUSED))
            assert await join._watch_deadlines(await store.set_run_state("r", RunState.RUNNING)) > 0
            assert (await checked_counts(store)).by_state == {"awaiting_reward": 2}
            join._running = "r", 0.0
            await join._watch_deadlines(await store.get_run("r"))
            assert (await checked_counts(store)).dropped == {"reward_timeout": 2}

    run_async(test)


def test_an_overdue_reward_that_comes_before_the_drop_counts(url):
    async def test():
        async with open_store(url) as store:
            await store.create_run(run_config(max_lag=1))
            await store.accept_prompts("r", [prompt(0, deadline_s=1e-9)])
            lifecycle = Lifecycle(store)
            for sample in range(2):
                await lifecycle.store_generated("r", trajectory(0, sample))
            one = await store.put_reward("r", "r.0.0", "default", 1.0)
            assert one.status is RewardStatus.APPLIED
            dropped, late = await asyncio.gather(lifecycle.expire("r"), store.put_reward("r", "r.0.1", "default", 1.0))
            # Whoever comes first: never both, never neither.
            assert (dropped, late.status) in [(0, RewardStatus.APPLIED), (1, RewardStatus.LATE)]
            await checked_counts(store)

    run_async(test)


def test_groups_closed_beside_one_that_finds_the_queue_full_are_told_as_well(url):
    """They were closed with it: what became of them is in no later answer."""

    async def test():
        async with open_store(url) as store:
            await store.create_run(run_config(max_lag=1))
            await store.accept_prompts("r", [prompt(0), prompt(1, deadline_s=1e-9)])
            for sample in range(2):
                await Lifecycle(store).store_generated("r", trajectory(0, sample))
                await store.put_reward("r", f"r.0.{sample}", "default", 1.0)
                await Lifecycle(store).store_generated("r", trajectory(1, sample))
            assert await Lifecycle(store).expire("r") == 2
            await store.client.hset(key("r", "run"), "queue_bound_batches", 0)
            with capture_logs() as logs:
                await RewardJoin(store)._close_groups("r")
            assert [(line["number"], line.get("group", "")) for line in logs] == [(1, "replaced"), (0, "")]
            assert (await checked_counts(store)).replaced == 1

    run_async(test)
