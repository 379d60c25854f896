"""Configuration of the gateway: `python -m services.gateway [CONFIG.toml] [key=value ...]`."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.config import strict


@strict
@dataclass(frozen=True, kw_only=True, slots=True)
class DispatcherConfig:
    max_inflight_samples: int = 256
    """Of one replica; a larger group goes to an idle one."""
    stream_idle_s: float = 60.0
    """Silence of a Generate stream after which its replica is asked whether it samples at all; if not, the stream is broken."""
    max_group_failures: int = 5
    """Faults of one group before the run is paused with reason infra_error; under max_lag, before its unfinished samples are
    dropped with that reason."""
    no_replica_s: float = 30.0
    """A run that has something to generate, but for so long no replica that is not ejected, is paused with reason no_replica. It
    goes on by itself as soon as there is one."""

    def __post_init__(self) -> None:
        if (
            self.max_inflight_samples < 1
            or self.max_group_failures < 1
            or not min(self.stream_idle_s, self.no_replica_s) > 0
        ):
            raise ValueError(f"every value must be above 0, got {self}")


@strict
@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayConfig:
    host: str = "127.0.0.1"
    """Of the HTTP API and of gRPC health. Anything but loopback needs a key."""
    port: int = 8000
    """HTTP. 0 picks a free one; the log line `ready` says which."""
    health_port: int = 0
    """gRPC health; 0 picks a free one."""
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0
    """Of /metrics; 0 picks a free one."""
    valkey: str = "redis://127.0.0.1:6379/0"
    """redis:// or rediss://"""
    weight_sync: str = "127.0.0.1:7301"
    """host:port"""
    keys: tuple[str, ...] = ()
    """API keys as `name:sha256-hex:scope,scope`; make one with `python -m services.gateway.auth NAME SCOPE ...`"""
    keys_file: str = ""
    """A file with one such entry a line."""
    max_body_bytes: int = 16 * 2**20
    """Of a request."""
    max_items: int = 1024
    """Of a batch of prompts, rewards or evaluation items."""
    max_streams: int = 64
    """Event streams open at once."""
    body_timeout_s: float = 30.0
    """Within which a request's body must arrive."""
    heartbeat_s: float = 5.0
    """Between two comments on an idle event stream."""
    gate_retry_s: int = 2
    """Retry-After while the admission gate is closed."""
    completion_timeout_s: float = 50.0
    """Deadline of an OpenAI-compatible completion."""
    rpc_timeout_s: float = 10.0
    """Deadline of a call to weight_sync."""
    tokenizer_timeout_s: float = 120.0
    """Deadline of loading a run's tokenizer."""
    drain_s: int = 5
    """From SIGTERM until open requests are cut."""
    valkey_retries: int = 6
    """Of a request's command while Valkey does not answer, some two seconds; then the request gets 503."""
    dispatcher: DispatcherConfig = field(default_factory=DispatcherConfig)
    log_level: str = "info"

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_items", "max_streams", "gate_retry_s"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("body_timeout_s", "heartbeat_s", "completion_timeout_s", "rpc_timeout_s", "tokenizer_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
