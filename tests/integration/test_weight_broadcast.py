"""Rounds of broadcast between real processes over gloo: who is in, who dies in the middle, who never answers."""

from __future__ import annotations

import pytest
import structlog
from structlog.testing import capture_logs

from services.trainer.offers import Offers
from shared.wire.pb import weight_sync_pb2 as pb
from tests.deadline import DEADLINE_S
from tests.integration.source_testing import Reader, byte_sum, offer, offers, readers

ELEMENTS = 4_000_000
"""A few megabytes: more than a socket takes without a reader."""
FAILED = {("failed", "round_failed"), ("failed", "aborted")}


def rounds(logs: list) -> list[tuple[int, tuple[str, ...]]]:
    return [(line["epoch"], tuple(sorted(line["replicas"]))) for line in logs if line["event"] == "broadcast"]


def test_replicas_get_versions_together_and_their_group_is_kept_until_one_joins() -> None:
    structlog.reset_defaults()
    with (
        capture_logs() as logs,
        offers("broadcast", broadcast_gather_s=DEADLINE_S) as made,
        readers("r0", "r1", "r2") as (first, second, third),
    ):
        # Nobody is waited for before it took part once, so whoever is new has its first round to itself.
        for step, newcomers in enumerate([[first, second], [], [], [third], [], []]):
            manifest = offer(made, step)
            old = [first, second, third][: {0: 0, 1: 2, 2: 2, 3: 2}.get(step, 3)]
            for reader in old:
                reader.ask("copy", manifest)
            assert {reader.answer() for reader in old} <= {("copied", byte_sum(step))}
            for reader in newcomers:
                reader.ask("copy", manifest)
                assert reader.answer() == ("copied", byte_sum(step))
    both, three = ("r0", "r1"), ("r0", "r1", "r2")
    found = rounds(logs)
    assert [replicas for _, replicas in found] == [("r0",), ("r1",), both, both, both, ("r2",), three, three]
    assert len({epoch for epoch, replicas in found if replicas == both}) == 1, "the group is kept"
    assert found[-1] == found[-2]


@pytest.mark.slow
def test_a_replica_that_leaves_is_not_waited_for_beyond_the_deadline() -> None:
    with offers("broadcast", broadcast_gather_s=0.5) as made, readers("r0", "r1") as (first, second):
        for step, asking in enumerate([(first, second), (second,), (second, first)]):
            manifest = offer(made, step)
            for reader in asking:
                reader.ask("copy", manifest)
            assert {reader.answer() for reader in asking} == {("copied", byte_sum(step))}


def in_the_middle(made: Offers, first: Reader, second: Reader, how: str) -> pb.Manifest:
    """A version that `first` waits for in a round in which `second` dies or stops."""
    manifest = offer(made, 0, elements=ELEMENTS)
    for reader in (first, second):
        assert reader.copy(manifest) == ("copied", byte_sum(0, elements=ELEMENTS))
    manifest = offer(made, 1, elements=ELEMENTS)
    first.ask("copy", manifest)
    rounds = made._rounds
    assert rounds is not None
    with rounds._wake:
        assert rounds._wake.wait_for(lambda: rounds._pending, DEADLINE_S)
    # The round waits for the one that took part before, and that is this one.
    second.ask(how, manifest)
    assert second.answer() == ("in",)
    return manifest


@pytest.mark.slow
def test_a_replica_killed_in_the_middle_fails_the_round_for_all_and_the_next_round_is_whole() -> None:
    with (
        offers("broadcast", broadcast_gather_s=DEADLINE_S, broadcast_timeout_s=20.0) as made,
        readers("r0", "r1") as (first, second),
    ):
        in_the_middle(made, first, second, "die")
        # What had arrived before the other one died is verified like anything else.
        assert first.answer() in {*FAILED, ("copied", byte_sum(1, elements=ELEMENTS))}
        manifest = offer(made, 2, elements=ELEMENTS)
        assert first.copy(manifest) == ("copied", byte_sum(2, elements=ELEMENTS))


@pytest.mark.slow
def test_a_replica_that_is_stopped_costs_its_round_and_the_trainer_goes_on_at_once() -> None:
    with (
        offers("broadcast", broadcast_gather_s=DEADLINE_S, broadcast_timeout_s=20.0) as made,
        readers("r0", "r1") as (first, second),
    ):
        in_the_middle(made, first, second, "stop")
        # Written and offered while the round is under way, or over: nothing here waits for it.
        manifest = offer(made, 2, elements=ELEMENTS)
        assert first.answer() in {*FAILED, ("copied", byte_sum(1, elements=ELEMENTS))}
        assert first.copy(manifest) == ("copied", byte_sum(2, elements=ELEMENTS))
