"""One Generate stream: one group on one replica, until every sample is finished or the stream breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from services.gateway.partial import PartialSample, ProtocolViolation
from shared.wire.lifecycle import PendingGroup
from shared.wire.pb import rollout_pb2 as pb
from shared.wire.pb import rollout_pb2_grpc as pb_grpc
from shared.wire.pb import weight_sync_pb2 as ws
from shared.wire.types import SamplingParams, int32_bytes

STATUS_TIMEOUT_S = 10.0

OnChunk = Callable[[pb.GenerateChunk], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A group to generate: what to sample, by which version."""

    run: str
    model: str
    group: PendingGroup
    version: ws.Version
    seed: int
    is_evaluation: bool
    is_pinned: bool = True
    """Whether `version` samples every token; under max_lag a later one may go on behind it."""

    @property
    def group_id(self) -> str:
        return self.group.group_id

    def request(self, samples: Sequence[PartialSample]) -> pb.GenerateRequest:
        """Asks for these samples; what was received of them already is named, so that they go on behind it."""
        return pb.GenerateRequest(
            run=self.run,
            manifest_digest=self.version.digest,
            seed=self.seed,
            prompt_number=self.group.number,
            prompt_token_ids=int32_bytes(self.group.prompt.token_ids),
            sampling=_sampling(self.group.prompt.sampling),
            samples=[
                pb.Sample(
                    trajectory_id=s.trajectory_id, sample_index=s.sample_index, token_ids=int32_bytes(s.token_ids)
                )
                for s in samples
            ],
            evaluation=self.is_evaluation,
        )


class StreamBroken(Exception):
    """The stream ended before its samples did."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        """A gRPC status in lower case, `idle`, `protocol` or `ended`."""


async def generate(
    channel: grpc.aio.Channel,
    work: Work,
    samples: Sequence[PartialSample],
    *,
    replica: str,
    idle_s: float,
    on_finished: Callable[[PartialSample], Awaitable[None]],
    on_chunk: OnChunk | None = None,
) -> None:
    """Streams until all samples are finished; `on_finished` is awaited for those that end with one message at once.

    A cancelled stream is an abort: the replica drops what it was sampling. Raises StreamBroken; samples keep what arrived.

    Args:
        idle_s: longest wait for the next message, or for a sign that the replica is busy with others.
        on_chunk: sees every chunk once it was checked and taken.
    """
    by_id = {s.trajectory_id: s for s in samples}
    stub = pb_grpc.RolloutEngineStub(channel)
    call = stub.Generate(work.request(samples))
    num_open = len(samples)
    try:
        while num_open:
            reply = await _next_reply(call, stub, idle_s)
            if reply is grpc.aio.EOF:
                raise StreamBroken("ended", f"{num_open} samples unfinished")
            if not reply.chunks:
                raise ProtocolViolation("a message without chunks")
            finished: list[PartialSample] = []
            try:
                for chunk in reply.chunks:
                    sample = by_id.get(chunk.trajectory_id)
                    if sample is None:
                        raise ProtocolViolation(f"chunk of {chunk.trajectory_id!r}, which was not asked for")
                    sample.add(
                        chunk, by=reply.version, fingerprint=reply.fingerprint, version=work.version, replica=replica,
                        is_pinned=work.is_pinned,
                    )  # fmt: skip
                    if on_chunk is not None:
                        on_chunk(chunk)
                    if sample.finish_reason is not None:
                        finished.append(sample)
            finally:
                # Together, so that groups are complete one by one and not all of them with the last sample of a batch; also
                # what ended before a chunk that is wrong.
                await asyncio.gather(*(on_finished(sample) for sample in finished))
            num_open -= len(finished)
    except ProtocolViolation as error:
        raise StreamBroken("protocol", str(error)) from error
    except TimeoutError as error:
        raise StreamBroken("idle", f"nothing for {idle_s:g} s") from error
    except grpc.aio.AioRpcError as error:
        raise StreamBroken(error.code().name.lower(), error.details() or "") from error
    finally:
        call.cancel()


async def _next_reply(call: grpc.aio.UnaryStreamCall, stub: pb_grpc.RolloutEngineStub, idle_s: float) -> Any:
    """The next message or EOF; a replica that samples for others meanwhile is waited for, since this group stands in its line.

    Raises TimeoutError when the replica has sampled nothing for anybody between two looks.
    """
    reading = asyncio.ensure_future(call.read())
    num_sampled = -1
    try:
        while not (await asyncio.wait([reading], timeout=idle_s))[0]:
            status = await stub.Status(pb.StatusRequest(), timeout=max(idle_s, STATUS_TIMEOUT_S))
            if status.num_sampled_tokens == num_sampled:
                raise TimeoutError
            num_sampled = status.num_sampled_tokens
        return reading.result()
    finally:
        reading.cancel()


def _sampling(sampling: SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
        stop_token_ids=sampling.stop_token_ids,
        stop=sampling.stop,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
    )
