"""AdamW on the fp32 masters, its learning-rate schedule, and clipping by the global gradient norm."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shared.wire.run import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Decoupled weight decay on matrices only; the fused implementation, which is one deterministic pass."""
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )


def learning_rate(config: OptimizerConfig, optimizer_step: int, num_optimizer_steps: int) -> float:
    """The rate of one optimizer step: a function of its number alone, so that a resume needs no state.

    Linear warmup over `warmup_steps`, then constant, or down to 0 at the end of the run, linearly or by a half cosine.

    Args:
        optimizer_step: from 0.
        num_optimizer_steps: of the whole run.
    """
    if optimizer_step < config.warmup_steps:
        return config.lr * (optimizer_step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.lr
    progress = (optimizer_step - config.warmup_steps) / max(num_optimizer_steps - config.warmup_steps, 1)
    return config.lr * (1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress)))


def apply(optimizer: torch.optim.Optimizer, *, lr: float, max_grad_norm: float, is_empty: bool) -> tuple[float, bool]:
    """One optimizer step on the accumulated gradients, which are cleared.

    The device alone decides whether to step: it is told the factor of the clipping and whether the norm is finite as tensors,
    so that the host waits once, for the norm, when everything is launched.

    Args:
        lr: learning rate.
        max_grad_norm: the gradient is scaled down to it; 0 or inf for no clipping.
        is_empty: nothing was accepted: leave weights and moments alone.

    Returns:
        The global gradient norm before clipping, and whether the step was taken: not when it is empty or the norm is not finite.
    """
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    total = nn.utils.get_total_norm(gradients)
    norm = total.full_tensor() if isinstance(total, DTensor) else total
    if not is_empty:
        for group in optimizer.param_groups:
            group["lr"] = lr
        # What the fused step divides gradients by, and what makes it pass over everything (as a gradient scaler's would).
        optimizer.grad_scale = ((norm + 1e-6) / (max_grad_norm or math.inf)).clamp(min=1.0)  # type: ignore[attr-defined]
        optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    value = float(norm)
    return value, math.isfinite(value) and not is_empty
