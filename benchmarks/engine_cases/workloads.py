"""What the engine is asked to do: the field's uniform workload and five that stress something else."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.architectures import QWEN3_1_7B, SMOLLM2_135M, TINY, kv_elements, num_parameters
from benchmarks.engine_cases.peers import VEXACT, VLLM
from shared.models import ModelConfig

BYTES = 2
"""Of an element of weights, keys and values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    prompt: list[int]
    max_tokens: int
    samples: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    name: str
    model: ModelConfig
    num_prompts: int
    prompt_tokens: int
    samples: int = 1
    new_tokens: int = 1
    is_heavy_tailed: bool = False
    """Lengths are log-normal with median `new_tokens`, at most `longest`, instead of all equal."""
    longest: int = 0
    is_prefill: bool = False
    """Prompt tokens are counted, not sampled ones."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Keys of RolloutConfig."""
    peers: Mapping[str, float] = field(default_factory=dict)
    """Tokens per second of other engines on the same workload and machine."""
    target: float | None = None
    """Of the exact mode, tokens per second."""
    least_ratio: float | None = None
    """Of exact over fast."""

    def requests(self, repeat: int) -> list[Request]:
        """Other prompts in every repeat, so that no cache remembers them; the same lengths."""
        draw, lengths = random.Random(f"{self.name}.{repeat}"), self.lengths()
        return [
            Request(
                prompt=draw.choices(range(self.model.vocab_size), k=self.prompt_tokens),
                max_tokens=n,
                samples=self.samples,
            )
            for n in lengths
        ]

    def lengths(self) -> list[int]:
        """New tokens of each prompt's samples."""
        if not self.is_heavy_tailed:
            return [self.new_tokens] * self.num_prompts
        draw = random.Random(self.name)
        drawn = [round(self.new_tokens * draw.lognormvariate(0.0, 1.2)) for _ in range(self.num_prompts - 1)]
        return [self.longest, *(min(max(n, 1), self.longest) for n in drawn)]

    @property
    def num_sequences(self) -> int:
        return self.num_prompts * self.samples

    @property
    def max_model_len(self) -> int:
        return self.prompt_tokens + max(self.lengths())

    @property
    def counted_tokens(self) -> int:
        """What the tokens per second count."""
        return self.num_prompts * self.prompt_tokens if self.is_prefill else self.samples * sum(self.lengths())

    @property
    def kv_tokens(self) -> int:
        """Slots that hold everything, in pages of 64 with one to spare for each sequence."""
        return self.samples * sum((self.prompt_tokens + n + 127) // 64 * 64 for n in self.lengths())

    @property
    def unit(self) -> str:
        return "prompt_tokens_per_s" if self.is_prefill else "output_tokens_per_s"

    def floor_s(self, *, bandwidth: float, matmul: float) -> tuple[float, float]:
        """Seconds that prefill and decode take at least where `bandwidth` bytes move and `matmul` FLOP are done a second.

        Prefill is bound by its products and its attention, each prompt once; decode by reading the weights once a step and the
        keys and values of every context, everything running at once.
        """
        m, p = self.model, self.prompt_tokens
        attention = 4 * m.num_layers * m.num_heads * m.head_dim * p * p / 2
        layers = num_parameters(m) - m.vocab_size * m.hidden_size
        prefill = self.num_prompts * (2 * layers * p + attention) / matmul
        steps = max(self.lengths()) - 1
        context = self.samples * sum((n - 1) * p + n * (n - 1) / 2 for n in self.lengths())
        decode = BYTES * (steps * num_parameters(m) + context * kv_elements(m)) / bandwidth
        return prefill, decode


FIELD = {
    "max_running": 256,
    "max_step_tokens": 8192,
    "max_chunk_tokens": 8192,
    "page_size": 64,
    "shares_prefixes": False,
}
WORKLOADS = (
    Workload(
        name="uniform", model=QWEN3_1_7B, num_prompts=256, prompt_tokens=256, new_tokens=512, config=FIELD,
        peers={"vllm 0.26.0": VLLM.rates["output"], "vexact 88ad2a9 fa3 plain": VEXACT.rates["output"]},
        target=24_000, least_ratio=0.97,
    ),
    Workload(
        name="prefill", model=QWEN3_1_7B, num_prompts=256, prompt_tokens=256, is_prefill=True, config=FIELD,
        peers={"vllm 0.26.0": VLLM.rates["prompt"]}, target=180_000,
    ),
    Workload(
        name="group", model=QWEN3_1_7B, num_prompts=32, prompt_tokens=512, samples=8, new_tokens=512,
        config=FIELD | {"shares_prefixes": True},
    ),
    Workload(
        name="long_tail", model=QWEN3_1_7B, num_prompts=128, prompt_tokens=256, new_tokens=512, is_heavy_tailed=True,
        longest=8192 - 256, config=FIELD, least_ratio=0.95,
    ),
    Workload(
        name="long_context", model=QWEN3_1_7B, num_prompts=8, prompt_tokens=32_768 - 512, new_tokens=512, config=FIELD,
        least_ratio=0.95,
    ),
    Workload(
        name="tiny", model=SMOLLM2_135M, num_prompts=1024, prompt_tokens=128, new_tokens=256,
        config=FIELD | {"max_running": 1024},
    ),
)  # fmt: skip

SMALL = {"max_running": 8, "max_step_tokens": 64, "max_chunk_tokens": 32, "page_size": 16, "shares_prefixes": False}
SMALL_WORKLOADS = (
    Workload(name="uniform", model=TINY, num_prompts=8, prompt_tokens=12, new_tokens=6, config=SMALL),
    Workload(name="prefill", model=TINY, num_prompts=8, prompt_tokens=24, is_prefill=True, config=SMALL),
    Workload(
        name="group", model=TINY, num_prompts=2, prompt_tokens=40, samples=4, new_tokens=6,
        config=SMALL | {"shares_prefixes": True},
    ),
    Workload(
        name="long_tail", model=TINY, num_prompts=6, prompt_tokens=8, new_tokens=4, is_heavy_tailed=True, longest=30,
        config=SMALL,
    ),
    Workload(name="long_context", model=TINY, num_prompts=2, prompt_tokens=150, new_tokens=4, config=SMALL),
    Workload(name="tiny", model=TINY, num_prompts=16, prompt_tokens=6, new_tokens=4, config=SMALL | {"max_running": 16}),
)  # fmt: skip
"""The same kinds for a CPU, in seconds: they show that the code runs, and no speed."""
