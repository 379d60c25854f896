"""What one decode step is made of: the operations that a step asks for are caught, and replayed part by part on their own.

A part's time is that of all its calls of one step, every layer's with its own weights and cache, in one CUDA graph: no launch is
on the clock and nothing is in the cache that a step would not leave there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.engine_cases.drive import Weights, build, submit
from benchmarks.engine_cases.workloads import Request, Workload
from benchmarks.harness import Record, cpu_time, graph_time
from services.rollout.offline import OfflineEngine
from shared.kernels import Ops

WORKLOAD = "uniform"
"""The workload whose middle is looked at."""
DECODE_STEPS = 16
"""Timed whole."""
IN_FLIGHT = 3
"""Steps until whatever was launched before has been read back, and one more."""
PARTS = {"linear": "gemms", "attention": "attention", "sample": "sampling"}
"""Operation -> part; every other operation is a small kernel."""
TARGETS_MS = {"gemms": 1.9, "head": 0.23, "attention": 3.9, "small": 0.5, "sampling": 0.2, "step": 6.8}
"""At 256 sequences with 512 tokens of context in a Qwen3-1.7B on an H200: what throwaway code reached, part by part."""

Call = Callable[[], Any]


def owners(ops: Ops) -> Iterator[tuple[Any, str, str]]:
    """(object, name of one of its functions, part) of everything that a step may call."""
    for name in dir(ops):
        if not name.startswith("_") and name not in SETTINGS and callable(getattr(ops, name)) and name != "table":
            yield ops, name, PARTS.get(name, "small")
    if ops.has_paged_kernels:
        from shared.kernels.cuda.merged import MergedRows
        from shared.models import merged

        yield ops.table, "linear", "gemms"  # type: ignore[attr-defined]
        yield merged, "attend", "attention"
        yield merged, "silu_mul_halves", "small"
        yield MergedRows, "place_qkv", "small"
        yield MergedRows, "add_norm", "small"


@contextmanager
def caught(ops: Ops) -> Iterator[dict[str, list[Call]]]:
    """The calls made in the block: part -> the same calls again, in order. What a call calls in turn is not listed again."""
    calls: dict[str, list[Call]] = {"gemms": [], "attention": [], "sampling": [], "small": []}
    depth = 0

    def catching(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if not depth:
                calls[part].append(partial(function, *args, **kwargs))
            depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                depth -= 1

        return call

    changed = [
        (owner, name, vars(owner).get(name), catching(getattr(owner, name), part)) for owner, name, part in owners(ops)
    ]
    for owner, name, _, call in changed:
        setattr(owner, name, call)
    try:
        yield calls
    finally:
        for owner, name, own, _ in changed:
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


SETTINGS = (
    "activate", "certify_linear", "choose_chunk", "describe", "identity", "machine", "settle_attention", "use_linear",
    "widen_head",
)  # fmt: skip
"""Methods of operations that compute nothing."""


def measure(engine: OfflineEngine, workload: Workload, weights: Weights) -> Iterator[Record]:
    """Milliseconds of the step and of its parts, at the workload's batch and the middle of its lengths."""
    context = workload.prompt_tokens + workload.new_tokens // 2
    params = {"sequences": workload.num_sequences, "context": context}
    record = partial(Record, "engine", "budget", params, engine.ops.mode)
    engine.ops.activate()
    found = whole(engine, workload, context) | parts(workload, weights, engine.ops, context)
    for name, ms in found.items():
        target = TARGETS_MS.get(name) if engine.ops.device.type == "cuda" else None
        against: dict[str, Any] = (
            {} if target is None else {"baseline": f"target {target} ms", "ratio": target / max(ms, 1e-9)}
        )
        yield record(f"{name}_ms", ms, "ms", **against)
    rest = found["device"] - sum(found[n] for n in ("gemms", "attention", "small", "head", "sampling"))
    yield record("rest_ms", rest, "ms")


def decoding(engine: OfflineEngine, workload: Workload, context: int, steps: int) -> None:
    """Brings every sequence to decode at `context` tokens less half of `steps`, with at least `steps` to go."""
    limit = engine.engine.config.max_step_tokens
    # The first ones decode while the last prompts are computed.
    lead = -(-workload.num_sequences * context // limit) + 4
    prompt_tokens = max(1, min(context - steps // 2, workload.max_model_len - lead - steps))
    requests = [
        Request(prompt=(r.prompt * context)[:prompt_tokens], max_tokens=lead + steps)
        for r in replace(workload, num_prompts=workload.num_sequences, samples=1).requests(-2)
    ]
    submit(engine, requests)
    scheduler = engine.engine.scheduler
    # What a sequence's object knows of its tokens is late.
    while scheduler.waiting or any(scheduler.slots.known[s.slot] <= prompt_tokens for s in scheduler.running):
        engine.step()
    assert len(scheduler.running) == len(requests), f"{len(scheduler.running)} of {len(requests)} sequences decode"


def drain(engine: OfflineEngine) -> None:
    engine.run()
    engine.results.clear()


def whole(engine: OfflineEngine, workload: Workload, context: int) -> dict[str, float]:
    """Of the engine as it runs: wall, device and host milliseconds a step."""
    num_steps = min(DECODE_STEPS, workload.new_tokens // 2)
    decoding(engine, workload, context, num_steps + IN_FLIGHT)
    for _ in range(IN_FLIGHT):
        # The times of prompts still under way would be counted.
        engine.step()
    engine.reset_times()
    begin = time.perf_counter()
    for _ in range(num_steps):
        engine.step()
    wall_s, t = time.perf_counter() - begin, replace(engine.times)
    drain(engine)
    seconds = {
        "step": wall_s,
        "device": t.device_s + t.sample_s,
        "idle": t.idle_s,
        "host": t.schedule_s + t.prepare_s + t.read_s,
    }
    return {name: 1e3 * value / max(t.num_steps, 1) for name, value in seconds.items()}


def parts(workload: Workload, weights: Weights, ops: Ops, context: int) -> dict[str, float]:
    """Of the operations of one step, made eagerly by an engine of its own over the same weights."""
    engine = build(workload, ops.mode, weights, cuda_graphs=False)
    decoding(engine, workload, context, 2)
    with caught(ops) as calls:
        engine.step()
    found = {part: milliseconds(made, ops) for part, made in calls.items()}
    found["head"] = milliseconds([partial(head, workload, weights, ops)], ops) if ops.has_paged_kernels else 0.0
    found["sampling"] -= found["head"]
    drain(engine)
    return found


def head(workload: Workload, weights: Weights, ops: Any) -> torch.Tensor:
    """The product that gives a decode step's logits."""
    weight = weights.judge.head_weight
    hidden = torch.zeros(workload.num_sequences, weight.shape[1], dtype=weight.dtype, device=weight.device)
    return ops.table.linear(hidden, weight, out_dtype=torch.float32)


def milliseconds(calls: list[Call], ops: Ops) -> float:
    """Of all calls, one after another."""
    if not calls:
        return 0.0

    @torch.inference_mode()
    def run() -> None:
        for call in calls:
            call()

    if ops.device.type == "cuda":
        return graph_time([run], repeats=20).median / 1e3
    return cpu_time(run).median / 1e3
