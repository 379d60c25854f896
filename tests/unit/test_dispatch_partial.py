"""Chunks become one trajectory, and what no replica may send is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.partial import PartialSample, ProtocolViolation
from shared.wire.codec import decode_trajectory, encode_trajectory
from shared.wire.lifecycle import PendingGroup
from shared.wire.pb import rollout_pb2 as pb
from shared.wire.pb import weight_sync_pb2 as ws
from shared.wire.prompts import PromptItem
from shared.wire.types import SamplingParams, Span, SpanKind, float32_bytes, int32_bytes

VERSION = ws.Version(lineage=0, step=3, digest="d3")


def chunk(tokens, start=0, **values) -> pb.GenerateChunk:
    fields = {
        "trajectory_id": "r.0.0", "start": start, "token_ids": int32_bytes(tokens),
        "logprobs": float32_bytes(np.array([-0.1 * t for t in tokens])), "top1": int32_bytes([t + 1 for t in tokens]),
        "kv": "fresh",
    } | values  # fmt: skip
    return pb.GenerateChunk(**fields)


def add(sample: PartialSample, piece: pb.GenerateChunk, *, by=VERSION, fingerprint="f", replica="a") -> None:
    sample.add(piece, by=by, fingerprint=fingerprint, version=VERSION, replica=replica)


def partial(max_tokens: int = 16) -> PartialSample:
    return PartialSample(trajectory_id="r.0.0", sample_index=0, max_tokens=max_tokens)


def group(prompt=(7, 8, 9)) -> PendingGroup:
    item = PromptItem(number=0, token_ids=prompt, n=1, sampling=SamplingParams(), prompt_id="mine")
    return PendingGroup(group_id="r.0", number=0, prompt=item, samples=(0,))


@given(cuts=st.lists(st.integers(1, 4), min_size=1, max_size=6), replicas=st.integers(1, 3))
def test_however_the_tokens_are_cut_into_chunks_the_record_is_the_same(cuts, replicas):
    tokens = list(range(1, sum(cuts) + 1))
    sample, start = partial(max_tokens=len(tokens)), 0
    for i, size in enumerate(cuts):
        finish = "stop" if start + size == len(tokens) else ""
        piece = chunk(tokens[start : start + size], start, finish_reason=finish)
        add(sample, piece, replica=f"replica-{i % replicas}")
        start += size
    t = decode_trajectory(encode_trajectory(sample.trajectory(group(), run="r", seed=5)))
    assert t.token_ids.tolist() == [7, 8, 9, *tokens]
    assert t.logprobs.tobytes() == float32_bytes(np.array([-0.1 * i for i in tokens]))
    assert t.top1.tolist() == [i + 1 for i in tokens]
    assert t.loss_mask.tolist() == [0, 0, 0] + [1] * len(tokens)
    assert t.spans == (
        Span(start=0, end=3, kind=SpanKind.PROMPT),
        Span(start=3, end=3 + len(tokens), kind=SpanKind.SAMPLED, policy_step=3, manifest_digest="d3"),
    )
    assert (t.prompt_id, t.seed, t.num_prompt_tokens) == ("mine", 5, 3)
    assert t.replicas == tuple(f"replica-{i}" for i in range(min(replicas, len(cuts))))


def test_spans_of_different_kv_stay_apart():
    sample = partial()
    add(sample, chunk([1, 2]))
    add(sample, chunk([3], 2, kv="mixed"))
    add(sample, chunk([4], 3, kv="mixed", finish_reason="length"))
    assert [(s.start, s.end, s.kv) for s in sample.spans] == [(0, 2, "fresh"), (2, 4, "mixed")]


@pytest.mark.parametrize(
    ("bad", "stamp", "text"),
    [
        (chunk([3], start=3), {}, "start at 3, expected 2"),
        (chunk([3], start=1), {}, "start at 1, expected 2"),
        (chunk([3], 2), {"by": ws.Version(lineage=0, step=3, digest="d4")}, "version 0/3/d4"),
        (chunk([3], 2), {"by": ws.Version(lineage=0, step=4, digest="d3")}, "version 0/4/d3"),
        (chunk([3], 2), {"by": ws.Version(lineage=1, step=3, digest="d3")}, "version 1/3/d3"),
        (chunk([3], 2, logprobs=b""), {}, "1 tokens, 0 logprobs"),
        (chunk([3], 2, logprobs=float32_bytes(np.array([np.nan]))), {}, "not finite"),
        (chunk([3], 2, top1=int32_bytes([1, 2])), {}, "2 top-1 ids"),
        (chunk([3] * 15, 2), {}, "17 tokens, at most 16"),
        (chunk([3], 2), {"fingerprint": "g"}, "numerics 'g'"),
        (chunk([3], 2, kv="warm"), {}, "kv is 'warm'"),
        (chunk([], 2), {}, "an empty chunk"),
        (chunk([], 2, finish_reason="aborted"), {}, "ended with 'aborted'"),
    ],
)
def test_a_chunk_that_contradicts_the_request_is_refused_and_changes_nothing(bad, stamp, text):
    sample = partial()
    add(sample, chunk([1, 2]))
    with pytest.raises(ProtocolViolation, match=r"r\.0\.0.*" + text):
        add(sample, bad, **stamp)
    assert (sample.token_ids, sample.finish_reason) == ([1, 2], None)


def test_a_sample_never_ends_empty_and_never_goes_on_behind_its_end():
    with pytest.raises(ProtocolViolation, match="ended without a token"):
        add(partial(), chunk([], finish_reason="stop"))
    sample = partial()
    add(sample, chunk([1], finish_reason="stop"))
    with pytest.raises(ProtocolViolation, match="behind the end"):
        add(sample, chunk([2], 1))


def test_the_end_may_come_without_tokens_of_its_own():
    sample = partial()
    add(sample, chunk([1]))
    add(sample, chunk([], 1, finish_reason="stop", kv=""), fingerprint="")
    assert sample.trajectory(group(), run="r", seed=0).token_ids.tolist() == [7, 8, 9, 1]
