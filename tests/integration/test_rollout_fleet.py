"""Two real replicas under the real weight_sync: versions move up and back, and a death is continued elsewhere."""

import signal

import grpc
import pytest

from shared.wire import rpc
from shared.wire.pb import rollout_pb2 as pb
from shared.wire.pb import weight_sync_pb2 as ws
from shared.wire.pb.weight_sync_pb2_grpc import WeightSyncStub
from shared.wire.types import int32_array
from shared.wire.weights import Publisher
from tests.integration.rollout_fixture import Driver, manifest_of, tensors_of, trainer_decoder
from tests.integration.rollout_process import DEADLINE_S, Service, collect, replica, request_of

PROMPT = list(range(20))


@pytest.fixture
def weight_sync(tmp_path):
    service = Service("weight_sync", data_dir=tmp_path / "versions", port=0, heartbeat_s=0.2, lease_s=60)
    try:
        port = service.wait_for("ready")["port"]
        yield f"127.0.0.1:{port}"
    finally:
        service.process.kill()
        service.process.wait(timeout=DEADLINE_S)


def publish(publisher: Publisher, seed: int, step: int) -> str:
    manifest = manifest_of(seed=seed, step=step)
    publisher.publish(manifest, tensors_of(trainer_decoder("float32", seed)), epoch=1, deadline_s=DEADLINE_S)
    return manifest.version.digest


def need(stub: WeightSyncStub, step: int, digest: str, replicas: set[str]) -> None:
    """Asks for a version and waits, on the stream of snapshots, until these replicas are ready with it."""
    stub.SetNeeded(ws.SetNeededRequest(run="demo", step=step), timeout=DEADLINE_S, wait_for_ready=True)
    seen = None
    for fleet in (watch := stub.Watch(ws.WatchRequest(), timeout=DEADLINE_S)):
        seen = fleet
        ready = {r.replica for r in fleet.replicas if r.state == "ready" and r.version.digest == digest}
        if ready == replicas:
            watch.cancel()
            return
    raise AssertionError(f"never ready: {seen}")


def test_replicas_follow_the_needed_version_and_continue_each_other(weight_sync, tmp_path):
    with (
        rpc.channel(weight_sync) as channel,
        replica(weight_sync, replica="r0", stream_tokens=2) as (first, first_stub),
        replica(weight_sync, replica="r1", page_size=4, max_chunk_tokens=3) as (_, second_stub),
        Publisher(weight_sync, transport="directory", directory=tmp_path / "shared") as directory,
        Publisher(weight_sync) as streamed,
    ):
        stub = WeightSyncStub(channel)
        digests = [publish(directory, 0, 0), publish(streamed, 1, 1)]
        for step in (0, 1, 0):
            need(stub, step, digests[step], {"r0", "r1"})
            for engine in (first_stub, second_stub):
                status = engine.Status(pb.StatusRequest(), timeout=DEADLINE_S)
                assert (status.manifest_digest, status.policy_step) == (digests[step], step)
            got = [
                collect(engine.Generate(request_of(digests[step], PROMPT, samples=2), timeout=DEADLINE_S))
                for engine in (first_stub, second_stub)
            ]
            assert got[0] == got[1], "the choice of replica cannot change a token"
        # SIGKILL in mid-generation; the other one goes on behind what arrived.
        arrived: dict[str, list[int]] = {f"demo.0.{i}": [] for i in range(12)}
        logprobs = dict.fromkeys(arrived, b"")
        stream = first_stub.Generate(request_of(digests[0], PROMPT, samples=12, max_tokens=140), timeout=DEADLINE_S)

        def receive_and_kill() -> None:
            for chunk in (chunk for reply in stream for chunk in reply.chunks):
                arrived[chunk.trajectory_id] += int32_array(chunk.token_ids).tolist()
                logprobs[chunk.trajectory_id] += chunk.logprobs
                if all(arrived.values()) and first.process.poll() is None:
                    first.process.send_signal(signal.SIGKILL)
                    first.process.wait(timeout=DEADLINE_S)

        with pytest.raises(grpc.RpcError) as error:
            receive_and_kill()
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert all(0 < len(tokens) < 140 for tokens in arrived.values())
        request = request_of(
            digests[0],
            PROMPT,
            samples=12,
            max_tokens=140,
            continued={i: arrived[f"demo.0.{i}"] for i in range(12)},
        )
        rest = collect(second_stub.Generate(request, timeout=DEADLINE_S))
        driver = Driver()
        driver.submit(PROMPT, samples=12, max_tokens=140)
        expected = driver.run()
        for t, tokens in arrived.items():
            alone = expected[t.removeprefix("demo.")]
            assert (tokens + rest[t]["tokens"], logprobs[t] + rest[t]["logprobs"]) == (alone.tokens, alone.bits)
        status = second_stub.Status(pb.StatusRequest(), timeout=DEADLINE_S)
        assert status.num_continued_tokens == sum(140 - len(tokens) for tokens in arrived.values()) > 0
