"""The dispatcher against a real Valkey and real gRPC peers: order, versions, interruptions, pauses, stops."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import grpc
import pytest

from services.gateway.dispatcher import Dispatcher
from shared.metrics import names
from shared.metrics.server import value
from shared.wire.lifecycle import Lifecycle
from shared.wire.pb import rollout_pb2 as pb
from shared.wire.prompts import EvalItem
from shared.wire.queue import TrainQueue
from shared.wire.records import RunRecord
from shared.wire.run import RunState
from shared.wire.store import RunStore
from shared.wire.types import SamplingParams, State
from tests.integration.fleet_testing import Engine, WeightSync, expected_tokens, serving, version
from tests.integration.wire_testing import (
    checked_counts,
    empty,
    open_store,
    prompt,
    run_async,
    run_config,
    valkey_server,
)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with valkey_server(tmp_path_factory.mktemp("valkey")) as server:
        yield server.url


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


def test_prompts_are_sampled_rewarded_queued_and_leased_version_by_version(url):
    async def test():
        async with rig(url) as r:
            queue = await asyncio.to_thread(TrainQueue.connect, r.url)
            epoch = await asyncio.to_thread(queue.take_over, "r", next_step=0)
            await r.store.accept_prompts("r", [prompt(n) for n in range(8)])
            await r.states(awaiting_reward=8, accepted=8)
            for step in range(4):
                await r.reward(range(2 * step, 2 * step + 2))
                groups = await asyncio.to_thread(queue.lease, "r", step, epoch=epoch, deadline_s=10)
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


def test_a_broken_stream_is_continued_elsewhere_from_the_tokens_received(url):
    async def test():
        async with rig(url, num_engines=2) as r:
            before = value(names.CONTINUED_TRAJECTORIES, run="r")
            for engine in r.engines:
                engine.break_at = 3
            await r.store.accept_prompts("r", [prompt(0), prompt(1)])
            await r.states(awaiting_reward=4)
            for number in range(2):
                await assert_exact(r.store, number, step=0)
            begun = [len(s.token_ids) // 4 for e in r.engines for q in e.requests for s in q.samples]
            assert sorted(begun) == [0, 0, 0, 0, 3, 3, 3, 3]
            assert value(names.CONTINUED_TRAJECTORIES, run="r") - before == 4

    run_async(test)


def test_a_replica_that_dies_in_mid_generation_costs_no_token_and_finished_samples_are_not_redone(url):
    async def test():
        async with rig(url, num_engines=2) as r:
            first, second = r.engines
            first.hold_at = 5
            second.state = "preparing"
            await r.sync.change()
            await r.store.accept_prompts("r", [prompt(0)])
            await first.held.wait()
            second.state = "ready"
            await r.sync.change()
            await r.kill(first)
            await r.states(awaiting_reward=2)
            await assert_exact(r.store, 0, step=0, replicas={"replica-0", "replica-1"})
            assert [len(s.token_ids) // 4 for s in second.requests[0].samples] == [5, 5]

    run_async(test)


def test_only_what_is_unfinished_is_asked_for_again(url):
    async def test():
        async with rig(url) as r:
            (engine,) = r.engines
            engine.lie = pb.GenerateChunk(finish_reason="length")
            # The first sample ends early; its next chunk, behind the end, breaks the stream.
            await r.store.accept_prompts("r", [prompt(0)])
            await r.states(awaiting_reward=2)
            again = engine.requests[1].samples
            assert [(s.trajectory_id, len(s.token_ids) // 4) for s in again] == [("r.0.1", 1)]
            short = (await r.store.get_trajectory("r", "r.0.0")).trajectory
            assert short is not None
            assert len(short.logprobs) == 1

    run_async(test)


def test_tokens_of_another_version_are_refused_and_sampled_again(url):
    async def test():
        async with rig(url) as r:
            (engine,) = r.engines
            engine.lie = pb.GenerateChunk(manifest_digest="digest-9", policy_step=9)
            before = value(names.REPLICA_FAILURES, reason="protocol")
            await r.store.accept_prompts("r", [prompt(0)])
            await r.states(awaiting_reward=2)
            await assert_exact(r.store, 0, step=0)
            assert value(names.REPLICA_FAILURES, reason="protocol") == before + 1

    run_async(test)


def test_a_replica_that_holds_another_digest_or_is_full_is_tried_again_without_blaming_the_group(url):
    async def test():
        async with rig(url, max_group_failures=1) as r:
            (engine,) = r.engines
            engine.refuse = [grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.RESOURCE_EXHAUSTED] * 2
            await r.store.accept_prompts("r", [prompt(0)])
            await r.states(awaiting_reward=2)
            assert len(engine.requests) == 5

    run_async(test)


def test_a_silent_stream_is_given_up_and_continued(url):
    async def test():
        async with rig(url, stream_idle_s=0.3) as r:
            (engine,) = r.engines
            engine.hold_at = 2
            await r.store.accept_prompts("r", [prompt(0)])
            await engine.held.wait()
            engine.hold_at = None
            await r.states(awaiting_reward=2)
            await assert_exact(r.store, 0, step=0)

    run_async(test)


def test_a_group_that_keeps_failing_pauses_the_run_and_resuming_tries_again(url):
    async def test():
        async with rig(url, max_group_failures=3) as r:
            (engine,) = r.engines
            engine.refuse = [grpc.StatusCode.INVALID_ARGUMENT] * 3
            await r.store.accept_prompts("r", [prompt(0)])
            await r.until(lambda: is_state(r.store, RunState.PAUSED))
            run = await r.store.get_run("r")
            assert run.reason == "infra_error"
            assert "r.0 failed 3 times, the last on replica-0" in run.detail
            assert "refused by the test" in run.detail
            assert (await checked_counts(r.store)).live == 2
            await r.store.set_run_state("r", RunState.RUNNING)
            await r.states(awaiting_reward=2)

    run_async(test)


async def is_state(store: RunStore, state: RunState) -> RunRecord | None:
    run = await store.get_run("r")
    return run if run.state is state else None


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


def test_an_ejected_replica_is_not_believed(url):
    async def test():
        async with rig(url, num_engines=2) as r:
            first, second = r.engines
            first.hold_at = 5
            second.state = "preparing"
            await r.sync.change()
            await r.store.accept_prompts("r", [prompt(0)])
            await first.held.wait()
            first.state, first.reason = "ejected", "probe: 1 logprob differs"
            second.state = "ready"
            await r.sync.change()
            await r.states(awaiting_reward=2)
            await assert_exact(r.store, 0, step=0, replicas={"replica-1"})
            assert [len(s.token_ids) for s in second.requests[0].samples] == [0, 0]

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


async def finished(store: RunStore, eval_id: int) -> bool:
    return (await store.get_eval("r", eval_id)).is_finished


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


def test_a_restarted_dispatcher_samples_open_prompts_again_and_enqueues_complete_groups(url):
    async def test():
        async with rig(url) as r:
            r.stop.set()
            (engine,) = r.engines
            await r.store.accept_prompts("r", [prompt(0), prompt(1)])
            lifecycle = Lifecycle(r.store)
            await lifecycle.start_generating("r", ["r.0.0", "r.1.0", "r.1.1"])
            stop = asyncio.Event()
            second = asyncio.create_task(Dispatcher(r.store, r.sync.address).run(stop))
            await r.states(awaiting_reward=4)
            assert len(engine.requests) == 2
            stop.set()
            await second
            # The gateway is down: clients' rewards came in just before, nobody closed the groups.
            await r.reward(range(2))
            assert await lifecycle.closable("r") == [0, 1]
            stop.clear()
            third = asyncio.create_task(Dispatcher(r.store, r.sync.address).run(stop))
            await r.states(queued=4)
            stop.set()
            await third

    run_async(test)


def test_a_restarted_weight_sync_is_told_again_what_is_needed(url):
    async def test():
        async with rig(url) as r:
            await r.store.accept_prompts("r", [prompt(0)])
            await r.states(awaiting_reward=2)
            await r.servers["weight_sync"].stop(None)
            # The same versions and replicas behind a new process, which knows nothing of the dispatcher.
            successor = WeightSync()
            successor.engines, successor.versions = r.sync.engines, r.sync.versions
            r.engines[0].version, r.engines[0].state = version(9), "ready"
            await r.stack.enter_async_context(serving(successor, r.sync.address))
            await successor.change()
            await r.store.accept_prompts("r", [prompt(1)])
            await r.states(awaiting_reward=4)
            assert successor.needed == [0]
            await assert_exact(r.store, 1, step=0)

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


def test_generation_goes_on_through_a_power_cut_of_valkey(tmp_path):
    async def test():
        with valkey_server(tmp_path, fsync="everysec") as server:
            async with rig(server.url) as r:
                (engine,) = r.engines
                engine.hold_at = 4
                await r.store.accept_prompts("r", [prompt(0), prompt(1)])
                (log,) = tmp_path.glob("appendonlydir/*.incr.aof")
                synced = log.stat().st_size
                await engine.held.wait()
                server.process.kill()
                server.process.wait(10)
                # The prompts were acknowledged; that they are being generated was not synced yet.
                os.truncate(log, synced)
                server.start()
                engine.go.set()
                await r.states(awaiting_reward=4)
                for number in range(2):
                    await assert_exact(r.store, number, step=0)
                await checked_counts(r.store)

    run_async(test)


def test_a_fault_in_a_loop_ends_the_dispatcher_loudly(url):
    async def test():
        async with AsyncExitStack() as stack:
            empty(url)
            store = await stack.enter_async_context(open_store(url))
            sync = WeightSync()
            await stack.enter_async_context(serving(sync))
            await sync.publish(0)
            engine = Engine("replica-0")
            sync.engines.append(engine)
            await stack.enter_async_context(serving(engine))
            await store.create_run(run_config())
            await store.accept_prompts("r", [prompt(0, mode="exact_match", answer="x")])
            with pytest.raises(ExceptionGroup) as caught:
                await Dispatcher(store, sync.address).run(asyncio.Event())
            assert caught.group_contains(RuntimeError, match="exact match")

    run_async(test)
