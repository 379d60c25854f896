"""msgpack with a schema version byte in front. Arrays are raw little-endian bytes; nothing is ever pickled.

>>> decode_group(encode_group(group)) == group  # arrays compare by value
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgpack
import numpy as np

from shared.wire.types import FinishReason, Group, Kv, SamplingParams, Span, SpanKind, Trajectory

SCHEMA_VERSION = 1

_ARRAYS = {"token_ids": "<i4", "logprobs": "<f4", "top1": "<i4", "loss_mask": "|u1"}


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
        return Group(**record, trajectories=trajectories)
    except (KeyError, TypeError, AttributeError) as error:
        raise CodecError(f"not a group record: {error}") from error


def _pack(record: dict[str, Any]) -> bytes:
    return bytes([SCHEMA_VERSION]) + msgpack.packb(record, use_bin_type=True)


def _unpack(data: bytes) -> dict[str, Any]:
    if not data or data[0] != SCHEMA_VERSION:
        found = data[0] if data else "nothing"
        raise CodecError(f"schema version {found}, this build reads {SCHEMA_VERSION}")
    try:
        record = msgpack.unpackb(memoryview(data)[1:], raw=False)
    except Exception as error:  # msgpack raises half a dozen unrelated types on malformed input
        raise CodecError(f"malformed msgpack: {error}") from error
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
        sampling = record["sampling"]
        for name in ("stop", "stop_token_ids"):
            sampling[name] = tuple(sampling[name])
        record["sampling"] = SamplingParams(**sampling)
        record["finish_reason"] = FinishReason(record["finish_reason"])
        record["replicas"] = tuple(record["replicas"])
        trajectory = Trajectory(**record)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CodecError(f"not a trajectory record: {error}") from error
    validate(trajectory)
    return trajectory


def validate(trajectory: Trajectory) -> None:
    """Raises CodecError when lengths, spans or numbers contradict each other."""
    t = trajectory
    problems = []
    if len(t.top1) != len(t.logprobs):
        problems.append(f"{len(t.logprobs)} logprobs but {len(t.top1)} top-1 ids")
    if len(t.loss_mask) != len(t.token_ids):
        problems.append(f"{len(t.token_ids)} tokens but a loss mask of {len(t.loss_mask)}")
    if len(t.logprobs) > len(t.token_ids):
        problems.append(f"{len(t.logprobs)} logprobs for {len(t.token_ids)} tokens")
    if not np.isfinite(t.logprobs).all():
        problems.append("a logprob that is not finite")
    if t.reward is not None and not np.isfinite(t.reward):
        problems.append(f"reward {t.reward}")
    end = 0
    for span in t.spans:
        if span.start != end or span.end <= span.start:
            problems.append(f"span {span.start}:{span.end} behind {end}")
            break
        end = span.end
    if end != len(t.token_ids):
        problems.append(f"spans cover {end} of {len(t.token_ids)} tokens")
    if problems:
        raise CodecError(f"trajectory {t.trajectory_id}: " + "; ".join(problems))
