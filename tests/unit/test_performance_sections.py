"""Sections on kernels, weights, overlap and two GPUs: right from what today's benchmarks write, left out without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.page import kernels, overlap, products, two_gpu, weights
from benchmarks.page.goals import Goal
from benchmarks.page.results import Results
from benchmarks.two_gpu_part import NUM_SEQUENCES
from tests.unit import page_records
from tests.unit.page_records import SEQUENCE_TOKENS, TWO_GPU, change, write

pytest_plugins = ("tests.unit.page_fixtures",)
NEW = ("h200/kernels", "h200/weight_sync", "cpu/weight_sync", "h200/overlap", "cpu/overlap", *TWO_GPU)
HEADINGS = ("## The kernels", "## Weights in motion", "## Generation beside training", "## Two GPUs")


def met(goals: list[Goal]) -> dict[str, bool | None]:
    return {g.what: g.is_met for g in goals}


def test_every_section_is_there_with_its_pictures(page: dict[str, Any], everything: Path) -> None:
    measured = page["read"](everything)
    text = page["document"](measured)
    assert all(f"\n{heading}\n" in text for heading in HEADINGS)
    assert "| not measured |" not in text
    drawn = page["plots"](measured)
    assert {"kernel_products", "kernel_decode", "weight_delta", "overlap_cpu", "overlap_h200"} <= drawn.keys()
    assert all(f"(plots/{name}.svg)" in text for name in drawn)


def test_without_its_files_a_section_is_left_out_and_its_targets_are_not_measured(
    page: dict[str, Any], everything: Path
) -> None:
    goals = page["targets"](page["read"](everything)).count("\n")
    for name in NEW:
        (everything / f"{name}.json").unlink()
    measured = page["read"](everything)
    text = page["document"](measured)
    assert not [heading for heading in HEADINGS if heading in text]
    assert not [name for name in page["plots"](measured) if f"(plots/{name}.svg)" not in text]
    assert not [name for name in NEW if f"`{name}.json`" in text]
    assert text.count("| not measured | - |") > 20
    # one row for each model that gRPC carried, or one for all of them
    assert 0 <= goals - page["targets"](measured).count("\n") <= 2


@pytest.mark.parametrize("name", NEW)
def test_any_one_file_may_be_missing(page: dict[str, Any], everything: Path, name: str) -> None:
    (everything / f"{name}.json").unlink()
    measured = page["read"](everything)
    text = page["document"](measured)
    assert all(f"(plots/{name}.svg)" in text for name in page["plots"](measured))


@pytest.mark.parametrize("section", ["attention", "logprob", "rowwise", "grouped", "gemm"])
def test_a_run_of_one_section_of_the_kernels_is_enough(kernel_file: Path, tmp_path: Path, section: str) -> None:
    cases = {
        "attention": ("attention", "chunked", "decode", "prefill"), "logprob": ("logprob",), "rowwise": ("rms", "silu", "rope"),
        "grouped": ("grouped",), "gemm": ("certification", "dispatch", "linear", "weight_gradient"),
    }  # fmt: skip
    every = json.loads(kernel_file.read_text())
    kept = [r for r in every if r["case"].startswith((*cases[section], "ceiling"))]
    (tmp_path / "kernels.json").write_text(json.dumps(kept))
    r = Results(tmp_path, "kernels")
    assert kernels.section(r).startswith("## The kernels")
    assert all(f"(plots/{name}.svg)" in kernels.section(r) for name in kernels.plots(r))
    assert None in met(kernels.goals(r)).values()


def test_averages_are_those_that_the_benchmark_printed(kernel_results: Path) -> None:
    r = Results(kernel_results, "h200/kernels")
    for metric, found in ((products.FEW, products.times(r, products.FEW)), (products.MANY, products.times(r, products.MANY)),
                          ("weight_gradient_time_us", products.gradients(r))):  # fmt: skip
        summary = r.first("summary", "geometric_mean_ratio", "exact", of=metric)
        assert len(found) == summary["params"]["cases"]
        assert products.mean(found) == pytest.approx(summary["value"])


def test_no_record_of_the_kernels_is_overlooked(kernel_results: Path) -> None:
    """Every differing bit and every gradient reaches the page, whatever its case is called."""
    r = Results(kernel_results, "h200/kernels")
    cases = {f["case"] for f in r.all(None, "differing_bits")}
    assert cases == {*kernels.CHECKS, "dispatch"}
    assert {f["case"] for f in r.records if f["metric"].endswith("_time_us")} == {
        *kernels.OTHERS, "decode_attention", "prefill_attention", "logprob", "linear", "weight_gradient",
    }  # fmt: skip
    assert None not in met(kernels.goals(r)).values()


@pytest.mark.parametrize(
    ("is_meant", "new", "goal"),
    [
        (lambda r: r["metric"] == "linear_few_rows_time_us", {"ratio": 0.69}, "products to cuBLAS, under 32 rows, worst"),
        (lambda r: r["metric"] == "linear_time_us", {"ratio": 0.69}, "products to cuBLAS, 32 rows and more, worst"),
        (lambda r: r["case"] == "dispatch", {"value": 3}, "differing bits of products"),
        (lambda r: r["case"] == "attention_phases", {"value": 1}, "differing bits of attention"),
        (lambda r: r["metric"] == "decode_in_graph_time_us", {"ratio": 0.89}, "decode, 256 x 768, of the copy bandwidth"),
        (lambda r: r["metric"] == "forward_cudnn_time_us", {"ratio": 0.7}, "attention forward to cuDNN"),
        (lambda r: r["metric"] == "backward_flash_time_us", {"ratio": 0.6}, "attention backward to FlashAttention"),
        (lambda r: r["metric"] == "logprob_time_us", {"ratio": 0.79}, "logprob, time to its products"),
        (lambda r: r["metric"] == "peak_bytes_beyond_gradients", {"value": 2.1e9}, "logprob, peak beyond weights and gradients"),
        (lambda r: r["metric"] == "gradient_error_ratio", {"value": 1.01}, "worst gradient's error to plain bfloat16"),
    ],
)  # fmt: skip
def test_a_missed_target_of_the_kernels_is_told(
    kernel_results: Path, is_meant: Callable[[dict], bool], new: dict[str, float], goal: str
) -> None:
    before = met(kernels.goals(Results(kernel_results, "h200/kernels")))
    change(kernel_results, "h200/kernels", is_meant, **new)
    after = met(kernels.goals(Results(kernel_results, "h200/kernels")))
    assert (before[f"kernels: {goal}"], after[f"kernels: {goal}"]) == (True, False)


def test_what_a_budget_left_out_is_told(kernel_results: Path) -> None:
    change(kernel_results, "h200/kernels", lambda r: r["metric"] == "linear_time_us", metric="not_run", value=1)
    assert "1 of 430 row counts was not timed" in products.section(Results(kernel_results, "h200/kernels"))


def test_a_long_pause_and_a_version_that_was_not_verified_are_told(results: Path) -> None:
    write(results, "h200/weight_sync", page_records.serving(pause_s=0.051))
    change(results, "cpu/weight_sync", lambda r: r["metric"] == "verified_versions", value=19)
    cpu, h200 = (Results(results, f"{where}/weight_sync") for where in ("cpu", "h200"))
    found = met(weights.goals(cpu, h200))
    assert found["weights: H200, 1.7b by ipc, sampling stands still"] is False
    assert found["weights: H200, 1.7b by ipc, a version in all"] is True
    assert found["weights: CPU, deltas of training with the right digest"] is False
    assert "| of it sampling stands still, ms | 51.0 |" in weights.section(cpu, h200)


def test_the_parts_of_a_step_add_up_to_it(tmp_path: Path) -> None:
    write(tmp_path, "h200/overlap", page_records.overlapped())
    r = Results(tmp_path, "h200/overlap")
    assert overlap.settings(r) == ["lag 0", "lag 1", "max_lag 1"]
    for case, both in (("lag 0", 0.0), ("lag 1", 4.0), ("max_lag 1", 2.0)):
        assert overlap.parts(r, case) == pytest.approx(
            {"both compute": both, "training alone": 4 - both, "generation alone": 6 - both, "neither": both}, abs=1e-6
        )


def test_differing_bits_of_a_run_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "h200/overlap", page_records.overlapped(differing_bits=2))
    assert met(overlap.goals([Results(tmp_path, "h200/overlap")])) == {
        "overlap: H200, differing bits of trained tokens": False
    }
    write(tmp_path, TWO_GPU[0], page_records.fsdp(tmp_path))
    write(tmp_path, TWO_GPU[2], page_records.main_job(monkeypatch))
    change(tmp_path, TWO_GPU[0], lambda r: r["baseline"] == "engine", value=7)
    goals = two_gpu.goals(Results(tmp_path, TWO_GPU[0]), Results(tmp_path, TWO_GPU[2]))
    assert [g.is_met for g in goals] == [True, False, True]
    assert goals[1].measured.startswith(f"7 in {NUM_SEQUENCES * SEQUENCE_TOKENS:,}")


def test_two_ranks_and_the_loop_are_told_against_what_they_are_to_reach(everything: Path) -> None:
    text = two_gpu.section(*(Results(everything, name) for name in TWO_GPU))
    assert "| 2 | 0.600 | 0.590 to 0.620 | 1.67 |" in text
    assert "a step takes 10.00 s,\n1.67 times the longer of generation and training (6.00 s)" in text
    assert "| transport | broadcast |" in text
