"""Other engines on the uniform workload and on its prompts alone, as measured on an H200 before: tokens per second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    name: str
    mode: str
    """plain | exact: whether it is asked for results that do not depend on the batch."""
    rates: Mapping[str, float]
    """output: sampled tokens, prefill included in the time; prompt: tokens of prompts, nothing else done."""
    note: str = ""
    variant: str = ""
    """What tells it from others of its name and mode, in a word or two."""


VLLM = Peer(
    name="vLLM 0.26.0", mode="plain", rates={"output": 23_800, "prompt": 184_000},
    note="the least of its runs; the best were 24,100 and 188,000",
)  # fmt: skip
VEXACT = Peer(
    name="VeXact 88ad2a9", mode="plain", rates={"output": 16_712, "prompt": 93_000},
    note="FlashAttention 3; its sort skipped, which is in its favour",
)  # fmt: skip
PEERS = (
    Peer(name="transformers", mode="plain", rates={"output": 4_239, "prompt": 118_000},
         note="generate, for 128 new tokens instead of 512", variant="128 new tokens"),
    VEXACT,
    Peer(
        name=VEXACT.name, mode="exact", rates={"output": 13_329, "prompt": 69_000},
        note="FlashAttention 3; its sort skipped, 10,850 as it falls back",
    ),
    VLLM,
    Peer(
        name=VLLM.name, mode="exact", rates={"output": 17_647, "prompt": 139_000},
        note="raw logprobs; the best run of prompts was 140,000", variant="raw logprobs",
    ),
    Peer(name=VLLM.name, mode="exact", rates={"output": 21_057}, note="processed logprobs", variant="processed logprobs"),
)  # fmt: skip
