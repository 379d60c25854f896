"""Distribution to replicas that join late, stall, lose answers, hold wrong bits or die. Real processes and gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from shared.wire.tensors import verify
from shared.wire.weights import RefusedError
from tests.integration.weight_sync_testing import (
    DEADLINE_S,
    QUICK,
    Peer,
    Process,
    all_ready,
    is_ejected,
    is_ready,
    manifest_of,
    running,
    watch,
    weights,
)


def publish(process: Process, step: int, *, directory: Path | None = None, **config: object) -> None:
    tensors = weights(step)
    with process.publisher(directory) as publisher:
        publisher.publish(manifest_of(step, tensors, **config), tensors, epoch=1, deadline_s=DEADLINE_S)


@pytest.mark.parametrize("transport", ["grpc", "directory"])
def test_every_replica_gets_every_needed_version_and_the_next_one_ahead(tmp_path: Path, transport: str) -> None:
    directory = tmp_path / "shared" if transport == "directory" else None

    async def run(process: Process) -> None:
        async with Peer(process.address, "a").serving() as a, Peer(process.address, "b").serving() as b:
            for step in (0, 1, 2):
                await asyncio.to_thread(publish, process, step, directory=directory)
            for step in (0, 1, 2, 1):
                assert await asyncio.to_thread(process.need, step)
                fleet = await watch(process.address, all_ready(step, "ab"))
                assert (fleet.run, fleet.needed_step, [v.step for v in fleet.versions]) == ("demo", step, [0, 1, 2])
                for peer in (a, b):
                    assert peer.held_step == step
                    verify(manifest_of(step, weights(step)), peer.held[1])
            await asyncio.to_thread(process.need, 0)
            await watch(process.address, all_ready(0, "ab"))

    with running(tmp_path / "data") as process:
        asyncio.run(run(process))
        assert any(path.name == "weights.safetensors" for path in (tmp_path / "data").rglob("*")) == (directory is None)


def test_a_late_joiner_gets_the_needed_version_without_a_new_publish(tmp_path: Path) -> None:
    async def run(process: Process) -> None:
        async with Peer(process.address, "a").serving():
            await asyncio.to_thread(publish, process, 0)
            await asyncio.to_thread(process.need, 0)
            await watch(process.address, all_ready(0, "a"))
            async with Peer(process.address, "b").serving():
                await watch(process.address, all_ready(0, "ab"))
            await watch(process.address, all_ready(0, "a"))

    with running(tmp_path) as process:
        asyncio.run(run(process))
        assert process.said("deregistered"), "leaving is said, not found out"


def test_a_replica_that_never_answers_prepare_is_ejected_holds_up_nobody_and_heals_when_it_can(tmp_path: Path) -> None:
    async def run(process: Process) -> None:
        async with Peer(process.address, "a").serving(), Peer(process.address, "stalled").serving() as stalled:
            stalled.go_on.clear()
            await asyncio.to_thread(publish, process, 0)
            await asyncio.to_thread(process.need, 0)
            await stalled.until(lambda: stalled.num_prepares)
            await watch(process.address, is_ready("a"))
            await asyncio.to_thread(publish, process, 1)
            await watch(process.address, is_ejected("stalled", because="DEADLINE_EXCEEDED"))
            stalled.go_on.set()
            await watch(process.address, all_ready(0, ("a", "stalled")))
            assert stalled.num_aborts >= 1, "what a failed Prepare may have left is dropped"

    with running(tmp_path, *QUICK, "prepare_timeout_s=1.0") as process:
        asyncio.run(run(process))


def test_a_commit_whose_answer_is_lost_is_repeated_and_swaps_once(tmp_path: Path) -> None:
    async def run(process: Process) -> None:
        async with Peer(process.address, "a").serving() as a:
            a.num_acks_to_lose = 1
            await asyncio.to_thread(publish, process, 0)
            await asyncio.to_thread(process.need, 0)
            await watch(process.address, all_ready(0, "a"))
            assert (a.num_commits, a.num_swaps, a.num_prepares) == (2, 1, 1)

    with running(tmp_path) as process:
        asyncio.run(run(process))


@pytest.mark.parametrize(
    ("fault", "because"),
    [
        ({"flip_held_bit": True}, "answered digest"),
        ({"probe_differing": 1}, "1 of 4 logprobs differ"),
        ({"fingerprint": "other"}, "numerics differ"),
    ],
)
def test_a_replica_with_wrong_bits_is_ejected_with_the_reason_and_healed_by_the_next_version(
    tmp_path: Path, fault: dict[str, object], because: str
) -> None:
    async def run(process: Process) -> None:
        async with Peer(process.address, "a").serving(), Peer(process.address, "wrong").serving() as wrong:
            healthy = {name: getattr(wrong, name) for name in fault}
            vars(wrong).update(fault)
            await asyncio.to_thread(publish, process, 0)
            await asyncio.to_thread(process.need, 0)
            fleet = await watch(process.address, is_ejected("wrong", because=because))
            assert not next(r for r in fleet.replicas if r.replica == "wrong").version.digest, "it serves nothing"
            await watch(process.address, is_ready("a"))
            vars(wrong).update(healthy)
            await asyncio.to_thread(publish, process, 1)
            await asyncio.to_thread(process.need, 1)
            await watch(process.address, all_ready(1, ("a", "wrong")))

    with running(tmp_path) as process:
        asyncio.run(run(process))


def test_in_fast_mode_a_differing_probe_does_not_eject(tmp_path: Path) -> None:
    async def run(process: Process) -> None:
        async with Peer(process.address, "a").serving() as a:
            a.probe_differing, a.fingerprint = 4, "other"
            await asyncio.to_thread(publish, process, 0, numerics="fast")
            await asyncio.to_thread(process.need, 0)
            await watch(process.address, all_ready(0, "a"))

    with running(tmp_path) as process:
        asyncio.run(run(process))


def test_after_a_kill_versions_are_read_back_and_replicas_register_again_without_fetching_again(tmp_path: Path) -> None:
    async def run(process: Process) -> None:
        async with Peer(process.address, "a").serving() as a, Peer(process.address, "b").serving():
            for step in (0, 1):
                await asyncio.to_thread(publish, process, step)
            await asyncio.to_thread(process.need, 0)
            before = await watch(process.address, all_ready(0, "ab"))
            await a.until(lambda: a.staged and a.staged[0].version.step == 1)
            process.kill()
            await asyncio.to_thread(process.start)
            await watch(process.address, lambda replicas, _: sorted(replicas) == ["a", "b"])
            await asyncio.to_thread(process.need, 0)
            after = await watch(process.address, all_ready(0, "ab"))
            assert after.versions == before.versions
            assert [r.incarnation for r in after.replicas] == [r.incarnation for r in before.replicas]
            assert a.fetched_steps.count(0) == 1, "what it held was committed again, not fetched again"
            await asyncio.to_thread(process.need, 1)
            await watch(process.address, all_ready(1, "ab"))

    with running(tmp_path) as process:
        asyncio.run(run(process))


def test_a_replica_that_dies_is_gone_when_its_lease_ends(tmp_path: Path) -> None:
    async def run(process: Process) -> None:
        async with Peer(process.address, "a").serving(), Peer(process.address, "dead").serving() as dead:
            await watch(process.address, lambda replicas, _: len(replicas) == 2)
            dead.registration.cancel()
            await watch(process.address, lambda replicas, _: sorted(replicas) == ["a"])

    with running(tmp_path, "heartbeat_s=0.2", "lease_s=1") as process:
        asyncio.run(run(process))
        assert "dead" in {line["replica"] for line in process.said("replica lost: its lease ended")}


@pytest.mark.parametrize("is_first", [True, False])
def test_a_replica_whose_cache_is_too_small_is_refused_whether_it_or_the_run_comes_first(
    tmp_path: Path, is_first: bool
) -> None:
    async def run(process: Process) -> None:
        if not is_first:
            await asyncio.to_thread(publish, process, 0, max_model_len=1024)
        async with Peer(process.address, "small").serving(kv_capacity_tokens=1023) as small:
            if is_first:
                await watch(process.address, lambda replicas, _: "small" in replicas)
                await asyncio.to_thread(publish, process, 0, max_model_len=1024)
                await watch(process.address, is_ejected("small", because="holds 1023 tokens"))
            with pytest.raises(RefusedError, match="holds 1023 tokens, but one sequence of run demo may have 1024"):
                await asyncio.wait_for(small.registration, DEADLINE_S)

    with running(tmp_path) as process:
        asyncio.run(run(process))


def test_sigterm_ends_it_with_0_in_bounded_time_with_watchers_and_a_stalled_call(tmp_path: Path) -> None:
    async def run(process: Process) -> None:
        async with Peer(process.address, "stalled").serving() as stalled:
            stalled.go_on.clear()
            await asyncio.to_thread(publish, process, 0)
            await asyncio.to_thread(process.need, 0)
            await stalled.until(lambda: stalled.num_prepares)
            watcher = asyncio.create_task(watch(process.address, lambda *_: False))
            await watch(process.address, lambda replicas, _: replicas["stalled"].state == "preparing")
            assert await asyncio.to_thread(process.terminate) == 0
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher

    with running(tmp_path, *QUICK, "prepare_timeout_s=600") as process:
        asyncio.run(run(process))
        assert process.said("stopped")
