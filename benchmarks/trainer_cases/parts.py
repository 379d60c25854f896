"""Where a step's time goes, by the names of what ran on the device (on the CPU, of torch's operations)."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.trainer_cases.ours import Trainer
from services.trainer.packing import MicroBatch

PARTS = (
    ("attention", r"packed_kernel|dq_kernel|dkv_kernel|delta_kernel|flash|fmha|scaled_dot"),
    ("head", r"^segment_kernel|^row_kernel|logit_gradient_kernel"),
    ("optimizer", r"adam|lpnorm|vector_norm|foreach_norm"),
    ("gemm", r"gemm|gemv|nvjet|cutlass|cublas|xmma|splitk|aten::(mm|addmm|bmm|baddbmm|linear)\b|mkldnn"),
    ("norms, rope, swiglu, embedding", r"norm_kernel|norm_backward|rope|silu|segment_sum|embedding|index|gather"),
    ("casts and copies of shards", r"chunk_cat|memcpy|memset|copy|foreach|multi_tensor|split_with_sizes"),
)
"""The first pattern that a name contains, case aside."""
OTHER = "other"


def part_of(name: str) -> str:
    return next((part for part, pattern in PARTS if re.search(pattern, name, re.IGNORECASE)), OTHER)


def profiled(run: Callable[[], Any], device: torch.device) -> tuple[dict[str, float], float]:
    """Seconds by part of one run, and of the whole by the wall."""
    run()
    is_cuda = device.type == "cuda"
    synchronize: Callable[[], None] = torch.cuda.synchronize if is_cuda else lambda: None
    synchronize()
    # Unprofiled, because the profiler slows the host.
    begin = time.perf_counter()
    run()
    synchronize()
    wall = time.perf_counter() - begin
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]) as profiler:
        run()
        synchronize()
    seconds: Counter[str] = Counter()
    for event in profiler.key_averages():
        # Ranges that the host marked appear on the device too, around the kernels that count.
        is_range = getattr(event, "is_user_annotation", False) or event.key.startswith(
            ("FSDP::", "Optimizer.", "Profiler")
        )
        if is_range or (event.device_type == DeviceType.CUDA) != is_cuda or not (is_cuda or "::" in event.key):
            continue
        seconds[part_of(event.key)] += 1e-6 * (event.self_device_time_total if is_cuda else event.self_cpu_time_total)
    return dict(seconds), wall


def split(trainer: Trainer, micro: MicroBatch) -> dict[str, float]:
    """Seconds of one step by part; the head with its products, and what the device waited for the host."""
    device = trainer.world.device
    seconds, wall = profiled(lambda: trainer.step(micro), device)
    config, rows = trainer.decoder.config, micro.token_ids.shape[0]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    hidden = torch.randn(rows, config.hidden_size, device=device).to(dtype).requires_grad_()
    weight = (0.02 * torch.randn(config.vocab_size, config.hidden_size, device=device)).to(dtype).requires_grad_()

    def head() -> None:
        output = trainer.decoder.ops.lm_logprob(hidden, weight, micro.targets, micro.temperature)
        (-output.logprob.mean()).backward()

    alone, _ = profiled(head, device)
    products = alone.get("gemm", 0.0)
    seconds["gemm"] = seconds.get("gemm", 0.0) - products
    seconds["head"] = seconds.get("head", 0.0) + products
    seconds["host"] = max(0.0, wall - sum(seconds.values()))
    return seconds
