"""The trainer's benchmark on the CPU: its arithmetic, its check, and that every section runs and is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import trainer
from benchmarks.architectures import QWEN3_1_7B
from benchmarks.trainer_cases.parts import part_of
from benchmarks.trainer_cases.shapes import Case, mfu, num_parameters, tiny
from shared.kernels import build_ops
from shared.models import Decoder, ModelConfig


@pytest.fixture(autouse=True)
def settings_stay() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.set_num_threads(threads)


@pytest.mark.parametrize("config", [tiny(), QWEN3_1_7B], ids=["tiny", "1.7B"])
def test_parameters_are_counted_as_the_decoder_has_them(config: ModelConfig) -> None:
    with torch.device("meta"):
        decoder = Decoder(config, build_ops("fast"))
    assert num_parameters(config) == sum(p.numel() for p in decoder.parameters())


def test_mfu_is_that_of_the_published_measurement() -> None:
    """transformers with SDPA and fused AdamW on an H200: 29,100 tokens/s at 4 x 4096 were an MFU of 0.345."""
    case = Case(4, 4096)
    assert mfu(QWEN3_1_7B, case, case.tokens / 29_100, is_step=True) == pytest.approx(0.345, abs=5e-4)
    assert mfu(QWEN3_1_7B, case, 1.0, is_step=False) * 3 == pytest.approx(mfu(QWEN3_1_7B, case, 1.0, is_step=True))


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NNT", "gemm"),
        ("gemm_kernel", "gemm"),
        ("packed_kernel", "attention"),
        ("segment_kernel", "head"),
        ("segment_sum_kernel", "norms, rope, swiglu, embedding"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>", "optimizer"),
        ("void at::native::multi_tensor_apply_kernel<LpNormFunctor<float>>", "optimizer"),
        ("void at::native::multi_tensor_apply_kernel<Copy<float>>", "casts and copies of shards"),
        ("void at::native::vectorized_elementwise_kernel<CUDAFunctor_add<float>>", "other"),
    ],
)
def test_kernels_are_counted_to_their_part(name: str, part: str) -> None:
    assert part_of(name) == part


def run(out: Path, *words: str) -> tuple[int, list[dict[str, Any]]]:
    code = trainer.main(["--tiny", "--out", str(out), *words])
    return code, json.loads(out.read_text())


def test_every_section_runs_and_is_kept(tmp_path: Path) -> None:
    code, records = run(tmp_path / "trainer.json")
    assert code == 0
    assert {r["value"] for r in records if r["metric"] == "differing_bits"} == {0}
    timed = {(r["case"], r["mode"]) for r in records if r["metric"] == "tokens_per_s"}
    assert timed == {(c, m) for c in ("forward", "step") for m in ("exact", "fast", "transformers")}
    assert {r["baseline"] for r in records if r["metric"] == "tokens_per_s_ratio"} == {"fast", "transformers"}
    assert {r["params"]["part"] for r in records if r["case"] == "step_part"} >= {"gemm", "head", "optimizer", "host"}
    assert all(r["value"] > 0 for r in records if r["metric"] in ("tokens_per_s", "mfu"))


def test_a_differing_bit_forbids_to_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "exact_ops", lambda *_: build_ops("fast"))
    code, records = run(tmp_path / "trainer.json")
    assert code == 1
    assert any(r["value"] for r in records if r["metric"] == "differing_bits")
    assert not any(r["metric"] == "tokens_per_s" for r in records)


def test_sections_behind_the_limit_are_left_out(tmp_path: Path) -> None:
    code, records = run(tmp_path / "trainer.json", "--limit_s", "0", "--only", "long")
    assert code == 0
    assert not any(r["metric"] == "tokens_per_s" for r in records)
