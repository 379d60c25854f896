"""The scheduler, driven by a fake model: budgets, order, preemption, sharing, and the end of every sequence."""

from array import array
from collections import deque

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.kv_cache import PagePool
from services.rollout.scheduler import Scheduler
from services.rollout.sequence import Sequence, SequenceState


def scheduler_of(*, num_pages=64, page_size=4, max_running=8, max_step_tokens=64, max_chunk_tokens=16):
    pool = PagePool(num_pages=num_pages, page_size=page_size)
    return Scheduler(pool, max_running=max_running, max_step_tokens=max_step_tokens, max_chunk_tokens=max_chunk_tokens)


def add(scheduler, arrival, tokens):
    seq = Sequence(arrival=arrival, token_ids=array("i", tokens))
    scheduler.add(seq)
    return seq


def step(scheduler, *, lengths=None):
    """One step of a fake model that samples token 1000 + arrival; sequences end at `lengths`. Returns the chunks."""
    chunks = launch(scheduler)
    ends = () if lengths is None else {c.seq.arrival for c in chunks if c.end + 1 >= lengths[c.seq.arrival]}
    read(scheduler, chunks, ends=ends)
    return chunks


def launch(scheduler):
    """Schedules a step and leaves what it samples pending. Returns its chunks."""
    coming = scheduler.schedule()
    scheduler.complete(coming)
    scheduler.slots.pending[coming.slots_S[coming.is_last_S]] += 1
    return list(coming)


def read(scheduler, chunks, *, ends=()):
    """The results of a launched step arrive; sequences named in `ends` end with them."""
    for seq in (c.seq for c in chunks if c.is_last):
        if seq.slot >= 0:
            token = np.full((3, 1), 1000 + seq.arrival, np.int32)
            scheduler.slots.extend(np.array([seq.slot]), token)
            scheduler.slots.settle(seq)
            scheduler.slots.watch(seq)
        else:
            seq.num_pending -= 1
            if seq.state.is_open:
                seq.token_ids.append(1000 + seq.arrival)
        if seq.arrival in ends and seq.state.is_open:
            scheduler.finish(seq)


def settled(scheduler, seq):
    scheduler.slots.settle(seq)
    return seq


def test_prefill_is_cut_into_chunks_and_mixed_with_decode_under_the_budget():
    scheduler = scheduler_of(max_step_tokens=6, max_chunk_tokens=4)
    first, second = add(scheduler, 0, [1]), add(scheduler, 1, range(10, 20))
    assert [(c.seq, c.start, c.end) for c in step(scheduler)] == [(first, 0, 1), (second, 0, 4)]
    assert [(c.seq, c.start, c.end) for c in step(scheduler)] == [(first, 1, 2), (second, 4, 8)]
    assert [(c.seq, c.start, c.end) for c in step(scheduler)] == [(first, 2, 3), (second, 8, 10)]


def test_the_budget_goes_to_the_oldest_first():
    scheduler = scheduler_of(max_step_tokens=2)
    seqs = [add(scheduler, i, [i + 1]) for i in range(4)]
    assert [c.seq for c in step(scheduler)] == seqs[:2]
    assert [c.seq for c in step(scheduler)] == seqs[:2]


def test_hundreds_that_come_together_get_their_places_over_several_steps():
    scheduler = scheduler_of(max_running=200, num_pages=400, max_step_tokens=400)
    for i in range(150):
        add(scheduler, i, [i])
    assert [len(step(scheduler)) for _ in range(6)] == [32, 64, 96, 128, 150, 150]


def test_siblings_wait_for_the_first_ones_prompt_pages_and_then_compute_only_the_rest():
    scheduler = scheduler_of(page_size=4)
    prompt = list(range(9))
    group = [add(scheduler, i, prompt) for i in range(4)]
    other = add(scheduler, 4, range(50, 59))
    assert [c.seq for c in step(scheduler)] == [group[0], other], "a later prompt does not wait with the siblings"
    chunks = step(scheduler)
    assert [(c.seq, c.start, c.end) for c in chunks if c.seq in group[1:]] == [(s, 8, 9) for s in group[1:]]
    assert scheduler.num_prefix_hit_tokens == 3 * 8
    shared = {tuple(s.pages[:2]) for s in group}
    assert len(shared) == 1


def test_a_long_shared_prompt_is_computed_once_even_in_chunks():
    scheduler = scheduler_of(page_size=4, max_chunk_tokens=4)
    group = [add(scheduler, i, range(17)) for i in range(3)]
    computed = 0
    while any(settled(scheduler, s).num_computed < 17 for s in group):
        computed += sum(c.end - c.start for c in step(scheduler))
    assert computed == 17 + 2, "and one token for each sibling; decode of the first starts later"


def test_a_waiting_sequence_is_not_overtaken_by_a_smaller_one_behind_it():
    scheduler = scheduler_of(num_pages=4, page_size=4)
    add(scheduler, 0, range(8))
    large, small = add(scheduler, 1, range(20, 36)), add(scheduler, 2, [1])
    step(scheduler)
    assert large.state is SequenceState.WAITING
    assert small.state is SequenceState.WAITING


def test_the_youngest_is_preempted_and_returns_to_its_place_in_line():
    scheduler = scheduler_of(num_pages=5, page_size=4, max_running=2)
    old, young = add(scheduler, 0, range(7)), add(scheduler, 1, range(20, 27))
    last = add(scheduler, 2, range(40, 44))
    for _ in range(3):
        step(scheduler)
    assert scheduler.num_preemptions == 1
    assert old.state is SequenceState.RUNNING
    assert scheduler.waiting == [young, last]
    assert young.num_computed == 0
    assert len(young.token_ids) == 9, "its sampled tokens stay"


def test_a_preempted_sequence_finds_its_own_cached_pages_again():
    scheduler = scheduler_of(num_pages=6, page_size=4)
    seq = add(scheduler, 0, range(9))
    step(scheduler)
    scheduler._preempt(seq)
    chunks = step(scheduler)
    assert [(c.start, c.end) for c in chunks] == [(8, 10)]


def test_restart_makes_every_sequence_compute_everything_again():
    scheduler = scheduler_of(page_size=4)
    seqs = [add(scheduler, i, range(9)) for i in range(2)]
    step(scheduler)
    step(scheduler)
    scheduler.restart("other digest")
    assert scheduler.waiting == seqs
    assert not scheduler.running
    assert [(c.seq, c.start) for c in step(scheduler)] == [(seqs[0], 0)]


def test_finishing_a_waiting_sequence_takes_it_out_of_line():
    scheduler = scheduler_of(max_running=1)
    first, second = add(scheduler, 0, [1]), add(scheduler, 1, [2])
    step(scheduler)
    scheduler.finish(second)
    assert scheduler.waiting == []
    scheduler.finish(first)
    assert not scheduler.has_work
    assert not list(scheduler.schedule())


@st.composite
def workloads(draw):
    page_size = draw(st.sampled_from([1, 2, 4, 8]))
    max_len = draw(st.integers(2, 24))
    num_pages = -(-max_len // page_size) + draw(st.integers(0, 6))
    scheduler = scheduler_of(
        num_pages=num_pages,
        page_size=page_size,
        max_running=draw(st.integers(1, 5)),
        max_step_tokens=draw(st.integers(1, 20)),
        max_chunk_tokens=draw(st.integers(1, 20)),
    )
    arrivals = draw(st.lists(st.tuples(st.integers(0, 6), st.integers(1, max_len)), min_size=1, max_size=12))
    return scheduler, max_len, arrivals


@given(workloads(), st.data())
def test_every_sequence_ends_within_the_budgets_and_no_page_is_lost(workload, data):
    scheduler, max_len, arrivals = workload
    pending, seqs, lengths = list(enumerate(arrivals)), [], {}
    num_steps = 0
    while pending or scheduler.has_work:
        while pending and (not scheduler.has_work or data.draw(st.booleans())):
            arrival, (prefix, length) = pending.pop(0)
            # Prompts of few kinds, so that many share a prefix.
            prompt = [prefix % 3] * max(1, length - 1 - prefix)
            lengths[arrival] = min(max_len, len(prompt) + 1 + prefix)
            seqs.append(add(scheduler, arrival, prompt[: max_len - 1] or [0]))
            lengths[arrival] = max(lengths[arrival], len(seqs[-1].token_ids) + 1)
        oldest = min((s for s in seqs if s.state is not SequenceState.FINISHED), key=lambda s: s.arrival)
        settled(scheduler, oldest)
        before = (len(oldest.token_ids), oldest.num_computed, oldest.state)
        chunks = step(scheduler, lengths=lengths)
        num_steps += 1
        assert sum(c.end - c.start for c in chunks) <= scheduler.max_step_tokens
        assert all(0 < c.end - c.start <= scheduler.max_chunk_tokens for c in chunks)
        assert len(chunks) == len({id(c.seq) for c in chunks}) <= scheduler.max_running
        settled(scheduler, oldest)
        if (len(oldest.token_ids), oldest.num_computed, oldest.state) == before:
            # It waited for a sibling's pages, and whoever came in meanwhile holds too many: they are fewer with every step.
            assert oldest.state is SequenceState.WAITING
            assert chunks
            assert all(c.start > 0 for c in chunks), "nobody comes in before it"
        for queue in (scheduler.waiting, scheduler.running):
            assert [s.arrival for s in queue] == sorted(s.arrival for s in queue)
        slots = [s.slot for s in scheduler.running]
        assert len(set(slots)) == len(slots)
        assert all(s.slot == -1 and not s.pages for s in scheduler.waiting)
        assert num_steps <= 100 * len(arrivals) * max_len
    assert all(s.state is SequenceState.FINISHED for s in seqs)
    assert all(len(s.token_ids) == lengths[s.arrival] for s in seqs)
    assert scheduler.pages.num_free == scheduler.pages.num_pages


@given(
    num_groups=st.integers(1, 4),
    num_samples=st.integers(1, 6),
    prompt_len=st.integers(1, 20),
    page_size=st.sampled_from([1, 4, 8]),
    chunk=st.integers(1, 32),
)
def test_with_room_for_all_a_group_computes_its_prompts_full_pages_once(
    num_groups, num_samples, prompt_len, page_size, chunk
):
    scheduler = scheduler_of(
        num_pages=2000, page_size=page_size, max_running=64, max_step_tokens=4096, max_chunk_tokens=chunk
    )
    lengths = {}
    for group in range(num_groups):
        for sample in range(num_samples):
            arrival = group * num_samples + sample
            add(scheduler, arrival, [100 + group] * prompt_len)
            lengths[arrival] = prompt_len + 1
    computed = 0
    while scheduler.has_work:
        computed += sum(c.end - c.start for c in step(scheduler, lengths=lengths))
    shared = (prompt_len - 1) // page_size * page_size
    assert computed == num_groups * (prompt_len + (num_samples - 1) * (prompt_len - shared))
    assert scheduler.num_preemptions == 0


def test_the_next_step_is_scheduled_while_the_token_of_the_last_is_pending():
    scheduler = scheduler_of()
    seq = add(scheduler, 0, range(5))
    seq.limit = 7
    first = launch(scheduler)
    second = launch(scheduler)
    assert [(c.start, c.end, c.is_last) for c in (*first, *second)] == [(0, 5, True), (5, 6, True)]
    read(scheduler, first)
    assert launch(scheduler) == [], "its last token is in flight, and nothing is computed behind that"
    read(scheduler, second, ends={0})
    assert not scheduler.has_work


def test_a_page_that_ends_with_a_pending_token_is_shared_once_the_token_is_known():
    scheduler = scheduler_of(page_size=4)
    seq = add(scheduler, 0, range(7))
    flights = [launch(scheduler)]
    flights.append(launch(scheduler))
    assert (settled(scheduler, seq).num_computed, scheduler.pages.num_cached) == (8, 1)
    read(scheduler, flights[0])
    flights.append(launch(scheduler))
    assert scheduler.pages.num_cached == 2
    younger = add(scheduler, 1, [*seq.token_ids, 3])
    assert len(scheduler.pages.lookup(younger)) == 2


@given(workloads(), st.integers(2, 3), st.data())
def test_pipelined_every_sequence_ends_and_no_page_is_lost(workload, most_in_flight, data):
    """As above, with steps launched before earlier ones are read; some sequences end before their limit."""
    scheduler, max_len, arrivals = workload
    seqs = []
    for arrival, (prefix, length) in enumerate(arrivals):
        seq = add(scheduler, arrival, [prefix % 3] * max(1, min(length, max_len - 1)))
        seq.limit = min(max_len, len(seq.token_ids) + 1 + prefix)
        seqs.append(seq)
    in_flight, num_steps = deque(), 0
    while scheduler.has_work or in_flight:
        coming = launch(scheduler)
        assert sum(c.end - c.start for c in coming) <= scheduler.max_step_tokens
        assert all(c.end <= c.seq.limit for c in coming)
        num_steps += 1
        if coming:
            in_flight.append(coming)
            if len(in_flight) < most_in_flight:
                continue
        landing = in_flight.popleft()
        ends = {c.seq.arrival for c in landing if len(c.seq.token_ids) + 1 >= c.seq.limit or data.draw(st.booleans())}
        read(scheduler, landing, ends=ends)
        assert num_steps <= 100 * len(arrivals) * max_len
    assert all(s.state is SequenceState.FINISHED and s.num_pending == 0 for s in seqs)
    assert scheduler.pages.num_free == scheduler.pages.num_pages
