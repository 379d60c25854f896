"""The model of `weight_serving` and the load on its replica: groups that end one after another, so that seconds are alike."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import grpc
import numpy as np
import torch

from benchmarks.architectures import QWEN3_1_7B
from shared.models import ModelConfig, Rope, load_config
from shared.wire.pb import rollout_pb2 as pb
from shared.wire.pb.rollout_pb2_grpc import RolloutEngineStub
from shared.wire.types import int32_bytes
from timzero.model.get import get

CALL_S = 600.0
TEMPERATURE = 1.0


@dataclass(frozen=True)
class Setting:
    """What is served, and under which load."""

    name: str
    model: ModelConfig
    dtype: torch.dtype
    prompts: int
    samples: int
    """Of each prompt."""
    prompt_tokens: int
    max_tokens: int
    window_s: float
    """Of undisturbed sampling before and behind the Prepares of each version, and of these, at least."""
    warm_tokens: int
    """Sampled before anything is measured."""
    words: tuple[str, ...]
    """Configuration of the replica."""

    def num_begun(self, number: int) -> int:
        """Tokens that the samples of a prompt's first group continue, as if sampled for a while: so groups don't end together for
        ever, and contexts have the lengths that they keep."""
        return self.max_tokens - max(1, self.max_tokens * (number + 1) // self.prompts)


def setting_of(*, device: str, is_tiny: bool) -> Setting:
    words: tuple[str, ...] = ("max_step_tokens=8192", f"device={device}")
    if is_tiny:
        rope = Rope(head_dim=8)
        model = ModelConfig(family="llama", vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
                            num_kv_heads=2, head_dim=8, max_position_embeddings=256, rope=rope, tie_word_embeddings=True,
                            eos_token_ids=())  # fmt: skip
        words = (*words, "kv_cache_tokens=4096", "max_running=16")
        return Setting("tiny", model, torch.float32, 2, 4, 16, 200, 0.2, 200, words)
    if device.startswith("cuda"):
        words = (*words, "kv_cache_tokens=524288", "max_running=256", "page_size=64")
        return Setting("1.7b", QWEN3_1_7B, torch.bfloat16, 32, 8, 256, 1600, 1.0, 256 * 100, words)
    model = load_config(get("smollm2-135m-instruct"))
    words = (*words, "kv_cache_tokens=32768", "max_running=32")
    return Setting("smollm2-135m", model, torch.bfloat16, 4, 4, 64, 900, 5.0, 2000, words)


class Load:
    """Keeps the replica sampling until the end of the block; samples go on across swaps."""

    def __init__(self, setting: Setting, stub: RolloutEngineStub, digest: str) -> None:
        self._setting, self._stub = setting, stub
        self.digest = digest
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(setting.prompts)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def _run(self, number: int) -> None:
        s = self._setting
        prompt = (np.arange(s.prompt_tokens) * (number + 1) % 50 + 3).astype(np.int32)
        sampling = pb.SamplingParams(temperature=TEMPERATURE, max_tokens=s.max_tokens)
        begun = np.random.default_rng(number).integers(3, 53, (s.samples, s.num_begun(number)), np.int32)
        while not self._stop.is_set():
            samples = [
                pb.Sample(trajectory_id=f"bench.{number}.{i}", sample_index=i, token_ids=int32_bytes(tokens))
                for i, tokens in enumerate(begun)
            ]
            request = pb.GenerateRequest(
                run="bench",
                manifest_digest=self.digest,
                seed=1,
                prompt_number=number,
                prompt_token_ids=int32_bytes(prompt),
                sampling=sampling,
                samples=samples,
            )
            try:
                for _ in self._stub.Generate(request, timeout=CALL_S):
                    if self._stop.is_set():
                        return
                begun = begun[:, :0]
            except grpc.RpcError as error:
                if self._stop.is_set() or error.code() is grpc.StatusCode.UNAVAILABLE:
                    # It is the end of it all, which others tell.
                    return
                # A version may have come between the look at the digest and the call.
                if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                    raise
