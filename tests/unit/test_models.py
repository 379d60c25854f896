"""Configs, RoPE variants, layouts and model directories."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from shared.kernels import build_ops
from shared.models import (
    Decoder,
    KVCache,
    ModelConfig,
    Rope,
    completion_rows,
    load_config,
    load_model,
    named_weights,
    paged_layout,
    prefix_shared_layout,
    resolve_model,
    save_model,
)
from shared.models.rope import RopeTable

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": [2, 5],
    "tie_word_embeddings": True,
}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 1.0},
    {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.1, "truncate": False},
]


def test_config_survives_a_round_trip_and_reads_both_forms() -> None:
    config = ModelConfig.from_hf(LLAMA)
    assert config.head_dim == 4
    assert config.eos_token_ids == (2, 5)
    assert ModelConfig.from_hf(config.to_hf()) == config
    five = {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    four = {**LLAMA, "rope_theta": 5e5, "rope_scaling": None}
    assert ModelConfig.from_hf(five) == ModelConfig.from_hf(four)
    assert ModelConfig.from_hf(five).rope.theta == 5e5


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "gpt2.*GPT2LMHeadModel.*use a model of llama"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "longrope.*use one of default"),
        ({"rope_scaling": {"type": "linear"}}, "missing: \\['factor'\\]"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"num_key_value_heads": 3}, "multiple of num_kv_heads"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ModelConfig.from_hf({**LLAMA, **changes})


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_rope_variants_equal_those_of_transformers(scaling: dict[str, Any]) -> None:
    theirs = LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=256, rope_scaling=dict(scaling)
    )
    expected, expected_scaling = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, torch.device("cpu"))
    rope = Rope.from_hf({"max_position_embeddings": 256, "rope_scaling": dict(scaling)}, 64)
    inv_freq, factor = rope.inverse_frequencies()
    assert torch.equal(inv_freq, expected)
    assert factor == expected_scaling
    assert Rope.from_hf({"max_position_embeddings": 256, **rope.to_hf()}, 64) == rope


def test_rope_rows_do_not_depend_on_how_the_table_grew() -> None:
    grown, fresh = RopeTable(Rope(head_dim=8)), RopeTable(Rope(head_dim=8))
    positions = torch.tensor([0, 3, 250])
    before = grown.rows(positions, torch.float32)
    after_growth = (grown.rows(torch.tensor([5000]), torch.float32), grown.rows(positions, torch.float32))[1]
    for a, b, c in zip(before, after_growth, fresh.rows(positions, torch.float32), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_layouts_name_their_rows() -> None:
    layout = prefix_shared_layout([3, 1], [[2, 1], [1]])
    assert layout.positions.tolist() == [0, 1, 2, 3, 4, 3, 0, 1]
    assert layout.query_rows.tolist() == list(range(8))
    assert layout.kv_rows[2, :4].tolist() == [0, 1, 2, 5]
    assert completion_rows([3, 1], [[2, 1], [1]]).tolist() == [2, 3, 2, 6]
    paged = paged_layout([[7], [2, 0]], 4, [1, 2], [3, 6])
    assert paged.query_rows.tolist() == [30, 0, 1]
    assert paged.positions.tolist() == [2, 4, 5]


def test_directories_are_written_and_read(tmp_path: Path) -> None:
    config, ops = ModelConfig.from_hf(LLAMA), build_ops("exact")
    decoder = Decoder(config, ops)
    decoder.init_weights(seed=1)
    assert "lm_head.weight" not in dict(named_weights(decoder))
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9]}))
    weights = dict(named_weights(decoder))
    save_model(weights, config, tmp_path / "to", dtype=torch.bfloat16, companions_from=tmp_path / "from")
    assert load_config(tmp_path / "to").eos_token_ids == (2, 5, 9)
    assert AutoConfig.from_pretrained(tmp_path / "to").dtype == torch.bfloat16
    loaded = load_model(resolve_model(tmp_path / "to"), ops, torch.bfloat16)
    assert [name for name, _ in named_weights(loaded)] == sorted(weights)
    assert all(torch.equal(w, weights[name].bfloat16()) for name, w in named_weights(loaded))
    assert all(p.requires_grad for p in loaded.parameters())


def test_directories_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        resolve_model(tmp_path)
    config, ops = ModelConfig.from_hf(LLAMA), build_ops("exact")
    decoder = Decoder(config, ops)
    decoder.init_weights()
    weights = dict(named_weights(decoder))
    del weights["model.norm.weight"]
    save_model(weights, config, tmp_path)
    with pytest.raises(ValueError, match=r"(?s)do not fit .*model\.norm\.weight"):
        load_model(tmp_path, ops, torch.float32)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="convert the weights to safetensors"):
        load_model(tmp_path, ops, torch.float32)


def test_a_name_that_the_hub_cannot_serve_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> str:
        raise OSError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(ValueError, match=r"could not be downloaded \(offline\).*HF_TOKEN.*pass the path"):
        resolve_model("nobody/nothing")


def test_cache_is_zeroed_and_knows_its_size() -> None:
    config = ModelConfig.from_hf(LLAMA)
    cache = KVCache(config, 10, torch.bfloat16)
    assert len(cache.layers) == 2
    assert all(not store.any() and store.shape == (10, 2, 4) for pair in cache.layers for store in pair)
    assert KVCache.bytes_per_slot(config, torch.bfloat16) == 2 * 2 * 2 * 4 * 2
