"""Weights from the trainer's memory: what a reader gets, who owns the memory for how long, and that nobody waits for a reader."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path

import grpc
import pytest
import torch

from services.rollout.sources import Sources, SourceUnavailable
from services.trainer.offers import Slot
from shared.transfer.memory import SharedArena, Unreachable, map_shared
from shared.wire import rpc
from shared.wire.pb import trainer_pb2 as trainer_pb
from shared.wire.pb import weight_sync_pb2 as pb
from shared.wire.pb.trainer_pb2_grpc import WeightSourceStub
from shared.wire.tensors import verify
from shared.wire.weights import Fenced, VersionConflict, WeightSyncError, fetch
from tests.deadline import DEADLINE_S
from tests.integration.source_testing import CPU, byte_sum, fill, layout_of, offer, offers, raw, readers, weights
from tests.integration.weight_sync_testing import manifest_of, running


def reason_of(sources: Sources, manifest: pb.Manifest) -> str:
    with pytest.raises(SourceUnavailable) as error:
        sources.copy(manifest, deadline_s=DEADLINE_S)
    return error.value.reason


def reading(channel: grpc.Channel, manifest: pb.Manifest) -> grpc.Future:
    """An open call that has its grant: a reader that copies and copies."""
    request = trainer_pb.AcquireRequest(manifest_digest=manifest.version.digest, replica="stalled")
    call = WeightSourceStub(channel).Acquire(request, timeout=DEADLINE_S)
    assert next(call).shm.nbytes
    return call


def test_versions_follow_one_another_through_two_buffers_that_a_reader_maps_once() -> None:
    with offers("shm") as made:
        sources = Sources("r0", CPU)
        for step in range(5):
            manifest = offer(made, step)
            got = sources.copy(manifest, deadline_s=DEADLINE_S)
            assert all(torch.equal(got[n], t) for n, t in weights(step).items())
            assert got["a"].dtype is torch.bfloat16
        assert len(sources._mapped) == 2
        # The one before is still there, the one before that is not.
        assert sources.copy(offer(made, 5), deadline_s=DEADLINE_S)
        older = manifest_of(3, raw(weights(3)))
        older.source.CopyFrom(manifest.source)
        assert sources.copy(manifest, deadline_s=DEADLINE_S)["b"].tolist() == weights(4)["b"].tolist()
        assert reason_of(sources, older) == "not_found"


def test_a_slot_with_memory_on_a_gpu_has_the_bytes_on_the_host_once_it_is_finished() -> None:
    tensors = weights(2)
    layout = layout_of(tensors)
    slot = Slot(layout, SharedArena(layout.nbytes), torch.zeros(layout.nbytes, dtype=torch.uint8))
    fill(slot, tensors)
    for views in (layout.views(slot.host.flat), layout.views(slot.device)):
        assert all(torch.equal(views[name].view(torch.uint8), t.view(torch.uint8)) for name, t in tensors.items())
    slot.close()


def test_another_process_copies_from_the_memory() -> None:
    with offers("shm") as made, readers("r0") as (reader,):
        for step in (0, 1, 2):
            reader.ask("copy", offer(made, step))
            assert reader.answer() == ("copied", byte_sum(step))


def test_a_reader_that_stalls_keeps_its_buffer_for_its_lease_and_holds_up_nobody() -> None:
    with offers("shm", source_lease_s=3.0) as made, rpc.channel(offer(made, 0).source.address) as channel:
        manifest = manifest_of(0, raw(weights(0)))
        stalled = reading(channel, manifest)
        layout = layout_of(weights(0))
        other = made.room(layout)
        assert other is not None
        other.digest = "the next one"
        assert made.room(layout) is other, "the buffer that is read is left alone, whatever is newer"
        other.digest = manifest.version.digest + "x"
        held = threading.Event()
        other.readers.add(held)
        assert made.room(layout) is None, "no buffer is free: the version goes through weight_sync"
        assert list(stalled) == [], "the lease ends by itself"
        freed = made.room(layout)
        assert freed is not None
        assert freed is not other
        other.readers.discard(held)


def test_a_reader_that_was_too_slow_finds_other_bytes_and_says_so() -> None:
    with offers("shm") as made:
        manifest = offer(made, 0)
        slot = next(s for s in made._slots if s.digest)
        slot.host.flat[1234] ^= 1
        assert reason_of(Sources("r0", CPU), manifest) == "mismatch"


def test_a_trainer_that_is_gone_is_not_waited_for() -> None:
    with offers("shm") as made:
        manifest = offer(made, 0)
    assert reason_of(Sources("r0", CPU), manifest) == "unavailable"


def test_a_copy_whose_time_is_over_is_given_up_at_once_and_leaves_the_next_one_alone() -> None:
    with offers("shm") as made:
        manifest, sources = offer(made, 0), Sources("r0", CPU)
        with sources._lock, pytest.raises(SourceUnavailable) as busy:
            sources.copy(manifest, deadline_s=-0.5)
        with pytest.raises(SourceUnavailable) as late:
            sources.copy(manifest, deadline_s=-0.5)
        assert busy.value.reason == "busy"
        # Before or behind the trainer's answer.
        assert late.value.reason in ("deadline_exceeded", "unreachable")
        assert sources.copy(manifest, deadline_s=DEADLINE_S)["b"].tolist() == weights(0)["b"].tolist()


def test_a_buffer_of_another_size_replaces_the_old_ones() -> None:
    with offers("shm") as made:
        sources = Sources("r0", CPU)
        for step, elements in enumerate((80_000, 80_000, 160_000, 160_000, 160_000)):
            manifest = offer(made, step, elements=elements)
            got = sources.copy(manifest, deadline_s=DEADLINE_S)
            assert torch.equal(got["a"], weights(step, elements=elements)["a"])


def test_closed_offers_hold_no_buffer_until_they_are_collected() -> None:
    gc.collect()
    gc.disable()
    try:
        with offers("shm") as made:
            offer(made, 0)
            slot = weakref.ref(made._slots[0])
        assert slot() is None
    finally:
        gc.enable()


def test_memory_of_another_layout_is_closed_and_unmapped_on_both_sides() -> None:
    inodes = set()
    with offers("shm") as made:
        sources = Sources("r0", CPU)
        for run in range(6):
            elements = 80_000 + run % 3 * 80_000
            for step in range(3):
                offer(made, step, elements=elements)
                memory = made._slots[-1].host.message()
                inodes.add(memory.inode)
                sources._map(trainer_pb.Grant(shm=memory), ("trainer", layout_of(weights(step, elements=elements))))
        assert len(inodes) == 12
        # Two buffers: the owner's descriptor, and a descriptor and a mapping of owner and reader each.
        assert (num_open(inodes), num_mapped(inodes)) == (6, 4)


def test_a_reader_that_missed_a_layout_unmaps_what_was_closed_in_between() -> None:
    inodes = set()
    with offers("shm") as made:
        sources = Sources("r0", CPU)
        for run in range(4):
            for step in range(2):
                offer(made, step)
                memory = made._slots[-1].host.message()
                inodes.add(memory.inode)
                sources._map(trainer_pb.Grant(shm=memory), ("trainer", layout_of(weights(step))))
            # A run of another model, whose versions this reader gets from weight_sync.
            offer(made, run, elements=80_000)
        assert len(inodes) == 8
        assert len(sources._mapped) == 2
        del memory
    assert num_mapped(inodes) == 2


def num_open(inodes: set[int]) -> int:
    """Descriptors of this process that name one of these memory files."""
    found = [path for path in Path("/proc/self/fd").iterdir() if "timzero-weights" in str(path.resolve())]
    return sum(path.stat().st_ino in inodes for path in found)


def num_mapped(inodes: set[int]) -> int:
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "timzero-weights" in line]
    return sum(int(line.split()[4]) in inodes for line in lines)


def test_a_file_that_has_the_path_of_another_one_by_now_is_not_taken_for_it() -> None:
    memory = SharedArena(4096)
    earlier = memory.message()
    earlier.inode += 1
    with pytest.raises(Unreachable, match="another file by now"):
        map_shared(earlier)
    assert map_shared(memory.message()).numel() == 4096


def test_an_announced_version_exists_at_once_and_its_bytes_are_waited_for(tmp_path) -> None:
    tensors = raw(weights(0))
    manifest = manifest_of(0, tensors)
    manifest.source.transport, manifest.source.address = "shm", "127.0.0.1:9"
    with running(tmp_path / "data") as process, process.stub() as stub, process.publisher() as publisher:
        announcement = pb.PublishChunk(epoch=3, manifest=manifest, announce=True)
        stub.Publish(iter([announcement]), timeout=DEADLINE_S, wait_for_ready=True)
        assert [v.version.digest for v in publisher.versions("demo")] == [manifest.version.digest]
        got: list = []
        fetching = threading.Thread(
            target=lambda: got.append(fetch(manifest, address=process.address, deadline_s=DEADLINE_S)), daemon=True
        )
        fetching.start()
        with pytest.raises(Fenced):
            publisher.publish(manifest, tensors, epoch=2, deadline_s=DEADLINE_S)
        other = manifest_of(0, raw(weights(1)))
        other.source.CopyFrom(manifest.source)
        with pytest.raises(VersionConflict):
            publisher.publish(other, raw(weights(1)), epoch=3, deadline_s=DEADLINE_S)
        assert not got
        publisher.publish(manifest, tensors, epoch=3, deadline_s=DEADLINE_S)
        publisher.settle(DEADLINE_S)
        fetching.join(DEADLINE_S)
        verify(manifest, got[0])
        # Nothing of a version that was only announced outlives the process; the one with bytes does.
        later = manifest_of(1, raw(weights(1)))
        later.source.CopyFrom(manifest.source)
        stub.Publish(iter([pb.PublishChunk(epoch=3, manifest=later, announce=True)]), timeout=DEADLINE_S)
        process.kill()
        process.start()
        assert [v.version.step for v in publisher.versions("demo", deadline_s=DEADLINE_S)] == [0]


def test_a_version_that_was_only_announced_can_be_retired(tmp_path) -> None:
    manifests = [manifest_of(step, raw(weights(step))) for step in (0, 1)]
    with running(tmp_path / "data") as process, process.stub() as stub, process.publisher() as publisher:
        for manifest in manifests:
            manifest.source.transport = "shm"
            announcement = pb.PublishChunk(epoch=1, manifest=manifest, announce=True)
            stub.Publish(iter([announcement]), timeout=DEADLINE_S, wait_for_ready=True)
        waiting = stub.Fetch(
            pb.FetchRequest(run="demo", digest=manifests[0].version.digest), timeout=DEADLINE_S, wait_for_ready=True
        )
        assert publisher.retain("demo", 1, epoch=1, deadline_s=DEADLINE_S) == 1
        with pytest.raises(grpc.RpcError) as error:
            list(waiting)
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
        assert [v.version.step for v in publisher.versions("demo")] == [1]


def test_bytes_that_could_not_be_stored_are_told_to_whoever_publishes_next(tmp_path) -> None:
    tensors = raw(weights(0))
    manifest = manifest_of(0, tensors)
    manifest.source.transport = "shm"
    with running(tmp_path / "data") as process, process.publisher() as publisher:
        publisher.publish(manifest, raw(weights(1)), epoch=1, deadline_s=DEADLINE_S)
        with pytest.raises(WeightSyncError, match="DATA_LOSS"):
            publisher.settle(DEADLINE_S)
        publisher.publish(manifest, tensors, epoch=1, deadline_s=DEADLINE_S)
        publisher.settle(DEADLINE_S)
        verify(manifest, fetch(manifest, address=process.address, deadline_s=DEADLINE_S))
