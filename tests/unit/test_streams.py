"""What a Generate call sends: everything that was delivered, in order, in few messages, and then how it ended."""

import asyncio
from array import array
from itertools import groupby
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.loop import STOPPED
from services.rollout.requests import replies
from services.rollout.samples import (
    GroupRequest,
    InDoubt,
    OtherVersion,
    Sample,
    SampleChunk,
    SampleFailed,
    ShuttingDown,
    Version,
)
from services.rollout.stopping import StopRule
from services.rollout.streams import Stream
from shared.wire import rpc
from shared.wire.types import FinishReason, Kv, SamplingParams, float32_bytes, int32_bytes

VERSIONS = [Version(lineage=0, step=step, digest=f"d{step}") for step in range(3)]


def sample_of(name: str) -> Sample:
    sampling = SamplingParams(max_tokens=9)
    request = GroupRequest(seed=0, prompt_number=0, sampling=sampling, stream=None)
    return Sample(
        arrival=0, token_ids=array("i", [1]), request=request, trajectory_id=name, sample_index=0, num_prompt_tokens=1,
        num_continued_tokens=0, stop_rule=StopRule(sampling),
    )  # fmt: skip


def chunk_of(name="t", *, start=0, count=1, version=VERSIONS[0], finish=None) -> SampleChunk:
    return SampleChunk(
        sample=sample_of(name), start=start, token_ids=array("i", range(count)), logprobs=array("f", [-0.5] * count),
        top1=array("i", range(1, count + 1)), version=version, kv=Kv.FRESH, finish_reason=finish,
    )  # fmt: skip


def failed(reason: str, *, is_in_doubt=False) -> SampleFailed:
    return SampleFailed(sample=sample_of("t"), reason=reason, is_in_doubt=is_in_doubt)


async def received(stream: Stream) -> tuple[list[list[SampleChunk]], Exception | None]:
    """Batches, and what was raised behind them."""
    batches: list[list[SampleChunk]] = []
    try:
        async for chunks in stream.chunks():
            batches.append(chunks)
    except Exception as error:
        return batches, error
    return batches, None


@given(
    deliveries=st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=6),
    ends=st.permutations(["length", "length", "failed", "failed"]),
    error_at=st.none() | st.integers(0, 10),
    turns=st.integers(0, 3),
)
def test_all_that_is_delivered_is_given_once_in_order_and_then_the_end(deliveries, ends, error_at, turns):
    """Args: turns, of the event loop between two deliveries: the call takes all, some or none of them meanwhile."""

    async def run() -> None:
        stream, sent, has_failed, error = Stream(4), [], False, None
        task = asyncio.create_task(received(stream))
        for i, delivery in enumerate([*deliveries, *ends]):
            if i == error_at:
                error = OtherVersion("it is over")
                stream.end(error)
                break
            if delivery == "failed":
                has_failed = True
                stream.fail(failed("another run came"))
            else:
                finish = FinishReason.LENGTH if delivery == "length" else None
                for n in [0] if finish else delivery:
                    sent.append(chunk_of(str(n), start=len(sent), finish=finish))
                    stream.put(sent[-1])
            for _ in range(turns):
                await asyncio.sleep(0)
        batches, raised = await task
        assert [chunk.start for chunks in batches for chunk in chunks] == list(range(len(sent)))
        assert all(batches)
        if error is not None:
            assert raised is error
        else:
            assert isinstance(raised, OtherVersion) == has_failed
        assert (stream.num_open == 0) == (error is None)

    asyncio.run(run())


def test_what_a_delivery_brings_wakes_the_call_once():
    async def run() -> None:
        stream = Stream(3)
        task = asyncio.create_task(received(stream))
        for is_last in (False, True):
            await asyncio.sleep(0)
            for name in "abc":
                stream.put(chunk_of(name, start=is_last, finish=FinishReason.LENGTH if is_last else None))
        batches, error = await task
        assert [[c.sample.trajectory_id for c in chunks] for chunks in batches] == [["a", "b", "c"]] * 2
        assert error is None

    asyncio.run(run())


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (failed("1 of 52 probe logprobs differ", is_in_doubt=True), InDoubt),
        (failed(STOPPED), ShuttingDown),
        (failed("the replica went over"), OtherVersion),
    ],
)
def test_a_failure_is_told_when_the_others_are_finished(failure, kind):
    async def run() -> None:
        stream = Stream(2)
        task = asyncio.create_task(received(stream))
        stream.fail(failure)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not task.done()
        stream.put(chunk_of(finish=FinishReason.STOP))
        batches, error = await task
        assert [len(chunks) for chunks in batches] == [1]
        assert type(error) is kind
        assert str(error) == failure.reason

    asyncio.run(run())


@given(
    rows=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.text(max_size=9)), max_size=12),
    most_bytes=st.integers(1, 500),
)
def test_messages_have_one_version_each_a_bounded_size_and_every_chunk_in_order(rows, most_bytes):
    chunks = [chunk_of(name, start=i, count=n, version=VERSIONS[v]) for i, (v, n, name) in enumerate(rows)]
    few = list(replies(chunks, "f"))
    with patch.object(rpc, "CHUNK_BYTES", most_bytes):
        many = list(replies(chunks, "f"))
    for messages in (few, many):
        got = [(message.version, chunk) for message in messages for chunk in message.chunks]
        assert len(got) == len(chunks)
        for (version, message), chunk in zip(got, chunks, strict=True):
            assert (version.lineage, version.step, version.digest) == (0, chunk.version.step, chunk.version.digest)
            assert (message.trajectory_id, message.start) == (chunk.sample.trajectory_id, chunk.start)
            assert (message.token_ids, message.top1) == (int32_bytes(chunk.token_ids), int32_bytes(chunk.top1))
            assert message.logprobs == float32_bytes(chunk.logprobs)
            assert (message.kv, message.finish_reason) == ("fresh", "")
        assert all(message.chunks and message.fingerprint == "f" for message in messages)
    assert len(few) == len(list(groupby(chunks, key=lambda chunk: chunk.version)))
    for message in many:
        tokens = sum(len(chunk.token_ids) // 4 for chunk in message.chunks)
        assert len(message.chunks) == 1 or 12 * tokens < most_bytes
