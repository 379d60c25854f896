"""Configuration of one rollout replica: this machine and this process. What is sampled is the run's business."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass, field

from shared.config import strict

CPU_CACHE_TOKENS = 16384
MOST_TOKENS = 2**31 - 1
"""Slots that the kernels can number."""


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
    device: str = "auto"
    """Where the model runs: cpu, cuda, cuda:N, or auto: a GPU if there is one."""
    kv_cache_tokens: int = 0
    """Tokens whose keys and values fit in the cache; must hold one sequence of the run's max_model_len. 0: 16384 on a CPU; on a
    GPU what kv_memory_share of its memory leaves beside the weights, another version on its way in and a step's activations."""
    kv_memory_share: float = 0.9
    """Share of a GPU's free memory, measured after loading, that a cache of automatic size is planned in, above 0 to 1."""
    cuda_graphs: bool = True
    """Replay captured steps on a GPU. Changes no bit."""
    shares_prefixes: bool = True
    """Whether sequences share the cached pages of equal prefixes. Changes no bit."""
    page_size: int = 0
    """Tokens of one page, a power of two. Prefixes are shared by whole pages. 0: 16 on a CPU, 64 on a GPU, where a step takes
    little more than a millisecond and every page that is full costs the host some microseconds."""
    max_running: int = 128
    """Sequences in one step, at most."""
    max_step_tokens: int = 2048
    """Tokens in one step, at most, prefill and decode together."""
    max_chunk_tokens: int = 512
    """Tokens of one sequence in one step, at most."""
    max_open_samples: int = 4096
    """Samples accepted and not finished; beyond it Generate answers RESOURCE_EXHAUSTED."""
    stream_tokens: int = 0
    """Sampled tokens of one sequence that are sent together; what is not sent is sampled again after a crash. 0: 4 on a CPU,
    128 on a GPU, where a step takes milliseconds."""
    threads: int = 1
    """Of torch. Part of the numerics fingerprint."""
    fetch_timeout_s: float = 600.0
    """Deadline for fetching one version's tensors, where the caller of PrepareWeights sets none."""
    shutdown_s: float = 10.0
    """After SIGTERM: time for the last step and for the streams to hear of it."""
    log_level: str = "info"

    def __post_init__(self) -> None:
        for name in ("max_running", "max_step_tokens", "max_chunk_tokens", "max_open_samples", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("kv_cache_tokens", "page_size", "stream_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 1, or 0 to choose by device, got {getattr(self, name)}")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {self.device!r}")
        if not 0 < self.kv_memory_share <= 1:
            raise ValueError(f"kv_memory_share must be above 0 and at most 1, got {self.kv_memory_share}")
        if self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size must be a power of two, got {self.page_size}")
        if 0 < self.kv_cache_tokens < self.tokens_per_page:
            raise ValueError(
                f"kv_cache_tokens must hold one page of {self.tokens_per_page}, got {self.kv_cache_tokens}; enlarge it"
            )
        for name in ("fetch_timeout_s", "shutdown_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")

    @property
    def is_measured(self) -> bool:
        """Whether the size of the cache is not known before a model is loaded."""
        return not self.kv_cache_tokens and self.device.startswith("cuda")

    @property
    def num_pages(self) -> int:
        assert not self.is_measured, "the cache has no size before a model is loaded"
        return (self.kv_cache_tokens or CPU_CACHE_TOKENS) // self.tokens_per_page

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens of the longest sequence that the cache holds, as far as it is known: a bound before memory is measured."""
        return MOST_TOKENS if self.is_measured else self.num_pages * self.tokens_per_page

    @property
    def tokens_per_page(self) -> int:
        """`page_size`, or what suits the device."""
        return self.page_size or (64 if self.device.startswith("cuda") else 16)

    @property
    def tokens_per_chunk(self) -> int:
        """`stream_tokens`, or what suits the device."""
        return self.stream_tokens or (128 if self.device.startswith("cuda") else 4)
