"""msgpack with a schema version byte in front. Arrays are raw little-endian bytes; nothing is ever pickled.

>>> encode_group(decode_group(data)) == data  # to the byte
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import msgpack
import numpy as np

from shared.wire.types import FinishReason, Group, Kv, SamplingParams, Span, SpanKind, Trajectory

SCHEMA_VERSION = 1

_ARRAYS = {"token_ids": "<i4", "logprobs": "<f4", "top1": "<i4", "loss_mask": "|u1"}

_NUMBER = int | float
_GROUP_TYPES: dict[str, Any] = {"run": str, "group_id": str, "prompt_number": int}
_TRAJECTORY_TYPES: dict[str, Any] = {
    "trajectory_id": str, "group_id": str, "prompt_id": str, "sample_index": int, "run": str, "seed": int,
    "fingerprint": str, "reward": _NUMBER | None, "rewards": {str: _NUMBER}, "replicas": [str],
    "sampler": str, "timestamps": {str: _NUMBER},
}  # fmt: skip
_SAMPLING_TYPES: dict[str, Any] = {
    "temperature": _NUMBER, "max_tokens": int, "stop_token_ids": [int], "stop": [str],
    "top_p": _NUMBER, "top_k": int, "min_p": _NUMBER,
}  # fmt: skip
_SPAN_TYPES: dict[str, Any] = {"start": int, "end": int, "lineage": int, "policy_step": int, "manifest_digest": str}


class CodecError(ValueError):
    """The bytes are no record of a schema this build reads."""


def encode_trajectory(trajectory: Trajectory) -> bytes:
    return _pack(_trajectory_dict(trajectory))


def decode_trajectory(data: bytes) -> Trajectory:
    """Raises CodecError with what is wrong; a record that fails here is poison and never reaches a batch."""
    return _trajectory(_unpack(data))


def encode_group(group: Group) -> bytes:
    return _pack(
        {
            "run": group.run,
            "group_id": group.group_id,
            "prompt_number": group.prompt_number,
            "trajectories": [_trajectory_dict(t) for t in group.trajectories],
        }
    )


def decode_group(data: bytes) -> Group:
    """Raises CodecError as `decode_trajectory` does."""
    record = _unpack(data)
    try:
        trajectories = tuple(_trajectory(t) for t in record.pop("trajectories"))
        group = Group(**record, trajectories=trajectories)
    except (KeyError, TypeError) as error:
        raise CodecError(f"not a group record: {error}") from error
    _check_types(group, _GROUP_TYPES)
    for t in trajectories:
        if (t.run, t.group_id) != (group.run, group.group_id):
            raise CodecError(
                f"group {group.group_id} of run {group.run} holds {t.trajectory_id} of {t.run}, {t.group_id}"
            )
    return group


def _pack(record: dict[str, Any]) -> bytes:
    return bytes([SCHEMA_VERSION]) + msgpack.packb(record, use_bin_type=True)


def _unpack(data: bytes) -> dict[str, Any]:
    if not data or data[0] != SCHEMA_VERSION:
        found = data[0] if data else "nothing"
        raise CodecError(f"schema version {found}, this build reads {SCHEMA_VERSION}")
    try:
        record = msgpack.unpackb(memoryview(data)[1:], raw=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise CodecError(f"malformed msgpack: {error or type(error).__name__}") from error
    if not isinstance(record, dict):
        raise CodecError(f"expected a map, got {type(record).__name__}")
    return record


def _trajectory_dict(trajectory: Trajectory) -> dict[str, Any]:
    record = {f.name: getattr(trajectory, f.name) for f in fields(Trajectory)}
    for name, dtype in _ARRAYS.items():
        record[name] = np.ascontiguousarray(record[name], dtype=dtype).tobytes()
    record["spans"] = [
        (s.start, s.end, s.kind.value, s.lineage, s.policy_step, s.manifest_digest, s.kv.value)
        for s in trajectory.spans
    ]
    record["sampling"] = {f.name: getattr(trajectory.sampling, f.name) for f in fields(SamplingParams)}
    record["finish_reason"] = trajectory.finish_reason.value
    return record


def _trajectory(record: dict[str, Any]) -> Trajectory:
    try:
        for name, dtype in _ARRAYS.items():
            record[name] = np.frombuffer(record[name], dtype=dtype).copy()
        record["spans"] = tuple(
            Span(start=a, end=b, kind=SpanKind(k), lineage=g, policy_step=s, manifest_digest=d, kv=Kv(v))
            for a, b, k, g, s, d, v in record["spans"]
        )
        sampling = dict(record["sampling"])
        for name in ("stop", "stop_token_ids"):
            sampling[name] = tuple(sampling[name])
        record["sampling"] = SamplingParams(**sampling)
        record["finish_reason"] = FinishReason(record["finish_reason"])
        record["replicas"] = tuple(record["replicas"])
        record["rewards"], record["timestamps"] = dict(record["rewards"]), dict(record["timestamps"])
        trajectory = Trajectory(**record)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CodecError(f"not a trajectory record: {error}") from error
    validate(trajectory)
    return trajectory


def _check_types(record: Any, types: dict[str, Any]) -> None:
    """Raises CodecError unless every field named is of its type; msgpack keeps no schema of its own."""
    for name, kind in types.items():
        value = getattr(record, name)
        if not _is(value, kind):
            raise CodecError(f"{type(record).__name__}.{name}: got {value!r:.60}")


def _is(value: Any, kind: Any) -> bool:
    """Args: kind: a type, [type] for a tuple of it, or {str: type} for a map to it."""
    if isinstance(kind, list):
        return isinstance(value, tuple) and all(_is(item, kind[0]) for item in value)
    if isinstance(kind, dict):
        return isinstance(value, dict) and all(_is(k, str) and _is(v, kind[str]) for k, v in value.items())
    return isinstance(value, kind) and not isinstance(value, bool)


def validate(trajectory: Trajectory) -> None:
    """Raises CodecError when types are wrong, or lengths, spans or numbers contradict each other."""
    t = trajectory
    _check_types(t, _TRAJECTORY_TYPES)
    _check_types(t.sampling, _SAMPLING_TYPES)
    for span in t.spans:
        _check_types(span, _SPAN_TYPES)
    problems = []
    if len(t.top1) != len(t.logprobs):
        problems.append(f"{len(t.logprobs)} logprobs but {len(t.top1)} top-1 ids")
    if len(t.loss_mask) != len(t.token_ids):
        problems.append(f"{len(t.token_ids)} tokens but a loss mask of {len(t.loss_mask)}")
    if len(t.logprobs) > len(t.token_ids):
        problems.append(f"{len(t.logprobs)} logprobs for {len(t.token_ids)} tokens")
    if not np.isfinite(t.logprobs).all():
        problems.append("a logprob that is not finite")
    if not all(math.isfinite(r) for r in (t.reward or 0, *t.rewards.values())):
        problems.append(f"reward {t.reward} of {t.rewards}")
    end = 0
    for span in t.spans:
        if span.start != end or span.end <= span.start:
            problems.append(f"span {span.start}:{span.end} behind {end}")
            break
        end = span.end
    if end != len(t.token_ids):
        problems.append(f"spans cover {end} of {len(t.token_ids)} tokens")
    num_sampled = sum(span.end - span.start for span in t.spans if span.kind is SpanKind.SAMPLED)
    if num_sampled != len(t.logprobs):
        problems.append(f"spans say {num_sampled} sampled tokens, there are {len(t.logprobs)} logprobs")
    if (t.loss_mask > 1).any():
        problems.append("a loss mask that is neither 0 nor 1")
    if problems:
        raise CodecError(f"trajectory {t.trajectory_id}: " + "; ".join(problems))
