"""A Llama in a GGUF file -> Hugging Face weights, config and tokenizer, without torch.

llama.cpp stores the rows of q and k so that the two halves of a rotary pair are neighbours; Hugging Face keeps the halves
apart. Everything else is a renaming and a dequantisation.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize

from timzero.model.directory import ModelError, write_json, write_weights

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_CONTROL = 3
"""llama.cpp's token type of special tokens."""


def convert(source: Path, staging: Path) -> None:
    """Writes model.safetensors (bfloat16), config.json, generation_config.json and the tokenizer's files into `staging`.

    Raises: ModelError when the file is no Llama or uses a tokenizer other than SmolLM's.
    """
    try:
        reader = GGUFReader(str(source))
    except (OSError, ValueError) as error:
        raise ModelError(f"{source} is no GGUF file: {error}") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    found = (fields.get("general.architecture"), fields.get("tokenizer.ggml.pre"))
    if found != ("llama", "smollm"):
        raise ModelError(f"{source}: only architecture llama with tokenizer smollm is converted, got {found}")
    config = _model_config(fields)
    tensors = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name = hugging_face_name(tensor.name)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            values = split_rotary_pairs(values, heads)
        tensors[name] = values
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    write_weights(staging / "model.safetensors", tensors, "bfloat16")
    write_json(staging / "config.json", config)
    write_json(
        staging / "generation_config.json",
        {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    _write_tokenizer(staging, fields)


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`. Raises ModelError for a tensor of no Llama."""
    parts = name.split(".")
    if parts[-1] == "weight" and len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight"
    if parts[-1] == "weight" and len(parts) == 2 and parts[0] in _TOP_NAMES:
        return f"{_TOP_NAMES[parts[0]]}.weight"
    raise ModelError(f"tensor {name!r} has no place in a Llama")


def split_rotary_pairs(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from pairs (0, h/2, 1, h/2 + 1, ...) back to halves (0, 1, ..., h - 1).

    Args:
        values: [num_heads * head_dim, D].
    """
    head_dim = values.shape[0] // num_heads
    return values.reshape(num_heads, head_dim // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)


def _model_config(fields: dict[str, Any]) -> dict[str, Any]:
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": _shortest(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest(fields["llama.rope.freq_base"]),
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _shortest(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _write_tokenizer(staging: Path, fields: dict[str, Any]) -> None:
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    special = [
        {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == _CONTROL
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level | {"add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }
    (staging / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    write_json(
        staging / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
            "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
            "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
            "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
            "clean_up_tokenization_spaces": False,
            "model_max_length": fields["llama.context_length"],
            "chat_template": fields["tokenizer.chat_template"],
        },
    )
