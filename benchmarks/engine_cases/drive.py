"""Engines in this process, over one architecture's weights: gated on bits, then timed."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.engine_cases.workloads import Request, Workload
from services.rollout.config import RolloutConfig
from services.rollout.offline import OfflineEngine, random_weights
from services.rollout.offline import Sampled as Result
from services.rollout.weights import DTYPES, ServedRun, certified
from shared.kernels import Mode, Ops
from shared.models import Decoder, ModelConfig, packed_layout
from shared.wire.run import RunConfig

GATE_PROMPTS, GATE_TOKENS = 48, 32
"""Of the gate's share of a workload: enough to fill mixed steps, little enough to be scored at once."""
SCORED_TOKENS = 16_384
"""Of one packed forward of the gate, at most."""


class Weights:
    """One architecture's weights on one device, the operations of both modes, and the trainer's forward over them."""

    def __init__(
        self, model: ModelConfig, device: str, dtype: str, tensors: Mapping[str, Tensor] | None = None
    ) -> None:
        """Args: tensors, by name; None draws them."""
        self.model, self.device, self.dtype = model, device, dtype
        self._ops: dict[Mode, Ops] = {}
        exact = self.ops("exact")
        self.tensors = random_weights(model, 0, ops=exact, dtype=DTYPES[dtype]) if tensors is None else dict(tensors)
        self.judge = self.decoder(exact)
        """The exact forward."""

    def ops(self, mode: Mode) -> Ops:
        """The mode's operations, checked when they are built; whoever computes with them activates them."""
        if mode not in self._ops:
            run = ServedRun(RunConfig(run="bench", model="bench", numerics=mode), self.model, DTYPES[self.dtype])
            with torch.inference_mode():
                self._ops[mode] = certified(run, self.device).ops
        return self._ops[mode]

    def decoder(self, ops: Ops) -> Decoder:
        """The weights under other operations; nothing is copied."""
        with torch.device("meta"):
            decoder = Decoder(self.model, ops)
        decoder.load_state_dict(self.tensors, assign=True)
        return decoder.requires_grad_(False).eval()

    def engine(self, mode: Mode, max_model_len: int, ops: Ops | None = None, **config: Any) -> OfflineEngine:
        """Args: ops, in place of the mode's; config, keys of RolloutConfig."""
        ops = self.ops(mode) if ops is None else ops
        ops.activate()
        return OfflineEngine(
            self.model, RolloutConfig(device=self.device, **config), numerics=mode, dtype=self.dtype,
            max_model_len=max_model_len, weights=self.tensors, ops=ops,
        )  # fmt: skip


def build(workload: Workload, mode: Mode, weights: Weights, **config: Any) -> OfflineEngine:
    """An engine for the workload, warmed up."""
    keys = dict(workload.config) | {"kv_cache_tokens": workload.kv_tokens} | config
    return weights.engine(mode, workload.max_model_len, **keys)


@dataclass(frozen=True, slots=True)
class Pass:
    """One run of a workload."""

    wall_s: float
    times: dict[str, float]
    """Sums of the engine's StepTimes."""


def submit(engine: OfflineEngine, requests: Sequence[Request], *, temperature: float = 1.0) -> list[str]:
    ids: list[str] = []
    for number, r in enumerate(requests):
        ids += engine.submit(
            r.prompt, samples=r.samples, max_tokens=r.max_tokens, temperature=temperature, number=number
        )
    return ids


def timed(engine: OfflineEngine, workload: Workload, repeat: int) -> Pass:
    """Submits everything at once and waits for the last token. Raises RuntimeError unless everything was sampled."""
    engine.ops.activate()
    requests = workload.requests(repeat)
    synchronize(engine)
    engine.reset_times()
    # As in a replica, no collection walks what was there before.
    gc.collect()
    gc.freeze()
    try:
        begin = time.perf_counter()
        ids = submit(engine, requests)
        engine.run()
        wall_s = time.perf_counter() - begin
    finally:
        gc.unfreeze()
    sampled = sum(len(engine.results[i].token_ids) for i in ids)
    wanted = sum(r.samples * r.max_tokens for r in requests)
    if sampled != wanted:
        raise RuntimeError(
            f"{workload.name}: {sampled} tokens were sampled, {wanted} asked for; look at the engine's limits"
        )
    engine.results.clear()
    return Pass(wall_s, asdict(engine.times))


def synchronize(engine: OfflineEngine) -> None:
    if engine.ops.device.type == "cuda":
        torch.cuda.synchronize(engine.ops.device)


@dataclass(frozen=True, slots=True)
class Gate:
    """Recorded logprobs against the trainer's packed forward."""

    tokens: int
    differing_bits: int
    mean_delta: float


def gate(engine: OfflineEngine, workload: Workload, judge: Decoder) -> Gate:
    """Runs a share of the workload and scores what was sampled by the packed forward of `judge`, which is exact."""
    engine.ops.activate()
    requests = [
        Request(prompt=r.prompt, max_tokens=min(r.max_tokens, GATE_TOKENS), samples=r.samples)
        for r in workload.requests(-1)[:GATE_PROMPTS]
    ]
    ids = submit(engine, requests)
    engine.run()
    prompts = [r.prompt for r in requests for _ in range(r.samples)]
    results = [engine.results[i] for i in ids]
    judge.ops.activate()
    found = compare(judge, prompts, results, temperature=1.0)
    engine.results.clear()
    return found


def compare(judge: Decoder, prompts: Sequence[list[int]], results: Sequence[Result], *, temperature: float) -> Gate:
    """Bits of sampled tokens' logprobs in the engine and in packed forwards of whole sequences."""
    differing, delta, tokens = 0, 0.0, 0
    for begin, end in batches(
        [len(p) + len(r.token_ids) for p, r in zip(prompts, results, strict=True)], SCORED_TOKENS
    ):
        expected = scored(judge, prompts[begin:end], [r.token_ids for r in results[begin:end]], temperature)
        recorded = np.concatenate([np.asarray(r.logprobs, np.float32) for r in results[begin:end]])
        differing += int((recorded.view(np.uint32) != expected.view(np.uint32)).sum())
        delta += float(np.abs(recorded - expected).sum())
        tokens += len(recorded)
    return Gate(tokens, differing, delta / max(tokens, 1))


def batches(lengths: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Consecutive ranges of at most `limit` tokens, or of one sequence."""
    ranges, begin, total = [], 0, 0
    for i, length in enumerate(lengths):
        if i > begin and total + length > limit:
            ranges.append((begin, i))
            begin, total = i, 0
        total += length
    return [*ranges, (begin, len(lengths))] if lengths else []


@torch.no_grad()
def scored(
    judge: Decoder, prompts: Sequence[list[int]], completions: Sequence[list[int]], temperature: float
) -> np.ndarray:
    """[sampled tokens] float32 by one packed forward, the trainer's path."""
    device = judge.head_weight.device
    sequences = [[*p, *c] for p, c in zip(prompts, completions, strict=True)]
    layout = packed_layout([len(s) for s in sequences])
    ends = np.cumsum([len(s) for s in sequences])
    rows = np.concatenate([np.arange(end - len(c) - 1, end - 1) for end, c in zip(ends, completions, strict=True)])
    ids = torch.from_numpy(np.concatenate(sequences).astype(np.int64)).to(device)
    rows_R = torch.from_numpy(rows).to(device)
    temperature_R = torch.full((len(rows),), temperature, device=device)
    out = judge.score(ids, layout.positions.to(device), layout, rows_R, ids[rows_R + 1], temperature_R)
    return out.logprob.cpu().numpy()
