"""What a client sees: runs, the admission gate, duplicates, rewards of every kind, listings, events, idempotency keys."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from shared.wire import archive
from shared.wire.lifecycle import Closed, Lifecycle
from shared.wire.prompts import EvalItem, RewardSpec
from shared.wire.queue import TrainQueue
from shared.wire.records import (
    AcceptStatus,
    IllegalTransition,
    RewardItem,
    RewardStatus,
    RunActive,
    RunExists,
    UnknownEvaluation,
    UnknownRun,
    UnknownTrajectory,
)
from shared.wire.run import RunState
from shared.wire.types import DropReason, SamplingParams, State
from tests.deadline import DEADLINE_S
from tests.integration.wire_testing import (
    checked_counts,
    fill,
    open_store,
    prompt,
    run_async,
    run_config,
    trajectory,
)

pytest_plugins = ("tests.integration.valkey_fixtures",)


async def statuses(store, items) -> list[str]:
    return [result.status.value for result in await store.accept_prompts("r", items)]


def test_runs_are_created_one_at_a_time_and_listed_newest_first(url):
    async def test():
        async with open_store(url) as store:
            assert await store.newest_run() is None
            with pytest.raises(UnknownRun):
                await store.get_run("r")
            config = run_config(temperature=0.7)
            assert (await store.create_run(config)).config == config
            with pytest.raises(RunExists):
                await store.create_run(config)
            with pytest.raises(RunActive, match="run r is not over"):
                await store.create_run(run_config(run="r2"))
            await store.set_run_state("r", RunState.STOPPED, reason="operator")
            with pytest.raises(RunExists):
                await store.create_run(config)
            for name in ("r2", "r3"):
                await store.create_run(run_config(run=name))
                await store.set_run_state(name, RunState.STOPPED)
            first = await store.list_runs(limit=2)
            assert [r.run for r in first.items] == ["r3", "r2"]
            second = await store.list_runs(cursor=first.next_cursor, limit=2)
            assert [r.run for r in second.items] == ["r"]
            assert second.next_cursor is None

    run_async(test)


def test_a_run_that_is_over_stays_over_and_equal_states_are_no_error(url):
    async def test():
        async with open_store(url) as store:
            await store.create_run(run_config())
            paused = await store.set_run_state("r", RunState.PAUSED, reason="operator", detail="lunch")
            assert (paused.state, paused.reason, paused.detail) == (RunState.PAUSED, "operator", "lunch")
            resumed = await store.set_run_state("r", RunState.RUNNING)
            assert (resumed.state, resumed.reason) == (RunState.RUNNING, "")
            await store.set_run_state("r", RunState.STOPPED)
            await store.set_run_state("r", RunState.STOPPED)
            with pytest.raises(IllegalTransition, match="run r is stopped and can't become running"):
                await store.set_run_state("r", RunState.RUNNING)
            with pytest.raises(UnknownRun):
                await store.set_run_state("nobody", RunState.PAUSED)
            types = [e.type for e in await store.events("r")]
            assert types == ["run.running", "run.paused", "run.running", "run.stopped"]

    run_async(test)


def test_a_paused_run_starts_no_sample_whoever_still_takes_it_for_running(url):
    async def test():
        async with open_store(url) as store:
            await store.create_run(run_config())
            await store.accept_prompts("r", [prompt(0)])
            lifecycle = Lifecycle(store)
            await store.set_run_state("r", RunState.PAUSED, reason="operator")
            assert await lifecycle.start_generating("r", ["r.0.0", "r.0.1"]) == set()
            assert (await checked_counts(store)).by_state == {State.ACCEPTED: 2}
            await store.set_run_state("r", RunState.RUNNING)
            assert await lifecycle.start_generating("r", ["r.0.0", "r.0.1"]) == {"r.0.0", "r.0.1"}

    run_async(test)


def test_prompts_get_ids_at_once_and_a_repeat_gets_the_same_ones(url):
    async def test():
        async with open_store(url) as store:
            await store.create_run(run_config())
            item = prompt(0, prompt_id="mine", metadata={"b": 1, "a": [2, "x"]})
            (result,) = await store.accept_prompts("r", [item])
            assert result.status is AcceptStatus.ACCEPTED
            assert (result.group_id, result.prompt_id, result.trajectory_ids) == ("r.0", "mine", ("r.0.0", "r.0.1"))
            (again,) = await store.accept_prompts("r", [replace(item, metadata={"a": [2, "x"], "b": 1})])
            assert again == replace(result, status=AcceptStatus.DUPLICATE)
            record = await store.get_trajectory("r", "r.0.1")
            assert (record.state, record.prompt_id, record.metadata) == (State.ACCEPTED, "mine", item.metadata)
            assert (await checked_counts(store)).accepted == 2

    run_async(test)


@pytest.mark.parametrize(
    "other",
    [
        prompt(0, prompt_id="mine", token_ids=(9,)),
        prompt(0, prompt_id="mine", n=3),
        prompt(0, prompt_id="mine", metadata={"x": 1}),
        prompt(0, prompt_id="mine", answer="4", mode="exact_match"),
        prompt(0, prompt_id="mine", sampling=SamplingParams(max_tokens=9)),
        prompt(0, prompt_id="yours"),
        prompt(1, prompt_id="mine"),
    ],
)
def test_a_number_or_prompt_id_with_another_body_is_a_conflict(url, other):
    async def test():
        async with open_store(url) as store:
            await store.create_run(run_config())
            await store.accept_prompts("r", [prompt(0, prompt_id="mine")])
            (result,) = await store.accept_prompts("r", [other])
            assert result.status is AcceptStatus.CONFLICT
            assert "taken by prompt 0" in result.detail
            assert result.trajectory_ids == ()
            assert (await checked_counts(store)).accepted == 2

    run_async(test)


def test_the_gate_follows_the_durable_checkpoint_and_one_bad_item_does_not_fail_the_others(url):
    async def test():
        async with open_store(url) as store:
            # queue_bound_batches is checkpoint_interval + lag + 2 = 4 batches of 2.
            await store.create_run(run_config(num_steps=6))
            answers = await store.accept_prompts("r", [prompt(n) for n in (7, 8, 0, 12)])
            assert [a.status.value for a in answers] == ["accepted", "gate_closed", "accepted", "out_of_range"]
            assert "not below 8" in answers[1].detail
            queue = await asyncio.to_thread(TrainQueue.connect, url)
            epoch = await asyncio.to_thread(queue.take_over, "r", next_step=0)
            await asyncio.to_thread(queue.commit_trained, "r", durable_step=1, epoch=epoch)
            assert await statuses(store, [prompt(8), prompt(9), prompt(10)]) == ["accepted", "accepted", "gate_closed"]
            await store.set_run_state("r", RunState.STOPPED)
            # A client that repeats itself still learns its ids.
            assert await statuses(store, [prompt(8), prompt(1)]) == ["duplicate", "run_over"]
            with pytest.raises(UnknownRun):
                await store.accept_prompts("nobody", [prompt(0)])

    run_async(test)


def test_rewards_are_idempotent_by_trajectory_source_and_revision(url):
    async def test():
        async with open_store(url) as store:
            await store.create_run(run_config())
            await store.accept_prompts("r", [prompt(0)])
            await Lifecycle(store).store_generated("r", trajectory(0, 0))

            async def put(value: float, revision: int, source: str = "default") -> str:
                return (await store.put_reward("r", "r.0.0", source, value, revision=revision)).status.value

            assert await put(1.0, 1) == "applied"
            assert await put(1.0, 1) == "unchanged"
            assert await put(2.0, 1) == "conflict"
            assert await put(1.0, 0) == "conflict"
            assert await put(0.1 + 0.2, 2) == "applied"
            assert await put(0.3, 2) == "conflict"
            assert await put(1.0, 3, source="other") == "unexpected_source"
            assert (await store.put_reward("r", "r.9.0", "default", 1.0)).status is RewardStatus.UNKNOWN
            assert (await store.get_trajectory("r", "r.0.0")).reward == 0.1 + 0.2
            with pytest.raises(ValueError, match="must be finite, got nan"):
                await put(float("nan"), 4)
            with pytest.raises(UnknownRun):
                await store.put_reward("nobody", "nobody.0.0", "default", 1.0)

    run_async(test)


def test_a_reward_may_come_before_the_text_and_several_sources_are_summed(url):
    async def test():
        async with open_store(url) as store:
            await store.create_run(run_config())
            await store.accept_prompts("r", [prompt(0, sources=("judge", "format"))])
            await store.put_reward("r", "r.0.0", "format", 0.25)
            assert (await store.get_trajectory("r", "r.0.0")).state is State.ACCEPTED
            lifecycle = Lifecycle(store)
            assert await lifecycle.store_generated("r", trajectory(0, 0)) is State.AWAITING_REWARD
            await store.put_reward("r", "r.0.0", "judge", 1.0)
            record = await store.get_trajectory("r", "r.0.0")
            assert (record.state, record.reward) == (State.REWARDED, 1.25)
            assert await lifecycle.first_deadline("r") is None

    run_async(test)


def test_a_sealed_reward_is_late_and_counted_but_a_repeat_of_the_applied_one_is_not(url):
    async def test():
        async with open_store(url) as store:
            await store.create_run(run_config())
            await fill(store, range(1))
            assert (await store.put_reward("r", "r.0.1", "default", 1.0)).status is RewardStatus.UNCHANGED
            late = await store.put_reward("r", "r.0.1", "default", 5.0, revision=1)
            assert (late.status, late.detail) == (RewardStatus.LATE, "the trajectory is queued")
            await store.set_run_state("r", RunState.STOPPED)
            assert (await store.put_reward("r", "r.0.0", "default", 5.0, revision=1)).status is RewardStatus.LATE
            assert (await checked_counts(store)).rewards_late == 2
            assert (await store.get_trajectory("r", "r.0.1")).reward == 1.0

    run_async(test)


def test_a_reward_replaced_while_the_group_is_being_closed_is_the_one_that_is_queued(url):
    async def test():
        async with open_store(url) as store:
            await store.create_run(run_config())
            await fill(store, range(1), close=False)
            lifecycle = Lifecycle(store)
            reading = store.trajectories

            async def replaced_meanwhile(*args, **kwargs):
                records = await reading(*args, **kwargs)
                await store.put_reward("r", "r.0.0", "default", 9.0, revision=1)
                return records

            store.trajectories = replaced_meanwhile  # type: ignore[method-assign]
            assert (await lifecycle.close_group("r", 0))[0] is Closed.CHANGED
            store.trajectories = reading  # type: ignore[method-assign]
            answer, group = await lifecycle.close_group("r", 0)
            assert answer is Closed.QUEUED
            assert group is not None
            assert [t.reward for t in group.trajectories] == [9.0, 1.0]
            assert group.trajectories[0].rewards == {"default": 9.0}
            assert (await lifecycle.close_group("r", 0))[0] is Closed.NOT_READY

    run_async(test)


def test_a_batch_of_rewards_answers_item_by_item(url):
    async def test():
        async with open_store(url) as store:
            await store.create_run(run_config())
            await store.accept_prompts("r", [prompt(0)])
            items = [
                RewardItem(trajectory_id="r.0.0", value=1.0),
                RewardItem(trajectory_id="r.7.0", value=1.0),
                RewardItem(trajectory_id="r.0.0", value=2.0),
                RewardItem(trajectory_id="r.0.1", value=1.0, source="nobody"),
            ]
            results = await store.put_rewards("r", items)
            assert [r.status.value for r in results] == ["applied", "unknown", "conflict", "unexpected_source"]

    run_async(test)


def test_listings_page_in_order_of_acceptance_and_filter_by_state(url):
    async def test():
        async with open_store(url) as store:
            await store.create_run(run_config())
            await fill(store, range(1))
            await store.accept_prompts("r", [prompt(2), prompt(1)])
            everything = ["r.0.0", "r.0.1", "r.2.0", "r.2.1", "r.1.0", "r.1.1"]
            found, cursor, pages = [], "", 0
            while cursor is not None:
                page = await store.list_trajectories("r", cursor=cursor, limit=4)
                found += [t.trajectory_id for t in page.items]
                cursor, pages = page.next_cursor, pages + 1
            assert (found, pages) == (everything, 2)
            page = await store.list_trajectories("r", state=State.ACCEPTED, limit=3)
            assert [t.trajectory_id for t in page.items] == ["r.2.0", "r.2.1", "r.1.0"]
            rest = await store.list_trajectories("r", state=State.ACCEPTED, cursor=page.next_cursor)
            assert [t.trajectory_id for t in rest.items] == ["r.1.1"]
            assert rest.next_cursor is None
            queued = await store.list_trajectories("r", state=State.QUEUED, with_tokens=True)
            assert [t.trajectory.logprobs.tolist() for t in queued.items if t.trajectory] == [[-0.5, -0.25]] * 2
            assert (await store.list_trajectories("r")).items[0].trajectory is None
            with pytest.raises(UnknownTrajectory):
                await store.get_trajectory("r", "r.0.7")

    run_async(test)


def test_trained_tokens_are_read_from_the_archive_once_they_left_valkey(url, tmp_path):
    async def test():
        async with open_store(url) as store:
            await store.create_run(run_config())
            await fill(store, range(2))
            queue = await asyncio.to_thread(TrainQueue.connect, url)
            epoch = await asyncio.to_thread(queue.take_over, "r", next_step=0)
            groups = await asyncio.to_thread(queue.lease, "r", 0, epoch=epoch, deadline_s=DEADLINE_S)
            uri = tmp_path.as_uri()
            archive.write_step(uri, 0, groups)
            assert (await store.get_trajectory("r", "r.1.0")).trajectory is not None
            await asyncio.to_thread(queue.commit_trained, "r", durable_step=1, epoch=epoch, archive=uri)
            assert await store.client.hexists("tz:{r}:t:r.1.0", "record") == 0
            file = tmp_path / "step-00000000.msgpack"
            file.rename(tmp_path / "away")
            with pytest.raises(OSError, match="step-00000000"):
                await store.get_trajectory("r", "r.1.0")
            (tmp_path / "away").rename(file)
            record = await store.get_trajectory("r", "r.1.0")
            assert (record.state, record.step, record.reward) == (State.TRAINED, 0, 0.0)
            assert record.trajectory is not None
            assert record.trajectory.token_ids.tolist() == trajectory(1, 0).token_ids.tolist()

    run_async(test)


def test_events_are_read_behind_a_cursor_and_waited_for(url):
    async def test():
        async with open_store(url) as store:
            await store.create_run(run_config())
            await store.accept_prompts("r", [prompt(0)])
            events = await store.events("r")
            assert [(e.type, e.trajectory_id, e.group_id) for e in events[1:]] == [
                ("trajectory.accepted", "r.0.0", "r.0"), ("trajectory.accepted", "r.0.1", "r.0"),
            ]  # fmt: skip
            assert await store.last_event("r") == events[-1].cursor
            assert [e.trajectory_id for e in await store.events("r", after=events[1].cursor)] == ["r.0.1"]
            assert await store.events("r", after=events[-1].cursor, block_s=0.05) == []
            waiting = asyncio.create_task(store.events("r", after=events[-1].cursor, block_s=DEADLINE_S))
            await store.set_run_state("r", RunState.PAUSED, reason="operator")
            assert [(e.type, e.reason) for e in await waiting] == [("run.paused", "operator")]

    run_async(test)


def test_evaluations_are_counted_apart_and_finish_one_by_one(url):
    async def test():
        async with open_store(url) as store:
            await store.create_run(run_config())
            greedy = SamplingParams(temperature=0.0, max_tokens=4)
            items = [EvalItem(token_ids=(1, i), n=2, sampling=greedy, metadata={"i": i}) for i in range(2)]
            first = await store.create_eval("r", items, step=3, digest="d3", metadata={"name": "before"})
            second = await store.create_eval("r", items[:1], step=0, seed=5)
            assert (first.eval, first.num_trajectories, first.metadata) == (0, 4, {"name": "before"})
            assert (second.eval, second.seed) == (1, 5)
            assert first.seed not in (second.seed, run_config().seed)
            assert [t.trajectory_id for t in first.trajectories] == ["r.e0.0.0", "r.e0.0.1", "r.e0.1.0", "r.e0.1.1"]
            assert first.items == tuple(items)
            lifecycle = Lifecycle(store)
            assert [e.eval for e in (await lifecycle.horizon("r")).evals] == [0, 1]
            await lifecycle.store_generated("r", trajectory(0, 0, group="e0.0", step=3), reward=1.0)
            assert (await store.put_reward("r", "r.e0.0.0", "mine", 2.0)).status is RewardStatus.APPLIED
            assert await lifecycle.drop_eval("r", 0, DropReason.STALE) == 3
            record = await store.get_eval("r", 0)
            assert record.is_finished
            assert [t.state.value for t in record.trajectories] == ["evaluated", "dropped", "dropped", "dropped"]
            assert {s: r.value for s, r in record.trajectories[0].rewards.items()} == {"exact_match": 1.0, "mine": 2.0}
            assert record.trajectories[2].metadata == {"i": 1}
            assert [e.eval for e in (await lifecycle.horizon("r")).evals] == [1]
            assert [e.num_finished for e in (await store.list_evals("r")).items] == [4, 0]
            counts = await checked_counts(store)
            assert (counts.accepted, counts.eval_accepted) == (0, 6)
            assert counts.eval_by_state == {State.EVALUATED: 1, State.DROPPED: 3, State.ACCEPTED: 2}
            with pytest.raises(UnknownEvaluation):
                await store.get_eval("r", 9)
            with pytest.raises(ValueError, match="at least one item"):
                await store.create_eval("r", [], step=0)
            with pytest.raises(UnknownRun):
                await store.create_eval("nobody", items, step=0)

    run_async(test)


def test_an_evaluation_of_a_run_that_was_followed_by_another_is_refused(url):
    """Replicas serve the newest run only: nobody would ever generate it."""

    async def test():
        async with open_store(url) as store:
            await store.create_run(run_config())
            await store.set_run_state("r", RunState.STOPPED)
            item = EvalItem(token_ids=(1,), sampling=SamplingParams())
            await store.create_eval("r", [item], step=0)
            await store.create_run(run_config(run="next"))
            with pytest.raises(IllegalTransition, match="run next"):
                await store.create_eval("r", [item], step=0)
            assert [e.eval for e in (await store.list_evals("r")).items] == [0]

    run_async(test)


def test_an_idempotency_key_goes_from_new_to_in_progress_to_answered(url):
    async def test():
        async with open_store(url) as store:
            assert await store.begin_request("k", "body") is None
            waiting = await store.begin_request("k", "other")
            assert waiting is not None
            assert (waiting.fingerprint, waiting.response) == ("body", None)
            await store.finish_request("k", "body", b'{"a":\n1}')
            answered = await store.begin_request("k", "body")
            assert answered is not None
            assert (answered.fingerprint, answered.response) == ("body", b'{"a":\n1}')
            assert 86_000 < await store.client.ttl("tz:idem:k") <= 86_400
            await store.abandon_request("k")
            assert await store.begin_request("k", "body") is None

    run_async(test)


def test_a_cancelled_task_ends_whatever_it_was_asking_valkey(url):
    """redis-py's own connections lose about one cancellation in thirty here on Python 3.11."""

    async def test():
        async with open_store(url) as store:

            async def ask_for_ever() -> None:
                while True:
                    await store.client.get("x")

            for turns in range(150):
                task = asyncio.create_task(ask_for_ever())
                for _ in range(20 + turns % 37):
                    await asyncio.sleep(0)
                task.cancel()
                done, _ = await asyncio.wait([task], timeout=DEADLINE_S)
                assert done, f"the cancellation was lost in turn {turns}"

    run_async(test)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"deadline_s": 0}, "deadline_s must be above 0"),
        ({"deadline_s": float("inf")}, "deadline_s must be above 0"),
        ({"sources": ()}, "distinct and not empty"),
        ({"sources": ("a", "a")}, "distinct and not empty"),
        ({"mode": "exact_match"}, "needs reward.answer"),
        ({"mode": "exact_match", "answer": "4", "sources": ("a",)}, "one source of its own"),
    ],
)
def test_a_reward_spec_that_could_never_be_met_is_refused(fields, text):
    with pytest.raises(ValueError, match=text):
        RewardSpec(**fields)
