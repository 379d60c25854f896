"""Models, batches, and the arithmetic of their speed."""

from __future__ import annotations

from dataclasses import dataclass

from shared.models import ModelConfig, Rope

PEAK_FLOPS = 989e12
"""Dense bfloat16 of an H100 or H200 SXM, by its data sheet."""


@dataclass(frozen=True)
class Case:
    """Sequences of one length, packed."""

    sequences: int
    length: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    @property
    def params(self) -> dict[str, int]:
        return {"sequences": self.sequences, "length": self.length}


def tiny() -> ModelConfig:
    return ModelConfig(
        family="qwen3",
        vocab_size=263,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        rope=Rope(head_dim=16),
        qk_norm=True,
        tie_word_embeddings=True,
    )


def num_parameters(config: ModelConfig) -> int:
    """Of a decoder without biases; a tied head counts once."""
    d, i, dim = config.hidden_size, config.intermediate_size, config.head_dim
    attention = d * dim * (2 * config.num_heads + 2 * config.num_kv_heads) + (2 * dim if config.qk_norm else 0)
    layer = attention + 3 * d * i + 2 * d
    return config.num_layers * layer + config.vocab_size * d * (1 if config.tie_word_embeddings else 2) + d


def flops(config: ModelConfig, case: Case, *, is_step: bool) -> float:
    """Of one forward, 2 x parameters x tokens and causal attention, or of a step, three times that; recomputation not counted."""
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * case.sequences * case.length**2
    return (2 * num_parameters(config) * case.tokens + attention) * (3 if is_step else 1)


def mfu(config: ModelConfig, case: Case, seconds: float, *, is_step: bool) -> float:
    """Share of PEAK_FLOPS."""
    return flops(config, case, is_step=is_step) / seconds / PEAK_FLOPS
