"""Tiny models, groups as an engine would record them, and learners, for the trainer's tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.trainer.batch import Batch, PolicyVersion, build_batch
from services.trainer.distributed import World, join, leave
from services.trainer.learner import Learner
from services.trainer.policy import load_policy
from services.trainer.weights import gather
from shared.kernels import build_ops
from shared.models import Decoder, ModelConfig, Rope, named_weights, packed_layout, save_model
from shared.wire.run import RunConfig
from shared.wire.tensors import RawTensor, manifest_digest, tensor_entry
from shared.wire.types import FinishReason, Group, SamplingParams, Span, SpanKind, Trajectory
from tests.deadline import DEADLINE_S

VOCAB = 61


def tiny_model(directory: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A Hugging Face directory of a model that runs in a millisecond."""
    fields: dict[str, Any] = {
        "family": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "rope": Rope(head_dim=8),
        "tie_word_embeddings": True,
        "eos_token_ids": (2,),
    }
    config = ModelConfig(**{**fields, **changes})
    decoder = Decoder(config, build_ops("exact"))
    # Wide weights, so that probabilities are far from uniform.
    decoder.init_weights(seed, std=0.3)
    save_model(dict(named_weights(decoder)), config, directory)
    return directory


def run_config(model: Path, **changes: Any) -> RunConfig:
    fields: dict[str, Any] = {
        "run": "demo",
        "model": str(model),
        "dtype": "bfloat16",
        "max_model_len": 64,
        "num_steps": 4,
        "prompts_per_step": 3,
        "samples_per_prompt": 4,
        "lag": 1,
        "temperature": 0.7,
        "checkpoint_interval": 2,
    }
    return RunConfig(**{**fields, **changes})


@contextmanager
def one_rank() -> Iterator[World]:
    """A world of one, with the settings that a trainer computes under. `conftest` undoes these."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    world = join("cpu", timeout_s=DEADLINE_S)
    try:
        yield world
    finally:
        leave()


class Engine:
    """A plain decoder that samples and records as a rollout replica does, sequence by sequence."""

    def __init__(self, decoder: Decoder, version: PolicyVersion) -> None:
        self.decoder, self.version = decoder, version

    def group(
        self,
        config: RunConfig,
        number: int,
        *,
        prompt: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        tool_tokens: int = 0,
    ) -> Group:
        """A complete group with rewards.

        Args:
            prompt: token ids; drawn from the number if left out.
            lengths: sampled tokens per sample.
            tool_tokens: of each longer completion, this many in the middle are not trainable.
        """
        rng = np.random.default_rng([config.seed, number])
        prompt = rng.integers(3, VOCAB, rng.integers(1, 20)).tolist() if prompt is None else prompt
        lengths = lengths or rng.integers(1, 9, config.samples_per_prompt).tolist()
        samples = [self._sample(list(prompt), n, config, rng) for n in lengths]
        return Group(
            run=config.run,
            group_id=f"{config.run}.{number}",
            prompt_number=number,
            trajectories=tuple(
                self._record(config, number, i, list(prompt), *sample, tool_tokens) for i, sample in enumerate(samples)
            ),
        )

    @torch.no_grad()
    def _sample(
        self, prompt: list[int], length: int, config: RunConfig, rng: np.random.Generator
    ) -> tuple[list[int], np.ndarray, np.ndarray]:
        tokens, logprobs, top1 = list(prompt), [], []
        for _ in range(length):
            layout = packed_layout([len(tokens)])
            hidden = self.decoder(torch.tensor(tokens), layout.positions, layout)[-1:]
            z = hidden.float() @ self.decoder.head_weight.float().T / config.temperature
            token = int(rng.choice(VOCAB, p=torch.softmax(z[0].double(), 0).numpy()))
            score = self.decoder.logprobs(hidden, torch.tensor([token]), torch.tensor([config.temperature]))
            tokens.append(token)
            logprobs.append(score.logprob.item())
            top1.append(int(score.top1))
        return tokens, np.array(logprobs, np.float32), np.array(top1, np.int32)

    def _record(
        self,
        config: RunConfig,
        number: int,
        index: int,
        prompt: list[int],
        tokens: list[int],
        logprobs: np.ndarray,
        top1: np.ndarray,
        tool_tokens: int,
    ) -> Trajectory:
        begin, end = len(prompt), len(tokens)
        loss_mask = np.concatenate((np.zeros(begin, np.uint8), np.ones(end - begin, np.uint8)))
        kinds = [(0, begin, SpanKind.PROMPT), (begin, end, SpanKind.SAMPLED)]
        if tool_tokens and end - begin > tool_tokens + 1:
            loss_mask[begin + 1 : begin + 1 + tool_tokens] = 0
            kinds[1:] = [
                (begin, begin + 1, SpanKind.SAMPLED),
                (begin + 1, begin + 1 + tool_tokens, SpanKind.TOOL),
                (begin + 1 + tool_tokens, end, SpanKind.SAMPLED),
            ]
        v = self.version
        return Trajectory(
            trajectory_id=f"{config.run}.{number}.{index}",
            group_id=f"{config.run}.{number}",
            prompt_id=f"p{number}",
            sample_index=index,
            run=config.run,
            seed=config.seed,
            sampling=SamplingParams(temperature=config.temperature, max_tokens=16),
            token_ids=np.array(tokens, np.int32),
            logprobs=logprobs,
            top1=top1,
            loss_mask=loss_mask,
            spans=tuple(
                Span(start=a, end=b, kind=k, lineage=v.lineage, policy_step=v.step, manifest_digest=v.digest)
                if k is SpanKind.SAMPLED
                else Span(start=a, end=b, kind=k)
                for a, b, k in kinds
            ),
            finish_reason=FinishReason.LENGTH,
            fingerprint="test",
            reward=reward_of(tokens[begin:]),
        )


def reward_of(sampled: Sequence[int]) -> float:
    """Small ids are good: a task that a tiny model learns."""
    return float(np.mean([t < VOCAB // 2 for t in sampled]))


def plain_decoder(config: ModelConfig, tensors: dict[str, RawTensor]) -> Decoder:
    """What a replica holds after fetching these tensors."""
    decoder = Decoder(config, build_ops("exact"))
    state = {
        name: torch.frombuffer(bytearray(bytes(t.data)), dtype=getattr(torch, t.dtype)).view(t.shape)
        for name, t in tensors.items()
    }
    decoder.load_state_dict(state, assign=True)
    return decoder.requires_grad_(False)


def digest_of(tensors: dict[str, RawTensor]) -> str:
    return manifest_digest(tensor_entry(name, tensor) for name, tensor in tensors.items())


def build_learner(config: RunConfig, world: World, *, numerics: str = "exact") -> Learner:
    """A learner at version 0, named."""
    decoder = load_policy(
        Path(config.model),
        build_ops(numerics),  # type: ignore[arg-type]
        getattr(torch, config.dtype),
        world,
        activation_checkpointing=config.activation_checkpointing,
    )
    learner = Learner(decoder, config, getattr(torch, config.dtype), world)
    publish(learner, 0)
    return learner


def publish(learner: Learner, step: int) -> dict[str, RawTensor]:
    """Takes and names the weights as version `step`, without weight_sync. On all ranks."""
    copy = learner.copies.take(step, lineage=0)
    tensors = gather(learner.decoder, copy, learner.world)
    digest = learner.world.from_leader(lambda: digest_of(tensors))
    learner.copies.name(PolicyVersion(0, step, digest))
    return tensors


def engine_of(learner: Learner, tensors: dict[str, RawTensor]) -> Engine:
    """An engine at the learner's current version."""
    return Engine(plain_decoder(learner.decoder.config, tensors), learner.copies.current.version)


def batch_of(engine: Engine, config: RunConfig, step: int, **kwargs: Any) -> Batch:
    """Batch `step`, sampled by this engine."""
    numbers = range(step * config.prompts_per_step, (step + 1) * config.prompts_per_step)
    return build_batch([engine.group(config, n, **kwargs) for n in numbers], config, step=step, vocab_size=VOCAB)


def masters(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: p.detach().full_tensor().clone() for name, p in learner.decoder.named_parameters()}  # type: ignore[attr-defined]


def train_steps(learner: Learner, steps: range, engines: dict[int, Engine], **kwargs: Any) -> list[Any]:
    """Train batch after batch under the run's fixed lag; `engines` gains one per version. On one rank."""
    config, results = learner.config, []
    for step in steps:
        batch = batch_of(engines[config.version_for(step)], config, step, **kwargs)
        results.append(learner.train(batch, learner.score(batch)))
        engines[step + 1] = engine_of(learner, publish(learner, step + 1))
    return results


def with_changes(config: RunConfig, **algorithm: Any) -> RunConfig:
    return replace(config, algorithm=replace(config.algorithm, **algorithm))
