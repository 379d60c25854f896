"""The trainer's side of the queue: order, fencing, take-over, acknowledgement with the checkpoint, poison, lost servers."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import redis

from shared.wire import archive
from shared.wire.codec import CodecError, encode_group
from shared.wire.lifecycle import Closed, Lifecycle
from shared.wire.queue import TrainQueue
from shared.wire.records import Fenced, IllegalTransition, RunOver, RunRecord
from shared.wire.run import RunState
from shared.wire.types import Group, State
from tests.deadline import DEADLINE_S
from tests.integration.wire_testing import (
    checked_counts,
    fill,
    prompt,
    run_config,
    trajectory,
    valkey_server,
    with_store,
)

pytest_plugins = ("tests.integration.valkey_fixtures",)


def start_run(url, *, filled: range = range(0), **values) -> None:
    async def act(store):
        config = run_config(**values)
        await store.create_run(config)
        await fill(store, filled, config=config)

    with_store(url, act)


def set_state(url, state: RunState) -> None:
    with_store(url, lambda store: store.set_run_state("r", state, reason="operator"))


def counts(url):
    return with_store(url, checked_counts)


def num_pending(url) -> int:
    return redis.Redis.from_url(url).xpending("tz:{r}:queue", "trainer")["pending"]


def numbers(groups) -> list[int]:
    return [g.prompt_number for g in groups]


def test_batches_are_leased_whole_and_in_number_order_whatever_order_they_came_in(url, queue):
    async def act(store):
        config = run_config()
        await store.create_run(config)
        for n in (3, 1, 2, 0):
            await fill(store, range(n, n + 1), config=config)

    with_store(url, act)
    epoch = queue.take_over("r", next_step=0)
    first = queue.lease("r", 0, epoch=epoch, deadline_s=DEADLINE_S)
    assert numbers(first) == [0, 1]
    assert [[t.sample_index for t in g.trajectories] for g in first] == [[0, 1], [0, 1]]
    assert [[t.reward for t in g.trajectories] for g in first] == [[0.0, 1.0], [0.0, 1.0]]
    assert counts(url).by_state == {State.LEASED: 4, State.QUEUED: 4}
    assert numbers(queue.lease("r", 1, epoch=epoch, deadline_s=DEADLINE_S)) == [2, 3]
    assert with_store(url, lambda s: s.get_trajectory("r", "r.3.0")).step == 1


def test_what_was_read_ahead_is_leased_and_what_comes_later_too(url, queue):
    start_run(url, filled=range(3))
    epoch = queue.take_over("r", next_step=0)
    for _ in range(2):
        queue.read_ahead("r", epoch=epoch)
        assert counts(url).by_state[State.QUEUED] == 6, "reading is not leasing"
    with_store(url, lambda store: fill(store, range(3, 4)))
    leased = [queue.lease("r", step, epoch=epoch, deadline_s=DEADLINE_S) for step in range(2)]
    assert [[g.prompt_number for g in groups or ()] for groups in leased] == [[0, 1], [2, 3]]


def test_an_incomplete_batch_is_not_leased_before_the_deadline_and_then_arrives(url, queue):
    start_run(url, filled=range(1))
    epoch = queue.take_over("r", next_step=0)
    begin = time.monotonic()
    assert queue.lease("r", 0, epoch=epoch, deadline_s=0.3) is None
    assert 0.25 < time.monotonic() - begin < DEADLINE_S / 2
    assert counts(url).by_state == {State.QUEUED: 2}
    with ThreadPoolExecutor(1) as pool:
        leasing = pool.submit(queue.lease, "r", 0, epoch=epoch, deadline_s=DEADLINE_S)
        with_store(url, lambda store: fill(store, range(1, 2)))
        assert numbers(leasing.result(DEADLINE_S)) == [0, 1]


def test_a_lease_waits_while_the_run_is_paused_and_ends_when_it_is_over(url, queue):
    start_run(url, filled=range(4))
    epoch = queue.take_over("r", next_step=0)
    set_state(url, RunState.PAUSED)
    assert queue.lease("r", 0, epoch=epoch, deadline_s=0.2) is None
    with ThreadPoolExecutor(1) as pool:
        leasing = pool.submit(queue.lease, "r", 0, epoch=epoch, deadline_s=DEADLINE_S)
        set_state(url, RunState.RUNNING)
        assert numbers(leasing.result(DEADLINE_S)) == [0, 1]
        waiting = pool.submit(queue.lease, "r", 3, epoch=epoch, deadline_s=DEADLINE_S)
        set_state(url, RunState.STOPPED)
        with pytest.raises(RunOver, match="run r is stopped") as caught:
            waiting.result(DEADLINE_S)
    assert caught.value.state is RunState.STOPPED


def test_groups_are_acknowledged_and_deleted_only_when_a_checkpoint_covers_them(url, queue):
    start_run(url, filled=range(4))
    epoch = queue.take_over("r", next_step=0)
    for step in range(2):
        queue.lease("r", step, epoch=epoch, deadline_s=DEADLINE_S)
        queue.record_step("r", step, {"loss": 0.5}, epoch=epoch)
    assert (counts(url).queue_depth, num_pending(url)) == (4, 4)
    assert queue.get_run("r").step == 2
    assert queue.commit_trained("r", durable_step=1, epoch=epoch) == 4
    after = counts(url)
    assert (after.queue_depth, num_pending(url)) == (2, 2)
    assert after.by_state == {State.TRAINED: 4, State.LEASED: 4}
    assert queue.get_run("r").durable_step == 1
    assert queue.commit_trained("r", durable_step=1, epoch=epoch) == 0
    assert queue.commit_trained("r", durable_step=2, epoch=epoch) == 4
    assert (counts(url).queue_depth, num_pending(url), counts(url).live) == (0, 0, 0)


@pytest.mark.parametrize("consumer", ["trainer-0", "another-host"])
def test_a_second_trainer_takes_over_what_was_pending_and_fences_the_first(url, queue, consumer):
    start_run(url, filled=range(6))
    old = queue.take_over("r", next_step=0)
    for step in range(2):
        queue.lease("r", step, epoch=old, deadline_s=DEADLINE_S)
    second = TrainQueue.connect(url, consumer=consumer)
    # The checkpoint holds step 0; step 1 was trained and lost.
    new = second.take_over("r", next_step=1)
    assert new == old + 1
    assert counts(url).by_state == {State.TRAINED: 4, State.LEASED: 4, State.QUEUED: 4}
    for call in (
        lambda: queue.lease("r", 1, epoch=old, deadline_s=DEADLINE_S),
        lambda: queue.record_step("r", 1, {}, epoch=old),
        lambda: queue.commit_trained("r", durable_step=2, epoch=old),
        lambda: queue.set_state("r", RunState.FAILED, epoch=old),
    ):
        with pytest.raises(Fenced, match="This one must stop"):
            call()
    assert numbers(second.lease("r", 1, epoch=new, deadline_s=DEADLINE_S)) == [2, 3]
    assert numbers(second.lease("r", 2, epoch=new, deadline_s=DEADLINE_S)) == [4, 5]
    assert second.commit_trained("r", durable_step=3, epoch=new) == 8
    assert counts(url).trained == 12
    second.close()


def test_take_over_trains_whatever_the_checkpoint_covers_even_if_valkey_forgot_most_of_it(url, queue):
    async def act(store):
        await store.create_run(run_config())
        await fill(store, range(1))
        await fill(store, range(1, 2), close=False)
        await store.accept_prompts("r", [prompt(2), prompt(3)])
        await Lifecycle(store).start_generating("r", ["r.2.0"])

    with_store(url, act)
    queue.take_over("r", next_step=2)
    after = counts(url)
    assert (after.trained, after.live, after.queue_depth) == (8, 0, 0)
    horizon = with_store(url, lambda store: Lifecycle(store).horizon("r"))
    assert horizon.first_open == 4
    with pytest.raises(IllegalTransition, match="durable up to step 2"):
        queue.take_over("r", next_step=1)


def test_a_repeated_lease_of_the_same_process_gives_the_same_groups(url, queue):
    start_run(url, filled=range(2))
    epoch = queue.take_over("r", next_step=0)
    first = queue.lease("r", 0, epoch=epoch, deadline_s=DEADLINE_S)
    second = queue.lease("r", 0, epoch=epoch, deadline_s=DEADLINE_S)
    assert [encode_group(g) for g in first] == [encode_group(g) for g in second]


def test_a_lost_consumer_group_heals_and_nothing_is_leased_twice(url, queue):
    start_run(url, filled=range(4))
    epoch = queue.take_over("r", next_step=0)
    queue.lease("r", 0, epoch=epoch, deadline_s=DEADLINE_S)
    redis.Redis.from_url(url).xgroup_destroy("tz:{r}:queue", "trainer")
    with_store(url, lambda store: fill(store, range(4, 6)))
    assert numbers(queue.lease("r", 1, epoch=epoch, deadline_s=DEADLINE_S)) == [2, 3]
    assert numbers(queue.lease("r", 2, epoch=epoch, deadline_s=DEADLINE_S)) == [4, 5]
    assert queue.commit_trained("r", durable_step=3, epoch=epoch) == 12
    assert (counts(url).queue_depth, num_pending(url)) == (0, 0)


def test_a_batch_is_leased_through_a_sigkill_of_valkey(tmp_path):
    with valkey_server(tmp_path, fsync="everysec") as server:
        start_run(server.url, filled=range(1))
        queue = TrainQueue.connect(server.url)
        epoch = queue.take_over("r", next_step=0)
        started = threading.Event()

        def lease():
            started.set()
            return queue.lease("r", 0, epoch=epoch, deadline_s=DEADLINE_S)

        with ThreadPoolExecutor(1) as pool:
            leasing = pool.submit(lease)
            started.wait(DEADLINE_S)
            server.process.kill()
            server.process.wait(DEADLINE_S)
            server.start()
            with_store(server.url, lambda store: fill(store, range(1, 2)))
            assert numbers(leasing.result(DEADLINE_S)) == [0, 1]
        assert queue.commit_trained("r", durable_step=1, epoch=epoch) == 4
        assert counts(server.url).queue_depth == 0
        queue.close()


def test_after_valkey_lost_its_newest_second_the_trainer_still_trains_every_group_once(url, queue):
    """The lease and the entry are lost, the trainer holds the groups: they are enqueued again and acknowledged with them."""
    start_run(url, filled=range(2))
    epoch = queue.take_over("r", next_step=0)
    client = redis.Redis.from_url(url)
    held = queue.lease("r", 0, epoch=epoch, deadline_s=DEADLINE_S)

    async def forget(store):
        # What the append-only file would have held before the groups were closed.
        for n in range(2):
            for sample in range(2):
                client.hset(f"tz:{{r}}:t:r.{n}.{sample}", "state", "rewarded")
            client.zadd("tz:{r}:closable", {str(n): n})
        client.delete("tz:{r}:queue", "tz:{r}:queued")
        client.hset("tz:{r}:counts", mapping={"state:leased": 0, "state:rewarded": 4})
        return [(await Lifecycle(store).close_group("r", n))[0] for n in range(2)]

    assert with_store(url, forget) == [Closed.QUEUED, Closed.QUEUED]
    assert queue.lease("r", 1, epoch=epoch, deadline_s=1.5) is None
    assert queue.commit_trained("r", durable_step=1, epoch=epoch) == 4
    assert numbers(held) == [0, 1]
    after = counts(url)
    assert (after.trained, after.live, after.queue_depth, num_pending(url)) == (4, 0, 0, 0)


def test_a_checkpoint_that_valkey_forgot_is_counted_again_and_opens_the_gate(url, queue):
    """A power cut takes back the last second of Valkey; the checkpoint on disk stays, and its prompts are not trained twice."""
    start_run(url, num_steps=12, checkpoint_interval=4, filled=range(8))
    epoch = queue.take_over("r", next_step=0)
    for step in range(4):
        queue.lease("r", step, epoch=epoch, deadline_s=DEADLINE_S)
    client = redis.Redis.from_url(url)
    saved = {key: client.dump(key) for key in client.keys("tz:{r}:*")}
    assert queue.commit_trained("r", durable_step=4, epoch=epoch) == 16
    for key, value in saved.items():
        client.restore(key, 0, value, replace=True)
    assert counts(url).trained == 0
    assert queue.lease("r", 4, epoch=epoch, deadline_s=0.1) is None
    after = counts(url)
    assert (after.trained, after.live, after.queue_depth) == (16, 0, 0)
    with_store(url, lambda store: fill(store, range(8, 16), config=run_config(num_steps=12, checkpoint_interval=4)))
    assert numbers(queue.lease("r", 7, epoch=epoch, deadline_s=DEADLINE_S)) == [14, 15]


def test_a_completed_run_has_trained_everything_even_if_valkey_forgot_the_last_checkpoint(url, queue):
    start_run(url, filled=range(8), checkpoint_interval=4)
    epoch = queue.take_over("r", next_step=0)
    for step in range(4):
        queue.lease("r", step, epoch=epoch, deadline_s=DEADLINE_S)
    # `commit_trained` was answered and lost.
    queue.set_state("r", RunState.COMPLETED, epoch=epoch)
    after = counts(url)
    assert (after.trained, after.live, after.queue_depth) == (16, 0, 0)


def test_a_prompt_of_a_batch_that_is_in_the_checkpoint_already_is_not_generated_again(url, queue):
    """Valkey lost prompts that were trained before they were on disk; their client, who was not answered, posts them again."""
    start_run(url, filled=range(1))
    queue.take_over("r", next_step=1)

    async def post(store):
        await store.accept_prompts("r", [prompt(1), prompt(2)])
        return await Lifecycle(store).horizon("r"), await Lifecycle(store).pending_prompts("r", first=0, end=9)

    horizon, pending = with_store(url, post)
    assert (horizon.first_open, [g.number for g in pending]) == (2, [2])
    after = counts(url)
    assert (after.trained, after.live) == (4, 2)


def test_an_epoch_that_a_power_cut_took_back_is_not_acted_under(tmp_path, monkeypatch):
    """The next trainer would be given the same one."""
    with valkey_server(tmp_path, fsync="everysec") as server:
        start_run(server.url)
        queue = TrainQueue.connect(server.url)
        (log,) = tmp_path.glob("appendonlydir/*.incr.aof")
        call, synced = queue._call, log.stat().st_size

        def cut_off_behind(*args):
            monkeypatch.undo()
            answer = call(*args)
            server.process.kill()
            server.process.wait(DEADLINE_S)
            os.truncate(log, synced)
            server.start()
            return answer

        monkeypatch.setattr(queue, "_call", cut_off_behind)
        assert queue.take_over("r", next_step=0) == with_store(server.url, lambda s: s.get_run("r")).epoch == 1
        queue.close()


def test_the_queue_is_bounded_and_takes_a_group_once(url, queue):
    start_run(url, filled=range(8), num_steps=6)

    async def act(store):
        lifecycle = Lifecycle(store)
        assert (await lifecycle.close_group("r", 0))[0] is Closed.NOT_READY
        # The gate admits no ninth group before the first are durable; one that slipped through would wait.
        await store.client.hset("tz:{r}:run", "durable_step", 1)
        await fill(store, range(8, 9), close=False)
        first = (await lifecycle.close_group("r", 8))[0]
        assert await lifecycle.closable("r") == [8]
        return first

    assert with_store(url, act) is Closed.FULL
    redis.Redis.from_url(url).hset("tz:{r}:run", "durable_step", 0)
    epoch = queue.take_over("r", next_step=0)
    queue.lease("r", 0, epoch=epoch, deadline_s=DEADLINE_S)
    queue.commit_trained("r", durable_step=1, epoch=epoch)
    assert with_store(url, lambda store: Lifecycle(store).close_group("r", 8))[0] is Closed.QUEUED


def poison_entry(url, number: int, data: bytes) -> None:
    async def act(store):
        revisions = [f"r.{number}.0", "1", f"r.{number}.1", "1"]
        answer = await store.call("enqueue", "r", time.time(), number, data, *revisions)
        assert answer == b"queued"

    with_store(url, act)


def lease_until_paused(queue: TrainQueue, epoch: int) -> RunRecord:
    deadline = time.monotonic() + DEADLINE_S
    while queue.get_run("r").state is not RunState.PAUSED and time.monotonic() < deadline:
        assert queue.lease("r", 0, epoch=epoch, deadline_s=0.2) is None
    run = queue.get_run("r")
    assert run.state is RunState.PAUSED
    return run


def group(number: int, *, step: int = 0, reward: float | None = 1.0) -> Group:
    samples = tuple(replace(trajectory(number, s, step=step), reward=reward) for s in range(2))
    return Group(run="r", group_id=f"r.{number}", prompt_number=number, trajectories=samples)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\x01garbage", "can't be read"),
        (b"", "schema version nothing"),
        (encode_group(group(1))[:-40], "malformed msgpack"),
        (encode_group(group(0)), "holds group r.0"),
        (encode_group(group(1, step=3)), "versions {3}, not 0"),
        (encode_group(group(1, reward=None)), "has no reward"),
    ],
    ids=["garbage", "empty", "torn", "another number", "another version", "unrewarded"],
)
def test_an_unreadable_group_pauses_the_run_by_name_and_resuming_trains_without_it(url, queue, data, text):
    async def act(store):
        await store.create_run(run_config())
        await fill(store, range(1))
        await fill(store, range(1, 2), close=False)

    with_store(url, act)
    poison_entry(url, 1, data)
    epoch = queue.take_over("r", next_step=0)
    run = lease_until_paused(queue, epoch)
    assert run.reason == "poison"
    assert run.detail.startswith("group r.1 can't be read")
    assert text in run.detail
    paused = counts(url)
    assert (paused.dropped, paused.live, paused.queue_depth) == ({"poison": 2}, 2, 1)
    set_state(url, RunState.RUNNING)
    assert numbers(queue.lease("r", 0, epoch=epoch, deadline_s=DEADLINE_S)) == [0]
    assert queue.commit_trained("r", durable_step=1, epoch=epoch) == 2
    assert (counts(url).trained, counts(url).dropped, counts(url).live) == (2, {"poison": 2}, 0)


def test_an_entry_that_names_no_group_is_removed_and_reported(url, queue):
    start_run(url, filled=range(2))
    entry = redis.Redis.from_url(url).xadd("tz:{r}:queue", {"who": "knows"})
    epoch = queue.take_over("r", next_step=0)
    assert f"queue entry {entry.decode()} can't be read" in lease_until_paused(queue, epoch).detail
    set_state(url, RunState.RUNNING)
    assert numbers(queue.lease("r", 0, epoch=epoch, deadline_s=DEADLINE_S)) == [0, 1]
    assert (counts(url).queue_depth, num_pending(url)) == (2, 2)


def test_a_checkpoint_made_after_the_stop_still_counts_what_it_holds(url, queue):
    start_run(url, filled=range(4))
    epoch = queue.take_over("r", next_step=0)
    queue.lease("r", 0, epoch=epoch, deadline_s=DEADLINE_S)
    set_state(url, RunState.STOPPED)
    stopped = counts(url)
    assert (stopped.dropped, stopped.live, stopped.queue_depth) == ({"cancelled": 8}, 0, 0)
    assert queue.commit_trained("r", durable_step=1, epoch=epoch) == 4
    after = counts(url)
    assert (after.trained, after.dropped) == (4, {"cancelled": 4})
    with pytest.raises(RunOver):
        queue.set_state("r", RunState.COMPLETED, epoch=epoch)
    with pytest.raises(RunOver):
        queue.take_over("r", next_step=1)


def test_steps_are_recorded_in_order_and_refuse_what_json_cannot_hold(url, queue):
    start_run(url)
    epoch = queue.take_over("r", next_step=0)
    for step in range(3):
        queue.record_step("r", step, {"loss": step / 2, "versions": [0, 1]}, epoch=epoch)
    with pytest.raises(ValueError, match="not JSON compliant"):
        queue.record_step("r", 3, {"loss": float("nan")}, epoch=epoch)
    epoch = queue.take_over("r", next_step=1)
    queue.record_step("r", 1, {"loss": 0.5}, epoch=epoch)
    steps = with_store(url, lambda store: store.steps("r"))
    assert [(s.step, s.epoch, s.metrics["loss"]) for s in steps] == [(0, 1, 0.0), (1, 1, 0.5), (2, 1, 1.0), (1, 2, 0.5)]
    later = with_store(url, lambda store: store.steps("r", after=steps[1].cursor))
    assert [s.step for s in later] == [2, 1]
    queue.set_state("r", RunState.COMPLETED, epoch=epoch)
    assert queue.get_run("r").state is RunState.COMPLETED


def test_the_newest_run_that_is_not_over_is_waited_for(url, queue):
    assert queue.wait_for_run(deadline_s=0.1) is None
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(queue.wait_for_run, DEADLINE_S)
        start_run(url, temperature=0.5)
        assert waiting.result(DEADLINE_S) == run_config(temperature=0.5)
    set_state(url, RunState.STOPPED)
    assert queue.wait_for_run(deadline_s=0.1) is None


def test_an_archive_that_is_none_is_said_to_be(tmp_path):
    archive.write_step(tmp_path.as_uri(), 3, [group(1)])
    assert [g.prompt_number for g in archive.read_step(tmp_path.as_uri(), 3)] == [1]
    (tmp_path / "step-00000003.msgpack").write_bytes(b"\xc1")
    with pytest.raises(CodecError, match="no archive of a step"):
        archive.read_step(tmp_path.as_uri(), 3)
