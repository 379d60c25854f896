"""A tiny model, its manifests, and an engine driven step by step without a server."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field

import numpy as np
import torch

from services.rollout.config import RolloutConfig
from services.rollout.engine import Engine
from services.rollout.offline import group_of
from services.rollout.samples import Sample, SampleChunk
from services.rollout.weights import Numerics, ServedModel, ServedRun, build_model, certified
from shared.config import unstructure
from shared.models import Decoder, ModelConfig, named_weights, packed_layout
from shared.wire.pb.weight_sync_pb2 import Manifest
from shared.wire.run import RunConfig
from shared.wire.tensors import RawTensor, build_manifest
from shared.wire.types import FinishReason, SamplingParams, float32_bytes, int32_bytes

MODEL = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
}
PROBES = [np.arange(5), np.arange(17) % 7, np.arange(33) % 11]


@functools.cache
def numerics_of(dtype: str, mode: str = "exact") -> Numerics:
    torch.set_num_threads(1)
    run = ServedRun(run_config(dtype, mode), ModelConfig.from_hf(MODEL), getattr(torch, dtype))
    return certified(run)


def run_config(dtype: str = "float32", mode: str = "exact", **changes) -> RunConfig:
    fields = {
        "run": "demo",
        "model": "/no/such/model",
        "dtype": dtype,
        "numerics": mode,
        "max_model_len": 160,
        **changes,
    }
    return RunConfig(**fields)


@functools.cache
def trainer_decoder(dtype: str, seed: int, mode: str = "exact") -> Decoder:
    decoder = Decoder(ModelConfig.from_hf(MODEL), numerics_of(dtype, mode).ops)
    decoder.init_weights(seed, std=0.25)
    return decoder.to(getattr(torch, dtype))


def tensors_of(decoder: Decoder) -> dict[str, RawTensor]:
    return {
        name: RawTensor(
            str(w.dtype).removeprefix("torch."), tuple(w.shape), w.detach().contiguous().view(torch.uint8).numpy()
        )
        for name, w in named_weights(decoder)
    }


@torch.no_grad()
def trainer_logprobs(decoder: Decoder, sequences, temperature: float = 1.0) -> list[np.ndarray]:
    """[n - 1] float32 of each sequence, by one packed forward: the trainer's path."""
    lengths = [len(s) for s in sequences]
    layout = packed_layout(lengths)
    token_ids = torch.tensor(np.concatenate(sequences), dtype=torch.int64)
    ends = np.cumsum(lengths)
    rows = torch.from_numpy(np.setdiff1d(np.arange(ends[-1]), ends - 1))
    out = decoder.score(
        token_ids, layout.positions, layout, rows, token_ids[rows + 1], torch.full((len(rows),), temperature)
    )
    return np.split(out.logprob.numpy(), np.cumsum(np.array(lengths) - 1)[:-1])


def manifest_of(
    dtype="float32", seed=0, *, step=0, mode="exact", probes=PROBES, tensors=None, **run_changes
) -> Manifest:
    decoder = trainer_decoder(dtype, seed, mode)
    return build_manifest(
        run=run_changes.get("run", "demo"),
        lineage=0,
        step=step,
        tensors=tensors or tensors_of(decoder),
        model_config_json=json.dumps(MODEL),
        run_config_json=json.dumps(unstructure(run_config(dtype, mode, **run_changes))),
        fingerprint=numerics_of(dtype, mode).fingerprint,
        probe_token_ids=[int32_bytes(p) for p in probes],
        probe_logprobs=[float32_bytes(l) for l in trainer_logprobs(decoder, probes)] if probes else [],
    )


def served_model(manifest: Manifest, dtype="float32", seed=0, mode="exact") -> ServedModel:
    tensors = tensors_of(trainer_decoder(dtype, seed, mode))
    return build_model(manifest, ServedRun.of(manifest), numerics_of(dtype, mode), tensors)


@dataclass
class Result:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top1: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    """Policy step of every token."""
    finish: str = ""
    failure: str = ""

    @property
    def bits(self) -> bytes:
        return np.asarray(self.logprobs, "<f4").tobytes()

    def add(self, chunk: SampleChunk) -> None:
        assert chunk.start == chunk.sample.num_continued_tokens + len(self.tokens), "chunks must be contiguous"
        self.tokens += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.top1 += chunk.top1
        self.steps += [chunk.version.step] * len(chunk.token_ids)
        assert not self.finish, "nothing follows the end"
        self.finish = chunk.finish_reason or ""

    def same(self, other: Result) -> bool:
        return (self.tokens, self.bits, self.top1, self.finish) == (
            other.tokens,
            other.bits,
            other.top1,
            other.finish,
        )


class Driver:
    """An engine, its samples and what came out of them."""

    def __init__(self, dtype="float32", seed=0, *, mode="exact", step=0, **config) -> None:
        defaults = {"kv_cache_tokens": 4096, "page_size": 16}
        self.engine = Engine(RolloutConfig(**{**defaults, **config}))
        self.dtype, self.mode = dtype, mode
        self.results: dict[str, Result] = {}
        self.samples: dict[str, Sample] = {}
        self.swap(seed, step=step)

    def swap(self, seed: int, *, step: int):
        manifest = manifest_of(self.dtype, seed, step=step, mode=self.mode)
        with torch.inference_mode():
            result = self.engine.swap(served_model(manifest, self.dtype, seed, self.mode))
        self.collect()
        return result

    @property
    def digest(self) -> str:
        return self.engine.model.version.digest

    def submit(
        self,
        prompt,
        *,
        number=0,
        samples=1,
        max_tokens=20,
        temperature=1.0,
        continued=None,
        decode=None,
        seed=3,
        **params,
    ) -> list[str]:
        sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, **params)
        group = group_of(
            prompt, sampling, samples=samples, number=number, seed=seed, continued=continued, decode=decode
        )
        self.engine.submit(group, self.engine.model)
        for sample in group:
            self.samples[sample.trajectory_id] = sample
            self.results[sample.trajectory_id] = Result()
        return [s.trajectory_id for s in group]

    def step(self) -> None:
        with torch.inference_mode():
            self.engine.step()
        self.collect()

    def collect(self) -> None:
        outputs = self.engine.take_outputs()
        for chunk in outputs.chunks:
            self.results[chunk.sample.trajectory_id].add(chunk)
        for failure in outputs.failures:
            self.results[failure.sample.trajectory_id].failure = failure.reason

    def run(self) -> dict[str, Result]:
        while self.engine.has_work:
            self.step()
        self.collect()
        return self.results


__all__ = ["MODEL", "PROBES", "Driver", "FinishReason", "Result", "manifest_of", "run_config", "served_model"]
