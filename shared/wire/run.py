"""What a run is: the one typed description that the gateway validates, Valkey keeps, and trainer and replicas obey."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from shared.config import strict
from shared.wire.algorithm import GROUP_ADVANTAGES, AlgorithmConfig


class RunState(StrEnum):
    RUNNING = "running"
    PAUSED = "paused"
    COMPLETED = "completed"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        return self in (RunState.COMPLETED, RunState.STOPPED, RunState.FAILED)


@strict
@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    lr: float = 2e-5
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Of the learning rate, behind the warm-up, over num_steps."""
    warmup_steps: int = 0
    max_grad_norm: float = 1.0
    """Of gradient clipping."""

    def __post_init__(self) -> None:
        if not self.lr >= 0:
            raise ValueError(f"optimizer.lr must be >= 0, got {self.lr}")
        _at_least("optimizer.warmup_steps", self.warmup_steps, 0)
        _at_least("optimizer.weight_decay", self.weight_decay, 0)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas must both be in [0, 1), got {self.betas}")
        for name in ("eps", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"optimizer.{name} must be above 0, got {getattr(self, name)}")


@strict
@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One run: one model, one trainer. Everything here is an input of the run; nothing about the machine is."""

    run: str
    """Name: 1 to 64 ASCII letters, digits, '-' or '_'. Ids of prompts and trajectories begin with it."""
    model: str
    """Hugging Face directory or hub name, as seen by every service."""
    seed: int = 0
    """Of sampling; with the prompt number, sample index and token index the whole key of the generator."""
    numerics: Literal["exact", "fast"] = "exact"
    """exact: kernels that keep the row contract, no TIM. fast: PyTorch's own."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Of the published weights and of every forward. auto: bfloat16 where the device has the instructions."""
    max_model_len: int = 1024
    """Prompt and sampled tokens of one sequence, at most."""
    num_steps: int = 1
    """Training steps; the run is completed after the last one."""
    prompts_per_step: int = 8
    """Groups in one batch."""
    samples_per_prompt: int = 8
    """Trajectories in one group."""
    lag: int = 1
    """Fixed lag: batch s is generated entirely by version max(0, s - lag)."""
    temperature: float = 1.0
    """Of every training rollout; the trainer divides its logits by the same number."""
    checkpoint_interval: int = 5
    """Steps between durable checkpoints."""
    keep_checkpoints: int = 2
    """Newest ones that stay on disk."""
    queue_batches: int = 0
    """Batches that may be accepted beyond the durable checkpoint. 0: checkpoint_interval + lag + 2."""
    reward_deadline_s: float = 3600.0
    """From generated to rewarded. A missed one pauses the run; it is never a reward of zero."""
    on_mismatch: Literal["stop", "continue"] = "stop"
    """What exact mode does when one bit of one logprob differs."""
    audit_share: float = 1.0
    """Share of the groups, chosen by number, whose tokens are scored under older versions only to be compared with the engine's.
    What the step needs scored anyway is always compared."""
    micro_batch_tokens: int = 4096
    """Packed rows of one forward and backward, at most (only a single trajectory with its prompt may exceed it)."""
    activation_checkpointing: Literal["none", "elementwise", "mlp", "layer"] = "none"
    """What the backward computes again instead of keeping it, ever more: norms and SwiGLU; the gate and up products too; whole
    layers. Changes no logprob."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        if not self.run or len(self.run) > 64 or not all(c.isascii() and (c.isalnum() or c in "-_") for c in self.run):
            raise ValueError(f"run must be 1 to 64 ASCII letters, digits, '-' or '_', got {self.run!r}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be in [0, 2^63), got {self.seed}")
        for name in ("max_model_len", "num_steps", "prompts_per_step", "samples_per_prompt", "checkpoint_interval",
                     "keep_checkpoints", "micro_batch_tokens"):  # fmt: skip
            _at_least(name, getattr(self, name), 1)
        _at_least("lag", self.lag, 0)
        if not 0 <= self.audit_share <= 1:
            raise ValueError(f"audit_share must be in [0, 1], got {self.audit_share}")
        if not self.temperature > 0:
            raise ValueError(
                f"temperature must be above 0 (greedy belongs to the evaluation lane), got {self.temperature}"
            )
        if not self.reward_deadline_s > 0:
            raise ValueError(f"reward_deadline_s must be above 0, got {self.reward_deadline_s}")
        if self.algorithm.mini_steps > self.prompts_per_step:
            raise ValueError(
                f"algorithm.mini_steps ({self.algorithm.mini_steps}) exceeds prompts_per_step ({self.prompts_per_step})"
            )
        self.algorithm.check_clip()
        most = self.algorithm.dynamic_groups
        if most > self.prompts_per_step or 0 < most < self.algorithm.mini_steps:
            raise ValueError(
                f"algorithm.dynamic_groups ({most}) must lie between mini_steps ({self.algorithm.mini_steps}) and the "
                f"prompts_per_step ({self.prompts_per_step}) from which they are taken"
            )
        if self.algorithm.advantage in GROUP_ADVANTAGES and self.samples_per_prompt < 2:
            raise ValueError(
                f"{self.algorithm.advantage} compares siblings: samples_per_prompt must be at least 2, got 1"
            )
        least = self.checkpoint_interval + self.lag + 1
        if self.queue_batches and self.queue_batches <= least:
            raise ValueError(
                f"queue_batches must exceed checkpoint_interval + lag + 1 = {least}, "
                f"got {self.queue_batches}: entries stay queued until a checkpoint covers them, so the run would deadlock"
            )

    @property
    def queue_bound_batches(self) -> int:
        return self.queue_batches or self.checkpoint_interval + self.lag + 2

    def batch_of(self, prompt_number: int) -> int:
        """The training step that consumes this prompt."""
        return prompt_number // self.prompts_per_step

    def version_for(self, batch: int) -> int:
        """The policy step that every token of this batch is sampled with."""
        return max(0, batch - self.lag)


def _at_least(name: str, value: float, bound: float) -> None:
    if not value >= bound:
        raise ValueError(f"{name} must be >= {bound}, got {value}")
