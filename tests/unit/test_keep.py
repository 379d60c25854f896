"""Commit mode `keep`: sequences go on behind old keys and values, and nobody else ever reads those."""

from __future__ import annotations

from array import array

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.kv_cache import PagePool
from services.rollout.scheduler import Scheduler
from services.rollout.sequence import Sequence, SequenceState


def scheduler(num_pages: int = 32, *, max_running: int = 4) -> Scheduler:
    pages = PagePool(num_pages=num_pages, page_size=2)
    made = Scheduler(pages, max_running=max_running, max_step_tokens=64, max_chunk_tokens=64)
    pages.reset("old")
    return made


def step(made: Scheduler) -> None:
    coming = made.schedule()
    made.complete(coming)
    made.slots.pending[coming.slots_S] += coming.is_last_S
    sampled = coming.slots_S[coming.is_last_S]
    made.slots.extend(sampled, np.full((3, len(sampled)), 7, np.int32))
    for seq in made.running:
        made.slots.settle(seq)
        made.slots.watch(seq)


@given(before=st.integers(1, 5), after=st.integers(0, 5))
def test_pages_that_mix_versions_are_never_found_again(before: int, after: int) -> None:
    made = scheduler()
    old = Sequence(arrival=0, token_ids=array("i", [1, 2, 3, 4, 5]))
    made.add(old)
    for _ in range(before):
        step(made)
    held = list(old.pages)
    made.keep("new")
    for _ in range(after):
        step(made)
    assert (old.state, old.is_mixed, old.pages[: len(held)]) == (SequenceState.RUNNING, True, held)
    assert made.pages.num_cached == 0
    twin = Sequence(arrival=1, token_ids=old.token_ids[:])
    assert made.pages.lookup(twin) == []
    made.add(twin)
    step(made)
    assert not twin.is_mixed
    assert made.pages.num_cached, "what the new weights computed is shared as ever"
    made.restart("newer")
    assert not old.is_mixed, "computed again from the first token"


def test_a_probe_gets_its_place_from_the_youngest() -> None:
    made = scheduler(num_pages=6, max_running=2)
    seqs = [Sequence(arrival=i, token_ids=array("i", [i, 2, 3])) for i in range(2)]
    for seq in seqs:
        made.add(seq)
    step(made)
    made.keep("new")
    made.make_room(5)
    assert [s.state for s in seqs] == [SequenceState.RUNNING, SequenceState.WAITING]
