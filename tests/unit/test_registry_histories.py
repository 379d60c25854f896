"""Random histories of joins, leaves, publishes, needed steps, retention, time and failures, against simulated replicas."""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.weight_sync.registry import Action, Phase, Registry, Replica, ReplicaState
from services.weight_sync.versions import Published, Version

NAMES = ("a", "b", "c")
LEASE_S, RETRY_S = 10.0, 5.0


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


class Histories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.registry = Registry(lease_s=LEASE_S, retry_s=RETRY_S, num_attempts=2)
        self.replicas: dict[str, Simulated] = {}
        self.now = 0.0
        self.num_incarnations = 0
        self.lineage, self.step = 0, -1

    # Trainer and dispatcher

    @rule()
    def publish(self) -> None:
        self.step += 1
        self._add(Version("demo", self.lineage, self.step, f"{self.lineage}-{self.step}"))

    @precondition(lambda self: self.step >= 1)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        oldest = self.registry.versions.oldest_steps.get("demo", 0)
        self.lineage += 1
        self.step = data.draw(st.integers(min(oldest, self.step), self.step))
        self._add(Version("demo", self.lineage, self.step, f"{self.lineage}-{self.step}"))

    def _add(self, version: Version) -> None:
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

    @rule(step=st.integers(0, 8))
    def need(self, step: int) -> None:
        self.registry.set_needed("demo", min(step, self.step + 2))

    @rule(step=st.integers(0, 8))
    def retain(self, step: int) -> None:
        used = {r.serving for r in self.registry.replicas.values()} | {
            r.staged for r in self.registry.replicas.values()
        }
        kept = {self.registry.target(), self.registry.versions.newest("demo")} | used
        self.registry.versions.retain("demo", step)
        dropped = self.registry.collect()
        assert not kept & set(dropped)
        assert all(v.step < step or v.step < self.registry.versions.oldest_steps["demo"] for v in dropped)

    # Replicas

    @rule(name=st.sampled_from(NAMES))
    def start(self, name: str) -> None:
        self.num_incarnations += 1
        self.replicas[name] = Simulated(name, self.num_incarnations)
        self._register(self.replicas[name])

    def _register(self, s: Simulated) -> None:
        self.registry.register(s.name, s.incarnation, s.name, 64, now=self.now)
        registered = self.registry.replicas[s.name]
        if registered.serving is None and registered.staged is None and registered.busy is None:
            s.answered_wrong.clear()

    @precondition(lambda self: self.replicas)
    @rule(data=st.data(), how=st.sampled_from(["leave", "register again", "heartbeat"]))
    def touch(self, data: st.DataObject, how: str) -> None:
        s = self.replicas[data.draw(st.sampled_from(sorted(self.replicas)))]
        if how == "leave":
            self.registry.deregister(s.name, s.incarnation)
            del self.replicas[s.name]
        elif how == "register again" or s.name not in self.registry.replicas:
            self._register(s)
        else:
            digest = s.serving.digest if s.serving else ""
            self.registry.heartbeat(s.name, s.incarnation, digest, now=self.now)

    @rule(seconds=st.sampled_from([1.0, RETRY_S, LEASE_S + 1]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.registry.expire(now=self.now)

    # Distribution

    def _pick(self, data: st.DataObject, *, is_busy: bool) -> tuple[Replica, Simulated] | None:
        live = sorted(n for n, r in self.registry.replicas.items() if (r.busy is not None) == is_busy)
        if not live:
            return None
        name = data.draw(st.sampled_from(live))
        return self.registry.replicas[name], self.replicas[name]

    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        if picked := self._pick(data, is_busy=False):
            self._begin(*picked)

    def _begin(self, r: Replica, s: Simulated) -> bool:
        action = self.registry.next_action(r, now=self.now)
        if action is None:
            return False
        if action.phase is Phase.COMMIT:
            assert action.version in (s.staged, s.serving), "told to commit what it has not staged"
            assert action.version == self.registry.target(), "told to commit what nobody needs"
        self.registry.begin(r, action)
        return True

    @rule(data=st.data(), how=st.sampled_from(["well", "well", "lost request", "lost answer", "wrong digest", "probe"]))
    def end(self, data: st.DataObject, how: str) -> None:
        if picked := self._pick(data, is_busy=True):
            self._end(*picked, how)

    def _end(self, r: Replica, s: Simulated, how: str) -> None:
        action = r.busy
        assert action is not None
        is_done = how != "lost request" and s.do(action)
        if action.phase is Phase.ABORT:
            self.registry.aborted(r)
        elif how.startswith("lost"):
            self.registry.failed(r, how, now=self.now)
        elif not is_done:
            self.registry.failed(r, "not staged", now=self.now, is_unstaged=True)
        else:
            is_wrong = how == "wrong digest" or (how == "probe" and action.phase is Phase.COMMIT)
            if is_wrong:
                s.answered_wrong.add(action.version)
            digest = "wrong" if how == "wrong digest" else action.version.digest
            if action.phase is Phase.PREPARE:
                self.registry.prepared(r, digest, "same")
            else:
                self.registry.committed(r, digest, 8, int(how == "probe"))

    @rule()
    def settle(self) -> None:
        """Nothing more fails and time goes on: every live, healthy replica ends up ready at what is needed."""
        for _ in range(40):
            self.now += RETRY_S
            for name, r in self.registry.replicas.items():
                r.expires_at = max(r.expires_at, self.now + LEASE_S)
                if r.busy is None and not self._begin(r, self.replicas[name]):
                    continue
                self._end(r, self.replicas[name], "well")
        target = self.registry.target()
        for name, r in self.registry.replicas.items():
            assert self.registry.next_action(r, now=self.now) is None
            if target is None:
                continue
            if target in self.replicas[name].answered_wrong and target in r.rejected:
                assert self.registry.state(r) is ReplicaState.EJECTED
            else:
                assert (self.registry.state(r), r.serving) == (ReplicaState.READY, target)
                ahead = self.registry.versions.resolve("demo", target.step + 1)
                may_fail = ahead == r.not_ahead or ahead in r.rejected
                assert r.staged == (None if may_fail else ahead)

    @invariant()
    def ready_is_the_truth(self) -> None:
        for name, r in self.registry.replicas.items():
            is_swapping = r.busy is not None and r.busy.phase is Phase.COMMIT
            if r.serving is not None and not is_swapping:
                assert self.replicas[name].serving == r.serving
                assert not self.registry.reason(r) or self.registry.target() in r.rejected

    @invariant()
    def what_is_in_use_exists(self) -> None:
        for r in self.registry.replicas.values():
            for v in (r.serving, r.staged, r.busy.version if r.busy else None):
                assert v is None or self.registry.versions.get(v) is not None

    @invariant()
    def an_infinite_rejection_had_a_wrong_answer(self) -> None:
        for name, r in self.registry.replicas.items():
            for v, rejection in r.rejected.items():
                assert rejection.retry_at < math.inf or v in self.replicas[name].answered_wrong


Histories.TestCase.settings = settings(max_examples=200, stateful_step_count=40)
test_random_histories = Histories.TestCase
