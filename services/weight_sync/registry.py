"""Which replicas live, and what each has to do next. No I/O and no clock: time is an argument.

    Publish, Retain, SetNeeded ──▶ versions, needed ──┐
    Register, Heartbeat, expiry ─▶ replicas ──────────┴▶ next_action ──▶ begin ──▶ prepared | committed | failed

A replica is moved to `target`, the version of the step that the dispatcher needs: Prepare, then Commit. When it is there,
the step behind it is prepared ahead. A state is never stored: it follows from what a replica serves, has staged, and was
rejected for, so no two fields can contradict each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from services.weight_sync.replica import Action, Phase, Rejection, Replica, ReplicaState
from services.weight_sync.versions import Published, Version, Versions


class RefusedError(Exception):
    """This replica can't serve the run."""


class UnknownReplicaError(Exception):
    """No such replica, or its lease ended: it has to register again."""


@dataclass(slots=True, kw_only=True)
class Registry:
    lease_s: float
    """A replica lives this long after its last heartbeat."""
    retry_s: float
    """A replica ejected for a call that failed is tried again after this long."""
    num_attempts: int
    """Failed calls, for one version, that eject a replica."""
    versions: Versions = field(default_factory=Versions)
    replicas: dict[str, Replica] = field(default_factory=dict)
    needed: tuple[str, int] | None = None
    """Run and step that the dispatcher's unfinished work needs."""

    def set_needed(self, run: str, step: int) -> bool:
        """True when the step is published."""
        self.needed = run, step
        return self.target() is not None

    @property
    def run(self) -> str:
        """The run being served: the dispatcher's, else the one published to last."""
        return self.needed[0] if self.needed else self.versions.newest_run()

    def target(self) -> Version | None:
        return self.versions.resolve(*self.needed) if self.needed else None

    def collect(self) -> list[Version]:
        """Forgets, and returns, versions that are retired and that nobody needs, serves or stages any more."""
        pinned = {self.target()}
        for r in self.replicas.values():
            pinned |= {r.serving, r.staged, r.leftover, r.busy.version if r.busy else None}
        dropped = self.versions.collect(pinned)
        for v in dropped:
            for r in self.replicas.values():
                r.rejected.pop(v, None)
                r.num_failures.pop(v, None)
        return dropped

    # Replicas

    def register(self, name: str, incarnation: str, address: str, kv_capacity_tokens: int, *, now: float) -> None:
        """Adds the replica, or renews it. An ejected one starts afresh. Raises RefusedError."""
        replica = Replica(
            name=name,
            incarnation=incarnation,
            address=address,
            kv_capacity_tokens=kv_capacity_tokens,
            expires_at=now + self.lease_s,
        )
        if refusal := self.refusal(replica):
            raise RefusedError(refusal)
        old = self.replicas.get(name)
        if old and (old.incarnation, old.address) == (incarnation, address) and not self.reason(old):
            old.expires_at = replica.expires_at
        else:
            self.replicas[name] = replica

    def heartbeat(self, name: str, incarnation: str, digest: str, *, now: float) -> bool:
        """Renews the lease. True when the replica turns out to serve something else, so that it is brought back.

        Raises: UnknownReplicaError, RefusedError.

        Args:
            digest: of what the replica says it serves; empty when it doesn't say.
        """
        r = self.replicas.get(name)
        if r is None or r.incarnation != incarnation:
            raise UnknownReplicaError(f"replica {name} ({incarnation}) is not registered")
        if refusal := self.refusal(r):
            raise RefusedError(refusal)
        r.expires_at = now + self.lease_s
        is_foreign = bool(digest and r.serving and digest != r.serving.digest and r.busy is None)
        r.num_foreign_heartbeats = r.num_foreign_heartbeats + 1 if is_foreign else 0
        # One such heartbeat may have been sent before the last Commit was acknowledged; the next one was not.
        if r.num_foreign_heartbeats < 2:
            return False
        r.serving, r.num_foreign_heartbeats = None, 0
        return True

    def deregister(self, name: str, incarnation: str) -> None:
        """A no-op for an incarnation that is not there."""
        if name in self.replicas and self.replicas[name].incarnation == incarnation:
            del self.replicas[name]

    def expire(self, *, now: float) -> list[Replica]:
        """Removes, and returns, replicas whose lease ended."""
        gone = [r for r in self.replicas.values() if r.expires_at <= now]
        for r in gone:
            del self.replicas[r.name]
        return gone

    def is_registered(self, r: Replica) -> bool:
        return self.replicas.get(r.name) is r

    def refusal(self, r: Replica) -> str:
        """Why this replica can't serve the run at all, or nothing."""
        newest = self.versions.newest(self.run)
        published = self.versions.get(newest) if newest else None
        if published is None or r.kv_capacity_tokens >= published.max_model_len:
            return ""
        return (
            f"the KV cache holds {r.kv_capacity_tokens} tokens, but one sequence of run {self.run} may have "
            f"{published.max_model_len} (max_model_len): give the replica a larger cache"
        )

    def reason(self, r: Replica) -> str:
        """Why the replica is ejected, or nothing."""
        target = self.target()
        if refusal := self.refusal(r):
            return refusal
        if target and r.serving != target and target in r.rejected:
            return r.rejected[target].reason
        return "" if r.serving else r.last_reason

    def state(self, r: Replica) -> ReplicaState:
        target = self.target()
        if self.reason(r):
            return ReplicaState.EJECTED
        if target is None:
            return ReplicaState.READY if r.serving else ReplicaState.JOINING
        if r.serving == target:
            return ReplicaState.READY
        return ReplicaState.STAGED if r.staged == target else ReplicaState.PREPARING

    # Distribution

    def next_action(self, r: Replica, *, now: float) -> Action | None:
        """The next call to make to this replica; None while one is under way or there is nothing to do."""
        if r.busy:
            return None
        if r.leftover:
            return Action(Phase.ABORT, r.leftover)
        target = self.target()
        if target is None:
            return None
        wanted = self._wanted(r, target, now)
        if r.staged and r.staged != wanted:
            return Action(Phase.ABORT, r.staged)
        if wanted is None:
            return None
        if r.staged != wanted:
            return Action(Phase.PREPARE, wanted)
        return Action(Phase.COMMIT, target) if wanted == target else None

    def _wanted(self, r: Replica, target: Version, now: float) -> Version | None:
        """What should be in the replica's staging."""
        if self.refusal(r):
            return None
        wanted = self.versions.resolve(target.run, target.step + 1) if r.serving == target else target
        if wanted is None or (r.serving == target and wanted == r.not_ahead):
            return None
        rejection = r.rejected.get(wanted)
        return None if rejection and now < rejection.retry_at else wanted

    def wake_at(self, r: Replica, *, now: float) -> float:
        """When, after now, `next_action` may change without an event."""
        target = self.target()
        rejection = r.rejected.get(target) if target else None
        return rejection.retry_at if rejection and rejection.retry_at > now else math.inf

    def begin(self, r: Replica, action: Action) -> None:
        """The call is being made."""
        r.busy = action
        if action.phase is not Phase.COMMIT:
            r.staged = r.leftover = None
        if action.phase is Phase.PREPARE and action.version == self.target():
            r.rejected.pop(action.version, None)
            r.last_reason = ""

    def prepared(self, r: Replica, digest: str, fingerprint: str) -> str:
        """Prepare was answered. Returns why the replica is rejected, or nothing."""
        published = self._end(r)
        version = published.version
        if digest != version.digest:
            return self._reject(r, version, f"Prepare of {version} answered digest {digest!r}", math.inf)
        if published.is_exact and fingerprint != published.fingerprint:
            reason = f"numerics differ: the trainer's are {published.fingerprint!r}, the replica's {fingerprint!r}"
            return self._reject(r, version, reason, math.inf)
        r.staged = version
        return ""

    def committed(self, r: Replica, digest: str, probe_tokens: int, probe_differing: int) -> str:
        """Commit was answered. Returns why the replica is rejected, or nothing."""
        published = self._end(r)
        version = published.version
        if digest != version.digest:
            return self._reject(r, version, f"Commit of {version} answered digest {digest!r}", math.inf)
        expected = published.num_probe_logprobs
        if published.is_exact and (probe_differing or probe_tokens < expected):
            reason = (
                f"probe of {version}: {probe_differing} of {probe_tokens} logprobs differ, {expected} were to be equal"
            )
            return self._reject(r, version, reason, math.inf)
        r.serving, r.staged, r.num_foreign_heartbeats, r.last_reason = version, None, 0, ""
        r.num_failures.pop(version, None)
        return ""

    def aborted(self, r: Replica) -> None:
        """Abort was answered, or failed: the next Prepare replaces whatever is staged."""
        r.busy = None

    def failed(self, r: Replica, reason: str, *, now: float, is_unstaged: bool = False) -> str:
        """Prepare or Commit was not answered, or with an error. Returns why the replica is ejected, or nothing.

        Args:
            is_unstaged: the replica says that this version is not staged there.
        """
        assert r.busy is not None
        phase, version = r.busy.phase, self._end(r).version
        if phase is Phase.COMMIT:
            # It may have swapped before the answer was lost. Commit is idempotent, so it is repeated.
            r.serving, r.staged = None, None if is_unstaged else version
        else:
            r.leftover = version
        if version != self.target():
            r.not_ahead = version
            return ""
        r.num_failures[version] = r.num_failures.get(version, 0) + 1
        if r.num_failures[version] < self.num_attempts:
            return ""
        return self._reject(r, version, f"{phase} of {version}: {reason}", now + self.retry_s)

    def _end(self, r: Replica) -> Published:
        assert r.busy is not None, f"no call to {r.name} is under way"
        published = self.versions.get(r.busy.version)
        assert published is not None, f"{r.busy.version} was dropped under a call"
        r.busy = None
        return published

    def _reject(self, r: Replica, version: Version, reason: str, retry_at: float) -> str:
        r.rejected[version] = Rejection(reason, retry_at)
        r.serving = r.staged = None
        r.leftover, r.last_reason = version, reason
        r.num_failures.pop(version, None)
        return reason
