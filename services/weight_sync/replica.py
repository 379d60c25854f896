"""What is known of one replica, and what can be asked of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from services.weight_sync.versions import Version


class ReplicaState(StrEnum):
    JOINING = "joining"
    """Registered, serves nothing, and nothing that it needs is published."""
    PREPARING = "preparing"
    STAGED = "staged"
    READY = "ready"
    """Serves the target, or the last version that it committed while the target is not published."""
    EJECTED = "ejected"
    """Not to be used, for a reason; healed by another version, by registering again or, after a failed call, by time."""


class Phase(StrEnum):
    PREPARE = "prepare"
    COMMIT = "commit"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Action:
    phase: Phase
    version: Version


@dataclass(frozen=True, slots=True)
class Rejection:
    reason: str
    retry_at: float
    """When the same version may be tried once more; inf: only another version heals."""


@dataclass(slots=True, kw_only=True, eq=False)
class Replica:
    """One registration; the object's identity is that of the registration."""

    name: str
    incarnation: str
    address: str
    kv_capacity_tokens: int
    expires_at: float
    serving: Version | None = None
    """Acknowledged by a Commit with the right digest and a clean probe, and nothing has put that in doubt since."""
    staged: Version | None = None
    """Acknowledged by a Prepare."""
    leftover: Version | None = None
    """May lie in staging after a failure: aborted before anything else."""
    busy: Action | None = None
    """The call under way."""
    num_failures: dict[Version, int] = field(default_factory=dict)
    rejected: dict[Version, Rejection] = field(default_factory=dict)
    last_reason: str = ""
    not_ahead: Version | None = None
    """Failed to be prepared ahead; tried again only when it is needed."""
    num_foreign_heartbeats: int = 0
