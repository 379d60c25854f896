"""`pytest -m gpu` on a CUDA machine: captured steps, a measured cache, a swap under graphs, work in a stream of its own."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.engine_cases.drive import scored
from services.rollout.config import RolloutConfig
from services.rollout.engine import PROBE_TEMPERATURE
from services.rollout.offline import OfflineEngine, Sampled, random_weights
from services.rollout.samples import Scoring
from services.rollout.times import own_stream
from shared.kernels.cuda.ops import CudaOps
from shared.models import Decoder, ModelConfig
from shared.wire.types import float32_bytes, int32_bytes
from tests.deadline import DEADLINE_S
from tests.kernels.cuda_testing import device_ops
from tests.kernels.kernel_testing import tiny_config

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def as_services_run(uninitialised_memory_is_nan: None) -> None:
    """Without the fills and the other kernels that deterministic algorithms bring into captured steps."""
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def ops(tmp_path_factory: pytest.TempPathFactory) -> CudaOps:
    return device_ops(tmp_path_factory.mktemp("table"))


MODEL: ModelConfig = tiny_config(
    "qwen3", hidden_size=256, intermediate_size=512, num_heads=4, num_kv_heads=2, head_dim=64, vocab_size=1003
)


def weights(ops: CudaOps, seed: int) -> dict[str, torch.Tensor]:
    return random_weights(MODEL, seed, ops=ops, dtype=torch.bfloat16, std=0.1)


def engine_of(ops: CudaOps, *, seed: int = 0, **config: object) -> OfflineEngine:
    fields = {
        "device": "cuda",
        "kv_cache_tokens": 65536,
        "max_running": 40,
        "max_step_tokens": 2048,
        "max_chunk_tokens": 999,
    }
    rollout = RolloutConfig(**{**fields, **config})
    return OfflineEngine(MODEL, rollout, max_model_len=4096, weights=weights(ops, seed), ops=ops)


def sampled(engine: OfflineEngine, first: int = 0) -> dict[str, Sampled]:
    """Short and long contexts, so that some are split in chunks, with prompts that come in while others decode."""
    for i, length in enumerate((3, 40, 1300, 17, 2500)):
        engine.submit([(7 * j + i) % 1003 for j in range(length)], number=first + i, samples=5, max_tokens=30 + 9 * i)
        for _ in range(3):
            engine.step()
    return engine.run()


def bits(results: dict[str, Sampled]) -> list[tuple]:
    return [(r.token_ids, np.float32(r.logprobs).tobytes(), r.top1, r.finish) for r in results.values()]


def test_replayed_steps_give_the_bits_of_eager_ones(ops: CudaOps) -> None:
    captured, eager = engine_of(ops), engine_of(ops, cuda_graphs=False)
    expected = bits(sampled(eager))
    assert bits(sampled(captured)) == expected
    kernels = captured.engine.describe()
    assert kernels["graphs"].endswith("captured"), kernels
    assert kernels["digests"] == "xxh3.sum_kernel", kernels
    assert captured.engine.num_graphs > 0
    assert captured.times.num_graph_steps > captured.times.num_steps / 2
    assert (eager.times.num_graph_steps, eager.engine.describe()["graphs"]) == (0, "eager")
    captured.reset_times()
    captured.results.clear()
    assert bits(sampled(captured)) == expected, "once more, now that every size is captured"
    times = captured.times
    assert min(times.device_s, times.sample_s, times.wait_s) > 0
    assert times.idle_share < 1


def test_a_swap_under_graphs_serves_the_new_weights(ops: CudaOps) -> None:
    engine = engine_of(ops)
    sampled(engine)
    engine.swap(weights(ops, 1))
    engine.results.clear()
    assert bits(sampled(engine)) == bits(sampled(engine_of(ops, seed=1)))


def test_the_probe_is_replayed_and_has_the_bits_of_an_eager_one(ops: CudaOps) -> None:
    probes = [np.arange(n, dtype=np.int32) for n in (5, 17, 33)]
    eager, captured = engine_of(ops, cuda_graphs=False).engine, engine_of(ops).engine
    scorings = [Scoring.of(ids.tolist(), PROBE_TEMPERATURE) for ids in probes]
    held = captured.model
    assert held is not None
    assert eager.model is not None
    with torch.inference_mode():
        eager.submit_scoring(scorings, eager.model)
        while eager.has_work:
            eager.step()
        held.manifest.probe_token_ids.extend(map(int32_bytes, probes))
        held.manifest.probe_logprobs.extend(float32_bytes(s.logprobs) for s in scorings)
        captured._pipeline.runner._warm_up()  # type: ignore[union-attr]
        before = captured.times.num_graph_steps
        result = captured.swap(held)
    assert (result.probe_tokens, result.probe_differing) == (52, 0)
    assert captured.times.num_graph_steps == before + 1


def test_merged_row_operations_have_the_bits_of_separate_ones_here(ops: CudaOps) -> None:
    kernels = engine_of(ops).engine.describe()
    assert kernels["place_qkv"] == "cuda.merged.qkv_kernel"
    assert kernels["add_norm"] == "cuda.rowwise.rms_norm"


def test_a_cache_of_automatic_size_takes_its_share_of_the_memory(ops: CudaOps) -> None:
    free_bytes, _ = torch.cuda.mem_get_info()
    engine = engine_of(ops, kv_cache_tokens=0, kv_memory_share=0.05)
    tokens = engine.engine.config.kv_capacity_tokens
    per_token = MODEL.num_layers * 2 * MODEL.num_kv_heads * MODEL.head_dim * 2
    assert 0.01 * free_bytes < tokens * per_token < 0.05 * free_bytes
    assert engine.engine.pages.num_pages == tokens // engine.engine.config.tokens_per_page
    engine.submit([1, 2, 3], max_tokens=3)
    assert engine.run()["0.0"].finish == "length"


def test_a_stream_of_its_own_changes_nothing(ops: CudaOps) -> None:
    expected = bits(sampled(engine_of(ops)))
    with own_stream("cuda"):
        assert bits(sampled(engine_of(ops))) == expected


def test_without_cublas_flags_of_its_mode_an_engine_puts_them_back(ops: CudaOps, tmp_path: Path) -> None:
    expected = bits(sampled(engine_of(ops)))
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (True, True)
    assert bits(sampled(engine_of(ops))) == expected


def test_in_steady_state_the_host_waits_for_no_operation_and_a_step_allocates_nothing(ops: CudaOps) -> None:
    """But for the event behind the step before, which every step ends with."""
    engine = engine_of(ops)
    engine.submit([1, 2, 3], samples=40, max_tokens=400)
    for _ in range(80):
        engine.step()
    engine.reset_times()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(50):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
    times = engine.times
    assert (times.num_steps, times.num_graph_steps, times.num_sampled) == (50, 50, 50 * 40)
    engine.run()


REFUSED = """
import torch
from services.rollout.graphs import Graphs
graphs, x = Graphs(torch.device("cuda"), is_enabled=True), torch.full((3,), 2.0, device="cuda")
stream = torch.cuda.current_stream()
assert graphs.run("good", lambda: x * 2).tolist() == [4.0] * 3
for _ in range(2):
    assert graphs.run("waits for the device", lambda: x * x.sum().item()).tolist() == [12.0] * 3
assert torch.cuda.current_stream() == stream
x.fill_(3.0)
assert graphs.run("good", lambda: x * 2).tolist() == [6.0] * 3, "replayed"
assert graphs.run("later", lambda: x + 1).tolist() == [4.0] * 3, "eager"
assert len(graphs) == 1
"""


def test_what_cannot_be_captured_runs_eagerly_and_what_was_captured_goes_on() -> None:
    """In a process of its own: a capture that failed leaves torch's default generator of the device unusable."""
    environ = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    words = [sys.executable, "-c", REFUSED]
    done = subprocess.run(words, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert "no more steps are captured" in done.stdout


@pytest.mark.timeout(600)
def test_a_sequence_of_128k_tokens_is_sampled_with_the_bits_of_the_trainers_forward(ops: CudaOps) -> None:
    """Beside short ones, in chunks of 8,192: its decode splits into 128 chunks of keys, the packed forward walks them."""
    longest, num_new = 128 * 1024, 40
    config = {"kv_cache_tokens": longest + 8192, "max_step_tokens": 8192, "max_chunk_tokens": 8192, "page_size": 64}
    rollout = RolloutConfig(device="cuda", max_running=8, **config)
    engine = OfflineEngine(MODEL, rollout, max_model_len=longest, weights=weights(ops, 0), ops=ops)
    prompts = [[(7 * i) % 1003 for i in range(longest - num_new)], [5, 6, 7]]
    ids = [engine.submit(p, number=i, max_tokens=num_new)[0] for i, p in enumerate(prompts)]
    results = engine.run()
    decoder = Decoder(MODEL, ops)
    decoder.load_state_dict(weights(ops, 0))
    decoder.to("cuda", torch.bfloat16)
    for prompt, i in zip(prompts, ids, strict=True):
        expected = scored(decoder, [prompt], [results[i].token_ids], 1.0)
        assert len(expected) == num_new
        assert expected.tobytes() == np.float32(results[i].logprobs).tobytes(), len(prompt)
