"""The gRPC server's process and that of the engine: neither leaves callers waiting when the other is gone or stands still."""

import os
import select
import signal
from contextlib import suppress

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.process import EXIT_FAULT
from shared.wire import rpc
from shared.wire.pb import rollout_pb2 as pb
from tests.integration.rollout_fixture import manifest_of, tensors_of, trainer_decoder
from tests.integration.rollout_process import (
    DEADLINE_S,
    code_of,
    replica,
    request_of,
    serve_version,
    weight_sync_peer,
)


@pytest.fixture
def served():
    """A replica's process, its stub, the pid of its gRPC server, and a digest that it serves."""
    with weight_sync_peer() as (peer, address), replica(address) as (service, stub):
        manifest = manifest_of(seed=0, step=0)
        serve_version(peer, stub, manifest, tensors_of(trainer_decoder("float32", 0)))
        ready = next(line for line in service.log if line["event"] == "ready")
        yield service, stub, ready, manifest.version.digest


def wait_for_end(pid: int) -> None:
    """Of a process that is not ours to wait for."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(1e3 * DEADLINE_S), f"process {pid} goes on"
    os.close(descriptor)


def long_stream(stub, digest):
    """A stream that goes on for a while, and has begun."""
    stream = stub.Generate(request_of(digest, range(20), samples=24, max_tokens=140), timeout=DEADLINE_S)
    next(stream)
    return stream


def watched_health(address):
    """What is said of the process's health, whenever it changes."""
    with rpc.channel(address) as channel:
        for reply in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S):
            yield health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)


def served_again(stub, request):
    """Replies of the first call that is not refused; it is until the replica's next sign of life."""
    while True:
        with suppress(grpc.RpcError):
            return list(stub.Generate(request, timeout=DEADLINE_S))


def test_a_replica_ends_when_its_grpc_server_is_killed(served):
    service, stub, ready, digest = served
    stream = long_stream(stub, digest)
    os.kill(ready["grpc_pid"], signal.SIGKILL)
    assert code_of(lambda: list(stream))[0] is grpc.StatusCode.UNAVAILABLE
    assert service.process.wait(DEADLINE_S) == EXIT_FAULT


def test_a_grpc_server_that_stands_still_is_killed_and_its_replica_ends(served):
    service, _, ready, _ = served
    os.kill(ready["grpc_pid"], signal.SIGSTOP)
    assert service.process.wait(DEADLINE_S) == EXIT_FAULT
    assert "the gRPC server's process stands still" in [line["event"] for line in service.last_lines()]
    wait_for_end(ready["grpc_pid"])


def test_the_grpc_server_ends_when_its_replica_is_killed(served):
    service, stub, ready, digest = served
    stream = long_stream(stub, digest)
    service.process.kill()
    assert code_of(lambda: list(stream)) == (grpc.StatusCode.UNAVAILABLE, "the engine's process is gone")
    wait_for_end(ready["grpc_pid"])


def test_calls_of_a_replica_that_stands_still_end_and_it_is_taken_in_again_when_it_goes_on(served):
    service, stub, ready, digest = served
    stream = long_stream(stub, digest)
    health = watched_health(ready["address"])
    assert next(health) == "SERVING"
    service.process.send_signal(signal.SIGSTOP)
    try:
        still = grpc.StatusCode.UNAVAILABLE, "the engine's process stands still"
        assert code_of(lambda: list(stream)) == still
        assert code_of(lambda: stub.Status(pb.StatusRequest(), timeout=DEADLINE_S)) == still
        assert next(health) == "NOT_SERVING"
    finally:
        service.process.send_signal(signal.SIGCONT)
    assert next(health) == "SERVING"
    health.close()
    replies = served_again(stub, request_of(digest, range(20), max_tokens=4))
    assert sum(len(chunk.token_ids) for reply in replies for chunk in reply.chunks) == 4 * 4
    assert service.process.poll() is None


def test_an_orderly_end_leaves_no_process_and_misses_none(served):
    service, _, ready, _ = served
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(DEADLINE_S) == 0
    wait_for_end(ready["grpc_pid"])
    assert not [line for line in service.last_lines() if line["level"] == "error"]


def test_a_request_that_cannot_be_read_is_refused_and_the_next_one_served(served):
    _, stub, ready, _ = served
    with rpc.channel(ready["address"]) as channel:
        call = channel.unary_unary("/timzero.rollout.v1.RolloutEngine/Abort")
        code, details = code_of(lambda: call(b"\xff\xff", timeout=DEADLINE_S))
        assert (code, details.split(":")[0]) == (grpc.StatusCode.INTERNAL, "no AbortRequest")
        unknown = channel.unary_unary("/timzero.rollout.v1.RolloutEngine/Nothing")
        assert code_of(lambda: unknown(b"", timeout=DEADLINE_S))[0] is grpc.StatusCode.UNIMPLEMENTED
    assert stub.Abort(pb.AbortRequest(trajectory_ids=["nobody"]), timeout=DEADLINE_S).num_aborted == 0
