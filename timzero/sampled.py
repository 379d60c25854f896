"""Groups that an engine of the user's sampled, as the client posts them: plain values, cut into requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

MAX_TOKENS = 2**19
"""Of one request: at most some 20 bytes each, against the gateway's default limit of 16 MiB a body."""
MAX_GROUPS = 256


def packed(group: Mapping[str, Any]) -> dict[str, Any]:
    """The group without arrays; logprobs that are float32 keep their bits."""
    plain = _plain(group)
    if isinstance(plain.get("samples"), Sequence):
        plain["samples"] = [_packed_sample(s) if isinstance(s, Mapping) else s for s in plain["samples"]]
    return plain


def parts(groups: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """The groups in order, cut into requests that stay below the limits."""
    part: list[Mapping[str, Any]] = []
    num_tokens = 0
    for group in groups:
        size = _num_tokens(group)
        if part and (num_tokens + size > MAX_TOKENS or len(part) == MAX_GROUPS):
            yield part
            part, num_tokens = [], 0
        part.append(group)
        num_tokens += size
    if part:
        yield part


def _num_tokens(group: Mapping[str, Any]) -> int:
    """What is no group counts as nothing: the gateway says what is wrong with it."""
    samples = group.get("samples")
    samples = [s for s in samples if isinstance(s, Mapping)] if isinstance(samples, Sequence) else []
    return sum(len(ids) for ids in (group.get("prompt_token_ids"), *(s.get("token_ids") for s in samples)) if ids)


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in fields.items()}


def _packed_sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    plain, logprobs = _plain(sample), sample.get("logprobs")
    if isinstance(logprobs, np.ndarray) and logprobs.dtype == np.float32:
        plain["logprobs_f32"] = logprobs.astype("<f4").tobytes()
        del plain["logprobs"]
    return plain
