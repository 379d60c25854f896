"""Configuration of weight_sync: where it listens, where versions lie, and how long anything may take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shared.config import strict


@strict
@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSyncConfig:
    data_dir: Path = Path("weight_sync")
    """Manifests, and the weights that came over gRPC. One process owns it at a time."""
    host: str = "127.0.0.1"
    """Interface that the gRPC server binds."""
    port: int = 7301
    """0 picks a free one."""
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0
    """Of /metrics; 0 picks a free one."""
    heartbeat_s: float = 2.0
    """What replicas are told at Register."""
    lease_s: float = 15.0
    """A replica that was not heard of for so long is gone."""
    prepare_timeout_s: float = 300.0
    """One PrepareWeights: the replica fetches and verifies the whole version in it."""
    commit_timeout_s: float = 120.0
    """One CommitWeights: the swap, the recomputed prefixes and the probe."""
    abort_timeout_s: float = 10.0
    num_attempts: int = 2
    """Failed calls, for one version, that eject a replica."""
    retry_s: float = 15.0
    """A replica ejected for failed calls is tried again after this long. Wrong bits are never retried."""
    commit_mode: Literal["reprefill", "drain", "keep"] = "reprefill"
    """What a replica does with sequences that run when it swaps (under fixed lag there are none): compute their prefixes again
    under the new weights, let them end first, or go on behind the old ones' keys and values; what is sampled then comes from no
    version that exists, is marked kv = mixed and is never compared."""
    shutdown_s: float = 5.0
    """After SIGTERM: time for publishes and fetches under way."""
    log_level: str = "info"

    def __post_init__(self) -> None:
        for name in ("heartbeat_s", "lease_s", "prepare_timeout_s", "commit_timeout_s", "abort_timeout_s", "retry_s",
                     "shutdown_s"):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.num_attempts < 1:
            raise ValueError(f"num_attempts must be >= 1, got {self.num_attempts}")
        if self.lease_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"lease_s must be at least two heartbeats of {self.heartbeat_s} s, got {self.lease_s}: "
                "a replica would be lost with one late heartbeat"
            )
