"""Requests as they arrive, checked and turned into what the engine computes; and its output turned into messages."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from services.rollout.samples import GroupRequest, InvalidRequest, OtherVersion, Sample, SampleChunk, Scoring
from services.rollout.stopping import REPLACEMENT, Decode, StopRule
from services.rollout.weights import ServedModel
from shared.wire import rpc
from shared.wire.pb import rollout_pb2 as pb
from shared.wire.pb import weight_sync_pb2 as ws
from shared.wire.types import SamplingParams, int32_array

BYTES_PER_TOKEN, BYTES_PER_CHUNK = 12, 64
"""In a message: of an id, a logprob and a top-1 id, and of what a chunk has besides them and its name."""


def sampling_of(message: pb.GenerateRequest) -> SamplingParams:
    """Raises InvalidRequest, naming the rule and the value got."""
    given, is_evaluation = message.sampling, message.evaluation
    params = SamplingParams(
        temperature=given.temperature,
        max_tokens=given.max_tokens,
        stop_token_ids=tuple(given.stop_token_ids),
        stop=tuple(given.stop),
        top_p=given.top_p,
        top_k=given.top_k,
        min_p=given.min_p,
    )
    checks = {
        "temperature must be finite and >= 0": math.isfinite(params.temperature) and params.temperature >= 0,
        "max_tokens must be >= 1": params.max_tokens >= 1,
        "top_p must be in [0, 1]": 0 <= params.top_p <= 1,
        "min_p must be in [0, 1]": 0 <= params.min_p <= 1,
        "stop strings must not be empty": all(params.stop),
        "stop strings must not contain the replacement character": not any(REPLACEMENT in s for s in params.stop),
        "temperature 0 belongs to evaluations; training rollouts need one above 0": is_evaluation
        or params.temperature > 0,
        "top_p, top_k and min_p are refused for training rollouts": is_evaluation or not params.is_truncated,
    }
    for rule, is_met in checks.items():
        if not is_met:
            raise InvalidRequest(f"{rule}, got {params}")
    return params


def samples_of(
    message: pb.GenerateRequest,
    sampling: SamplingParams,
    model: ServedModel,
    *,
    kv_capacity_tokens: int,
    decode: Decode | None,
    stream: Any,
) -> list[Sample]:
    """The samples of one Generate call.

    Args:
        sampling: `sampling_of` the message.
        kv_capacity_tokens: tokens of the longest sequence that the cache holds.
        decode: of the run's tokenizer, where the request has stop strings.

    Raises: InvalidRequest, OtherVersion.
    """
    run = model.run.config
    held = (run.run, model.version.digest)
    if (message.run, message.manifest_digest) != held:
        raise OtherVersion(f"the replica holds {held}, asked for {(message.run, message.manifest_digest)}")
    request = GroupRequest(
        seed=message.seed,
        prompt_number=message.prompt_number,
        sampling=sampling,
        stream=stream,
    )
    if not message.samples:
        raise InvalidRequest("a call without samples; give at least one")
    names = [s.trajectory_id for s in message.samples]
    if len({*names} - {""}) != len(names):
        raise InvalidRequest(f"every sample needs a trajectory_id of its own, got {names}")
    prompt = _token_ids(message.prompt_token_ids, "prompt_token_ids", model.run.model.vocab_size)
    if not prompt:
        raise InvalidRequest("prompt_token_ids is empty; a prompt has at least one token")
    limit = min(run.max_model_len, kv_capacity_tokens)
    if len(prompt) + request.sampling.max_tokens > limit:
        raise InvalidRequest(
            f"{len(prompt)} prompt tokens and max_tokens {request.sampling.max_tokens} exceed {limit}, "
            f"the least of the run's max_model_len ({run.max_model_len}) and the cache; shorten one of them"
        )
    # One without strings keeps nothing of a sample.
    shared = None if sampling.stop else StopRule(sampling)
    return [_sample(s, request, prompt, model, shared or StopRule(sampling, decode)) for s in message.samples]


def _sample(
    message: pb.Sample, request: GroupRequest, prompt: array[int], model: ServedModel, stop_rule: StopRule
) -> Sample:
    continued = _token_ids(message.token_ids, f"token_ids of {message.trajectory_id}", model.run.model.vocab_size)
    if len(continued) > request.sampling.max_tokens:
        raise InvalidRequest(
            f"{message.trajectory_id} continues {len(continued)} tokens, but max_tokens is {request.sampling.max_tokens}"
        )
    return Sample(
        arrival=0,
        token_ids=prompt + continued,
        request=request,
        trajectory_id=message.trajectory_id,
        sample_index=message.sample_index,
        num_prompt_tokens=len(prompt),
        num_continued_tokens=len(continued),
        stop_rule=stop_rule,
    )


def scorings_of(message: pb.ScoreRequest, model: ServedModel, *, kv_capacity_tokens: int) -> list[Scoring]:
    """The sequences of one Score call, empty ones for those of a single token. Raises InvalidRequest."""
    if not (math.isfinite(message.temperature) and message.temperature >= 0):
        raise InvalidRequest(f"temperature must be finite and >= 0 (0 reads as 1), got {message.temperature}")
    limit = min(model.run.config.max_model_len, kv_capacity_tokens)
    scorings = []
    for i, data in enumerate(message.token_ids):
        ids = _token_ids(data, f"sequence {i}", model.run.model.vocab_size)
        if not 1 <= len(ids) <= limit:
            raise InvalidRequest(f"sequence {i} has {len(ids)} tokens, expected 1 to {limit}")
        scorings.append(Scoring.of(ids, message.temperature))
    return scorings


def replies(chunks: Sequence[SampleChunk], fingerprint: str) -> Iterator[pb.GenerateReply]:
    """Chunks of one call in order, in few messages: each of one version, and of `rpc.CHUNK_BYTES` or a single chunk at most."""
    for version, same in groupby(chunks, key=lambda chunk: chunk.version):
        stamp = ws.Version(lineage=version.lineage, step=version.step, digest=version.digest)
        reply, num_bytes = pb.GenerateReply(version=stamp, fingerprint=fingerprint), 0
        for chunk in same:
            size = BYTES_PER_CHUNK + len(chunk.sample.trajectory_id) + BYTES_PER_TOKEN * len(chunk.token_ids)
            if num_bytes and num_bytes + size > rpc.CHUNK_BYTES:
                yield reply
                reply, num_bytes = pb.GenerateReply(version=stamp, fingerprint=fingerprint), 0
            num_bytes += size
            # Made in place: a message that is handed over would be copied.
            reply.chunks.add(
                trajectory_id=chunk.sample.trajectory_id,
                start=chunk.start,
                token_ids=chunk.token_ids.tobytes(),
                logprobs=chunk.logprobs.tobytes(),
                top1=chunk.top1.tobytes(),
                kv=chunk.kv,
                finish_reason=chunk.finish_reason or "",
            )
        yield reply


def tokenizer_decode(model_name: str) -> Decode:
    """Loads the run's tokenizer, which takes seconds: call it in a thread.

    Raises InvalidRequest when there is none to be had.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_name)
    except (OSError, ValueError) as error:
        raise InvalidRequest(
            f"stop strings need the tokenizer of {model_name!r}, which cannot be loaded: {error}"
        ) from error

    def decode(token_ids: Sequence[int]) -> str:
        text = tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    return decode


def _token_ids(data: bytes, name: str, vocab_size: int) -> array[int]:
    if len(data) % 4:
        raise InvalidRequest(f"{name} must be int32 values, got {len(data)} bytes")
    if not data:
        return array("i")
    ids = int32_array(data)
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise InvalidRequest(f"{name} must be in [0, {vocab_size}), got values from {ids.min()} to {ids.max()}")
    return array("i", data)
