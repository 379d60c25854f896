"""Versions through an object store: a server that speaks S3, weight_sync as a process, replicas that fetch."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import s3fs
from moto.server import ThreadedMotoServer

from shared.wire.tensor_file import WEIGHTS_FILE
from shared.wire.tensors import DigestMismatch, verify
from shared.wire.weights import Publisher, fetch
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

ROOT = "s3://weights/of a team"


@pytest.fixture(scope="module")
def store() -> Iterator[s3fs.S3FileSystem]:
    """A bucket, and how every process finds it: by the environment, as on a real machine."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            environment.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        found = s3fs.S3FileSystem(use_listings_cache=False)
        found.mkdir("weights")
        yield found
    server.stop()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def process(tmp_path: Path, store: s3fs.S3FileSystem) -> Iterator[Process]:
    with running(tmp_path / "data") as started:
        yield started
    store.invalidate_cache()
    if store.exists(ROOT):
        store.rm(ROOT, recursive=True)


def publisher(process: Process) -> Publisher:
    return Publisher(process.address, transport="directory", directory=ROOT)


def publish(made: Publisher, step: int):
    tensors = weights(step)
    manifest = manifest_of(step, tensors)
    assert made.publish(manifest, tensors, epoch=1, deadline_s=DEADLINE_S) == manifest.version
    return manifest


def steps_in(store: s3fs.S3FileSystem) -> list[int]:
    store.invalidate_cache()
    return sorted(int(path.split("/")[-2].split("-")[1]) for path in store.find(ROOT))


def test_replicas_read_from_the_store_and_what_is_retired_is_gone_from_it(process: Process, store) -> None:
    async def run(made: Publisher) -> None:
        async with Peer(process.address, "a").serving() as a, Peer(process.address, "b").serving() as b:
            manifests = [await asyncio.to_thread(publish, made, step) for step in range(3)]
            for step in (0, 2):
                await asyncio.to_thread(process.need, step)
                await watch(process.address, all_ready(step, "ab"))
                for peer in (a, b):
                    verify(manifests[step], peer.held[1])
            process.kill()
            await asyncio.to_thread(process.start)
            assert [v.version.step for v in await asyncio.to_thread(made.versions, "demo")] == [0, 1, 2]
            await asyncio.to_thread(process.need, 2)
            await watch(process.address, all_ready(2, "ab"))
            assert steps_in(store) == [0, 1, 2]
            assert await asyncio.to_thread(lambda: made.retain("demo", 2, epoch=1, deadline_s=DEADLINE_S)) == 2

    with publisher(process) as made:
        asyncio.run(run(made))
        assert steps_in(store) == [2]
        assert made.sent.num_bytes == made.sent.full_bytes
    assert not list(process.data_dir.rglob(WEIGHTS_FILE)), "weight_sync keeps no copy"
    assert {line["uri"].startswith(ROOT) for line in process.said("published")} == {True}


def test_a_replica_that_can_not_reach_the_store_gets_the_bytes_from_weight_sync(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    with publisher(process) as made:
        manifest = publish(made, 0)
    with monkeypatch.context() as elsewhere:
        # The port of discard, where nobody listens.
        elsewhere.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        s3fs.S3FileSystem.clear_instance_cache()
        verify(manifest, fetch(manifest, address=process.address, deadline_s=DEADLINE_S))
        s3fs.S3FileSystem.clear_instance_cache()
    manifest.uri = "nothing-like-it://bucket/demo"
    verify(manifest, fetch(manifest, address=process.address, deadline_s=DEADLINE_S))


def test_a_damaged_object_is_told_and_put_there_again(process: Process, store) -> None:
    with publisher(process) as made:
        manifest = publish(made, 0)
        (path,) = store.find(ROOT)
        data = bytearray(store.cat_file(path))
        data[-1] ^= 1
        store.pipe_file(path, bytes(data))
        with pytest.raises(DigestMismatch):
            fetch(manifest, address=process.address, deadline_s=DEADLINE_S)
        process.kill()
        process.start()
        assert process.said("version lost")
        assert made.versions("demo", deadline_s=DEADLINE_S) == []
        publish(made, 0)
        verify(manifest, fetch(manifest, address=process.address, deadline_s=DEADLINE_S))


def test_an_object_that_is_gone_is_published_again(process: Process, store) -> None:
    with publisher(process) as made:
        manifest = publish(made, 0)
        store.rm(ROOT, recursive=True)
        assert publish(made, 0) == manifest
        assert steps_in(store) == [0]
        verify(manifest, fetch(manifest, address=process.address, deadline_s=DEADLINE_S))
