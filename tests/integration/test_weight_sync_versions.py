"""Publishing, fencing, conflicts, damage on the way and on disk, retention, restarts. Real processes and gRPC."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from shared.process import EXIT_FAULT
from shared.wire.pb import weight_sync_pb2 as pb
from shared.wire.rpc import CHUNK_BYTES
from shared.wire.tensors import DigestMismatch, RawTensor, chunks, verify
from shared.wire.weights import Fenced, Publisher, UnknownVersion, VersionConflict, WeightSyncError, fetch
from tests.integration.weight_sync_testing import (
    DEADLINE_S,
    Peer,
    Process,
    all_ready,
    manifest_of,
    running,
    watch,
    weights,
)

TRANSPORTS = pytest.mark.parametrize("transport", ["grpc", "directory"])


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    with running(tmp_path / "data") as started:
        yield started


@pytest.fixture(scope="module")
def shared_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """For tests that leave nothing behind."""
    with running(tmp_path_factory.mktemp("weight_sync") / "data") as started:
        yield started


def shared(tmp_path: Path, transport: str) -> Path | None:
    return tmp_path / "shared" if transport == "directory" else None


def publish(
    publisher: Publisher, step: int, *, epoch: int = 1, lineage: int = 0, seed: int | None = None
) -> pb.Manifest:
    tensors = weights(step if seed is None else seed)
    manifest = manifest_of(step, tensors, lineage=lineage)
    assert publisher.publish(manifest, tensors, epoch=epoch, deadline_s=DEADLINE_S) == manifest.version
    return manifest


def steps(publisher: Publisher) -> list[int]:
    return [v.version.step for v in publisher.versions("demo", deadline_s=DEADLINE_S)]


def send(process: Process, messages: list[pb.PublishChunk]) -> grpc.StatusCode:
    with process.stub() as stub, pytest.raises(grpc.RpcError) as raised:
        stub.Publish(iter(messages), timeout=DEADLINE_S)
    return raised.value.code()


def files(root: Path) -> list[str]:
    return sorted(
        str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and path.name not in ("lock", "epoch")
    )


@TRANSPORTS
def test_what_is_fetched_is_what_was_published_and_publishing_again_changes_nothing(
    process: Process, tmp_path: Path, transport: str
) -> None:
    with process.publisher(shared(tmp_path, transport)) as publisher:
        manifest = publish(publisher, 3)
        (info,) = publisher.versions("demo")
        assert (info.version, info.nbytes) == (manifest.version, sum(e.nbytes for e in manifest.tensors))
        assert abs(info.published_at - time.time()) < DEADLINE_S
        assert publisher.versions("demo")[-1].version == manifest.version
        assert publisher.versions("nothing") == []
        got = publisher.manifest("demo", manifest.version.digest)
        assert got == manifest
        verify(got, fetch(got, address=process.address, deadline_s=DEADLINE_S))
        before = files(tmp_path)
        publish(publisher, 3)
        assert (files(tmp_path), publisher.versions("demo")) == (before, [info])


def test_a_reader_that_does_not_see_the_directory_fetches_over_grpc(process: Process, tmp_path: Path) -> None:
    with process.publisher(tmp_path / "shared") as publisher:
        manifest = publish(publisher, 0)
    manifest.uri = (tmp_path / "not mounted here").as_uri()
    verify(manifest, fetch(manifest, address=process.address, deadline_s=DEADLINE_S))


def test_only_the_named_tensors_are_sent(process: Process) -> None:
    with process.publisher() as publisher, process.stub() as stub:
        manifest = publish(publisher, 0)
        request = pb.FetchRequest(run="demo", digest=manifest.version.digest, names=["norm"])
        assert {c.name for c in stub.Fetch(request, timeout=DEADLINE_S)} == {"norm"}
        request.names.append("typo")
        with pytest.raises(grpc.RpcError) as raised:
            list(stub.Fetch(request, timeout=DEADLINE_S))
        assert (raised.value.code(), "no tensor typo" in raised.value.details()) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            True,
        )


def test_an_unknown_version_is_said_to_be_unknown(process: Process) -> None:
    manifest = manifest_of(0, weights(0))
    with process.publisher() as publisher, pytest.raises(UnknownVersion, match="has no version with digest"):
        publisher.manifest("demo", manifest.version.digest)
    with pytest.raises(UnknownVersion):
        fetch(manifest, address=process.address, deadline_s=DEADLINE_S)


@TRANSPORTS
def test_a_fenced_trainer_is_refused_also_after_a_restart(process: Process, tmp_path: Path, transport: str) -> None:
    with process.publisher(shared(tmp_path, transport)) as publisher:
        publish(publisher, 0, epoch=1)
        publish(publisher, 1, epoch=2)
        with pytest.raises(Fenced, match="belongs to epoch 2, got 1"):
            publish(publisher, 2, epoch=1)
        with pytest.raises(Fenced):
            publisher.retain("demo", 1, epoch=1, deadline_s=DEADLINE_S)
        process.kill()
        process.start()
        with pytest.raises(Fenced):
            publish(publisher, 2, epoch=1)
        assert steps(publisher) == [0, 1]


def test_the_same_step_with_other_weights_is_a_conflict_and_goes_into_a_new_lineage(process: Process) -> None:
    with process.publisher() as publisher:
        publish(publisher, 0)
        publish(publisher, 1)
        with pytest.raises(VersionConflict, match="under a new lineage"):
            publish(publisher, 1, seed=100)
        forked = publish(publisher, 1, seed=100, lineage=1)
        assert publisher.versions("demo")[-1].version == forked.version
        assert process.need(1)
        fleet = asyncio.run(watch(process.address, lambda _, fleet: fleet.needed_step == 1))
        assert [(v.lineage, v.step) for v in fleet.versions] == [(0, 0), (1, 1)], "the orphan is not offered"


def damaged(messages: list[pb.PublishChunk], how: str) -> list[pb.PublishChunk]:
    if how == "flipped bit":
        data = bytearray(messages[-2].chunk.data)
        data[len(data) // 2] ^= 1
        messages[-2].chunk.data = bytes(data)
    elif how == "lost chunk":
        del messages[2]
    elif how == "cut short":
        del messages[-1]
    elif how == "repeated chunk":
        messages.insert(2, messages[1])
    return messages


@pytest.mark.parametrize("how", ["flipped bit", "lost chunk", "cut short", "repeated chunk"])
def test_damage_on_the_wire_is_data_loss_and_nothing_is_stored(shared_process: Process, how: str) -> None:
    tensors = weights(0, elements=CHUNK_BYTES)
    manifest = manifest_of(0, tensors)
    messages = [
        pb.PublishChunk(epoch=1, manifest=manifest),
        *(pb.PublishChunk(chunk=c) for c in chunks(manifest, tensors)),
    ]
    assert send(shared_process, damaged(messages, how)) == grpc.StatusCode.DATA_LOSS
    with shared_process.publisher() as publisher:
        assert steps(publisher) == []
    assert files(shared_process.data_dir) == []


def test_a_trainer_whose_bytes_are_not_those_of_its_manifest_is_told_and_not_retried_for_ever(process: Process) -> None:
    manifest = manifest_of(0, weights(0))
    with (
        process.publisher() as publisher,
        pytest.raises(WeightSyncError, match=r"DATA_LOSS: tensor layer\.0: expected"),
    ):
        publisher.publish(manifest, weights(1), epoch=1, deadline_s=600)


def test_a_damaged_file_in_the_directory_is_data_loss_and_the_trainer_writes_it_again(
    process: Process, tmp_path: Path
) -> None:
    with process.publisher(tmp_path / "shared") as publisher:
        manifest = publish(publisher, 0)
        (path,) = (tmp_path / "shared").rglob("weights.safetensors")
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(DigestMismatch):
            fetch(manifest, address=process.address, deadline_s=DEADLINE_S)
        manifest.version.step = 1
        assert send(process, [pb.PublishChunk(epoch=1, manifest=manifest)]) == grpc.StatusCode.DATA_LOSS
        publish(publisher, 0)
        assert steps(publisher) == [0]
        assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: setattr(m, "run", "../../etc"), "run must be"),
        (lambda m: setattr(m, "run_config_json", "{}"), "run_config_json"),
        (lambda m: setattr(m, "run_config_json", "not json"), "run_config_json"),
        (lambda m: setattr(m, "uri", "nothing-like-it://x"), "can.t be used here"),
        (lambda m: setattr(m, "uri", "file:///nowhere"), "Mount the trainer's directory"),
        (lambda m: m.ClearField("tensors"), "at least one tensor"),
    ],
)
def test_a_manifest_that_can_not_be_used_is_refused_with_the_reason(
    shared_process: Process, change: Callable[[pb.Manifest], None], said: str
) -> None:
    manifest = manifest_of(0, weights(0))
    change(manifest)
    with shared_process.stub() as stub, pytest.raises(grpc.RpcError, match=said) as raised:
        stub.Publish(iter([pb.PublishChunk(epoch=1, manifest=manifest)]), timeout=DEADLINE_S)
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert files(shared_process.data_dir) == []


class Trap(dict[str, RawTensor]):
    """Tensors; reading one of them for the first time makes something happen first."""

    def __init__(self, tensors: dict[str, RawTensor], name: str, spring: Callable[[], None]) -> None:
        super().__init__(tensors)
        self.name: str = name
        self.spring: Callable[[], None] | None = spring

    def __getitem__(self, name: str) -> RawTensor:
        if name == self.name and self.spring:
            spring, self.spring = self.spring, None
            spring()
        return super().__getitem__(name)


def test_a_publish_survives_a_kill_of_weight_sync_in_the_middle_of_the_stream(process: Process) -> None:
    def spring() -> None:
        process.kill()
        process.start()

    tensors = weights(0, elements=CHUNK_BYTES)
    manifest = manifest_of(0, tensors)
    with process.publisher() as publisher:
        trapped = Trap(tensors, "layer.2", spring)
        assert publisher.publish(manifest, trapped, epoch=1, deadline_s=DEADLINE_S) == manifest.version
        assert trapped.spring is None
        assert steps(publisher) == [0]
    assert not list(process.data_dir.rglob("*.tmp"))


def test_a_publish_waits_for_a_weight_sync_that_is_down_but_not_beyond_its_deadline(process: Process) -> None:
    process.kill()
    tensors = weights(0)
    with process.publisher() as publisher:
        with pytest.raises(WeightSyncError, match=r"did not answer in time\. Is it running"):
            publisher.publish(manifest_of(0, tensors), tensors, epoch=1, deadline_s=0.5)
        restart = threading.Timer(0.5, process.start)
        restart.start()
        publish(publisher, 0)
        restart.join()


@TRANSPORTS
def test_versions_survive_a_kill_and_a_damaged_one_is_lost_loudly(
    process: Process, tmp_path: Path, transport: str
) -> None:
    directory = shared(tmp_path, transport)
    with process.publisher(directory) as publisher:
        kept, damaged_one = publish(publisher, 0), publish(publisher, 1)
        process.kill()
        name = f"0-1-{damaged_one.version.digest[:12]}"
        path = (directory or process.data_dir) / "demo" / name / "weights.safetensors"
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        (process.data_dir / "demo" / ".left-by-a-crash.tmp").mkdir()
        process.start()
        assert steps(publisher) == [0]
        (lost,) = process.said("version lost")
        assert name in lost["path"]
        verify(kept, fetch(kept, address=process.address, deadline_s=DEADLINE_S))
        assert not list(process.data_dir.rglob("*.tmp"))
        publish(publisher, 1)
        assert steps(publisher) == [0, 1]


@TRANSPORTS
def test_retention_deletes_bytes_but_not_what_is_needed_or_served(
    process: Process, tmp_path: Path, transport: str
) -> None:
    directory = shared(tmp_path, transport)
    root = (directory or process.data_dir) / "demo"

    def held() -> set[str]:
        return {path.parent.name.rsplit("-", 1)[0] for path in root.rglob("weights.safetensors")}

    async def run(publisher: Publisher) -> None:
        async with Peer(process.address, "a").serving():
            await asyncio.to_thread(process.need, 1)
            await watch(process.address, all_ready(1, "a"))
            dropped = await asyncio.to_thread(publisher.retain, "demo", 3, epoch=1, deadline_s=DEADLINE_S)
            assert (dropped, steps(publisher)) in ((1, [1, 2, 3, 4]), (2, [1, 3, 4])), "step 2 may be staged ahead"
            await asyncio.to_thread(process.need, 4)
            await watch(process.address, all_ready(4, "a"))
            await watch(process.address, lambda _, fleet: [v.step for v in fleet.versions] == [3, 4])

    with process.publisher(directory) as publisher:
        for step in range(5):
            publish(publisher, step)
        if directory:
            fenced = root / "0-2-0123456789ab"
            fenced.mkdir()
            (fenced / "weights.safetensors").write_bytes(b"left by a trainer that was fenced")
            (root / "0-2-notours").mkdir()
        asyncio.run(run(publisher))
        assert process.terminate() == 0
        assert held() == {"0-3", "0-4"}
        assert directory is None or (root / "0-2-notours").exists()


def test_a_second_process_does_not_touch_the_same_data(process: Process) -> None:
    command = [sys.executable, "-m", "services.weight_sync", f"data_dir={process.data_dir}", "port=0"]
    second = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert second.returncode == EXIT_FAULT
    assert "belongs to another weight_sync that is running" in second.stderr


def test_a_step_with_unchanged_weights_is_a_version_of_its_own(process: Process) -> None:
    async def run() -> None:
        async with Peer(process.address, "a").serving() as a:
            for step in (0, 1):
                await asyncio.to_thread(process.need, step)
                await watch(process.address, all_ready(step, "a"))
            assert a.fetched_steps == [0]
            assert a.held_step == 1

    with process.publisher() as publisher:
        for step in (0, 1):
            publish(publisher, step, seed=0)
        asyncio.run(run())


def test_270_megabytes_stream_in_and_out_and_memory_stays_bounded(process: Process, capsys) -> None:
    tensors = weights(0, num_tensors=30, elements=4_500_000)
    manifest = manifest_of(0, tensors)
    megabytes = sum(e.nbytes for e in manifest.tensors) / 1e6
    with process.publisher() as publisher:
        before = peak_rss_mb(process)
        begin = time.perf_counter()
        publisher.publish(manifest, tensors, epoch=1, deadline_s=DEADLINE_S)
        published = time.perf_counter()
        grown = peak_rss_mb(process) - before
        got = fetch(manifest, address=process.address, deadline_s=DEADLINE_S)
        fetched = time.perf_counter()
    verify(manifest, got)
    with capsys.disabled():
        print(
            f"\ngRPC stream of {megabytes:.0f} MB: publish {megabytes / (published - begin):.0f} MB/s (digests and fsync "
            f"included), fetch {megabytes / (fetched - published):.0f} MB/s (digests included), memory +{grown:.0f} MB"
        )
    # Chunks in flight, not the version: how many are depends on the machine's load, and the allocator keeps them. Whoever
    # held the version would hold those on top of it.
    assert grown < megabytes


def peak_rss_mb(process: Process) -> float:
    assert process.process is not None
    status = Path(f"/proc/{process.process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1e3
