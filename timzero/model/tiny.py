"""`tiny-sort`: a random Llama of 76,096 parameters with a tokenizer of 32 words, the same bytes on every machine."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from timzero.model.directory import write_json, write_weights

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 64, 2, 4, 2, 16, 128
WORDS = [
    "<pad>", "<bos>", "<eos>", "<unk>", *"0123456789", "sort", "=", "system", "user", "assistant", ":",
    *"abcdefghijkl",
]  # fmt: skip
SEED = 20_26


def write(staging: Path) -> None:
    """Writes the whole model directory. Weights are float32."""
    write_weights(staging / "model.safetensors", _weights(), "float32")
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    write_json(
        staging / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "float32",
            "vocab_size": len(WORDS),
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            **ids,
        },
    )
    write_json(staging / "generation_config.json", ids)
    _write_tokenizer(staging)


def _weights() -> dict[str, np.ndarray]:
    """Normal values of standard deviation 1/sqrt(fan in); norms are ones."""
    rng = np.random.Generator(np.random.PCG64(SEED))

    def normal(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": normal(len(WORDS), HIDDEN)}
    for i in range(LAYERS):
        tensors |= {
            f"model.layers.{i}.input_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"model.layers.{i}.self_attn.q_proj.weight": normal(HEADS * HEAD_DIM, HIDDEN),
            f"model.layers.{i}.self_attn.k_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            f"model.layers.{i}.self_attn.v_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            f"model.layers.{i}.self_attn.o_proj.weight": normal(HIDDEN, HEADS * HEAD_DIM),
            f"model.layers.{i}.post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"model.layers.{i}.mlp.gate_proj.weight": normal(INTERMEDIATE, HIDDEN),
            f"model.layers.{i}.mlp.up_proj.weight": normal(INTERMEDIATE, HIDDEN),
            f"model.layers.{i}.mlp.down_proj.weight": normal(HIDDEN, INTERMEDIATE),
        }
    tensors["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    return tensors


def _write_tokenizer(staging: Path) -> None:
    special = [
        {"id": i, "content": WORDS[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for i in range(4)
    ]  # fmt: skip
    write_json(
        staging / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": special,
            "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": None,
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(WORDS)}, "unk_token": "<unk>"},
        },
    )
    write_json(
        staging / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 2048,
            "chat_template": "{% for m in messages %}{{ '<bos> ' + m['role'] + ' : ' + m['content'] + ' <eos> ' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<bos> assistant : ' }}{% endif %}",
        },
    )
