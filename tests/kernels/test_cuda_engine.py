"""The engine over the CUDA kernels, interpreted: padded, mixed and exact steps sample one function of the prompt."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from services.rollout.config import RolloutConfig
from services.rollout.offline import OfflineEngine, Sampled
from services.rollout.samples import UnservableRun
from shared.kernels import InexactKernelError, build_ops
from shared.kernels.certify import Table
from shared.kernels.cuda.merged import MergedRows, silu_mul_halves
from shared.kernels.cuda.ops import CudaOps
from shared.models import Decoder, ModelConfig, packed_layout
from shared.models.merged import MergedDecoder, certify_merged
from shared.transfer.arena import ArenaLayout
from shared.wire.types import int32_bytes
from tests.kernels.cuda_testing import DEVICE, IS_INTERPRETED, device_ops
from tests.kernels.kernel_testing import same_bits, tiny_config

DTYPE = "float32" if IS_INTERPRETED else "bfloat16"


def model_of(family: str = "qwen3") -> ModelConfig:
    return tiny_config(family, num_layers=1, num_heads=2, num_kv_heads=1, vocab_size=67)


def weights_of(model: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    decoder = Decoder(model, build_ops("exact"))
    decoder.init_weights(seed, std=0.3)
    return {name: w.detach() for name, w in decoder.named_parameters()}


def engine_of(directory: Path, model: ModelConfig, **config: object) -> OfflineEngine:
    fields = {"kv_cache_tokens": 256, "page_size": 4, "max_running": 11, "max_step_tokens": 48, "device": str(DEVICE)}
    rollout = RolloutConfig(**{**fields, **config})
    return OfflineEngine(
        model, rollout, dtype=DTYPE, max_model_len=160, weights=weights_of(model), ops=device_ops(directory)
    )


GROUPS = {0: [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], 1: [7], 2: [*range(17)]}


def sampled(engine: OfflineEngine, groups: int = 3) -> dict[str, Sampled]:
    for number in range(groups):
        engine.submit(GROUPS[number], number=number, samples=2, max_tokens=3 + number)
    return engine.run()


def bits(results: dict[str, Sampled]) -> dict[str, tuple]:
    return {t: (r.token_ids, np.float32(r.logprobs).tobytes(), r.top1, r.finish) for t, r in results.items()}


def trainer_bits(engine: OfflineEngine, model: ModelConfig) -> dict[str, bytes]:
    """Logprobs of what was sampled, by the trainer's packed forward over projections that are not merged."""
    decoder = Decoder(model, engine.ops)
    decoder.load_state_dict(weights_of(model))
    decoder.to(DEVICE, getattr(torch, DTYPE))
    sequences = [GROUPS[int(t[0])] + r.token_ids for t, r in engine.results.items()]
    layout, ids = packed_layout([len(s) for s in sequences]), torch.tensor([i for s in sequences for i in s])
    rows = torch.arange(len(ids) - 1)
    with torch.no_grad():
        out = decoder.score(
            ids.to(DEVICE), layout.positions.to(DEVICE), layout, rows.to(DEVICE), ids[1:].to(DEVICE),
            torch.ones(len(rows), device=DEVICE),
        )  # fmt: skip
    logprobs, ends = out.logprob.cpu().numpy(), np.cumsum([len(s) for s in sequences])
    return {
        t: logprobs[end - 1 - len(r.token_ids) : end - 1].tobytes()
        for end, (t, r) in zip(ends, engine.results.items(), strict=True)
    }


def assert_padding_shows_nowhere(family: str, directory: Path, groups: int = 3) -> None:
    """Padded steps, small enough to cut prompts, against steps of exact sizes and against the trainer."""
    model = model_of(family)
    padded = engine_of(directory, model, kv_cache_tokens=160, max_chunk_tokens=7, max_running=2 * groups)
    results = bits(sampled(padded, groups))
    assert padded.times.num_graph_steps == padded.times.num_steps
    assert {t: b for t, (_, b, _, _) in results.items()} == trainer_bits(padded, model)
    exact = engine_of(directory, model, cuda_graphs=False)
    assert bits(sampled(exact, groups)) == results
    assert exact.times.num_graph_steps == 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_padded_steps_exact_steps_and_the_trainer_give_the_same_bits(tmp_path):
    assert_padding_shows_nowhere("qwen3", tmp_path, groups=2)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_head_sees_the_rows_that_are_sampled_and_no_others(tmp_path, monkeypatch):
    rows, logits = [], CudaOps._logits
    monkeypatch.setattr(CudaOps, "_logits", lambda self, x, w: rows.append(len(x)) or logits(self, x, w))
    engine = engine_of(tmp_path, model_of(), max_chunk_tokens=16)
    engine.submit([*range(40)], max_tokens=2)
    engine.run()
    assert engine.times.num_tokens == 41
    assert rows == [1, 1], "neither prompts nor padding"


def test_decode_steps_are_captured_beforehand_up_to_the_largest_that_is_ever_replayed(tmp_path, monkeypatch):
    monkeypatch.setattr("services.rollout.graphs.FEW_TOKENS", 20)
    monkeypatch.setattr("services.rollout.graphs.LAUNCH_PRODUCTS", 0)
    engine = engine_of(tmp_path, model_of(), max_running=40)
    steps = {exact.tokens: captured for exact, captured in engine.engine._pipeline.runner._decode_steps()}
    assert max(steps) == 40, "larger ones run, and their draws are captured"
    assert {size for size, shape in steps.items() if shape is not None} == {n for n in steps if n <= 20}
    assert all(shape.tokens == size for size, shape in steps.items() if shape is not None)


def test_the_probe_has_a_shape_that_is_captured_beforehand(tmp_path, monkeypatch):
    engine = engine_of(tmp_path, model_of()).engine
    runner, held = engine._pipeline.runner, engine.model
    assert runner._probe_step() is None
    held.manifest.probe_token_ids.extend(int32_bytes(np.arange(n, dtype=np.int32)) for n in (2, 5, 17))
    held.manifest.probe_logprobs.extend(bytes(4 * (n - 1)) for n in (2, 5, 17))
    shapes, captured = [], runner._captured
    monkeypatch.setattr(runner, "_captured", lambda *args: shapes.append(captured(*args)) or shapes[-1])
    expected = runner._probe_step()
    shapes.clear()
    with torch.inference_mode():
        engine.swap(held)
    assert expected is not None
    assert shapes == [expected]


def test_a_probe_that_no_step_holds_is_not_captured(tmp_path):
    engine = engine_of(tmp_path, model_of(), max_step_tokens=16).engine
    runner, ids = engine._pipeline.runner, [int32_bytes(np.arange(n, dtype=np.int32)) for n in (2, 16, 2)]
    engine.model.manifest.probe_token_ids.extend(ids[:2])
    captured = runner._probe_step()
    assert captured is not None
    assert captured.tokens == runner._block.num_tokens
    engine.model.manifest.probe_token_ids.append(ids[2])
    assert runner._probe_step() is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_every_family_gives_the_same_bits_padded_or_not(family, tmp_path):
    assert_padding_shows_nowhere(family, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_contexts_of_many_chunks_give_the_same_bits_whoever_is_split(tmp_path, monkeypatch):
    """Chunks of 64 keys, so that some contexts have three and others one: few long ones beside short, or all split."""
    monkeypatch.setattr(CudaOps, "choose_chunk", lambda self, num_programs, longest: 64)
    model = model_of("llama")
    results = []
    for is_padded in (True, False):
        engine = engine_of(tmp_path, model, cuda_graphs=is_padded, kv_cache_tokens=512, max_step_tokens=160)
        engine.submit([*range(60)] * 2 + [1, 2], number=9, samples=2, max_tokens=8)
        results.append(bits(sampled(engine)))
    assert results[0] == results[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_swap_in_place_serves_the_new_weights_and_filters_work_on_padded_steps(tmp_path):
    model = model_of("llama")
    engine = engine_of(tmp_path, model)
    held = engine.engine.model.decoder
    assert engine.swap(weights_of(model, seed=1)).digest == engine.engine.model.version.digest
    assert engine.engine.model.decoder is held
    engine.submit([5, 6, 7], number=1, max_tokens=2, temperature=1.5, top_k=1)
    engine.submit([5, 6, 7], number=2, max_tokens=2, temperature=0.0)
    results = engine.run()
    assert results["1.0"].token_ids == results["2.0"].token_ids == results["2.0"].top1
    fresh = OfflineEngine(
        model, engine.engine.config, dtype=DTYPE, max_model_len=160, weights=weights_of(model, seed=1), ops=engine.ops
    )
    fresh.submit([5, 6, 7], number=2, max_tokens=2, temperature=0.0)
    assert bits(fresh.run())["2.0"] == bits(results)["2.0"]


def test_a_first_version_keeps_nothing_of_the_buffer_that_it_came_in(tmp_path):
    model = model_of()
    given = {n: w.to(DEVICE, getattr(torch, DTYPE)) for n, w in weights_of(model).items()}
    layout = ArenaLayout.of((name, DTYPE, tuple(w.shape)) for name, w in given.items())
    flat = torch.empty(layout.nbytes, dtype=torch.uint8, device=DEVICE)
    for name, view in layout.views(flat).items():
        view.copy_(given[name])
    decoder = Decoder(model, device_ops(tmp_path))
    decoder.load_state_dict(layout.views(flat), assign=True)
    buffer = StorageWeakRef(flat.untyped_storage())
    del flat, view
    assert not buffer.expired()
    merged = MergedDecoder(decoder.requires_grad_(False), decoder.ops, num_positions=16)
    assert buffer.expired()
    storages = {w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in decoder.parameters()}
    assert sum(storages.values()) == sum(w.nbytes for w in given.values()), "no weight lies in memory twice"
    assert all(same_bits(w, given[name]) for name, w in merged.decoder.named_parameters())


def test_a_merged_operation_with_other_bits_refuses_to_start_in_exact_mode_alone(tmp_path, monkeypatch):
    def off_by_a_bit(gate_up: torch.Tensor) -> torch.Tensor:
        out = silu_mul_halves(gate_up)
        out.view(torch.uint8)[0, 0] ^= 1
        return out

    monkeypatch.setattr("shared.kernels.cuda.merged.silu_mul_halves", off_by_a_bit)
    with pytest.raises(
        UnservableRun, match=r"silu_mul .* in 1 of \d+ .* values .* Empty Triton's cache .* numerics 'fast'"
    ):
        engine_of(tmp_path, model_of())
    MergedRows((2, 1, 16), torch.float32, DEVICE, has_norms=False, is_exact=False)


@pytest.mark.skipif(not IS_INTERPRETED, reason="a device certifies it")
def test_a_product_that_is_not_certified_is_named_before_anything_is_served(tmp_path):
    ops = CudaOps(DEVICE, Table(tmp_path))
    with pytest.raises(InexactKernelError, match=r"the product 64x48 float16 float16 is not in .* needs a CUDA device"):
        certify_merged(ops, model_of(), torch.float16)
