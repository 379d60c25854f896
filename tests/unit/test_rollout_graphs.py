"""Sizes of captured steps, and the block that a step's inputs are sent in."""

from array import array
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.blocks import ALIGNMENT, Block, Fields, clear, fill
from services.rollout.config import MOST_TOKENS, RolloutConfig
from services.rollout.graphs import (
    FEW_TOKENS,
    Graphs,
    Shape,
    capturable,
    most_tiles,
    padded,
    padded_sizes,
)
from services.rollout.inputs import SlotTables
from services.rollout.memory import sized
from services.rollout.samples import UnservableRun
from services.rollout.sequence import Sequence
from services.rollout.slots import Step


@given(st.integers(1, 1 << 20))
def test_less_than_an_eighth_of_a_captured_step_is_padding(size):
    holds = padded(size)
    assert size <= holds
    assert padded(holds) == holds
    assert size <= 8 or holds - size < size / 8


@given(st.integers(1, 3000), st.sampled_from([2, 4, 8]))
def test_the_captured_sizes_are_those_that_padding_leads_to(largest, parts):
    sizes = {padded(n, parts=parts) for n in range(1, largest + 1)}
    assert padded_sizes(largest, parts=parts) == sorted(sizes, reverse=True)


@given(st.lists(st.integers(2, 700), min_size=1, max_size=300), st.integers(0, 200))
def test_a_step_with_prompts_has_the_shape_that_is_captured_at_the_start_for_its_tokens(prompts, num_ones):
    limits = {"tile_queries": 64, "max_running": 600, "most_tokens": 1 << 20}
    num_tokens = num_ones + sum(prompts)
    step = Shape(num_tokens, num_ones, 0, 1, 1024, sum(-(-n // 64) for n in prompts))
    found = capturable(step, **limits)
    assert found is not None
    assert found == capturable(Shape(found.tokens, 0, 0, 1, 1024, 1), **limits)
    assert found.tokens in padded_sizes(num_tokens, parts=4)


SHAPES = st.builds(
    Shape,
    tokens=st.just(0),
    ones=st.integers(0, 300),
    longs=st.integers(0, 300),
    chunks=st.integers(1, 128),
    chunk=st.just(1024),
    tiles=st.just(0),
)


@given(
    SHAPES, st.lists(st.integers(2, 200), max_size=90), st.sampled_from([4, 16, 32, 64]), st.sampled_from([20, 4000])
)
def test_a_captured_shape_holds_the_exact_one_or_there_is_none(shape, prompts, tile_queries, most_tokens):
    num_tiles = sum(-(-n // tile_queries) for n in prompts)
    exact = shape._replace(tokens=shape.ones + shape.longs + sum(prompts), tiles=num_tiles)
    if not 0 < shape.ones + shape.longs + len(prompts) <= 300:
        return
    found = capturable(exact, tile_queries=tile_queries, max_running=300, most_tokens=most_tokens)
    parts = 2 if exact.longs else 4 if prompts else 8
    if found is None:
        assert padded(exact.tokens, parts=parts) > (min(most_tokens, FEW_TOKENS) if exact.longs else most_tokens)
        return
    assert found.tiles <= most_tiles(found.tokens, tile_queries=tile_queries, max_running=300)
    assert exact.tokens <= found.tokens == padded(exact.tokens, parts=parts)
    assert found.tiles >= num_tiles
    assert found.chunks >= exact.chunks or not exact.longs
    if found.ones:
        assert (found.ones, found.longs) >= (exact.ones, exact.longs)
        assert found.longs >= exact.longs
    else:
        assert found.longs >= exact.ones + exact.longs, "all are split"


def test_without_a_gpu_a_captured_function_just_runs():
    calls = []
    graphs = Graphs(torch.device("cpu"), is_enabled=True)
    assert [graphs.run("key", lambda: calls.append(1) or len(calls)) for _ in range(3)] == [1, 2, 3]
    assert len(graphs) == 0


def test_what_cannot_be_captured_runs_eagerly_and_so_does_what_comes_later(monkeypatch):
    """Torch's part is played, since a CPU captures nothing."""
    replayed, streams, is_refused = [], [], False

    @contextmanager
    def capture(graph, **_):
        if is_refused:
            raise RuntimeError("operation not permitted when stream is capturing")
        yield

    stream = SimpleNamespace(device=torch.device("cuda"))
    graph = SimpleNamespace(replay=lambda: replayed.append(1))
    for name, value in (
        ("current_stream", lambda: stream),
        ("graph_pool_handle", int),
        ("CUDAGraph", lambda: graph),
        ("graph", capture),
        ("set_stream", streams.append),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr("services.rollout.graphs._capture_stream", lambda device: None)
    graphs = Graphs(torch.device("cuda"), is_enabled=True)
    assert [graphs.run("good", lambda: "good") for _ in range(2)] == ["good", "good"]
    assert (len(graphs), len(replayed), graphs.describe()) == (1, 1, "1 captured")
    is_refused = True
    assert [graphs.run("bad", lambda: "bad") for _ in range(2)] == ["bad", "bad"]
    assert streams == [stream], "the failed capture's stream is left, and no other capture is tried"
    is_refused = False
    assert [graphs.run(key, lambda: "good") for key in ("good", "later")] == ["good", "good"]
    assert (len(graphs), len(replayed)) == (1, 2), "what was captured before is replayed"


def test_fields_are_aligned_and_what_a_step_fills_in_arrives():
    block = Block(Fields(num_slots=3, num_rows=4, num_tiles=2), num_tokens=16, device=torch.device("cpu"))
    for size in (16, 5, 8):
        host = block.next_host(size)
        for i, view in enumerate(host.values()):
            view[:] = i
        block.send()
        device = block.device(size)
        assert list(device) == list(host)
        for i, (name, tensor) in enumerate(device.items()):
            assert tensor.tolist() == [i] * len(tensor), name
        fields, num_bytes = block.fields.placed(size)
        assert all(begin % ALIGNMENT == 0 for _, _, _, begin in fields)
        assert block.fields.num_bytes(size) == num_bytes


def test_the_two_copies_on_the_host_are_used_in_turn():
    block = Block(Fields(num_slots=1, num_rows=1, num_tiles=1), num_tokens=4, device=torch.device("cpu"))
    first, second = block.next_host(4), block.next_host(4)
    first["ids"][:], second["ids"][:] = 1, 2
    assert first["ids"].tolist() == [1] * 4
    assert block.next_host(4) is first


def step_of(*shares, changed=()):
    """A step of (sequence, start, end), in ascending order of slot, each computed to its end."""
    seqs, starts, ends = zip(*shares, strict=True)
    return Step(
        slots_S=np.array([s.slot for s in seqs]),
        starts_S=np.array(starts),
        ends_S=np.array(ends),
        is_last_S=np.ones(len(seqs), bool),
        is_pending_S=np.array([s.num_pending > 0 for s in seqs]),
        seqs_S=np.array(seqs, object),
        stints_S=np.zeros(len(seqs), np.int64),
        changed=list(changed),
    )


def test_padding_belongs_to_nobody_and_is_written_nowhere():
    tables = SlotTables(num_slots=4, max_pages=8)
    block = Block(Fields(num_slots=4, num_rows=4, num_tiles=8), num_tokens=32, device=torch.device("cpu"))
    seqs = [Sequence(arrival=i, token_ids=array("i", range(10, 21)), slot=slot) for i, slot in enumerate((2, 0))]
    seqs[0].pages, seqs[1].pages = [5, 6, 7], [1, 2, 3]
    seqs[0].num_pending = 1
    batch = tables.batch(step_of((seqs[1], 2, 11), (seqs[0], 11, 12), changed=seqs))
    host = block.next_host(16)
    fill(host, batch, tables, Shape(16, 4, 0, 1, 1024, 6), page_size=4, tile_queries=4)
    assert host["ids"].tolist() == [*range(12, 21), -1 - 2, *[0] * 6]
    assert host["kv_slots"].tolist() == [*(4 + p for p in range(2, 11)), 7 * 4 + 3, *[-1] * 6]
    assert host["positions"].tolist() == [*range(2, 11), 11, *[0] * 6]
    assert host["contexts"].tolist() == [11, 0, 12, 0, 0]
    assert host["q_starts"].tolist() == [0, 9, 9, 10, 10, 10], "slot 4 has no queries"
    assert host["ones"].tolist() == [2, 4, 4, 4]
    assert host["tile_seqs"].tolist() == [0, 0, 0, 4, 4, 4, 4, 4]
    assert host["tile_firsts"].tolist()[:3] == [8, 4, 0], "the longest walk first"
    clear(host, tables)
    assert host["kv_slots"].tolist() == [-1] * 16
    assert not np.any(host["contexts"])


def test_new_pages_of_a_long_context_are_sent_and_nothing_else_of_it():
    tables = SlotTables(num_slots=2, max_pages=8192)
    seq = Sequence(arrival=0, token_ids=array("i", [1]) * 131071, slot=1, pages=list(range(8192)))
    at, pages = tables.batch(step_of((seq, 131000, 131071), changed=[seq])).new_pages
    assert (len(at), at[0], pages[-1]) == (8192, 8192, 8191)
    assert len(tables.batch(step_of((seq, 131071, 131072))).new_pages[0]) == 0


def test_a_measured_cache_has_whole_pages_and_holds_a_sequence_or_says_what_to_do():
    config = RolloutConfig(device="cuda", page_size=16)
    assert config.is_measured
    assert sized(config, 1003, 512).kv_capacity_tokens == 992
    assert sized(config, 1 << 40, 512).kv_capacity_tokens <= MOST_TOKENS
    with pytest.raises(UnservableRun, match=r"room for a KV cache of 496 tokens.*may have 512; lower max_step_tokens"):
        sized(config, 511, 512)


def test_what_is_chosen_by_device_can_be_given():
    cpu, gpu, given = RolloutConfig(), RolloutConfig(device="cuda"), RolloutConfig(page_size=4, stream_tokens=7)
    assert [(c.tokens_per_page, c.tokens_per_chunk) for c in (cpu, gpu, given)] == [(16, 4), (64, 128), (4, 7)]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("device", "tpu", "device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
        ("kv_memory_share", 0.0, "kv_memory_share must be above 0"),
        ("kv_cache_tokens", -1, "kv_cache_tokens must be >= 1, or 0 to choose by device"),
        ("kv_cache_tokens", 15, "kv_cache_tokens must hold one page of 16, got 15"),
        ("page_size", -1, "page_size must be >= 1, or 0 to choose by device"),
        ("page_size", 48, "page_size must be a power of two, got 48"),
    ],
)
def test_a_setting_out_of_range_is_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        RolloutConfig(**{field: value})
