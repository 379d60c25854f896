"""The engine's benchmark over the CUDA path, interpreted: what it will run on a device, in both modes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.architectures import TINY
from benchmarks.engine_cases import budget
from benchmarks.engine_cases.arms import Arms, Plan
from benchmarks.engine_cases.drive import Weights, build, gate, timed
from benchmarks.engine_cases.workloads import Workload
from shared.kernels.cuda import fast
from shared.kernels.cuda.fast import FastCudaOps
from tests.kernels.cuda_testing import interpreted_ops

pytestmark = pytest.mark.slow
MODEL = replace(TINY, num_layers=1, hidden_size=32, intermediate_size=32, num_heads=2, num_kv_heads=1)
CONFIG = {"max_running": 3, "max_step_tokens": 16, "max_chunk_tokens": 16, "page_size": 16, "shares_prefixes": False}
WORKLOAD = Workload(name="uniform", model=MODEL, num_prompts=3, prompt_tokens=6, new_tokens=4, config=CONFIG)


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Weights:
    monkeypatch.setattr(fast, "num_multiprocessors", lambda device: 4)
    ops = {"exact": interpreted_ops(tmp_path), "fast": FastCudaOps(torch.device("cpu"))}
    monkeypatch.setattr(Weights, "ops", lambda self, mode: ops[mode])
    return Weights(MODEL, "cpu", "float32")


def test_both_modes_are_gated_timed_and_taken_apart(weights: Weights) -> None:
    engines = {mode: build(WORKLOAD, mode, weights) for mode in ("exact", "fast")}
    assert gate(engines["exact"], WORKLOAD, weights.judge).differing_bits == 0
    assert gate(engines["fast"], WORKLOAD, weights.judge).mean_delta < 1e-5
    for mode, engine in engines.items():
        assert timed(engine, WORKLOAD, 0).times["num_sampled"] == 3 * 4
        found = {r.metric: r.value for r in budget.measure(engine, WORKLOAD, weights)}
        assert all(found[f"{part}_ms"] > 0 for part in ("gemms", "attention", "small", "head", "sampling")), (
            mode,
            found,
        )
    with budget.caught(weights.ops("exact")) as calls:
        engines["exact"].submit([1, 2, 3], max_tokens=1)
        engines["exact"].step()
    assert {part: len(made) for part, made in calls.items()} == {"gemms": 4, "attention": 1, "sampling": 1, "small": 5}
    assert "linear" not in vars(weights.ops("exact").table), "nothing stays caught"


def test_arms_of_the_contract_run_over_the_paged_kernels(weights: Weights) -> None:
    plan = Plan(
        name="interpreted", model=MODEL, device="cpu", dtype="float32", num_requests=3, new_tokens=3, batch_sizes=(1, 2),
        least_requests=2, chunk_sizes=(2,), prompt_tokens=(1, 6), long_prompt=10, page_size=4, max_step_tokens=16,
        scored_tokens=64,
    )  # fmt: skip
    found = list(Arms(plan, weights).run())
    assert [f.arm for f in found if f.num_differing] == []
    assert all(f.num_compared for f in found)
