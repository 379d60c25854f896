"""Architectures that benchmarks run on; weights are random unless a directory of real ones is given."""

from __future__ import annotations

from shared.models import ModelConfig

QWEN3_1_7B = ModelConfig.from_hf(
    {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }
)
SMOLLM2_135M = ModelConfig.from_hf(
    {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_theta": 100_000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
)
TINY = ModelConfig.from_hf(
    {
        "model_type": "qwen3",
        "vocab_size": 131,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
    }
)


def num_parameters(model: ModelConfig) -> int:
    """Weights that a step reads: projections, norms and the head, but not a table of embeddings beside the head."""
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    d, i = model.hidden_size, model.intermediate_size
    norms = 2 * d + (2 * model.head_dim if model.qk_norm else 0)
    return model.num_layers * (d * (q + 2 * kv) + q * d + 3 * d * i + norms) + d + model.vocab_size * d


def kv_elements(model: ModelConfig) -> int:
    """Elements of the keys and values of one token, all layers."""
    return model.num_layers * 2 * model.num_kv_heads * model.head_dim
