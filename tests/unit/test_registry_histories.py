"""Random histories of joins, leaves, publishes, needed steps, retention, time and failures, against simulated replicas."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from services.weight_sync.registry import Registry
from services.weight_sync.replica import Action, Phase, Replica, ReplicaState
from services.weight_sync.versions import Published, Version

LEASE_S, RETRY_S = 10.0, 5.0
OUTCOMES = ("well", "well", "well", "well", "lost request", "lost answer", "wrong digest", "probe")
KINDS = (
    ("begin",) * 12 + ("end",) * 10 + ("publish",) * 4 + ("need",) * 4 + ("settle", "retain", "start", "wait") * 2
    + ("fork", "leave", "register again", "heartbeat", "lose lease")
)  # fmt: skip


class Simulated:
    """A replica as it really is, whatever the registry believes."""

    def __init__(self, name: str, incarnation: int) -> None:
        self.name, self.incarnation = name, str(incarnation)
        self.staged: Version | None = None
        self.serving: Version | None = None
        self.answered_wrong: set[Version] = set()

    def do(self, action: Action) -> bool:
        """False when it refuses: there is nothing to commit."""
        if action.phase is Phase.PREPARE:
            self.staged = action.version
        elif action.phase is Phase.ABORT:
            self.staged = None
        elif self.serving != action.version:
            if self.staged != action.version:
                return False
            self.serving, self.staged = action.version, None
        return True


class History:
    """Applies events to a registry and checks what must hold after each."""

    def __init__(self) -> None:
        self.registry = Registry(lease_s=LEASE_S, retry_s=RETRY_S, num_attempts=2)
        self.replicas: dict[str, Simulated] = {}
        self.now = 0.0
        self.num_incarnations = 0
        self.lineage, self.step = 0, -1
        self.seen: Counter[str] = Counter()

    def apply(self, kind: str, x: int, how: str) -> None:
        registry = self.registry
        if kind == "publish":
            self.publish(self.step + 1)
        elif kind == "fork" and self.step >= 0:
            self.lineage += 1
            self.publish(max(self.step - x, min(self.step, registry.versions.oldest_steps.get("demo", 0))))
        elif kind == "need":
            last = registry.needed[1] if registry.needed else -1
            registry.set_needed("demo", max(0, min(last + (1, 1, 1, -1, -2, 2)[x % 6], self.step + 1)))
        elif kind == "retain":
            self.retain(self.step - x % 4)
        elif kind == "start":
            self.num_incarnations += 1
            self.replicas["abc"[x % 3]] = Simulated("abc"[x % 3], self.num_incarnations)
            self.register(self.replicas["abc"[x % 3]])
        elif kind in ("wait", "lose lease"):
            self.now += LEASE_S + 1 if kind == "lose lease" else RETRY_S / 2
            registry.expire(now=self.now)
        elif kind == "settle":
            self.settle()
        elif self.replicas:
            s = self.replicas[sorted(self.replicas)[x % len(self.replicas)]]
            self.touch(s, kind, how)

    def publish(self, step: int) -> None:
        self.step = step
        version = Version("demo", self.lineage, step, f"{self.lineage}-{step}")
        self.registry.versions.add(
            Published(
                version=version,
                fingerprint="same",
                is_exact=True,
                max_model_len=64,
                num_probe_logprobs=8,
                nbytes=1,
                published_at=self.now,
            )
        )

    def retain(self, oldest_step: int) -> None:
        live = self.registry.replicas.values()
        used = {r.serving for r in live} | {r.staged for r in live} | {r.busy.version for r in live if r.busy}
        kept = used | {self.registry.target(), self.registry.versions.newest("demo")}
        self.registry.versions.retain("demo", oldest_step)
        dropped = self.registry.collect()
        assert not kept & set(dropped)
        assert all(v.step < self.registry.versions.oldest_steps["demo"] for v in dropped)
        self.seen["dropped"] += len(dropped)

    def register(self, s: Simulated) -> None:
        before = self.registry.replicas.get(s.name)
        self.registry.register(s.name, s.incarnation, s.name, 64, now=self.now)
        if self.registry.replicas[s.name] is not before:
            s.answered_wrong.clear()

    def touch(self, s: Simulated, kind: str, how: str) -> None:
        r = self.registry.replicas.get(s.name)
        if kind == "leave":
            self.registry.deregister(s.name, s.incarnation)
            del self.replicas[s.name]
        elif kind == "register again" or r is None:
            self.register(s)
        elif kind == "heartbeat":
            digest = s.serving.digest if s.serving else ""
            self.registry.heartbeat(s.name, s.incarnation, digest, now=self.now)
        elif kind == "begin" and r.busy is None:
            self.begin(r, s)
        elif kind == "end" and r.busy is not None:
            self.end(r, s, how)

    def begin(self, r: Replica, s: Simulated) -> bool:
        action = self.registry.next_action(r, now=self.now)
        if action is None:
            return False
        if action.phase is Phase.COMMIT:
            assert action.version in (s.staged, s.serving), "told to commit what it has not staged"
            assert action.version == self.registry.target(), "told to commit what nobody needs"
        self.registry.begin(r, action)
        return True

    def end(self, r: Replica, s: Simulated, how: str) -> None:
        action = r.busy
        assert action is not None
        is_done = how != "lost request" and s.do(action)
        self.seen[f"{action.phase} {how}"] += 1
        if action.phase is Phase.ABORT:
            self.registry.aborted(r)
        elif how.startswith("lost"):
            self.registry.failed(r, how, now=self.now)
        elif not is_done:
            self.registry.failed(r, "not staged", now=self.now, is_unstaged=True)
        else:
            if how == "wrong digest" or (how == "probe" and action.phase is Phase.COMMIT):
                s.answered_wrong.add(action.version)
            digest = "wrong" if how == "wrong digest" else action.version.digest
            if action.phase is Phase.PREPARE:
                self.registry.prepared(r, digest, "same")
            else:
                self.registry.committed(r, digest, 8, int(how == "probe"))

    def settle(self) -> None:
        """Nothing fails any more and time goes on: every live, healthy replica ends up ready at what is needed."""
        registry, target = self.registry, self.registry.target()
        for _ in range(16):
            self.now += RETRY_S
            for name, r in registry.replicas.items():
                r.expires_at = self.now + LEASE_S
                if r.busy or self.begin(r, self.replicas[name]):
                    self.end(r, self.replicas[name], "well")
        for name, r in registry.replicas.items():
            assert registry.next_action(r, now=self.now) is None
            if target is None:
                continue
            if target in r.rejected:
                assert target in self.replicas[name].answered_wrong
                assert registry.state(r) is ReplicaState.EJECTED
                continue
            assert (registry.state(r), r.serving) == (ReplicaState.READY, target)
            ahead = registry.versions.resolve("demo", target.step + 1)
            assert r.staged == (None if ahead == r.not_ahead or ahead in r.rejected else ahead)
            self.seen["ready"] += 1

    def check(self) -> None:
        for name, r in self.registry.replicas.items():
            is_swapping = r.busy is not None and r.busy.phase is Phase.COMMIT
            if r.serving is not None and not is_swapping:
                assert self.replicas[name].serving == r.serving, "the registry believes in what is not there"
            for v in (r.serving, r.staged, r.busy.version if r.busy else None):
                assert v is None or self.registry.versions.get(v) is not None, "a version in use was dropped"
            for v, rejection in r.rejected.items():
                assert rejection.retry_at < math.inf or v in self.replicas[name].answered_wrong


events = st.tuples(st.sampled_from(KINDS), st.integers(0, 11), st.sampled_from(OUTCOMES))


@settings(max_examples=150)
@given(events=st.lists(events, min_size=50, max_size=150))
def test_what_must_hold_holds_after_every_event_of_a_random_history(events: list[tuple[str, int, str]]) -> None:
    history = History()
    for event in [("publish", 0, ""), ("start", 0, ""), ("start", 1, ""), ("need", 0, ""), *events, ("settle", 0, "")]:
        history.apply(*event)
        history.check()
