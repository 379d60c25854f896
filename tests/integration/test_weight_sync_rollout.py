"""weight_sync and real rollout replicas: published weights are served, a wrong bit keeps a replica out, a kill is healed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from shared.process import EXIT_REFUSED
from shared.wire.pb import rollout_pb2 as engine_pb
from shared.wire.tensors import RawTensor
from tests.integration.rollout_fixture import manifest_of, tensors_of, trainer_decoder
from tests.integration.rollout_process import collect, replica, request_of
from tests.integration.weight_sync_testing import DEADLINE_S, Process, all_ready, is_ejected, running, watch

WORDS = ("heartbeat_s=0.2", "lease_s=60")


def publish(
    process: Process, step: int, *, seed: int, directory: Path | None = None, flip: bool = False, **config
) -> str:
    """Digest of the published version; with `flip`, one bit of one weight differs from what the probe was scored with."""
    tensors = tensors_of(trainer_decoder("float32", seed))
    if flip:
        name = "model.norm.weight"
        data = np.array(tensors[name].data)
        data[2] ^= 1
        tensors = tensors | {name: RawTensor(tensors[name].dtype, tensors[name].shape, data)}
    manifest = manifest_of("float32", seed, step=step, tensors=tensors, **config)
    with process.publisher(directory) as publisher:
        return publisher.publish(manifest, tensors, epoch=1, deadline_s=DEADLINE_S).digest


def test_two_replicas_follow_the_needed_version_over_either_transport_and_sample_from_it(tmp_path: Path) -> None:
    with (
        running(tmp_path / "data", *WORDS) as process,
        replica(process.address, replica="a") as (_, a),
        replica(process.address, replica="b") as (_, b),
    ):
        digests = [publish(process, 0, seed=0), publish(process, 1, seed=1, directory=tmp_path / "shared")]
        for step in (0, 1, 0):
            process.need(step)
            asyncio.run(watch(process.address, all_ready(step, "ab")))
            got = [collect(s.Generate(request_of(digests[step], [1, 2, 3]), timeout=DEADLINE_S)) for s in (a, b)]
            assert got[0] == got[1]
            assert set(got[0]["demo.0.0"]["steps"]) == {step}
        process.kill()
        process.start()
        asyncio.run(watch(process.address, lambda replicas, _: len(replicas) == 2))
        process.need(1)
        asyncio.run(watch(process.address, all_ready(1, "ab")))


def test_one_flipped_bit_of_a_published_weight_shows_in_the_probe_and_the_next_version_heals(tmp_path: Path) -> None:
    with running(tmp_path, *WORDS) as process, replica(process.address, replica="a") as (_, stub):
        publish(process, 0, seed=0, flip=True)
        process.need(0)
        asyncio.run(watch(process.address, is_ejected("a", because="logprobs differ")))
        publish(process, 1, seed=1)
        process.need(1)
        asyncio.run(watch(process.address, all_ready(1, "a")))
        assert stub.Status(engine_pb.StatusRequest(), timeout=DEADLINE_S).policy_step == 1


def test_a_replica_that_is_too_small_exits_with_the_reason(tmp_path: Path) -> None:
    with running(tmp_path, *WORDS) as process:
        publish(process, 0, seed=0)
        with replica(process.address, replica="small", kv_cache_tokens=64) as (service, _):
            assert service.exit_code() == EXIT_REFUSED
            assert any("one sequence of run demo may have 160" in str(line) for line in service.last_lines())
