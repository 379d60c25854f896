"""The RolloutEngine service: requests in, chunks out, weights staged and committed. Computes nothing itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import NoReturn, TypeVar

import grpc
import structlog

from services.rollout.blocking import in_thread
from services.rollout.config import RolloutConfig
from services.rollout.engine import CommitResult
from services.rollout.loop import STOPPED, EngineLoop
from services.rollout.meters import Meters
from services.rollout.pipeline import Outputs
from services.rollout.requests import replies, samples_of, sampling_of, scorings_of, tokenizer_decode
from services.rollout.samples import (
    BadManifest,
    Full,
    GivenUp,
    InDoubt,
    InvalidRequest,
    OtherVersion,
    Refused,
    Sample,
    ShuttingDown,
    UnservableRun,
)
from services.rollout.staging import Staging
from services.rollout.stopping import Decode
from services.rollout.streams import Stream
from services.rollout.weights import ServedModel
from shared.wire import rpc
from shared.wire.pb import rollout_pb2 as pb
from shared.wire.pb.rollout_pb2_grpc import RolloutEngineServicer
from shared.wire.tensors import DigestMismatch
from shared.wire.types import float32_bytes
from shared.wire.weights import ReplicaLink, UnknownVersion, WeightSyncError

T = TypeVar("T")
log = structlog.get_logger()

HEALTH_SERVICE = "timzero.rollout.v1.RolloutEngine"
"""SERVING while the replica may be sampled from; the empty name is SERVING while the process is up."""


class EngineEnded(Exception):
    """The engine loop failed; the process is about to exit."""


_CODES: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (BadManifest, grpc.StatusCode.INVALID_ARGUMENT),
    (OtherVersion, grpc.StatusCode.FAILED_PRECONDITION),
    (GivenUp, grpc.StatusCode.ABORTED),
    (UnservableRun, grpc.StatusCode.FAILED_PRECONDITION),
    (Full, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (ShuttingDown, grpc.StatusCode.UNAVAILABLE),
    (EngineEnded, grpc.StatusCode.INTERNAL),
    (InDoubt, grpc.StatusCode.DATA_LOSS),
    (DigestMismatch, grpc.StatusCode.DATA_LOSS),
    (UnknownVersion, grpc.StatusCode.NOT_FOUND),
    (WeightSyncError, grpc.StatusCode.UNAVAILABLE),
)
_ANSWERED = tuple(kind for kind, _ in _CODES)


class RolloutService(RolloutEngineServicer):
    """gRPC in front of an engine loop. Its methods run in the event loop of the main thread."""

    def __init__(
        self, config: RolloutConfig, loop: EngineLoop, link: ReplicaLink, meters: Meters, health: rpc.Health
    ) -> None:
        self._config, self._loop, self._link, self._meters = config, loop, link, meters
        self._engine, self._health = loop.engine, health
        self._staging = Staging(config, loop)
        self._streams: set[Stream] = set()
        self._health_update: asyncio.Task[None] | None = None
        self._decoders: dict[str, asyncio.Future[Decode]] = {}
        self.refused: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why this process may not serve the run: it should exit."""
        self.ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        """The engine loop is over; its fault, if that is why."""

    def deliver(self, outputs: Outputs) -> None:
        for chunk in outputs.chunks:
            chunk.sample.request.stream.put(chunk)
        for failure in outputs.failures:
            failure.sample.request.stream.fail(failure)

    def end(self, fault: BaseException | None) -> None:
        """The engine loop is over: no stream will hear from it again."""
        error = ShuttingDown(STOPPED) if fault is None else EngineEnded(f"the engine failed: {fault}")
        for stream in self._streams:
            stream.end(error)
        self.ended.set_result(fault)

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateReply]:
        stream = Stream(len(request.samples))
        samples: list[Sample] = []
        self._streams.add(stream)
        try:
            model = self._model
            samples = await self._samples(request, model, stream)
            self._submit(samples, model, stream)
            async for chunks in stream.chunks():
                for reply in replies(chunks, model.numerics.fingerprint):
                    yield reply
        except _ANSWERED as error:
            await _abort(context, error)
        finally:
            self._streams.discard(stream)
            if stream.num_open:
                # Most likely the client is gone: nobody would read what these samples still cost.
                self._loop.call(lambda: self._engine.abort(samples))

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortReply:
        ids = set(request.trajectory_ids)
        try:
            return pb.AbortReply(num_aborted=await self._in_loop(lambda: self._engine.abort_ids(ids)))
        except _ANSWERED as error:
            await _abort(context, error)

    async def Score(self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext) -> pb.ScoreReply:
        try:
            model = self._model
            scorings = scorings_of(request, model, kv_capacity_tokens=self._engine.config.kv_capacity_tokens)
            pending = [s for s in scorings if s.targets]
            await self._in_loop(lambda: self._engine.submit_scoring(pending, model))
            try:
                await asyncio.gather(*(asyncio.wrap_future(s.done) for s in pending))
            finally:
                self._loop.call(lambda: self._engine.abort(pending))
            logprobs = [float32_bytes(s.logprobs) for s in scorings]
            return pb.ScoreReply(logprobs=logprobs, manifest_digest=model.version.digest)
        except _ANSWERED as error:
            await _abort(context, error)

    async def PrepareWeights(
        self, request: pb.PrepareWeightsRequest, context: grpc.aio.ServicerContext
    ) -> pb.PrepareWeightsReply:
        begin = time.monotonic()
        try:
            timeout_s = context.time_remaining() or self._config.fetch_timeout_s
            model = await self._staging.prepare(request.manifest, timeout_s=timeout_s)
        except _ANSWERED as error:
            self._meters.failed("prepare")
            log.warning("prepare failed", digest=request.manifest.version.digest, reason=str(error))
            self._refuse_if_unservable(error)
            await _abort(context, error)
        seconds = time.monotonic() - begin
        self._meters.prepared(seconds)
        log.info(
            "prepared", run=model.run.config.run, step=model.version.step, digest=model.version.digest, seconds=seconds
        )
        return pb.PrepareWeightsReply(
            manifest_digest=model.version.digest, fingerprint=model.numerics.fingerprint, seconds=seconds
        )

    async def CommitWeights(
        self, request: pb.CommitWeightsRequest, context: grpc.aio.ServicerContext
    ) -> pb.CommitWeightsReply:
        try:
            result = await self._staging.commit(request.manifest_digest, mode=request.mode, on_commit=self._committed)
        except _ANSWERED as error:
            self._meters.failed("commit")
            self._refuse_if_unservable(error)
            await _abort(context, error)
        return pb.CommitWeightsReply(
            manifest_digest=result.digest,
            probe_tokens=result.probe_tokens,
            probe_differing=result.probe_differing,
            pause_seconds=result.pause_s,
            pause_parts=result.parts_s,
        )

    async def AbortWeights(
        self, request: pb.AbortWeightsRequest, context: grpc.aio.ServicerContext
    ) -> pb.AbortWeightsReply:
        self._staging.abort(request.manifest_digest)
        return pb.AbortWeightsReply()

    async def Status(self, request: pb.StatusRequest, context: grpc.aio.ServicerContext) -> pb.StatusReply:
        engine, model = self._engine, self._engine.model
        reply = pb.StatusReply(
            replica=self._config.replica,
            num_running=len(engine.scheduler.running),
            num_waiting=len(engine.scheduler.waiting),
            kv_usage=engine.kv_usage,
            num_preemptions=engine.scheduler.num_preemptions,
            num_sampled_tokens=engine.counters.sampled_tokens,
            num_prefix_hit_tokens=engine.scheduler.num_prefix_hit_tokens,
            num_continued_tokens=engine.counters.continued_tokens,
            staged_digest=self._staging.staged_digest,
            is_recomputing=engine.recompute.is_going_on,
            recompute_seconds=engine.recompute.seconds,
        )
        if model is not None:
            reply.manifest_digest = model.version.digest
            reply.lineage, reply.policy_step = model.version.lineage, model.version.step
            reply.kernels.update(engine.describe())
            reply.fingerprint = model.numerics.fingerprint
            reply.max_model_len = model.run.config.max_model_len
        return reply

    @property
    def _model(self) -> ServedModel:
        if self._engine.model is None:
            raise OtherVersion("the replica holds no version yet")
        return self._engine.model

    def _refuse_if_unservable(self, error: Exception) -> None:
        if isinstance(error, UnservableRun) and not self.refused.done():
            self.refused.set_result(str(error))

    def _committed(self, result: CommitResult) -> None:
        model, doubt = self._model, self._engine.doubt
        self._link.manifest_digest = result.digest
        self._meters.committed(model, result, self._engine.describe())
        update = rpc.set_health(self._health, serving=not doubt, service=HEALTH_SERVICE)
        self._health_update = asyncio.create_task(update)
        write = log.error if doubt else log.info
        write(
            "committed",
            step=model.version.step,
            digest=result.digest,
            probe_tokens=result.probe_tokens,
            probe_differing=result.probe_differing,
            pause_s=result.pause_s,
            parts_s=result.parts_s,
            doubt=doubt,
        )

    async def _samples(self, request: pb.GenerateRequest, model: ServedModel, stream: Stream) -> list[Sample]:
        sampling = sampling_of(request)
        return samples_of(
            request,
            sampling,
            model,
            kv_capacity_tokens=self._engine.config.kv_capacity_tokens,
            decode=await self._decode(model.run.config.model) if sampling.stop else None,
            stream=stream,
        )

    def _submit(self, samples: list[Sample], model: ServedModel, stream: Stream) -> None:
        """Puts a group in line; the stream hears of a refusal. One that is not refused costs no way back from the engine."""
        event_loop = asyncio.get_running_loop()

        def hand_on(submitted: Future[None]) -> None:
            error = submitted.exception()
            # Any other error ends the engine loop, which every stream hears.
            if isinstance(error, Refused):
                event_loop.call_soon_threadsafe(stream.end, error)

        self._loop.call(lambda: self._engine.submit(samples, model)).add_done_callback(hand_on)

    async def _decode(self, model_name: str) -> Decode:
        """The run's tokenizer, loaded by the first request that needs it."""
        if model_name not in self._decoders:
            self._decoders[model_name] = in_thread(lambda: tokenizer_decode(model_name))
        try:
            # A request that is cancelled must not take the load away from the others that wait for it.
            return await asyncio.shield(self._decoders[model_name])
        except InvalidRequest:
            self._decoders.pop(model_name, None)
            raise

    async def _in_loop(self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._loop.call(function))


async def _abort(context: grpc.aio.ServicerContext, error: Exception) -> NoReturn:
    code = next(code for kind, code in _CODES if isinstance(error, kind))
    await context.abort(code, str(error))
    raise AssertionError("abort raises")
