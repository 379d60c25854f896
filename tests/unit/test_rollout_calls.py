"""Calls in the engine's process, driven through the frames that the gRPC server's process would send."""

import asyncio
import socket
from types import SimpleNamespace

import grpc

from services.rollout.calls import FrontProcess
from services.rollout.frames import Frames
from shared.wire.pb import rollout_pb2 as pb


class Service:
    """Notes how its calls end."""

    def __init__(self):
        self.ends = []

    async def Status(self, request, context):
        return pb.StatusReply(replica="r0")

    async def Abort(self, request, context):
        await context.abort(grpc.StatusCode.NOT_FOUND, "nobody")

    async def Score(self, request, context):
        raise ConnectionError("of its own")

    async def Generate(self, request, context):
        try:
            for number in range(1000):
                yield pb.GenerateReply(fingerprint=str(number))
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.ends.append("cancelled")
            raise
        finally:
            self.ends.append("closed")


async def exchanged(*frames, num_ends, service=None):
    """What is answered to frames that arrive in one piece, until so many calls have ended; and the calls left open."""
    ours, theirs = [await Frames.over(end) for end in socket.socketpair()]
    front = FrontProcess(SimpleNamespace(pid=0), ours)
    for frame in frames:
        theirs.send(*frame)
    running, got = asyncio.create_task(front.run(service or Service())), []
    async for frame in theirs.received():
        got.append(frame)
        num_ends -= frame[0] == "end"
        if num_ends == 0:
            break
    theirs.close()
    await running
    # Their ends are told behind this.
    await asyncio.sleep(0)
    ours.close()
    return got, front._calls


def call(number, method, request=b""):
    return "call", number, method, 9.0, request


def test_a_reply_a_refusal_a_fault_and_a_request_that_cannot_be_read_each_end_their_call():
    frames = [call(0, "Status"), call(1, "Abort"), call(2, "Score"), call(3, "Abort", b"\xff\xff")]
    got, left = asyncio.run(exchanged(*frames, num_ends=4))
    (reply,) = (frame for frame in got if frame[0] == "reply")
    assert (reply[1], pb.StatusReply.FromString(reply[2]).replica) == (0, "r0")
    ends = {number: (code, details) for kind, number, code, *rest in got if kind == "end" for details in rest}
    assert ends[0] == (grpc.StatusCode.OK.value[0], "")
    assert ends[1] == (grpc.StatusCode.NOT_FOUND.value[0], "nobody")
    assert ends[2] == (grpc.StatusCode.UNKNOWN.value[0], "ConnectionError: of its own")
    assert (ends[3][0], ends[3][1].split(":")[0]) == (grpc.StatusCode.INTERNAL.value[0], "no AbortRequest")
    assert not left


def test_a_call_that_is_cancelled_before_it_begins_is_forgotten():
    frames = [frame for number in range(9) for frame in (call(number, "Generate"), ("cancel", number))]
    _, left = asyncio.run(exchanged(*frames, call(9, "Status"), num_ends=1))
    assert not left


def test_a_stream_is_closed_when_the_other_process_is_gone():
    service = Service()
    asyncio.run(exchanged(call(0, "Generate"), call(1, "Status"), num_ends=1, service=service))
    assert service.ends[-1] == "closed"
