"""The hard check of opportunistic mode: what no trainer can train is dropped at the lease, counted, and missed by nobody."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shared.wire.lifecycle import Closed, Lifecycle
from shared.wire.queue import TrainQueue, unusable
from shared.wire.records import RewardStatus
from shared.wire.run import RunConfig
from shared.wire.store import RunStore
from shared.wire.types import DropReason, Group, Kv, Span, SpanKind, State, Trajectory
from tests.deadline import DEADLINE_S
from tests.integration.wire_testing import (
    checked_counts,
    prompt,
    run_config,
    trajectory,
    valkey_server,
    with_store,
)

pytest_plugins = ("tests.integration.valkey_fixtures",)

CONFIG = run_config(max_lag=1)
HELD = ("d0", "d1", "d2")


def sampled(number: int, sample: int, *versions: tuple[int, str]) -> Trajectory:
    """Two tokens, from one (step, digest) or one from each of two."""
    t = trajectory(number, sample)
    spans = [
        Span(
            start=3 + i,
            end=4 + i if i + 1 < len(versions) else 5,
            kind=SpanKind.SAMPLED,
            policy_step=step,
            manifest_digest=digest,
        )
        for i, (step, digest) in enumerate(versions)
    ]
    return replace(t, spans=(t.spans[0], *spans))


def of(step: int, digest: str = "") -> tuple[int, str]:
    return step, digest or f"d{step}"


def group(number: int, *versions: tuple[int, str]) -> Group:
    return Group(run="r", group_id=f"r.{number}", prompt_number=number, trajectories=(sampled(number, 0, *versions),))


def test_the_oldest_token_decides_and_a_version_that_nobody_holds_is_an_orphan():
    assert unusable(CONFIG, group(4, of(1), of(2)), HELD) == {}
    assert unusable(CONFIG, group(4, of(0), of(2)), HELD) == {"r.4.0": DropReason.STALE}
    assert unusable(CONFIG, group(4, of(1), of(2, "other")), HELD) == {"r.4.0": DropReason.ORPHAN_LINEAGE}
    assert unusable(CONFIG, group(4, of(1), of(2, "other")), None) == {}
    assert unusable(CONFIG, group(4, of(1), of(3)), None) == {"r.4.0": DropReason.ORPHAN_LINEAGE}
    assert unusable(RunConfig(run="r", model="m"), group(4, of(0)), HELD) == {}


def test_another_engines_tokens_are_of_no_version_but_grow_stale_too():
    theirs = replace(group(4, of(1)).trajectories[0], sampler="vllm")
    foreign = replace(group(4), trajectories=(theirs,))
    assert unusable(CONFIG, foreign, ("d2",)) == {}
    old = replace(theirs, spans=(replace(theirs.spans[1], policy_step=0, kv=Kv.MIXED),))
    assert unusable(CONFIG, replace(foreign, trajectories=(old,)), ("d2",)) == {"r.4.0": DropReason.STALE}


async def sample_and_close(store: RunStore, number: int, versions: Mapping[int, Sequence[tuple[int, str]]]) -> None:
    """What engine and grader do with these samples of a group, and the dispatcher then with the group."""
    lifecycle = Lifecycle(store)
    for sample, of_sample in versions.items():
        await lifecycle.store_generated("r", sampled(number, sample, *of_sample))
        await store.put_reward("r", f"r.{number}.{sample}", "default", float(sample))
    assert (await lifecycle.close_group("r", number))[0] is Closed.QUEUED


def test_a_stale_sample_is_dropped_at_the_lease_and_its_siblings_are_trained_also_by_the_next_trainer(url, queue):
    async def fill(store):
        await store.create_run(run_config(max_lag=1, samples_per_prompt=3))
        await store.accept_prompts("r", [prompt(n, n=3) for n in range(6)])
        for n in range(4):
            await sample_and_close(store, n, {s: [of(n // 2)] for s in range(3)})
        await sample_and_close(store, 4, {0: [of(2)], 1: [of(0)], 2: [of(1)]})
        await sample_and_close(store, 5, {0: [of(2)], 1: [of(2, "gone")], 2: [of(1), of(2)]})

    with_store(url, fill)
    epoch = queue.take_over("r", next_step=2)
    for _ in range(2):
        groups = queue.lease("r", 2, epoch=epoch, deadline_s=DEADLINE_S, digests=["d1", "d2"])
        assert [[t.sample_index for t in g.trajectories] for g in groups] == [[0, 2], [0, 2]]
        assert with_store(url, checked_counts).dropped == {"stale": 1, "orphan_lineage": 1}
        # The one that starts again holds other versions; what was dropped stays dropped.
        epoch = queue.take_over("r", next_step=2)
    assert queue.lease("r", 2, epoch=epoch, deadline_s=DEADLINE_S)
    queue.commit_trained("r", durable_step=3, epoch=epoch, archive="memory://a")
    counts = with_store(url, checked_counts)
    assert (counts.trained, counts.num_dropped, counts.live, counts.queue_depth) == (16, 2, 0, 0)
    late = with_store(url, lambda store: store.put_reward("r", "r.4.1", "default", 9.0, revision=1))
    assert late.status is RewardStatus.LATE
    dropped = with_store(url, lambda store: store.get_trajectory("r", "r.4.1"))
    assert (dropped.state, dropped.reason, dropped.step) == (State.DROPPED, "stale", None)
    assert dropped.trajectory is not None


def test_a_group_that_falls_short_at_the_lease_is_sampled_again_once_and_then_its_batch_does_without_it(url, queue):
    async def fill(store):
        await store.create_run(CONFIG)
        await store.accept_prompts("r", [prompt(n) for n in range(4)])
        for n in range(2):
            await sample_and_close(store, n, {0: [of(0)], 1: [of(0)]})
        await sample_and_close(store, 2, {0: [of(0)], 1: [of(2)]})
        await sample_and_close(store, 3, {0: [of(0)], 1: [of(1)]})

    async def pending(store):
        return [(g.group_id, g.samples) for g in await Lifecycle(store).pending_prompts("r", first=0, end=8)]

    with_store(url, fill)
    epoch = queue.take_over("r", next_step=1)
    end = time.monotonic() + DEADLINE_S
    while not (counts := with_store(url, checked_counts)).replaced and time.monotonic() < end:
        assert queue.lease("r", 1, epoch=epoch, deadline_s=0.05) is None
    assert (counts.dropped, counts.replaced) == ({"orphan_lineage": 1, "small_group": 1}, 1)
    assert with_store(url, pending) == [("r.2", (2, 3))]
    # The call again, as after a lost reply: it is about samples that are dropped already, and not about those in their place.
    queue._call("drop_trajectories", "r", time.time(), epoch, 2, b"", "r.2.1", "orphan_lineage")
    assert with_store(url, checked_counts) == counts
    # The trainer is at its batch, so its version can always sample what is missing.
    with_store(url, lambda store: sample_and_close(store, 2, {2: [of(2)], 3: [of(1)]}))
    (group,) = queue.lease("r", 1, epoch=epoch, deadline_s=DEADLINE_S)
    assert group.prompt_number == 3
    queue.commit_trained("r", durable_step=2, epoch=epoch)
    counts = with_store(url, checked_counts)
    assert (counts.trained, counts.num_dropped, counts.live) == (6, 4, 0)
    assert with_store(url, pending) == []


def test_a_power_cut_that_forgets_a_drop_takes_the_group_back_from_the_trainer(tmp_path):
    """Otherwise the forgotten sample would be TRAINED with the checkpoint of a step that never saw it."""

    async def fill(store):
        await store.create_run(run_config(max_lag=1, samples_per_prompt=3, prompts_per_step=1))
        await store.accept_prompts("r", [prompt(0, n=3, deadline_s=1e-9)])
        lifecycle = Lifecycle(store)
        for sample in range(3):
            await lifecycle.store_generated("r", sampled(0, sample, of(0)))
        for sample in range(2):
            await store.put_reward("r", f"r.0.{sample}", "default", 1.0)

    async def expire_and_close(store):
        lifecycle = Lifecycle(store)
        assert await lifecycle.expire("r") == 1
        assert (await lifecycle.close_group("r", 0))[0] is Closed.QUEUED

    with valkey_server(tmp_path, fsync="everysec") as server:
        with_store(server.url, fill)
        queue = TrainQueue.connect(server.url)
        epoch = queue.take_over("r", next_step=0)
        (log,) = tmp_path.glob("appendonlydir/*.incr.aof")
        synced = log.stat().st_size
        with_store(server.url, expire_and_close)
        # The trainer has read the group when the power goes; it comes back without the drop and without the entry.
        assert queue.lease("r", 0, epoch=epoch, deadline_s=DEADLINE_S) is not None
        queue.take_over("r", next_step=0)
        server.process.kill()
        server.process.wait(DEADLINE_S)
        os.truncate(log, synced)
        server.start()
        epoch = queue.get_run("r").epoch
        assert queue.lease("r", 0, epoch=epoch, deadline_s=0.01) is None
        assert with_store(server.url, checked_counts).live == 3
        with_store(server.url, expire_and_close)
        (group,) = queue.lease("r", 0, epoch=epoch, deadline_s=DEADLINE_S)
        assert len(group.trajectories) == 2
        queue.commit_trained("r", durable_step=1, epoch=epoch)
        counts = with_store(server.url, checked_counts)
        assert (counts.trained, counts.dropped, counts.live) == (2, {"reward_timeout": 1}, 0)
        queue.close()
