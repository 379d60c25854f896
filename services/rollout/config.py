"""Configuration of one rollout replica: this machine and this process. What is sampled is the run's business."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from shared.config import strict


@strict
@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    replica: str = field(default_factory=lambda: f"rollout-{socket.gethostname()}")
    """Stable name; two replicas that run at the same time need two names."""
    host: str = "127.0.0.1"
    """Interface that the engine's gRPC server binds."""
    port: int = 0
    """0 picks a free one."""
    advertised_address: str = ""
    """host:port where weight_sync and the gateway reach this replica. Empty: the bound host and port."""
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0
    """Of /metrics; 0 picks a free one."""
    weight_sync: str = "127.0.0.1:7301"
    """host:port of weight_sync."""
    kv_cache_tokens: int = 16384
    """Tokens whose keys and values fit in the cache; must hold one sequence of the run's max_model_len."""
    page_size: int = 16
    """Tokens of one page, a power of two. Prefixes are shared by whole pages."""
    max_running: int = 128
    """Sequences in one step, at most."""
    max_step_tokens: int = 2048
    """Tokens in one step, at most, prefill and decode together."""
    max_chunk_tokens: int = 512
    """Tokens of one sequence in one step, at most."""
    max_open_samples: int = 4096
    """Samples accepted and not finished; beyond it Generate answers RESOURCE_EXHAUSTED."""
    stream_tokens: int = 4
    """Sampled tokens of one sequence that are sent together. What is not sent is sampled again after a crash."""
    threads: int = 1
    """Of torch. Part of the numerics fingerprint."""
    fetch_timeout_s: float = 600.0
    """Deadline for fetching one version's tensors, where the caller of PrepareWeights sets none."""
    shutdown_s: float = 10.0
    """After SIGTERM: time for the last step and for the streams to hear of it."""
    log_level: str = "info"

    def __post_init__(self) -> None:
        for name in ("kv_cache_tokens", "page_size", "max_running", "max_step_tokens", "max_chunk_tokens",
                     "max_open_samples", "stream_tokens", "threads"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size must be a power of two, got {self.page_size}")
        if self.kv_cache_tokens < self.page_size:
            raise ValueError(
                f"kv_cache_tokens must hold one page of {self.page_size}, got {self.kv_cache_tokens}; enlarge it"
            )
        for name in ("fetch_timeout_s", "shutdown_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")

    @property
    def num_pages(self) -> int:
        return self.kv_cache_tokens // self.page_size

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens of the longest sequence that the cache holds."""
        return self.num_pages * self.page_size
