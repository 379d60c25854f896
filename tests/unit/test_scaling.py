"""docs/scaling.md: its tables are those of its formulas, and its formulas are what runs."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.architectures import QWEN3_1_7B
from benchmarks.trainer_cases.shapes import num_parameters
from shared.kernels import build_ops
from shared.models import Decoder, ModelConfig, Rope

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def scaling() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs/generate_scaling.py"))


def test_the_tables_are_up_to_date(scaling: dict[str, Any]) -> None:
    assert (ROOT / "docs/scaling.md").read_text() == scaling["document"](), "run `make docs`"


def test_parameters_are_those_of_the_decoder(scaling: dict[str, Any]) -> None:
    assert scaling["SMALL"].parameters == num_parameters(QWEN3_1_7B)
    for model in scaling["MODELS"][:2]:
        config = ModelConfig(
            family="qwen3",
            vocab_size=model.vocab,
            hidden_size=model.hidden,
            intermediate_size=model.inner,
            num_layers=model.layers,
            num_heads=model.heads,
            num_kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            max_position_embeddings=40960,
            rope=Rope(head_dim=model.head_dim),
            qk_norm=True,
        )
        with torch.device("meta"):
            decoder = Decoder(config, build_ops("fast"))
        assert model.parameters == sum(p.numel() for p in decoder.parameters())


def test_sizes_are_those_that_the_models_are_named_by(scaling: dict[str, Any]) -> None:
    small, large, sparse = scaling["MODELS"]
    assert [round(m.parameters / 1e9) for m in (small, large, sparse)] == [8, 33, 235]
    assert round(sparse.active_parameters / 1e9) == 22
