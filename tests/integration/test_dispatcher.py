"""The dispatcher against a real Valkey and real gRPC peers: order, versions, evaluations, rewards, pauses, stops."""

from __future__ import annotations

import asyncio

from shared.wire.prompts import EvalItem
from shared.wire.queue import TrainQueue
from shared.wire.run import RunState
from shared.wire.types import SamplingParams, State
from tests.deadline import DEADLINE_S
from tests.integration.dispatcher_testing import assert_exact, finished, is_state, rig
from tests.integration.fleet_testing import expected_tokens, version
from tests.integration.wire_testing import (
    checked_counts,
    prompt,
    run_async,
    run_config,
)

pytest_plugins = ("tests.integration.valkey_fixtures",)


def test_prompts_are_sampled_rewarded_queued_and_leased_version_by_version(url):
    async def test():
        async with rig(url) as r:
            queue = await asyncio.to_thread(TrainQueue.connect, r.url)
            epoch = await asyncio.to_thread(queue.take_over, "r", next_step=0)
            await r.store.accept_prompts("r", [prompt(n) for n in range(8)])
            await r.states(awaiting_reward=8, accepted=8)
            for step in range(4):
                await r.reward(range(2 * step, 2 * step + 2))
                groups = await asyncio.to_thread(queue.lease, "r", step, epoch=epoch, deadline_s=DEADLINE_S)
                assert [g.prompt_number for g in groups] == [2 * step, 2 * step + 1]
                assert [[t.reward for t in g.trajectories] for g in groups] == [[0.0, 1.0]] * 2
                await r.sync.publish(step + 1)
                await r.states(**{
                    0: {"leased": 4, "awaiting_reward": 8, "accepted": 4},
                    1: {"leased": 8, "awaiting_reward": 8},
                    2: {"leased": 12, "awaiting_reward": 4},
                    3: {"leased": 16},
                }[step])  # fmt: skip
            for number in range(8):
                await assert_exact(r.store, number, step=max(0, number // 2 - 1))
            # Each version once it is needed; after the last batch the newest one.
            assert r.sync.needed == [0, 1, 2, 3, 4]
            assert await asyncio.to_thread(queue.commit_trained, "r", durable_step=4, epoch=epoch) == 16
            counts = await checked_counts(r.store)
            assert (counts.trained, counts.live) == (16, 0)
            queue.close()

    run_async(test)


def test_missing_prompts_of_a_batch_hold_the_version_back(url):
    async def test():
        async with rig(url, published=(0, 1)) as r:
            # Batch 1 is prompts 2 and 3; with 3 missing, version 1 must not be needed.
            await r.store.accept_prompts("r", [prompt(n) for n in (0, 1, 2, 4)])
            await r.states(awaiting_reward=6, accepted=2)
            assert set(r.sync.needed) == {0}
            await r.store.accept_prompts("r", [prompt(3)])
            await r.states(awaiting_reward=10)
            await assert_exact(r.store, 4, step=1)

    run_async(test)


def test_a_paused_run_lets_what_is_running_finish_and_starts_nothing(url):
    async def test():
        async with rig(url, max_inflight_samples=2) as r:
            (engine,) = r.engines
            engine.hold_at = 4
            await r.store.accept_prompts("r", [prompt(0), prompt(1)])
            await engine.held.wait()
            await r.store.set_run_state("r", RunState.PAUSED, reason="operator")
            engine.go.set()
            await r.states(awaiting_reward=2, accepted=2)
            await r.store.set_run_state("r", RunState.RUNNING)
            await r.states(awaiting_reward=4)
            assert len(engine.requests) == 2

    run_async(test)


def test_stopping_a_run_aborts_what_is_running_and_drops_the_rest(url):
    async def test():
        async with rig(url) as r:
            (engine,) = r.engines
            engine.hold_at = 4
            await r.store.accept_prompts("r", [prompt(n) for n in range(4)])
            await engine.held.wait()
            await r.store.set_run_state("r", RunState.STOPPED, reason="operator")
            await engine.idle.wait()
            counts = await checked_counts(r.store)
            assert counts.dropped == {"cancelled": 8}
            assert counts.live == 0

    run_async(test)


def test_cancelling_a_group_aborts_its_samples_and_the_next_version_comes(url):
    async def test():
        async with rig(url, config=run_config(lag=0, prompts_per_step=1), published=(0, 1)) as r:
            (engine,) = r.engines
            engine.hold_at = 4
            await r.store.accept_prompts("r", [prompt(0)])
            await engine.held.wait()
            assert await r.store.cancel_group("r", 0) == 2
            await engine.idle.wait()
            await r.store.accept_prompts("r", [prompt(1)])
            engine.go.set()
            await r.states(dropped=2, awaiting_reward=2)
            await assert_exact(r.store, 1, step=1)
            assert (await checked_counts(r.store)).dropped == {"cancelled": 2}

    run_async(test)


def test_evaluations_go_on_after_the_run_was_stopped(url):
    async def test():
        async with rig(url) as r:
            await r.store.set_run_state("r", RunState.STOPPED, reason="operator")
            item = EvalItem(token_ids=(5, 6, 7), sampling=SamplingParams(max_tokens=8))
            created = await r.store.create_eval("r", [item], step=0)
            await r.until(lambda: finished(r.store, created.eval))

    run_async(test)


def test_groups_stay_together_and_go_to_the_least_loaded_replica_within_its_bound(url):
    async def test():
        async with rig(url, num_engines=2, max_inflight_samples=2, config=run_config(prompts_per_step=4)) as r:
            for engine in r.engines:
                engine.hold_at = 1
            await r.store.accept_prompts("r", [prompt(n) for n in range(4)])
            for engine in r.engines:
                await engine.held.wait()
            assert [[q.prompt_number for q in e.requests] for e in r.engines] == [[0], [1]]
            assert [[s.trajectory_id for s in e.requests[0].samples] for e in r.engines] == [
                ["r.0.0", "r.0.1"], ["r.1.0", "r.1.1"],
            ]  # fmt: skip
            for engine in r.engines:
                engine.go.set()
            await r.states(awaiting_reward=8)

    run_async(test)


def test_evaluations_use_their_own_seed_and_version_and_are_never_queued(url):
    async def test():
        async with rig(url, published=(0, 1)) as r:
            await r.store.accept_prompts("r", [prompt(n) for n in range(4)])
            await r.states(awaiting_reward=8)
            items = [EvalItem(token_ids=(1, 2, 3), n=2, sampling=SamplingParams(temperature=0.0, max_tokens=8))]
            # Version 1 is being served; the evaluation of 0 brings the replica back, between groups only.
            old = await r.store.create_eval("r", items, step=0, digest="digest-0", seed=77)
            await r.until(lambda: finished(r.store, old.eval))
            record = await r.store.get_eval("r", old.eval)
            for sample, t in enumerate(record.trajectories):
                assert t.state is State.EVALUATED
                assert t.trajectory is not None
                assert t.trajectory.token_ids[3:].tolist() == expected_tokens(77, 0, sample, 0, 8)
            assert r.engines[0].requests[-1].evaluation
            await r.store.accept_prompts("r", [prompt(4), prompt(5)])
            await r.states(awaiting_reward=12)
            await assert_exact(r.store, 5, step=1)
            counts = await checked_counts(r.store)
            assert (counts.accepted, counts.eval_accepted) == (12, 2)

    run_async(test)


def test_an_evaluation_of_a_retired_version_is_dropped_instead_of_holding_the_run(url):
    async def test():
        async with rig(url, published=(2, 3)) as r:
            items = [EvalItem(token_ids=(1,), n=3, sampling=SamplingParams(max_tokens=2))]
            gone = await r.store.create_eval("r", items, step=1)
            forked = await r.store.create_eval("r", items, step=2, digest="of another lineage")
            await r.until(lambda: finished(r.store, gone.eval))
            await r.until(lambda: finished(r.store, forked.eval))
            reasons = [(await r.store.get_eval("r", e.eval)).trajectories[0].reason for e in (gone, forked)]
            assert reasons == ["stale", "orphan_lineage"]

    run_async(test)


def test_exact_match_is_graded_from_the_decoded_sample(url):
    async def decode(model: str, token_ids) -> str:
        assert model == "m"
        return " " + "-".join(map(str, token_ids)) + "\n"

    async def test():
        async with rig(url, decode=decode) as r:
            right = "-".join(map(str, expected_tokens(11, 0, 0, 0, 8)))
            await r.store.accept_prompts("r", [prompt(0, mode="exact_match", answer=right)])
            await r.states(queued=2)
            records = [await r.store.get_trajectory("r", f"r.0.{i}") for i in range(2)]
            assert [t.reward for t in records] == [1.0, 0.0]
            items = [EvalItem(token_ids=(1,), sampling=SamplingParams(max_tokens=2), answer="no")]
            evaluation = await r.store.create_eval("r", items, step=0)
            await r.until(lambda: finished(r.store, evaluation.eval))
            (sample,) = (await r.store.get_eval("r", evaluation.eval)).trajectories
            assert sample.rewards["exact_match"].value == 0.0

    run_async(test)


def test_a_missing_reward_pauses_the_run_and_posting_it_goes_on(url):
    async def test():
        async with rig(url) as r:
            await r.store.accept_prompts("r", [prompt(0, deadline_s=0.2)])
            await r.until(lambda: is_state(r.store, RunState.PAUSED))
            run = await r.store.get_run("r")
            assert run.reason == "missing_reward"
            assert "2 trajectories" in run.detail or "1 trajectories" in run.detail
            assert (await checked_counts(r.store)).live == 2
            await r.reward(range(1))
            await r.states(queued=2)
            await r.store.set_run_state("r", RunState.RUNNING)
            assert (await r.store.get_run("r")).state is RunState.RUNNING
            await r.store.accept_prompts("r", [prompt(1)])
            await r.states(queued=2, awaiting_reward=2)

    run_async(test)


def test_a_replica_is_sent_back_to_an_older_version_only_when_nothing_is_running(url):
    async def test():
        async with rig(url, published=(0, 1)) as r:
            (engine,) = r.engines
            await r.store.accept_prompts("r", [prompt(n) for n in range(4)])
            await r.states(awaiting_reward=8)
            engine.hold_at = 4
            await r.store.accept_prompts("r", [prompt(4), prompt(5)])
            await engine.held.wait()
            assert r.sync.needed[-1] == 1
            items = [EvalItem(token_ids=(1,), sampling=SamplingParams(max_tokens=2))]
            evaluation = await r.store.create_eval("r", items, step=0)
            # Time for a wrong SetNeeded to come; the group that is running has to end first.
            await r.until(lambda: finished(r.store, evaluation.eval), deadline_s=0.5)
            assert r.sync.needed == [0, 1]
            engine.go.set()
            await r.until(lambda: finished(r.store, evaluation.eval))
            assert r.sync.needed[2] == 0
            await r.states(awaiting_reward=12)

    run_async(test)


def test_a_new_run_is_taken_up_and_evaluations_of_the_old_one_are_cancelled(url):
    async def test():
        async with rig(url) as r:
            items = [EvalItem(token_ids=(1,), sampling=SamplingParams(max_tokens=2))]
            await r.store.set_run_state("r", RunState.STOPPED)
            r.sync.versions.clear()
            await r.sync.change()
            waiting = await r.store.create_eval("r", items, step=7)
            r.sync.run = "r2"
            await r.store.create_run(run_config(run="r2"))
            r.sync.versions.append(version(0))
            await r.sync.change()
            await r.store.accept_prompts("r2", [prompt(0)])

            async def generated() -> bool:
                return (await r.store.counts("r2")).by_state.get(State.AWAITING_REWARD) == 2

            await r.until(generated, run="r2")
            assert (await r.store.get_eval("r", waiting.eval)).trajectories[0].reason == "cancelled"

    run_async(test)
