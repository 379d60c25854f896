"""Frames between the process of the engine and that of its gRPC server."""

import asyncio
import socket

from hypothesis import given
from hypothesis import strategies as st

from services.rollout.frames import READ_BYTES, Frames
from shared.wire.rpc import MAX_MESSAGE_BYTES

SIZES = st.one_of(st.integers(0, 99), st.integers(READ_BYTES - 20, READ_BYTES + 20), st.just(3 * READ_BYTES))


async def exchanged(sent):
    """What comes out at the other end, which is closed behind the last frame."""
    ends = [await Frames.over(end) for end in socket.socketpair()]

    async def send():
        for frame in sent:
            ends[0].send(*frame)
            await ends[0].drain()
        ends[0].close()

    sending = asyncio.create_task(send())
    got = [frame async for frame in ends[1].received()]
    await sending
    ends[1].close()
    return got


@given(sizes=st.lists(SIZES, max_size=6), numbers=st.lists(st.integers(0, 2**63), min_size=6, max_size=6))
def test_frames_of_any_size_arrive_whole_and_in_order(sizes, numbers):
    sent = [["reply", number, bytes([number % 256]) * size] for number, size in zip(numbers, sizes, strict=False)]
    assert asyncio.run(exchanged(sent)) == sent


def test_the_largest_message_of_a_call_arrives():
    sent = [["reply", 1, b"x" * MAX_MESSAGE_BYTES], ["end", 1, 0, ""]]
    assert asyncio.run(exchanged(sent)) == sent


def test_what_is_sent_to_an_end_that_is_gone_is_lost_without_an_error():
    async def run():
        ends = [await Frames.over(end) for end in socket.socketpair()]
        ends[1].close()
        for _ in range(9):
            ends[0].send("ping")
            await asyncio.sleep(0)
        assert [frame async for frame in ends[0].received()] == []

    asyncio.run(run())
