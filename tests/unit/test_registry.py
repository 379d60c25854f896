"""The registry's decisions, one behaviour at a time. No servers, no clock."""

from __future__ import annotations

import math

import pytest

from services.weight_sync.registry import RefusedError, Registry, UnknownReplicaError
from services.weight_sync.replica import Action, Phase, Replica, ReplicaState
from services.weight_sync.versions import ConflictError, FencedError, Published, Version

PREPARE, COMMIT, ABORT = Phase.PREPARE, Phase.COMMIT, Phase.ABORT


def version(step: int, *, lineage: int = 0, run: str = "demo", digest: str = "") -> Version:
    return Version(run, lineage, step, digest or f"{run}-{lineage}-{step}")


def publish(registry: Registry, *versions: Version, is_exact: bool = True, max_model_len: int = 64) -> None:
    for v in versions:
        registry.versions.add(
            Published(
                version=v,
                fingerprint="same",
                is_exact=is_exact,
                max_model_len=max_model_len,
                num_probe_logprobs=8,
                nbytes=1,
                published_at=float(len(registry.versions.by_run)),
            )
        )


def new(*versions: Version, needed: int | None = None) -> Registry:
    registry = Registry(lease_s=10, retry_s=5, num_attempts=2)
    publish(registry, *versions)
    if needed is not None:
        registry.set_needed("demo", needed)
    return registry


def join(registry: Registry, name: str = "a", *, incarnation: str = "1", capacity: int = 64, now: float = 0) -> Replica:
    registry.register(name, incarnation, f"{name}:1", capacity, now=now)
    return registry.replicas[name]


def step(registry: Registry, r: Replica, phase: Phase, v: Version, *, now: float = 0) -> None:
    """Asserts that this is the next action, and begins it."""
    assert registry.next_action(r, now=now) == Action(phase, v)
    registry.begin(r, Action(phase, v))


def bring(registry: Registry, r: Replica, v: Version, *, now: float = 0) -> None:
    """Prepare and Commit, both answered well."""
    if r.staged != v:
        step(registry, r, PREPARE, v, now=now)
        assert registry.prepared(r, v.digest, "same") == ""
    step(registry, r, COMMIT, v, now=now)
    assert registry.committed(r, v.digest, 8, 0) == ""


def test_a_joiner_is_prepared_then_committed_then_ready_and_the_next_step_is_prepared_ahead() -> None:
    registry = new(version(0), version(1), version(2), needed=0)
    r = join(registry)
    assert registry.state(r) is ReplicaState.PREPARING
    step(registry, r, PREPARE, version(0))
    assert registry.next_action(r, now=0) is None, "one call at a time"
    registry.prepared(r, version(0).digest, "same")
    assert registry.state(r) is ReplicaState.STAGED
    step(registry, r, COMMIT, version(0))
    registry.committed(r, version(0).digest, 8, 0)
    assert (registry.state(r), r.serving) == (ReplicaState.READY, version(0))
    step(registry, r, PREPARE, version(1))
    assert registry.state(r) is ReplicaState.READY, "it serves while it prepares ahead"
    registry.prepared(r, version(1).digest, "same")
    assert registry.next_action(r, now=0) is None, "nothing is committed before it is needed"
    registry.set_needed("demo", 1)
    step(registry, r, COMMIT, version(1))


def test_nothing_happens_before_the_dispatcher_says_what_it_needs_or_the_trainer_publishes_it() -> None:
    registry = new(version(0))
    r = join(registry)
    assert (registry.next_action(r, now=0), registry.state(r)) == (None, ReplicaState.JOINING)
    assert registry.set_needed("demo", 1) is False
    assert registry.next_action(r, now=0) is None
    publish(registry, version(1))
    assert registry.next_action(r, now=0) == Action(PREPARE, version(1))


def test_a_replica_goes_back_to_an_older_version_and_drops_what_it_had_staged() -> None:
    registry = new(version(0), version(1), version(2), needed=1)
    r = join(registry)
    bring(registry, r, version(1))
    step(registry, r, PREPARE, version(2))
    registry.prepared(r, version(2).digest, "same")
    registry.set_needed("demo", 0)
    step(registry, r, ABORT, version(2))
    registry.aborted(r)
    bring(registry, r, version(0))
    assert registry.state(r) is ReplicaState.READY


def test_a_fenced_epoch_is_refused_and_the_same_epoch_is_not_new() -> None:
    versions = new().versions
    assert versions.fence("demo", 3)
    assert not versions.fence("demo", 3)
    with pytest.raises(FencedError, match="belongs to epoch 3, got 2"):
        versions.fence("demo", 2)
    assert versions.fence("other", 1)


def test_publishing_again_is_idempotent_and_another_digest_is_a_conflict() -> None:
    registry = new(version(0))
    publish(registry, version(0))
    assert registry.versions.holds(version(0))
    assert not registry.versions.holds(version(1))
    with pytest.raises(ConflictError, match="under a new lineage"):
        registry.versions.holds(version(0, digest="other"))
    assert not registry.versions.holds(version(0, lineage=1, digest="other"))


def test_a_fork_makes_the_older_lineage_an_orphan_from_there_on() -> None:
    registry = new(version(4), version(5), version(6), version(5, lineage=1), needed=4)
    assert registry.target() == version(4)
    registry.set_needed("demo", 5)
    assert registry.target() == version(5, lineage=1)
    assert registry.set_needed("demo", 6) is False, "step 6 of lineage 0 was trained from weights that no longer exist"


def test_retention_drops_what_is_old_but_nothing_needed_served_staged_or_newest() -> None:
    registry = new(*(version(s) for s in range(6)), needed=1)
    r = join(registry)
    bring(registry, r, version(1))
    step(registry, r, PREPARE, version(2))
    registry.prepared(r, version(2).digest, "same")
    registry.versions.retain("demo", 100)
    assert registry.collect() == [version(0), version(3), version(4)]
    registry.set_needed("demo", 5)
    assert registry.collect() == [], "still staged and served"
    step(registry, r, ABORT, version(2))
    registry.aborted(r)
    bring(registry, r, version(5))
    assert registry.collect() == [version(1), version(2)]


def test_a_replica_that_can_not_hold_one_sequence_is_refused_in_either_order() -> None:
    registry = new(version(0), needed=0)
    with pytest.raises(RefusedError, match="holds 63 tokens, but one sequence of run demo may have 64"):
        join(registry, capacity=63)
    registry = new()
    r = join(registry, capacity=63)
    publish(registry, version(0))
    registry.set_needed("demo", 0)
    assert registry.state(r) is ReplicaState.EJECTED
    assert "larger cache" in registry.reason(r)
    assert registry.next_action(r, now=0) is None
    with pytest.raises(RefusedError):
        registry.heartbeat("a", "1", "", now=1)


def test_a_lease_ends_without_heartbeats_and_the_replica_has_to_register_again() -> None:
    registry = new(version(0), needed=0)
    r = join(registry)
    registry.heartbeat("a", "1", "", now=9)
    assert registry.expire(now=18.9) == []
    assert registry.expire(now=19) == [r]
    with pytest.raises(UnknownReplicaError):
        registry.heartbeat("a", "1", "", now=20)


def test_another_incarnation_starts_from_nothing_and_the_old_one_is_not_heard_any_more() -> None:
    registry = new(version(0), needed=0)
    old = join(registry)
    bring(registry, old, version(0))
    r = join(registry, incarnation="2")
    assert (r is old, r.serving, registry.is_registered(old)) == (False, None, False)
    with pytest.raises(UnknownReplicaError):
        registry.heartbeat("a", "1", "", now=0)
    registry.deregister("a", "1")
    assert registry.is_registered(r)


def test_the_same_incarnation_that_registers_again_keeps_what_it_serves() -> None:
    registry = new(version(0), needed=0)
    r = join(registry)
    bring(registry, r, version(0))
    assert join(registry, now=5) is r
    assert r.expires_at == 15


@pytest.mark.parametrize(
    ("digest", "fingerprint", "said"),
    [("other", "same", "answered digest 'other'"), ("demo-0-0", "other", "numerics differ")],
)
def test_a_wrong_answer_to_prepare_ejects_and_staging_is_aborted(digest: str, fingerprint: str, said: str) -> None:
    registry = new(version(0), needed=0)
    r = join(registry)
    step(registry, r, PREPARE, version(0))
    assert said in registry.prepared(r, digest, fingerprint)
    assert registry.state(r) is ReplicaState.EJECTED
    assert said in registry.reason(r)
    step(registry, r, ABORT, version(0))
    registry.aborted(r)
    assert registry.next_action(r, now=1e9) is None, "wrong bits are not tried again"


@pytest.mark.parametrize(
    ("digest", "tokens", "differing", "said"),
    [("other", 8, 0, "answered digest"), ("demo-0-1", 8, 1, "1 of 8 logprobs differ"), ("demo-0-1", 0, 0, "0 of 0")],
)
def test_a_wrong_answer_to_commit_ejects(digest: str, tokens: int, differing: int, said: str) -> None:
    registry = new(version(0), version(1), needed=0)
    r = join(registry)
    bring(registry, r, version(0))
    registry.set_needed("demo", 1)
    step(registry, r, PREPARE, version(1))
    registry.prepared(r, version(1).digest, "same")
    step(registry, r, COMMIT, version(1))
    assert said in registry.committed(r, digest, tokens, differing)
    assert (registry.state(r), r.serving) == (ReplicaState.EJECTED, None)


def test_in_fast_mode_fingerprint_and_probe_may_differ_but_not_the_digest() -> None:
    registry = new(needed=0)
    publish(registry, version(0), is_exact=False)
    r = join(registry)
    step(registry, r, PREPARE, version(0))
    assert registry.prepared(r, version(0).digest, "other") == ""
    step(registry, r, COMMIT, version(0))
    assert registry.committed(r, version(0).digest, 8, 8) == ""
    assert registry.state(r) is ReplicaState.READY


def test_an_ejected_replica_is_tried_once_with_the_next_version_and_never_again_with_the_same() -> None:
    registry = new(version(0), needed=0)
    r = join(registry)
    step(registry, r, PREPARE, version(0))
    registry.prepared(r, "other", "same")
    step(registry, r, ABORT, version(0))
    registry.aborted(r)
    registry.set_needed("demo", 1)
    assert registry.state(r) is ReplicaState.EJECTED, "the alarm stays while the next version is not there"
    publish(registry, version(1))
    bring(registry, r, version(1))
    assert registry.state(r) is ReplicaState.READY
    registry.set_needed("demo", 0)
    assert (registry.state(r), registry.next_action(r, now=1e9)) == (ReplicaState.EJECTED, None)


def test_an_ejected_replica_that_registers_again_starts_afresh() -> None:
    registry = new(version(0), needed=0)
    r = join(registry)
    step(registry, r, PREPARE, version(0))
    registry.prepared(r, "other", "same")
    again = join(registry)
    assert again is not r
    bring(registry, again, version(0))


def test_prepare_is_repeated_once_then_the_replica_is_ejected_for_a_while() -> None:
    registry = new(version(0), needed=0)
    r = join(registry)
    for last in (False, True):
        step(registry, r, PREPARE, version(0))
        assert bool(registry.failed(r, "DEADLINE_EXCEEDED", now=1)) is last
        step(registry, r, ABORT, version(0))
        registry.aborted(r)
    assert registry.state(r) is ReplicaState.EJECTED
    assert registry.next_action(r, now=5.9) is None
    assert registry.wake_at(r, now=1) == 6
    step(registry, r, PREPARE, version(0), now=6)
    assert registry.state(r) is ReplicaState.PREPARING
    registry.prepared(r, version(0).digest, "same")
    bring(registry, r, version(0), now=6)
    assert registry.state(r) is ReplicaState.READY
    assert registry.wake_at(r, now=6) == math.inf


def test_a_lost_answer_to_commit_is_repeated_without_another_prepare() -> None:
    registry = new(version(0), version(1), needed=0)
    r = join(registry)
    bring(registry, r, version(0))
    registry.set_needed("demo", 1)
    step(registry, r, PREPARE, version(1))
    registry.prepared(r, version(1).digest, "same")
    step(registry, r, COMMIT, version(1))
    registry.failed(r, "UNAVAILABLE", now=0)
    assert r.serving is None, "nobody knows what it serves"
    bring(registry, r, version(1))


def test_a_replica_that_lost_its_staging_is_prepared_again_but_not_for_ever() -> None:
    registry = new(version(0), needed=0)
    r = join(registry)
    for last in (False, True):
        step(registry, r, PREPARE, version(0))
        registry.prepared(r, version(0).digest, "same")
        step(registry, r, COMMIT, version(0))
        assert bool(registry.failed(r, "nothing staged", now=0, is_unstaged=True)) is last


def test_a_failure_to_prepare_ahead_does_not_eject_and_is_not_repeated_until_needed() -> None:
    registry = new(version(0), version(1), needed=0)
    r = join(registry)
    bring(registry, r, version(0))
    step(registry, r, PREPARE, version(1))
    assert registry.failed(r, "DEADLINE_EXCEEDED", now=0) == ""
    assert (registry.state(r), r.serving) == (ReplicaState.READY, version(0))
    step(registry, r, ABORT, version(1))
    registry.aborted(r)
    assert registry.next_action(r, now=1e9) is None
    registry.set_needed("demo", 1)
    bring(registry, r, version(1))


def test_a_replica_that_says_twice_that_it_serves_something_else_is_brought_back() -> None:
    registry = new(version(0), needed=0)
    r = join(registry)
    bring(registry, r, version(0))
    assert not registry.heartbeat("a", "1", "other", now=1), "this one may have been sent before the Commit"
    assert not registry.heartbeat("a", "1", version(0).digest, now=2)
    assert not registry.heartbeat("a", "1", "other", now=3)
    assert registry.heartbeat("a", "1", "other", now=4)
    assert registry.state(r) is ReplicaState.PREPARING
    bring(registry, r, version(0))


def test_two_steps_with_the_same_weights_are_two_versions() -> None:
    same = version(1, digest=version(0).digest)
    registry = new(version(0), same, needed=0)
    r = join(registry)
    bring(registry, r, version(0))
    registry.set_needed("demo", 1)
    bring(registry, r, same)
    assert r.serving == same


def test_another_run_takes_over_when_the_dispatcher_says_so() -> None:
    other = version(0, run="other")
    registry = new(version(3), needed=3)
    r = join(registry)
    bring(registry, r, version(3))
    publish(registry, other)
    assert (registry.run, registry.state(r)) == ("demo", ReplicaState.READY)
    registry.set_needed("other", 0)
    bring(registry, r, other)
    assert registry.run == "other"
