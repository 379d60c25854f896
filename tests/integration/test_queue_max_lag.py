"""The hard check of opportunistic mode: what no trainer can train is dropped at the lease, counted, and missed by nobody."""

from __future__ import annotations

from dataclasses import replace

from shared.wire.lifecycle import Lifecycle
from shared.wire.queue import unusable
from shared.wire.run import RunConfig
from shared.wire.types import DropReason, Group, Kv, Span, SpanKind, Trajectory
from tests.deadline import DEADLINE_S
from tests.integration.wire_testing import (
    checked_counts,
    open_store,
    prompt,
    run_async,
    run_config,
    trajectory,
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
    assert unusable(CONFIG, group(4, of(1), of(2)), HELD) is None
    assert unusable(CONFIG, group(4, of(0), of(2)), HELD) is DropReason.STALE
    assert unusable(CONFIG, group(4, of(1), of(2, "other")), HELD) is DropReason.ORPHAN_LINEAGE
    assert unusable(CONFIG, group(4, of(1), of(2, "other")), None) is None
    assert unusable(CONFIG, group(4, of(1), of(3)), None) is DropReason.ORPHAN_LINEAGE
    assert unusable(RunConfig(run="r", model="m"), group(4, of(0)), HELD) is None


def test_another_engines_tokens_are_of_no_version_but_grow_stale_too():
    theirs = replace(group(4, of(1)).trajectories[0], sampler="vllm")
    foreign = replace(group(4), trajectories=(theirs,))
    assert unusable(CONFIG, foreign, ("d2",)) is None
    old = replace(theirs, spans=(replace(theirs.spans[1], policy_step=0, kv=Kv.MIXED),))
    assert unusable(CONFIG, replace(foreign, trajectories=(old,)), ("d2",)) is DropReason.STALE


def test_dropped_groups_are_counted_their_batch_is_complete_without_them_and_no_checkpoint_trains_them(url, queue):
    versions = {
        0: [of(0)], 1: [of(0)], 2: [of(0), of(1)], 3: [of(1)], 4: [of(0), of(2)], 5: [of(1), of(2)],
        6: [of(2, "gone")], 7: [of(3)],
    }  # fmt: skip

    async def fill(numbers):
        async with open_store(url) as store:
            lifecycle = Lifecycle(store)
            await store.accept_prompts("r", [prompt(n) for n in numbers])
            for n in numbers:
                for sample in range(2):
                    await lifecycle.store_generated("r", sampled(n, sample, *versions[n]))
                    await store.put_reward("r", f"r.{n}.{sample}", "default", 1.0)
                await lifecycle.close_group("r", n)

    async def begin():
        async with open_store(url) as store:
            await store.create_run(CONFIG)

    async def counts():
        async with open_store(url) as store:
            return await checked_counts(store)

    run_async(begin)
    run_async(lambda: fill(range(8)))
    epoch = queue.take_over("r", next_step=0)
    leased = []
    for step in range(4):
        held = [f"d{s}" for s in range(max(0, step - 1), step + 1)]
        groups = queue.lease("r", step, epoch=epoch, deadline_s=DEADLINE_S, digests=held)
        leased.append([g.prompt_number for g in groups])
    assert leased == [[0, 1], [2, 3], [5], [7]]
    found = run_async(counts)
    assert found.dropped == {"stale": 2, "orphan_lineage": 2}
    assert found.live == 12
    # A trainer that starts again meets the same batches.
    epoch = queue.take_over("r", next_step=2)
    again = queue.lease("r", 2, epoch=epoch, deadline_s=DEADLINE_S, digests=["d1", "d2"])
    assert [g.prompt_number for g in again] == [5]
    queue.commit_trained("r", durable_step=4, epoch=epoch)
    found = run_async(counts)
    assert (found.trained, found.num_dropped, found.live) == (12, 4, 0)
