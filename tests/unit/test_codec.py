"""Records on the wire: what is written comes back to the byte, and nothing else is ever taken for a record."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.extra.numpy as hnp
import msgpack
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shared.wire.codec import CodecError, decode_group, decode_trajectory, encode_group, encode_trajectory
from shared.wire.prompts import (
    EvalItem,
    PromptItem,
    RewardSpec,
    decode_eval_item,
    decode_prompt,
    encode_prompt,
    fingerprint,
)
from shared.wire.types import FinishReason, Group, Kv, SamplingParams, Span, SpanKind, Trajectory

names = st.text(max_size=12)
finite = st.floats(allow_nan=False, allow_infinity=False)
finite32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
token_ids = st.integers(0, 2**31 - 1)


@st.composite
def trajectories(draw: st.DrawFn, run: str = "r", group_id: str = "r.0") -> Trajectory:
    num_prompt, num_sampled = draw(st.integers(1, 20)), draw(st.integers(0, 20))
    total = num_prompt + num_sampled
    cuts = sorted(draw(st.sets(st.integers(1, max(1, num_sampled - 1)), max_size=3))) if num_sampled > 1 else []
    ends = [num_prompt, *(num_prompt + c for c in cuts), total] if num_sampled else [num_prompt]
    starts = [0, *ends[:-1]]
    spans = tuple(
        Span(
            start=a,
            end=b,
            kind=SpanKind.SAMPLED if a else SpanKind.PROMPT,
            lineage=draw(st.integers(0, 2**32 - 1)),
            policy_step=draw(st.integers(0, 2**63 - 1)),
            manifest_digest=draw(names),
            kv=draw(st.sampled_from(Kv)),
        )
        for a, b in zip(starts, ends, strict=True)
    )
    return Trajectory(
        trajectory_id=draw(names),
        group_id=group_id,
        prompt_id=draw(names),
        sample_index=draw(st.integers(0, 1000)),
        run=run,
        seed=draw(st.integers(0, 2**63 - 1)),
        sampling=SamplingParams(
            temperature=draw(finite),
            max_tokens=draw(st.integers(1, 10**6)),
            stop_token_ids=tuple(draw(st.lists(token_ids, max_size=3))),
            stop=tuple(draw(st.lists(names, max_size=3))),
        ),
        token_ids=draw(hnp.arrays(np.int32, total, elements=token_ids)),
        logprobs=draw(hnp.arrays(np.float32, num_sampled, elements=finite32)),
        top1=draw(hnp.arrays(np.int32, num_sampled, elements=token_ids)),
        loss_mask=draw(hnp.arrays(np.uint8, total, elements=st.integers(0, 1))),
        spans=spans,
        finish_reason=draw(st.sampled_from(FinishReason)),
        fingerprint=draw(names),
        reward=draw(st.none() | finite),
        rewards=draw(st.dictionaries(names, finite, max_size=3)),
        replicas=tuple(draw(st.lists(names, max_size=3))),
        timestamps=draw(st.dictionaries(names, finite, max_size=3)),
    )


@st.composite
def groups(draw: st.DrawFn) -> Group:
    members = tuple(draw(st.lists(trajectories(), max_size=3)))
    return Group(run="r", group_id="r.0", prompt_number=draw(st.integers(0, 2**40)), trajectories=members)


def one_trajectory() -> Trajectory:
    """Two prompt tokens, two sampled ones."""
    return Trajectory(
        trajectory_id="r.0.1",
        group_id="r.0",
        prompt_id="p",
        sample_index=1,
        run="r",
        seed=7,
        sampling=SamplingParams(stop=("\n",), stop_token_ids=(2,)),
        token_ids=np.array([5, 6, 7, 2], np.int32),
        logprobs=np.array([-0.5, -1e-9], np.float32),
        top1=np.array([7, 3], np.int32),
        loss_mask=np.array([0, 0, 1, 1], np.uint8),
        spans=(Span(start=0, end=2, kind=SpanKind.PROMPT), Span(start=2, end=4, kind=SpanKind.SAMPLED)),
        finish_reason=FinishReason.STOP,
        fingerprint="cpu",
        reward=1.0,
        rewards={"exact": 1.0},
    )


def packed(**changes: object) -> bytes:
    """The record of `one_trajectory` with fields replaced or, given `...`, left out."""
    data = encode_trajectory(one_trajectory())
    record = msgpack.unpackb(data[1:]) | changes
    return data[:1] + msgpack.packb({k: v for k, v in record.items() if v is not ...})


@given(trajectories())
def test_a_trajectory_comes_back_to_the_byte(trajectory: Trajectory) -> None:
    data = encode_trajectory(trajectory)
    back = decode_trajectory(data)
    assert encode_trajectory(back) == data
    for name in ("token_ids", "logprobs", "top1", "loss_mask"):
        sent, got = getattr(trajectory, name), getattr(back, name)
        assert got.dtype == sent.dtype
        assert got.tobytes() == sent.tobytes()
        assert got.flags.writeable
    assert (back.spans, back.sampling, back.rewards) == (trajectory.spans, trajectory.sampling, trajectory.rewards)


@given(groups())
def test_a_group_comes_back_to_the_byte(group: Group) -> None:
    data = encode_group(group)
    assert encode_group(decode_group(data)) == data


@given(groups(), st.data())
def test_a_truncated_record_is_a_codec_error(group: Group, data: st.DataObject) -> None:
    whole = encode_group(group)
    length = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(CodecError):
        decode_group(whole[:length])


@given(trajectories(), st.data())
def test_flipped_bytes_never_raise_anything_but_a_codec_error(trajectory: Trajectory, data: st.DataObject) -> None:
    damaged = bytearray(encode_trajectory(trajectory))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    for decode in (decode_trajectory, decode_group):
        try:
            decode(bytes(damaged))
        except CodecError:
            continue


json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
fields_of_a_trajectory = st.sampled_from(sorted(msgpack.unpackb(encode_trajectory(one_trajectory())[1:])))


@given(fields_of_a_trajectory, json_like)
@example("reward", {"": 1.0})
@example("fingerprint", {})
@example("rewards", {b"": 1.0})
@example("replicas", "ab")
def test_a_field_of_any_other_type_is_refused_or_stays_a_record(field: str, value: object) -> None:
    try:
        back = decode_trajectory(packed(**{field: value}))
    except CodecError:
        return
    assert decode_trajectory(encode_trajectory(back)).trajectory_id == back.trajectory_id


@given(st.binary(max_size=200))
def test_garbage_is_a_codec_error(data: bytes) -> None:
    for decode in (decode_trajectory, decode_group):
        for candidate in (data, b"\x01" + data):
            with pytest.raises(CodecError):
                decode(candidate)


def test_deep_nesting_is_a_codec_error() -> None:
    with pytest.raises(CodecError):
        decode_group(b"\x01" + b"\x91" * 100_000 + b"\x00")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_logprob_or_reward_that_is_not_finite_is_refused(bad: float) -> None:
    whole = one_trajectory()
    for broken in (
        replace(whole, logprobs=np.array([-0.5, bad], np.float32)),
        replace(whole, reward=bad),
        replace(whole, rewards={"exact": bad}),
    ):
        with pytest.raises(CodecError, match=r"trajectory r\.0\.1: .*(finite|reward)"):
            decode_trajectory(encode_trajectory(broken))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"top1": np.array([1], np.int32)}, "2 logprobs but 1 top-1 ids"),
        ({"loss_mask": np.zeros(3, np.uint8)}, "4 tokens but a loss mask of 3"),
        ({"loss_mask": np.array([0, 0, 1, 2], np.uint8)}, "neither 0 nor 1"),
        ({"spans": (Span(start=0, end=2, kind=SpanKind.PROMPT),)}, "spans cover 2 of 4"),
        ({"spans": (Span(start=0, end=4, kind=SpanKind.PROMPT),)}, "spans say 0 sampled tokens, there are 2"),
        (
            {"spans": (Span(start=0, end=2, kind=SpanKind.PROMPT), Span(start=1, end=4, kind=SpanKind.SAMPLED))},
            "span 1:4 behind 2",
        ),
    ],
)
def test_contradictions_are_named(changes: dict, said: str) -> None:
    with pytest.raises(CodecError, match=said):
        decode_trajectory(encode_trajectory(replace(one_trajectory(), **changes)))


def test_a_missing_and_an_unknown_field_are_refused() -> None:
    with pytest.raises(CodecError):
        decode_trajectory(packed(fingerprint=...))
    with pytest.raises(CodecError):
        decode_trajectory(packed(policy="x"))


def test_a_group_holds_its_own_samples_only() -> None:
    stranger = replace(one_trajectory(), group_id="r.9")
    with pytest.raises(CodecError, match=r"group r\.0 of run r holds r\.0\.1 of r, r\.9"):
        decode_group(encode_group(Group(run="r", group_id="r.0", prompt_number=0, trajectories=(stranger,))))


def test_another_schema_version_is_refused_by_number() -> None:
    data = encode_trajectory(one_trajectory())
    with pytest.raises(CodecError, match="schema version 9, this build reads 1"):
        decode_trajectory(b"\x09" + data[1:])
    with pytest.raises(CodecError, match="schema version nothing"):
        decode_trajectory(b"")


def test_8192_tokens_fit_in_the_size_that_the_design_states() -> None:
    num_prompt, num_sampled = 1024, 7168
    trajectory = replace(
        one_trajectory(),
        token_ids=np.zeros(num_prompt + num_sampled, np.int32),
        logprobs=np.zeros(num_sampled, np.float32),
        top1=np.zeros(num_sampled, np.int32),
        loss_mask=np.zeros(num_prompt + num_sampled, np.uint8),
        spans=(
            Span(start=0, end=num_prompt, kind=SpanKind.PROMPT),
            Span(start=num_prompt, end=num_prompt + num_sampled, kind=SpanKind.SAMPLED),
        ),
    )
    assert len(encode_trajectory(trajectory)) < 100_000


samplings = st.builds(
    SamplingParams,
    temperature=finite, max_tokens=token_ids, stop_token_ids=st.lists(token_ids, max_size=3).map(tuple),
    stop=st.lists(names, max_size=3).map(tuple),
)  # fmt: skip
asked = {
    "token_ids": st.lists(token_ids, min_size=1, max_size=9).map(tuple), "n": st.integers(1, 9), "sampling": samplings,
    "metadata": st.dictionaries(names, names | finite | st.lists(token_ids, max_size=2), max_size=3),
}  # fmt: skip
specs = st.builds(
    RewardSpec, sources=st.lists(names, min_size=1, max_size=3, unique=True).map(tuple), answer=st.none() | names
)


@given(st.builds(PromptItem, number=token_ids, reward=specs, prompt_id=names, **asked))
def test_a_prompt_comes_back_equal_and_has_the_fingerprint_of_its_body(item: PromptItem) -> None:
    assert decode_prompt(encode_prompt(item)) == item
    reordered = replace(item, metadata=dict(reversed(item.metadata.items())))
    assert fingerprint(reordered) == fingerprint(item)
    for changes in (
        {"number": item.number + 1},
        {"token_ids": (*item.token_ids, 0)},
        {"sampling": replace(item.sampling, top_k=item.sampling.top_k + 1)},
        {"reward": replace(item.reward, deadline_s=item.reward.deadline_s + 1)},
        {"metadata": {**item.metadata, "one more than twelve": 1}},
    ):
        assert fingerprint(replace(item, **changes)) != fingerprint(item)


@given(st.builds(EvalItem, answer=st.none() | names, **asked))
def test_an_evaluation_item_comes_back_equal(item: EvalItem) -> None:
    assert decode_eval_item(encode_prompt(item)) == item
