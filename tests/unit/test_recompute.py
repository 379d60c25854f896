"""When everything that ran at a swap is computed again, and who counts for it."""

from __future__ import annotations

from array import array

from services.rollout.kv_cache import PagePool
from services.rollout.recompute import Recompute
from services.rollout.scheduler import Scheduler
from services.rollout.sequence import Sequence


def scheduler_of(*lengths: int) -> Scheduler:
    pages = PagePool(num_pages=64, page_size=4)
    scheduler = Scheduler(pages, max_running=8, max_step_tokens=10, max_chunk_tokens=10)
    for arrival, length in enumerate(lengths):
        add(scheduler, arrival, length)
    return scheduler


def add(scheduler: Scheduler, arrival: int, length: int) -> Sequence:
    seq = Sequence(arrival=arrival, token_ids=array("i", [100 * arrival + i for i in range(length)]), limit=60)
    scheduler.add(seq)
    return seq


def step(scheduler: Scheduler) -> None:
    """What a launch does to the slots: chunks are computed, and the next token of those at their end is pending."""
    found = scheduler.schedule()
    scheduler.slots.pending[found.slots_S[found.is_last_S]] += 1
    scheduler.complete(found)


def test_it_is_over_with_the_launch_that_computes_the_last_prefix() -> None:
    scheduler, recompute = scheduler_of(8, 14), Recompute()
    recompute.begin(scheduler, 2)
    going_on = []
    for _ in range(3):
        step(scheduler)
        recompute.look(scheduler)
        going_on.append(recompute.is_going_on)
        assert (recompute.seconds == 0) == recompute.is_going_on
    # 8 + 2 of 22 tokens, 10 more, the last 2.
    assert going_on == [True, True, False]


def test_who_comes_later_does_not_count_and_who_ended_does_not_hold_it_up() -> None:
    scheduler, recompute = scheduler_of(10, 10), Recompute()
    recompute.begin(scheduler, 2)
    add(scheduler, 2, 30)
    step(scheduler)
    recompute.look(scheduler)
    assert recompute.is_going_on
    for seq in [s for s in (*scheduler.running, *scheduler.waiting) if s.arrival == 1]:
        scheduler.finish(seq)
    recompute.look(scheduler)
    assert not recompute.is_going_on
    assert scheduler.waiting, "the newcomer is not computed"


def test_where_nobody_ran_there_is_nothing_to_wait_for() -> None:
    recompute = Recompute()
    recompute.begin(scheduler_of(), 0)
    assert not recompute.is_going_on
    assert recompute.seconds == 0
