"""The engine in one process, without servers: for benchmarks and tests of the engine itself.

>>> engine = OfflineEngine(model_config, RolloutConfig(device="cpu"), dtype="float32")   # doctest: +SKIP
>>> engine.submit([1, 2, 3], samples=2, max_tokens=5)                                    # doctest: +SKIP
['0.0', '0.1']
>>> engine.run()["0.1"].finish                                                           # doctest: +SKIP
'length'
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from services.rollout.config import RolloutConfig
from services.rollout.engine import CommitResult, Engine
from services.rollout.samples import GroupRequest, Sample
from services.rollout.stopping import Decode, StopRule
from services.rollout.times import StepTimes
from services.rollout.weights import DTYPES, Numerics, ServedRun, build_model, certified, held_digest
from shared.kernels import Ops
from shared.models import Decoder, ModelConfig
from shared.wire.pb.weight_sync_pb2 import Manifest
from shared.wire.run import RunConfig
from shared.wire.types import SamplingParams


@dataclass(slots=True)
class Sampled:
    """What came of one sample."""

    token_ids: list[int] = field(default_factory=list)
    """Sampled here: without prompt and continued tokens."""
    logprobs: list[float] = field(default_factory=list)
    """float32 values."""
    top1: list[int] = field(default_factory=list)
    finish: str = ""
    """stop | length | aborted; empty while it goes on."""


class OfflineEngine:
    """One engine and its samples; call it from one thread."""

    def __init__(
        self,
        model: ModelConfig,
        config: RolloutConfig,
        *,
        numerics: Literal["exact", "fast"] = "exact",
        dtype: str = "bfloat16",
        max_model_len: int = 4096,
        seed: int = 0,
        weights: Mapping[str, Tensor] | None = None,
        ops: Ops | None = None,
    ) -> None:
        """Args:
        dtype: of weights and activations, bfloat16 or float32.
        seed: of random weights, drawn where `weights` are not given.
        weights: by name, cast to dtype.
        ops: None builds the mode's for `config.device`, and checks them.
        """
        self.engine = Engine(config)
        run = RunConfig(run="offline", model="offline", numerics=numerics, max_model_len=max_model_len)
        self._run = ServedRun(run, model, DTYPES[dtype])
        if ops is None:
            with torch.inference_mode():
                self._numerics = certified(self._run, self.engine.config.device)
        else:
            self._numerics = Numerics(ops, "")
        self.results: dict[str, Sampled] = {}
        self._num_versions = 0
        self.swap(random_weights(model, seed, ops=self.ops, dtype=self._run.dtype) if weights is None else weights)

    @property
    def ops(self) -> Ops:
        return self._numerics.ops

    @property
    def times(self) -> StepTimes:
        return self.engine.times

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def reset_times(self) -> None:
        self.engine.times.reset()

    def swap(self, weights: Mapping[str, Tensor]) -> CommitResult:
        """Serves other weights, as a commit does."""
        manifest = Manifest(run="offline")
        manifest.version.step = self._num_versions
        device, dtype = self.ops.device, self._run.dtype
        # Copies, unless they are of the right kind already.
        tensors = {name: w.to(device=device, dtype=dtype) for name, w in weights.items()}
        model = build_model(manifest, self._run, self._numerics, tensors, device=device)
        manifest.version.digest = held_digest(model) or f"offline-{self._num_versions}"
        self._num_versions += 1
        with torch.inference_mode():
            result = self.engine.swap(model)
        self._collect()
        return result

    def submit(
        self,
        prompt: Sequence[int],
        *,
        samples: int = 1,
        max_tokens: int = 16,
        temperature: float = 1.0,
        number: int = 0,
        seed: int = 0,
        continued: Mapping[int, Sequence[int]] | None = None,
        **params: object,
    ) -> list[str]:
        """Puts a group in line. Returns its ids, "number.index".

        Args:
            number: of the prompt; with seed, sample index and token index the key of every draw.
            continued: by sample index, tokens sampled before.
            params: further fields of SamplingParams.
        """
        sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, **params)  # type: ignore[arg-type]
        group = group_of(prompt, sampling, samples=samples, number=number, seed=seed, continued=continued)
        assert self.engine.model is not None
        self.engine.submit(group, self.engine.model)
        self.results.update({s.trajectory_id: Sampled() for s in group})
        return [s.trajectory_id for s in group]

    def step(self) -> None:
        with torch.inference_mode():
            self.engine.step()
        self._collect()

    def preempt(self) -> None:
        """Takes every place away between two steps, as others' tokens do where the cache is full."""
        with torch.inference_mode():
            self.engine.drain()
        self._collect()
        # No other sequence could run beside one that fills the cache.
        self.engine.scheduler.make_room(self.engine.config.kv_capacity_tokens)

    def run(self) -> dict[str, Sampled]:
        """Steps until nothing is open."""
        with torch.inference_mode():
            while self.engine.has_work:
                self.engine.step()
                self._collect()
        self._collect()
        return self.results

    def _collect(self) -> None:
        outputs = self.engine.take_outputs()
        for chunk in outputs.chunks:
            result = self.results[chunk.sample.trajectory_id]
            result.token_ids += chunk.token_ids
            result.logprobs += chunk.logprobs
            result.top1 += chunk.top1
            result.finish = chunk.finish_reason or ""
        if outputs.failures:
            raise RuntimeError(f"the engine gave up samples: {outputs.failures[0].reason}")


def group_of(
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    samples: int,
    number: int,
    seed: int,
    continued: Mapping[int, Sequence[int]] | None = None,
    decode: Decode | None = None,
) -> list[Sample]:
    """What a Generate call of these samples puts in line, named "number.index".

    Args:
        continued: by sample index, tokens sampled before.
        decode: of the tokenizer, for stop strings.
    """
    request = GroupRequest(seed=seed, prompt_number=number, sampling=sampling, stream=None)
    group = []
    for index in range(samples):
        tokens = list((continued or {}).get(index, ()))
        group.append(
            Sample(
                arrival=0,
                token_ids=array("i", [*prompt, *tokens]),
                request=request,
                trajectory_id=f"{number}.{index}",
                sample_index=index,
                num_prompt_tokens=len(prompt),
                num_continued_tokens=len(tokens),
                stop_rule=StopRule(sampling, decode),
            )
        )
    return group


def random_weights(
    model: ModelConfig, seed: int, *, ops: Ops, dtype: torch.dtype, std: float = 0.02
) -> dict[str, Tensor]:
    """Norms 1, biases 0, everything else normal, drawn on the device of `ops`."""
    with torch.device("meta"):
        decoder = Decoder(model, ops)
    generator = torch.Generator(ops.device).manual_seed(seed)
    weights = {}
    for name, parameter in sorted(decoder.named_parameters()):
        weight = torch.ones(parameter.shape, dtype=dtype, device=ops.device)
        if name.endswith(".bias"):
            weight.zero_()
        elif not name.endswith("norm.weight"):
            weight.normal_(std=std, generator=generator)
        weights[name] = weight
    return weights
