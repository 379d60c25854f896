"""What lives by slot is what a plain visit to every sequence would have come to."""

from array import array
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.blocks import Block, Fields, clear, fill
from services.rollout.graphs import Shape, padded
from services.rollout.inputs import SlotTables
from services.rollout.kv_cache import PagePool
from services.rollout.meters import Meters
from services.rollout.requests import replies
from services.rollout.samples import GroupRequest, Sample, SampleChunk, Version
from services.rollout.scheduler import Scheduler
from services.rollout.sequence import SequenceState
from services.rollout.slots import MOST_STOP_IDS, Slots
from services.rollout.stopping import StopRule
from services.rollout.times import StepTimes
from shared.metrics import names
from shared.metrics.server import value
from shared.wire.types import Kv, SamplingParams, float32_bytes, int32_bytes


def sample_of(prompt, *, arrival=0, max_tokens=9, decode=None, **params):
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    return Sample(
        arrival=arrival,
        token_ids=array("i", prompt),
        limit=len(prompt) + max_tokens,
        request=GroupRequest(seed=arrival, prompt_number=arrival, sampling=sampling, stream=None),
        trajectory_id=str(arrival),
        sample_index=arrival,
        num_prompt_tokens=len(prompt),
        num_continued_tokens=0,
        stop_rule=StopRule(sampling, decode),
    )


@given(
    tokens=st.lists(st.integers(0, 11), min_size=1, max_size=40),
    most=st.integers(1, 12),
    max_tokens=st.integers(1, 40),
    stop_ids=st.lists(st.integers(0, 11), max_size=MOST_STOP_IDS + 2),
    stop=st.sampled_from([(), ("ab",), ("aca", "d")]),
    data=st.data(),
)
def test_a_sample_ends_and_streams_as_if_it_were_looked_at_after_every_token(
    tokens, most, max_tokens, stop_ids, stop, data
):
    slots = Slots(5, tokens_per_chunk=most)
    sample = sample_of(
        [1, 2],
        max_tokens=max_tokens,
        stop_token_ids=tuple(stop_ids),
        stop=stop,
        decode=lambda ids: "".join(map(chr, ids)),
    )
    plain = StopRule(sample.request.sampling, lambda ids: "".join(map(chr, ids)))
    for _ in range(data.draw(st.integers(0, 3))):
        slots.enter(sample_of([7]))
    slots.enter(sample)
    at, logprobs, chunks = np.array([sample.slot]), [], 0
    for i, token in enumerate(tokens):
        logprobs.append(np.float32(-i / 7))
        slots.pending[at] += 1
        due = slots.extend(at, np.array([[token], [logprobs[-1].view(np.int32)], [token + 1]], np.int32))
        expected = plain.check([1, 2, *tokens[: i + 1]], 2)
        if len(due) or data.draw(st.booleans()):
            slots.settle(sample)
            assert sample.token_ids.tolist() == [1, 2, *tokens[: i + 1]]
            assert sample.num_pending == 0
            held = len(sample.logprobs)
            assert np.float32(sample.logprobs).tobytes() == np.float32(logprobs[i + 1 - held :]).tobytes()
            assert sample.top1.tolist() == [t + 1 for t in tokens[i + 1 - held : i + 1]]
            assert 0 < held <= most
        if expected is not None:
            assert len(due), "an end is seen at once"
            assert sample.stop_rule.check(sample.token_ids, 2) is expected
            break
        if len(due):
            assert sample.stop_rule.check(sample.token_ids, 2) is None
            if slots.room(sample) == 0:
                sample.begin_chunk()
                chunks += 1
            slots.watch(sample)
        elif i + 1 == len(tokens):
            slots.settle(sample)
            assert len(sample.logprobs) < most
    assert chunks <= -(-len(tokens) // most) + 1
    slots.leave(sample)
    assert sample.slot == -1
    assert slots.num_free == 5 - int(slots.runs.sum())


def test_chunks_of_a_group_are_due_together_and_those_of_groups_that_came_together_are_spread_over_the_steps():
    slots = Slots(64, tokens_per_chunk=8)
    # Groups of four, which come in any order.
    for i in np.random.default_rng(0).permutation(64).tolist():
        slots.enter(sample_of([1, 2], arrival=i // 4, max_tokens=100))
    everybody, due = np.arange(64), []
    for _ in range(16):
        found = slots.extend(everybody, np.zeros((3, 64), np.int32))
        due.append(sorted(sample.arrival for sample in slots.seqs[found]))
        for sample in slots.seqs[found].tolist():
            slots.settle(sample)
            assert slots.room(sample) == 0
            sample.begin_chunk()
            slots.watch(sample)
    assert [len(groups) for groups in due] == [8] * 16
    assert all(groups == sorted([groups[0]] * 4 + [groups[-1]] * 4) for groups in due)


@given(max_tokens=st.integers(1, 40), most=st.integers(1, 12), number=st.integers(0, 20))
def test_the_chunk_that_ends_a_sample_takes_what_it_can_hold(max_tokens, most, number):
    slots = Slots(1, tokens_per_chunk=most)
    sample = sample_of([1, 2], arrival=number, max_tokens=max_tokens)
    slots.enter(sample)
    sizes = []
    while sum(sizes) < max_tokens:
        if len(slots.extend(np.array([0]), np.zeros((3, 1), np.int32))):
            slots.settle(sample)
            if slots.room(sample) == 0:
                sizes.append(len(sample.logprobs))
                sample.begin_chunk()
            slots.watch(sample)
    assert max(sizes) <= most
    assert len(sizes) <= -(-max_tokens // most) + 1
    assert len(sizes) == 1 or sizes[-2] + sizes[-1] > most
    assert len(sizes) == 1 or max_tokens > most


def scheduler_of(num_pages, max_step_tokens, max_chunk_tokens, max_running):
    pool = PagePool(num_pages=num_pages, page_size=2)
    return Scheduler(
        pool,
        max_running=max_running,
        max_step_tokens=max_step_tokens,
        max_chunk_tokens=max_chunk_tokens,
        tokens_per_chunk=3,
    )


def signature(scheduler, step):
    chunks = [(c.seq.arrival, c.seq.slot, c.start, c.end, c.is_last, list(c.seq.pages)) for c in step]
    queues = [[s.arrival for s in queue] for queue in (scheduler.running, scheduler.waiting)]
    return (
        chunks,
        queues,
        [s.arrival for s in step.changed],
        [*scheduler.pages._free, *scheduler.pages._idle],
        scheduler.num_preemptions,
    )


def drive(scheduler, step, in_flight, ends):
    """Completes a step, then reads one that was in flight: everyone draws its own arrival."""
    scheduler.complete(step)
    slots = scheduler.slots
    slots.pending[step.slots_S[step.is_last_S]] += 1
    for seq, stint, is_last in in_flight:
        if not is_last:
            continue
        if seq.slot >= 0 and slots.stints[seq.slot] == stint:
            slots.extend(np.array([seq.slot]), np.full((3, 1), seq.arrival, np.int32))
            slots.settle(seq)
            seq.begin_chunk()
            slots.watch(seq)
        else:
            seq.num_pending -= 1
            if seq.state.is_open:
                seq.token_ids.append(seq.arrival)
        if seq.state.is_open and (seq.arrival in ends or len(seq.token_ids) == seq.limit):
            scheduler.finish(seq)
    return list(zip(step.seqs_S.tolist(), step.stints_S.tolist(), step.is_last_S.tolist(), strict=True))


@given(
    prompts=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2)), min_size=1, max_size=9),
    num_pages=st.integers(9, 30),
    most=st.tuples(st.integers(1, 20), st.integers(1, 9), st.integers(1, 6)),
    most_in_flight=st.integers(2, 3),
    data=st.data(),
)
def test_a_step_by_arithmetic_is_the_step_made_one_by_one(prompts, num_pages, most, most_in_flight, data):
    twins = [scheduler_of(num_pages, *most) for _ in range(2)]
    twins[1]._everybody = lambda: None
    flights, todo = [deque([[]] * (most_in_flight - 1)) for _ in twins], list(enumerate(prompts))
    while todo or any(t.has_work for t in twins):
        if todo and (not twins[0].has_work or data.draw(st.booleans())):
            arrival, (length, max_tokens, kind) = todo.pop(0)
            for twin in twins:
                twin.add(sample_of([kind] * length, arrival=arrival, max_tokens=max_tokens))
        steps = [twin.schedule() for twin in twins]
        assert signature(twins[0], steps[0]) == signature(twins[1], steps[1])
        ends = data.draw(st.sets(st.integers(0, len(prompts)), max_size=2))
        for twin, step, in_flight in zip(twins, steps, flights, strict=True):
            in_flight.append(drive(twin, step, in_flight.popleft(), ends))
        if data.draw(st.integers(0, 9)) == 0:
            for twin in twins:
                for seq in [s for s in (*twin.running, *twin.waiting) if s.arrival in ends]:
                    twin.finish(seq)
    for twin in twins:
        assert twin.pages.num_free == num_pages
        assert not twin.slots.pending.any()


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    steps=st.lists(st.sampled_from(["decode", "decode", "decode", "part", "leave", "enter"]), min_size=3, max_size=14),
    chunk=st.sampled_from([8, 16, 1024]),
    num_hosts=st.integers(2, 3),
)
def test_a_block_that_is_brought_up_to_date_is_a_block_that_is_filled_anew(lengths, steps, chunk, num_hosts):
    slots, tables = Slots(8, tokens_per_chunk=99), SlotTables(num_slots=8, max_pages=32)
    fields, device = Fields(num_slots=8, num_rows=8, num_tiles=16), torch.device("cpu")
    block, fresh = (Block(fields, num_tokens=64, device=device, num_hosts=num_hosts) for _ in range(2))
    changed = []

    def enter(length):
        sample = sample_of([3] * length, arrival=length, max_tokens=60, temperature=1 + length / 8)
        sample.pages, sample.num_computed = [7 * length + i for i in range(24)], length
        sample.num_pending = 1
        slots.enter(sample)
        changed.append(sample)

    for length in lengths:
        enter(length)
    for kind in steps:
        if kind == "enter" and slots.num_free:
            enter(len(changed) + 5)
        known = [s for s in slots.seqs if s is not None and s not in changed]
        if kind == "leave" and len(known) > 1:
            slots.leave(known[0])
        some = np.flatnonzero(slots.runs)[1 if kind == "part" else 0 :]
        if kind == "part" and not len(some):
            continue
        batch = tables.batch(slots.step(some, np.ones(len(some), np.int64), list(changed)))
        changed.clear()
        assert batch.is_decode
        num_longs = int((batch.ends_S > chunk).sum())
        shape = Shape(padded(len(some)), len(some) - num_longs, num_longs, 2, chunk, 0)
        got, expected = block.fill(batch, tables, shape, 4, 4), fresh.next_host(shape.tokens)
        fill(expected, batch, tables, shape, 4, 4)
        for name in expected:
            assert got[name].tobytes() == expected[name].tobytes(), name
        slots.computed[some] += 1
        slots.pending[some] += 1
        slots.extend(some, np.zeros((3, len(some)), np.int32))


@pytest.mark.parametrize(("num_pages", "is_inside"), [(4, True), (5, False)])
def test_new_pages_travel_in_the_block_or_beside_it_but_never_in_parts(num_pages, is_inside):
    tables = SlotTables(num_slots=4, max_pages=8)
    slots = Slots(4, tokens_per_chunk=9)
    sample = sample_of(range(4 * num_pages))
    sample.pages = list(range(10, 10 + num_pages))
    slots.enter(sample)
    batch = tables.batch(slots.step(np.array([sample.slot]), np.array([4 * num_pages]), [sample]))
    block = Block(Fields(num_slots=4, num_rows=4, num_tiles=32), num_tokens=64, device=torch.device("cpu"))
    host = block.fill(batch, tables, Shape(64, 4, 0, 1, 1024, 32), 4, 4)
    nobodys = 4 * 8
    assert host["page_at"].tolist() == ([0, 1, 2, 3] if is_inside else [nobodys] * 4)
    assert host["page_ids"].tolist() == ([10, 11, 12, 13] if is_inside else [0] * 4)
    clear(host, tables)
    assert host["page_at"].tolist() == [nobodys] * 4


@given(
    st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(width=32, allow_nan=False), st.integers(0, 2**31 - 1))),
)
def test_a_chunks_message_has_the_bits_of_what_was_sampled(rows):
    ids, logprobs, top1 = ([row[i] for row in rows] for i in range(3))
    sample = sample_of([1])
    chunk = SampleChunk(
        sample=sample, start=0, token_ids=array("i", ids), logprobs=array("f", logprobs), top1=array("i", top1),
        version=Version(lineage=0, step=1, digest="d"), kv=Kv.FRESH, finish_reason=None,
    )  # fmt: skip
    ((message,),) = (reply.chunks for reply in replies([chunk], "f"))
    assert (message.token_ids, message.top1) == (int32_bytes(ids), int32_bytes(top1))
    assert message.logprobs == float32_bytes(np.float32(logprobs))


def test_metrics_that_are_updated_now_and_then_lose_no_step(monkeypatch):
    monkeypatch.setattr("services.rollout.meters.INTERVAL_S", 1e9)
    counters = dict.fromkeys(("sampled_tokens", "continued_tokens", "prefill_tokens", "dropped_rows"), 0)
    scheduler = SimpleNamespace(running=[1], waiting=[], num_prefix_hit_tokens=0, num_preemptions=0)
    engine = SimpleNamespace(
        counters=SimpleNamespace(**counters),
        scheduler=scheduler,
        times=StepTimes(),
        kv_usage=0.5,
        num_graphs=0,
        has_work=True,
    )
    meters = Meters("slots-test")
    seen = []
    for step in range(9):
        engine.counters.sampled_tokens += 3
        scheduler.running = [1] * (1 + (step >= 4))
        engine.has_work = step < 8
        meters.observe(engine, 0.5)
        seen.append(value(names.SAMPLED_TOKENS, replica="slots-test"))
    assert seen == [3, 3, 3, 3, 15, 15, 15, 15, 27]


def test_nobody_is_looked_for_in_a_slot_that_changed_hands():
    slots = Slots(1, tokens_per_chunk=4)
    first, second = sample_of([1, 2]), sample_of([3], arrival=1)
    slots.enter(first)
    step = slots.step(np.array([0]), np.array([1]), [])
    slots.leave(first)
    slots.enter(second)
    assert step.stints_S[0] != slots.stints[0]
    assert second.state is SequenceState.NEW
    assert (slots.known[0], slots.look_at[0]) == (1, 4)
