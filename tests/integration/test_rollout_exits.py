"""How a real replica process ends: on SIGTERM, by a fault, by a refusal."""

import signal

import grpc
import numpy as np
import pytest

from shared.process import EXIT_FAULT, EXIT_REFUSED
from shared.wire.pb import rollout_pb2 as pb
from tests.integration.rollout_fixture import Driver, manifest_of, tensors_of, trainer_decoder
from tests.integration.rollout_process import (
    DEADLINE_S,
    code_of,
    collect,
    replica,
    request_of,
    serve_version,
    weight_sync_peer,
)

PROMPT = list(range(20))


def test_sigterm_ends_streams_with_what_they_have_and_waits_for_no_fetch():
    with weight_sync_peer() as (peer, address), replica(address) as (process, stub):
        first = manifest_of(seed=0, step=0)
        serve_version(peer, stub, first, tensors_of(trainer_decoder("float32", 0)))
        second = manifest_of(seed=1, step=1)
        peer.versions[second.version.digest] = second, tensors_of(trainer_decoder("float32", 1))
        peer.hold_fetch.set()
        prepare = stub.PrepareWeights.future(pb.PrepareWeightsRequest(manifest=second), timeout=DEADLINE_S)
        assert peer.fetching.wait(DEADLINE_S)
        request = request_of(first.version.digest, PROMPT, samples=24, max_tokens=140)
        stream = stub.Generate(request, timeout=DEADLINE_S)
        replies = [next(stream)]
        process.process.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.RpcError) as error:
            replies.extend(stream)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "continue elsewhere" in error.value.details()
        assert process.exit_code() == 0
        assert peer.deregistered.is_set()
        peer.go_on.set()
        assert code_of(prepare.result)[0] in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        # What arrived is a prefix of what an undisturbed replica samples, to the last flushed token; four show it.
        driver = Driver()
        driver.submit(PROMPT, samples=4, max_tokens=140)
        expected = driver.run()
        arrived = collect(replies)
        for name, whole in expected.items():
            tokens = arrived[f"demo.{name}"]["tokens"]
            assert tokens == whole.tokens[: len(tokens)]


def test_a_fault_in_the_loop_ends_every_stream_and_the_process():
    """Weights with a NaN, published without a probe that would have caught them."""
    with weight_sync_peer() as (peer, address), replica(address) as (process, stub):
        decoder = trainer_decoder("float32", 0)
        tensors = tensors_of(decoder)
        poisoned = np.frombuffer(tensors["model.norm.weight"].data.tobytes(), "<f4").copy()
        poisoned[0] = np.nan
        tensor = tensors["model.norm.weight"]
        tensors["model.norm.weight"] = type(tensor)(tensor.dtype, tensor.shape, poisoned)
        manifest = manifest_of(seed=0, step=4, tensors=tensors, probes=[])
        serve_version(peer, stub, manifest, tensors)
        calls = [
            stub.Generate(request_of(manifest.version.digest, PROMPT, number=n), timeout=DEADLINE_S) for n in range(2)
        ]
        code, details = code_of(lambda: list(calls[0]))
        assert code is grpc.StatusCode.INTERNAL
        assert "not finite" in details
        assert code_of(lambda: list(calls[1]))[0] in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE)
        assert process.exit_code() == EXIT_FAULT
        assert any(line["event"] == "engine loop failed" for line in process.last_lines())


def test_a_replica_that_weight_sync_refuses_exits():
    with weight_sync_peer() as (peer, address):
        peer.min_capacity = 100
        with replica(address, kv_cache_tokens=64) as (process, _):
            assert process.exit_code() == EXIT_REFUSED
            assert any("too small for the run" in line.get("reason", "") for line in process.last_lines())


@pytest.mark.parametrize("reason", ["cache", "fingerprint"])
def test_a_replica_that_may_not_serve_the_run_says_so_and_exits(reason):
    config = {"kv_cache_tokens": 144} if reason == "cache" else {}
    with weight_sync_peer() as (_, address), replica(address, **config) as (process, stub):
        manifest = manifest_of(seed=0, step=0)
        if reason == "fingerprint":
            manifest.fingerprint = "mode=exact device='abacus'"
        request = pb.PrepareWeightsRequest(manifest=manifest)
        code, details = code_of(lambda: stub.PrepareWeights(request, timeout=DEADLINE_S))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert ("raise kv_cache_tokens" if reason == "cache" else "abacus") in details
        assert process.exit_code() == EXIT_REFUSED
