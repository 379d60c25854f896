"""The row contract of a whole engine, arm by arm: the same requests in other company, and what may not change.

The base arm runs all requests at once. Every other arm runs some or all of them again under one change, and each token must come
out with the same id, the same argmax and the same 32 bits of logprob. An arm says whether it did what its name says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.engine_cases.drive import Weights, batches, scored
from services.rollout.offline import OfflineEngine
from shared.kernels import Mode, Ops, build_ops, fast
from shared.models import Decoder, ModelConfig

TEMPERATURES = (0.6, 1.0, 1.3)
"""Of the requests, in turn: one batch holds them all."""
CONTROL_BATCH = 32
"""Few enough rows for the library to split the inner dimension."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How much is run."""

    name: str
    model: ModelConfig
    device: str
    dtype: str
    num_requests: int
    """Of the base arm: one more than its largest sibling's batch."""
    new_tokens: int
    batch_sizes: tuple[int, ...]
    least_requests: int
    """Of the smallest arm; batches smaller than this run one after another."""
    chunk_sizes: tuple[int, ...]
    prompt_tokens: tuple[int, int]
    """Least and most of the short prompts."""
    long_prompt: int
    """Of every eighth prompt: more than one chunk of the attention."""
    page_size: int
    max_step_tokens: int
    scored_tokens: int
    """Of one packed forward."""

    def prompts(self) -> list[list[int]]:
        draw = random.Random(self.name)
        lengths = [
            self.long_prompt if i % 8 == 7 else draw.randint(*self.prompt_tokens) for i in range(self.num_requests)
        ]
        return [draw.choices(range(self.model.vocab_size), k=n) for n in lengths]

    @property
    def max_model_len(self) -> int:
        return max(self.prompt_tokens[1], self.long_prompt) + self.new_tokens

    @property
    def kv_tokens(self) -> int:
        """Room for every request at once, two pages to spare for each."""
        return sum(-(-(len(p) + self.new_tokens) // self.page_size) + 2 for p in self.prompts()) * self.page_size


@dataclass(frozen=True, slots=True)
class Sampled:
    """One request's tokens."""

    tokens: np.ndarray
    """[new] int32; so is top1."""
    bits: np.ndarray
    """[new] uint32 of the float32 logprobs."""
    top1: np.ndarray

    def differing(self, other: Sampled) -> int:
        """Tokens that are not the same in every bit."""
        same = (self.tokens == other.tokens) & (self.bits == other.bits) & (self.top1 == other.top1)
        return int((~same).sum())


Answers = dict[int, Sampled]
"""By number of the request."""


@dataclass(slots=True)
class Finding:
    """What one arm came to."""

    arm: str
    compared: dict[float, int] = field(default_factory=dict)
    """Tokens by temperature."""
    differing: dict[float, int] = field(default_factory=dict)
    problem: str = ""
    """Why the arm proves nothing: it did not do what its name says."""

    def add(self, number: int, compared: int, differing: int) -> None:
        t = temperature_of(number)
        self.compared[t] = self.compared.get(t, 0) + compared
        self.differing[t] = self.differing.get(t, 0) + differing

    @property
    def num_compared(self) -> int:
        return sum(self.compared.values())

    @property
    def num_differing(self) -> int:
        return sum(self.differing.values())


def temperature_of(number: int) -> float:
    return TEMPERATURES[number % len(TEMPERATURES)]


class Arms:
    """Engines over one model's weights."""

    def __init__(self, plan: Plan, weights: Weights) -> None:
        """Args: weights, of the plan's model on its device."""
        self.plan, self.prompts, self.weights = plan, plan.prompts(), weights
        self.base: Answers = {}

    def run(self) -> Iterator[Finding]:
        """Every arm, the base first."""
        plan, everyone = self.plan, list(range(self.plan.num_requests))
        engine = self._engine()
        self.base = self._answers(engine, everyone, batch=len(everyone))
        graphs = engine.times.num_graph_steps
        yield self._scored("trainer's packed forward", self.weights.judge)
        for size in plan.batch_sizes:
            least = max(size, -(-plan.least_requests // size) * size)
            yield self._again(f"batch of {size}", engine, everyone[:least], batch=size)
        yield self._again("other positions", engine, random.Random(1).sample(everyone, len(everyone)))
        yield self._continued(engine)
        del engine
        for size in plan.chunk_sizes:
            yield self._again(f"chunks of {size}", self._engine(max_chunk_tokens=size), everyone)
        yield self._eager(graphs)
        yield self._prefix_hits()
        yield self._preempted()
        yield self._resumed()

    def controls(self) -> Iterator[Finding]:
        """What must differ: library products in the engine, the library's attention in the trainer's forward."""
        engine = self._engine(mode="fast", ops=library_products(self.plan))
        finding, numbers = Finding("control: library products"), range(self.plan.least_requests)
        answers = self._answers(engine, numbers, batch=min(CONTROL_BATCH, len(numbers)))
        self._judged(finding, answers, self.weights.judge)
        yield finding
        judge = self.weights.decoder(library_attention(self.plan))
        yield self._scored("control: scaled_dot_product_attention", judge)

    def _engine(self, *, mode: Mode = "exact", ops: Ops | None = None, **changes: Any) -> OfflineEngine:
        plan = self.plan
        config = {
            "kv_cache_tokens": plan.kv_tokens, "max_running": plan.num_requests, "page_size": plan.page_size,
            "max_step_tokens": plan.max_step_tokens, "max_chunk_tokens": plan.max_step_tokens, "shares_prefixes": False,
        }  # fmt: skip
        return self.weights.engine(mode, plan.max_model_len, ops, **config | changes)

    def _answers(self, engine: OfflineEngine, numbers: Sequence[int], *, batch: int) -> Answers:
        """What the engine samples for these requests, `batch` of them open at a time."""
        answers: Answers = {}
        engine.ops.activate()
        for begin in range(0, len(numbers), batch):
            members = numbers[begin : begin + batch]
            ids = [self._submit(engine, n)[0] for n in members]
            engine.run()
            answers |= {n: sampled(engine.results[i]) for n, i in zip(members, ids, strict=True)}
            engine.results.clear()
        return answers

    def _submit(self, engine: OfflineEngine, number: int, **more: Any) -> list[str]:
        return engine.submit(
            self.prompts[number],
            samples=1,
            max_tokens=self.plan.new_tokens,
            temperature=temperature_of(number),
            number=number,
            **more,
        )

    def _again(
        self,
        arm: str,
        engine: OfflineEngine,
        numbers: Sequence[int],
        *,
        batch: int | None = None,
        proof: Callable[[OfflineEngine], str] = lambda engine: "",
    ) -> Finding:
        finding = Finding(arm)
        for number, answer in self._answers(engine, numbers, batch=batch or len(numbers)).items():
            finding.add(number, len(answer.tokens), answer.differing(self.base[number]))
        finding.problem = proof(engine)
        return finding

    def _eager(self, graphs_of_base: int) -> Finding:
        def proof(engine: OfflineEngine) -> str:
            if engine.times.num_graph_steps:
                return "a graph was replayed"
            return "" if graphs_of_base or self.plan.device == "cpu" else "the base arm replayed no graph"

        return self._again("eager", self._engine(cuda_graphs=False), range(self.plan.num_requests), proof=proof)

    def _prefix_hits(self) -> Finding:
        def proof(engine: OfflineEngine) -> str:
            return "" if engine.engine.scheduler.num_prefix_hit_tokens else "no prefix was found in the cache"

        engine, everyone = self._engine(shares_prefixes=True), range(self.plan.num_requests)
        self._answers(engine, everyone, batch=len(everyone))
        return self._again("prefix hits", engine, everyone, proof=proof)

    def _preempted(self) -> Finding:
        def proof(engine: OfflineEngine) -> str:
            return "" if engine.engine.scheduler.num_preemptions else "nobody was preempted"

        plan = self.plan
        least = (-(-plan.max_model_len // plan.page_size) + 2) * plan.page_size
        tokens = max(plan.kv_tokens // 2 // plan.page_size * plan.page_size, least)
        engine = self._engine(kv_cache_tokens=tokens)
        return self._again("preempted and resumed", engine, range(plan.num_requests), proof=proof)

    def _resumed(self) -> Finding:
        """Everybody loses its place in the middle, and comes back behind pages of its own, which are still there."""
        finding, engine = Finding("preempted, resumed behind its own pages"), self._engine(shares_prefixes=True)
        ids = {n: self._submit(engine, n)[0] for n in self.base}
        scheduler, counters = engine.engine.scheduler, engine.engine.counters
        while counters.sampled_tokens < len(ids) * self.plan.new_tokens // 2:
            engine.step()
        engine.preempt()
        num_preempted, num_hits = scheduler.num_preemptions, scheduler.num_prefix_hit_tokens
        engine.run()
        for number, i in ids.items():
            answer = sampled(engine.results[i])
            finding.add(number, len(answer.tokens), answer.differing(self.base[number]))
        if num_preempted < len(ids) or scheduler.num_prefix_hit_tokens < num_hits + len(ids) * self.plan.page_size:
            finding.problem = f"{num_preempted} of {len(ids)} were preempted, and not all found a page again"
        return finding

    def _continued(self, engine: OfflineEngine) -> Finding:
        """The second half of every sample, its first half given: what a replica does that takes over another's work."""
        finding, half = Finding("continued elsewhere"), self.plan.new_tokens // 2
        ids = {n: self._submit(engine, n, continued={0: a.tokens[:half].tolist()})[0] for n, a in self.base.items()}
        engine.run()
        for number, i in ids.items():
            answer, whole = sampled(engine.results[i]), self.base[number]
            rest = replace(whole, tokens=whole.tokens[half:], bits=whole.bits[half:], top1=whole.top1[half:])
            finding.add(number, len(rest.tokens), answer.differing(rest))
        engine.results.clear()
        return finding

    def _scored(self, arm: str, judge: Decoder) -> Finding:
        """The base arm's logprobs against packed forwards of whole sequences."""
        finding = Finding(arm)
        self._judged(finding, self.base, judge)
        return finding

    def _judged(self, finding: Finding, answers: Answers, judge: Decoder) -> None:
        judge.ops.activate()
        for t in TEMPERATURES:
            numbers = [n for n in answers if temperature_of(n) == t]
            lengths = [len(self.prompts[n]) + self.plan.new_tokens for n in numbers]
            for begin, end in batches(lengths, self.plan.scored_tokens):
                members = numbers[begin:end]
                completions = [answers[n].tokens.tolist() for n in members]
                expected = scored(judge, [self.prompts[n] for n in members], completions, t).view(np.uint32)
                recorded = np.concatenate([answers[n].bits for n in members])
                finding.add(members[0], len(expected), int((recorded != expected).sum()))


def library_products(plan: Plan) -> Ops:
    """The exact operations, but for products as the library chooses them by their number of rows."""
    if plan.device == "cpu":
        ops = build_ops("exact", "cpu")
        ops.use_linear(F.linear)
        return ops
    from shared.kernels.cuda.fast import LibraryProducts, use_library_defaults
    from shared.kernels.cuda.ops import CudaOps

    ops = CudaOps(torch.device(plan.device), LibraryProducts(rounds_logits=False))
    ops.activate = use_library_defaults  # type: ignore[method-assign]
    ops.keeps_table = False
    return ops


def library_attention(plan: Plan) -> Ops:
    """The exact operations, but for the attention."""
    ops = build_ops("exact", plan.device)
    ops.attention = fast.attention  # type: ignore[method-assign]
    return ops


def sampled(result: Any) -> Sampled:
    """Args: result, of an OfflineEngine."""
    bits = np.asarray(result.logprobs, np.float32).view(np.uint32)
    return Sampled(np.asarray(result.token_ids, np.int32), bits, np.asarray(result.top1, np.int32))
