"""The dispatcher when something breaks: streams, replicas, weight_sync, Valkey, itself. Not a token differs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import grpc
import pytest

from services.gateway.dispatcher import Dispatcher
from shared.metrics import names
from shared.metrics.server import value
from shared.wire.lifecycle import Lifecycle
from shared.wire.pb import rollout_pb2 as pb
from shared.wire.run import RunState
from tests.deadline import DEADLINE_S
from tests.integration.dispatcher_testing import assert_exact, is_state, rig
from tests.integration.fleet_testing import Engine, WeightSync, serving, version
from tests.integration.wire_testing import (
    checked_counts,
    empty,
    open_store,
    prompt,
    run_async,
    run_config,
    valkey_server,
)

pytest_plugins = ("tests.integration.valkey_fixtures",)


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
            engine.lie = version(9)
            before = value(names.REPLICA_FAILURES, reason="protocol")
            await r.store.accept_prompts("r", [prompt(0)])
            await r.states(awaiting_reward=2)
            await assert_exact(r.store, 0, step=0)
            assert value(names.REPLICA_FAILURES, reason="protocol") == before + 1

    run_async(test)


class Split(Engine):
    """Its first message ends the first sample, and then says something wrong about the second."""

    async def _sample(self, request: pb.GenerateRequest, context) -> AsyncIterator[pb.GenerateReply]:
        async for reply in super()._sample(request, context):
            if len(self.requests) == 1:
                reply.chunks[0].finish_reason, reply.chunks[1].kv = "length", "warm"
            yield reply


def test_what_ended_before_a_wrong_chunk_of_the_same_message_is_not_sampled_again(url):
    async def test():
        async with rig(url, num_engines=0) as r:
            engine = await r.add_engine(Split("replica-0"))
            await r.store.accept_prompts("r", [prompt(0)])
            await r.states(awaiting_reward=2)
            again = engine.requests[1].samples
            assert [(s.trajectory_id, len(s.token_ids) // 4) for s in again] == [("r.0.1", 0)]
            short = (await r.store.get_trajectory("r", "r.0.0")).trajectory
            assert short is not None
            assert len(short.logprobs) == 1

    run_async(test)


class Hollow(Engine):
    """Its first message has no chunks."""

    async def _sample(self, request: pb.GenerateRequest, context) -> AsyncIterator[pb.GenerateReply]:
        if len(self.requests) == 1:
            yield pb.GenerateReply(version=self.version, fingerprint="f")
        async for reply in super()._sample(request, context):
            yield reply


def test_a_message_without_chunks_is_no_sign_of_life(url):
    async def test():
        async with rig(url, num_engines=0) as r:
            engine = await r.add_engine(Hollow("replica-0"))
            before = value(names.REPLICA_FAILURES, reason="protocol")
            await r.store.accept_prompts("r", [prompt(0)])
            await r.states(awaiting_reward=2)
            await assert_exact(r.store, 0, step=0)
            assert len(engine.requests) == 2
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
        async with rig(url, stream_idle_s=0.3, max_group_failures=1000) as r:
            (engine,) = r.engines
            engine.hold_at = 2
            await r.store.accept_prompts("r", [prompt(0)])
            await engine.held.wait()
            engine.hold_at = None
            await r.states(awaiting_reward=2)
            await assert_exact(r.store, 0, step=0)

    run_async(test)


def test_a_group_that_stands_in_line_at_a_busy_replica_is_waited_for(url):
    async def test():
        async with rig(url, stream_idle_s=0.1) as r:
            (engine,) = r.engines
            engine.hold_at, engine.is_busy = 0, True
            await r.store.accept_prompts("r", [prompt(0)])
            async with asyncio.timeout(DEADLINE_S):
                await engine.asked.wait()
            engine.go.set()
            await r.states(awaiting_reward=2)
            assert len(engine.requests) == 1

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


def test_what_a_replica_sampled_before_it_failed_its_proof_is_sampled_again(url):
    async def test():
        async with rig(url, num_engines=2, max_group_failures=1) as r:
            before = value(names.CONTINUED_TRAJECTORIES, run="r")
            for engine in r.engines:
                engine.break_at, engine.break_code = 3, grpc.StatusCode.DATA_LOSS
            await r.store.accept_prompts("r", [prompt(0), prompt(1)])
            await r.states(awaiting_reward=4)
            for number in range(2):
                await assert_exact(r.store, number, step=0)
            assert [len(s.token_ids) for e in r.engines for q in e.requests for s in q.samples] == [0] * 8
            assert value(names.CONTINUED_TRAJECTORIES, run="r") == before

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
            await r.stack.enter_async_context(serving(successor, r.sync.held_port))
            await successor.change()
            await r.store.accept_prompts("r", [prompt(1)])
            await r.states(awaiting_reward=4)
            assert successor.needed == [0]
            await assert_exact(r.store, 1, step=0)

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
                server.process.wait(DEADLINE_S)
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


def test_a_run_whose_lone_replica_is_ejected_is_paused_with_the_reason_and_goes_on_when_another_comes(url):
    async def test():
        async with rig(url, no_replica_s=0.3) as r:
            (engine,) = r.engines
            engine.state, engine.reason = "ejected", "probe: 1 logprob differs"
            await r.sync.change()
            await r.store.accept_prompts("r", [prompt(0)])
            await r.until(lambda: is_state(r.store, RunState.PAUSED))
            run = await r.store.get_run("r")
            assert run.reason == "no_replica"
            assert "replica-0: probe: 1 logprob differs" in run.detail
            await r.add_engine(Engine("replica-1"))
            await r.states(awaiting_reward=2)
            assert (await r.store.get_run("r")).state is RunState.RUNNING
            await assert_exact(r.store, 0, step=0, replicas={"replica-1"})

    run_async(test)


def test_an_operators_pause_is_not_ended_by_a_replica_that_comes(url):
    async def test():
        async with rig(url, num_engines=0, no_replica_s=0.2) as r:
            await r.store.accept_prompts("r", [prompt(0)])
            await r.until(lambda: is_state(r.store, RunState.PAUSED))
            await r.store.set_run_state("r", RunState.PAUSED, reason="operator")
            assert not await Lifecycle(r.store).resume("r", only="no_replica")
            run = await r.store.get_run("r")
            assert (run.state, run.reason) == (RunState.PAUSED, "operator")

    run_async(test)
