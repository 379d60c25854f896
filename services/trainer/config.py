"""What a trainer process is told about its machine; everything about the run comes from the run's own RunConfig."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shared.config import strict
from shared.wire.tensor_file import is_object


@strict
@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerConfig:
    """`python -m services.trainer [CONFIG.toml] [key=value ...]`, the same on every rank."""

    redis_url: str = "redis://127.0.0.1:6379/0"
    weight_sync: str = "127.0.0.1:7301"
    """host:port."""
    run_dir: str = "runs"
    """Directory shared by all ranks. Run NAME keeps {run_dir}/NAME/checkpoints, trajectories and steps.jsonl."""
    transport: Literal["directory", "grpc", "shm", "ipc", "broadcast"] = "grpc"
    """How published bytes reach the replicas. `shm` (memory of this host), `ipc` (GPU memory of this host) and `broadcast`
    (gloo or NCCL) announce a version at once and send it to weight_sync in the background, for whoever comes too late."""
    source_host: str = "127.0.0.1"
    """Interface where replicas ask for bytes in the memory of rank 0; `broadcast` between hosts needs another one."""
    source_port: int = 0
    """0 picks a free one."""
    source_advertised: str = ""
    """Host name under which replicas reach it. Empty: source_host."""
    source_lease_s: float = 30.0
    """Longest time that one replica may read a version from the trainer's memory."""
    broadcast_timeout_s: float = 20.0
    """Of one round: for its group to come together, and again for its bytes."""
    broadcast_gather_s: float = 0.5
    """How long a round waits for replicas that were in the last one."""
    directory: str | None = None
    """Of transport `directory`: a path that weight_sync and the replicas see too, or a place in an object store that they reach
    (s3://bucket/prefix, gs://..., whatever fsspec has a package for)."""
    delta: bool = False
    """Over `grpc`, send only what changed since the version before: faster where the network is the limit, see operations.md."""
    older_versions: Literal["device", "host", "directory"] = "device"
    """Where the versions behind the current one lie, with which stale tokens are audited: beside the model, in (pinned) memory of
    the host, or in `directory`, from which they are read back."""
    run: str | None = None
    """Train only the run of this name; None: whatever run is not over."""
    exit_when_done: bool = False
    """Exit with code 0 after the first run that ends, instead of waiting for the next."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    reshard_after_forward: bool = True
    """Free gathered weights behind each layer's forward. False gathers once a step: less traffic, more memory."""
    offload: bool = False
    """Masters, gradients and moments in the host's memory, where the optimizer then runs."""
    background_checkpoints: bool = False
    """Write checkpoints from a copy in the host's memory while training goes on."""
    export_dir: str | None = None
    """Where versions are written as Hugging Face directories: {export_dir}/{run}/step-XXXXXXXX."""
    export_interval: int = 0
    """Steps between exports; 0: only after the last step."""
    threads: int = 1
    """Of torch, per rank; part of the numerics fingerprint."""
    host: str = "127.0.0.1"
    port: int = 0
    """gRPC Status and health, rank 0 only. 0 picks a free one; the log line `ready` names it."""
    metrics_port: int = 0
    """Prometheus /metrics, rank 0 only."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    poll_s: float = 2.0
    """Longest single wait for a run or a batch; a stop signal is seen in between."""
    publish_deadline_s: float = 600.0
    """How long a publish may wait for weight_sync to come back."""
    collective_timeout_s: float = 1800.0
    """After which ranks that wait for one another give up; must exceed publish_deadline_s."""

    def __post_init__(self) -> None:
        if (self.transport == "directory") != (self.directory is not None):
            raise ValueError(
                f"directory goes with transport 'directory', got {self.transport!r} and {self.directory!r}"
            )
        if self.older_versions == "directory" and self.directory is None:
            raise ValueError("older_versions 'directory' needs transport 'directory'; use 'host'")
        if self.older_versions == "directory" and is_object(str(self.directory)):
            raise ValueError(f"older_versions 'directory' maps files, which {self.directory!r} has not; use 'host'")
        if self.transport == "ipc" and self.device == "cpu":
            raise ValueError("transport 'ipc' shares GPU memory, but device is 'cpu'; use transport 'shm'")
        if self.source_host in ("0.0.0.0", "::") and not self.source_advertised:
            raise ValueError(
                f"source_host {self.source_host!r} is no address to reach; set source_advertised to this host's name"
            )
        for name in ("threads", "poll_s", "publish_deadline_s", "source_lease_s", "broadcast_timeout_s",
                     "broadcast_gather_s"):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.export_interval < 0 or (self.export_interval and self.export_dir is None):
            raise ValueError(
                f"export_interval must be >= 0 and goes with export_dir, got {self.export_interval} and {self.export_dir!r}"
            )
        if not self.collective_timeout_s > self.publish_deadline_s:
            raise ValueError(
                f"collective_timeout_s ({self.collective_timeout_s}) must exceed publish_deadline_s ({self.publish_deadline_s})"
            )
