"""Deltas end to end: what is sent, what is fetched, and that all bytes come wherever a delta can't."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from shared.metrics import names
from shared.metrics.server import metric
from shared.wire.pb import rollout_pb2 as engine_pb
from shared.wire.pb import weight_sync_pb2 as pb
from shared.wire.tensor_file import read_file
from shared.wire.tensors import RawTensor, verify
from shared.wire.weights import Fenced, Publisher, VersionConflict, fetch
from tests.integration import rollout_fixture
from tests.integration.rollout_process import replica
from tests.integration.weight_sync_testing import DEADLINE_S, Process, all_ready, manifest_of, running, watch

Tensors = dict[str, RawTensor]


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    with running(tmp_path / "data", "heartbeat_s=0.2", "lease_s=60") as started:
        yield started


def sender(process: Process) -> Publisher:
    return Publisher(process.address, delta=True)


def versions(num: int = 3, *, elements: int = 3_000_000) -> list[Tensors]:
    """Each some elements away from the one before, as training leaves them."""
    rng = np.random.default_rng(0)
    current = rng.integers(0, 2**16, elements).astype("<u2")
    found = []
    for step in range(num):
        found.append({"norm": RawTensor("float32", (5,), np.full(5, step, "<f4")),
                      "w": RawTensor("bfloat16", (elements,), current.copy())})  # fmt: skip
        current = current + (rng.random(elements) < 0.05).astype("<u2")
    return found


def publish(publisher: Publisher, step: int, tensors: Tensors, *, epoch: int = 1, lineage: int = 0) -> pb.Manifest:
    manifest = manifest_of(step, tensors, lineage=lineage)
    publisher.publish(manifest, tensors, epoch=epoch, deadline_s=DEADLINE_S)
    return manifest


def fallbacks(phase: str, reason: str) -> float:
    return metric(names.DELTA_FALLBACKS).labels(phase, reason)._value.get()


def moved(process: Process, transport: str) -> float:
    """Bytes that weight_sync has counted under this transport."""
    port = process.said("ready")[-1]["metrics_port"]
    lines = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S).text.splitlines()
    label = f'timzero_weight_sync_bytes_total{{transport="{transport}"}}'
    return sum(float(line.split()[-1]) for line in lines if line.startswith(label))


def is_whole(publisher: Publisher) -> bool:
    """Whether all bytes of the version were sent, once, with a little framing."""
    return 1 < publisher.sent.num_bytes / publisher.sent.full_bytes < 1.001


def delta_file(process: Process, step: int) -> Path:
    (path,) = process.data_dir.glob(f"demo/*-{step}-*/delta.chunks")
    return path


def fetched(process: Process, manifest: pb.Manifest, base: Tensors | None) -> Tensors:
    return fetch(manifest, address=process.address, deadline_s=DEADLINE_S, base=base)


def test_a_delta_is_sent_and_fetched_and_all_bytes_are_kept(process: Process) -> None:
    v = versions()
    with sender(process) as publisher:
        publish(publisher, 0, v[0])
        assert is_whole(publisher)
        assert delta_files(process) == []
        for step in (1, 2):
            manifest = publish(publisher, step, v[step])
            assert 0 < publisher.sent.num_bytes < 0.1 * publisher.sent.full_bytes
            assert manifest.base_digest == manifest_of(step - 1, v[step - 1]).version.digest
            assert publisher.manifest("demo", manifest.version.digest) == manifest
            verify(manifest, read_file(delta_file(process, step).parent / "weights.safetensors"))
        before = {t: moved(process, t) for t in ("grpc", "grpc-delta")}
        verify(manifest, fetched(process, manifest, v[1]))
        assert moved(process, "grpc-delta") - before["grpc-delta"] == publisher.sent.num_bytes
        assert moved(process, "grpc") == before["grpc"]
        verify(manifest, fetched(process, manifest, None))
        assert moved(process, "grpc") - before["grpc"] > publisher.sent.full_bytes
        publish(publisher, 2, v[2])
        assert publisher.sent.num_bytes < publisher.sent.full_bytes, "published again, nothing is read"
        assert len(publisher.versions("demo")) == 3


def delta_files(process: Process) -> list[Path]:
    return list(process.data_dir.glob("demo/*/delta.chunks"))


def test_without_delta_and_in_a_directory_every_version_is_whole(process: Process, tmp_path: Path) -> None:
    v = versions(2)
    with process.publisher() as publisher:
        for step in (0, 1):
            assert publish(publisher, step, v[step]).base_digest == ""
            assert is_whole(publisher)
    with Publisher(process.address, transport="directory", directory=tmp_path / "shared", delta=True) as publisher:
        for step in (0, 1):
            manifest = publish(publisher, step, v[step], lineage=1)
            assert (manifest.base_digest, publisher.sent.num_bytes) == ("", publisher.sent.full_bytes)
    assert delta_files(process) == []


def test_a_base_that_weight_sync_lost_makes_the_trainer_send_all_bytes(process: Process) -> None:
    v = versions(3)
    with sender(process) as publisher:
        publish(publisher, 0, v[0])
        process.kill()
        shutil.rmtree(process.data_dir / "demo")
        process.start()
        before = fallbacks("publish", "no_base")
        manifest = publish(publisher, 1, v[1])
        assert fallbacks("publish", "no_base") == before + 1
        assert manifest.base_digest == ""
        assert publisher.sent.num_bytes > publisher.sent.full_bytes
        verify(manifest, fetched(process, manifest, v[0]))
        assert publish(publisher, 2, v[2]).base_digest == manifest.version.digest, "from the next one on, deltas again"


def test_a_base_with_other_bytes_makes_the_trainer_send_all_bytes(process: Process) -> None:
    v = versions(2)
    with sender(process) as publisher:
        publish(publisher, 0, v[0])
        (path,) = process.data_dir.glob("demo/*/weights.safetensors")
        with path.open("r+b") as file:
            file.seek(-1001, 2)
            byte = file.read(1)
            file.seek(-1001, 2)
            file.write(bytes([byte[0] ^ 1]))
        before = fallbacks("publish", "mismatch")
        manifest = publish(publisher, 1, v[1])
        assert fallbacks("publish", "mismatch") == before + 1
        verify(manifest, fetched(process, manifest, None))
        assert delta_files(process) == []


@pytest.mark.parametrize(
    "damage", ["a flipped byte", "an end that is missing", "no such file", "the replica's own bit"]
)
def test_a_replica_that_a_delta_does_not_help_fetches_all_bytes(process: Process, damage: str) -> None:
    v = versions(2)
    with sender(process) as publisher:
        publish(publisher, 0, v[0])
        manifest = publish(publisher, 1, v[1])
    path, base = delta_file(process, 1), dict(v[0])
    data = bytearray(path.read_bytes())
    if damage == "a flipped byte":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "an end that is missing":
        path.write_bytes(data[:-100])
    elif damage == "no such file":
        path.unlink()
    else:
        bits = np.array(base["w"].data)
        bits[1234] ^= 1
        base["w"] = RawTensor("bfloat16", bits.shape, bits)
    before, full = fallbacks("fetch", "mismatch"), moved(process, "grpc")
    verify(manifest, fetched(process, manifest, base))
    assert fallbacks("fetch", "mismatch") == before + (damage != "no such file")
    assert moved(process, "grpc") > full


def test_a_delta_outlives_a_restart_and_its_base(process: Process) -> None:
    v = versions(3)
    with sender(process) as publisher:
        for step in (0, 1):
            manifest = publish(publisher, step, v[step])
        assert publisher.retain("demo", 1, epoch=1, deadline_s=DEADLINE_S) == 1
        process.kill()
        process.start()
        verify(manifest, fetched(process, manifest, v[0]))
        assert (moved(process, "grpc-delta") > 0, moved(process, "grpc")) == (True, 0)
        publish(publisher, 2, v[2])
        assert publisher.sent.num_bytes < 0.1 * publisher.sent.full_bytes, "the base was read back"
        assert publisher.retain("demo", 2, epoch=1, deadline_s=DEADLINE_S) == 1
    assert [p.parent.name.split("-")[1] for p in delta_files(process)] == ["2"]


def test_deltas_are_fenced_and_conflict_as_whole_versions_do(process: Process) -> None:
    v = versions(3)
    with sender(process) as old, sender(process) as new:
        publish(old, 0, v[0])
        publish(new, 0, v[0], epoch=2)
        with pytest.raises(Fenced):
            publish(old, 1, v[1])
        publish(new, 1, v[1], epoch=2)
        with pytest.raises(VersionConflict):
            publish(new, 1, v[2], epoch=2)
        manifest = publish(new, 1, v[2], epoch=2, lineage=1)
        assert manifest.base_digest == manifest_of(1, v[1]).version.digest
        verify(manifest, fetched(process, manifest, v[1]))


def test_a_real_replica_applies_deltas_to_what_it_serves_and_passes_the_probe(tmp_path: Path) -> None:
    # A probe takes weights that the replica can compute with: two initialisations, which differ everywhere.
    with (
        running(tmp_path, "heartbeat_s=0.2", "lease_s=60") as process,
        sender(process) as publisher,
        replica(process.address, replica="a") as (_, stub),
    ):
        for seed in (0, 1):
            tensors = rollout_fixture.tensors_of(rollout_fixture.trainer_decoder("float32", seed))
            manifest = rollout_fixture.manifest_of("float32", seed, step=seed, tensors=tensors)
            before = {t: moved(process, t) for t in ("grpc", "grpc-delta")}
            publisher.publish(manifest, tensors, epoch=1, deadline_s=DEADLINE_S)
            process.need(seed)
            asyncio.run(watch(process.address, all_ready(seed, "a")))
            came = {t: moved(process, t) - before[t] for t in before}
            in_and_out = 2 * publisher.sent.num_bytes
            assert came == ({"grpc": 0, "grpc-delta": in_and_out} if seed else {"grpc": in_and_out, "grpc-delta": 0})
        assert stub.Status(engine_pb.StatusRequest(), timeout=DEADLINE_S).policy_step == 1
