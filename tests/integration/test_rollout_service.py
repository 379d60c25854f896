"""The real replica process over gRPC: weights in, tokens out, refusals, cancellation, and how it ends."""

import signal
import threading

import grpc
import httpx
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.rollout.server import HEALTH_SERVICE
from shared.process import EXIT_FAULT, EXIT_REFUSED
from shared.wire import rpc
from shared.wire.pb import rollout_pb2 as pb
from shared.wire.types import float32_array, int32_bytes
from tests.integration.rollout_fixture import Driver, manifest_of, tensors_of, trainer_decoder, trainer_logprobs
from tests.integration.rollout_process import (
    DEADLINE_S,
    collect,
    replica,
    request_of,
    serve_version,
    weight_sync_peer,
)

PROMPT = list(range(20))
MAX_OPEN = 24


@pytest.fixture(scope="module")
def served():
    with (
        weight_sync_peer() as (peer, address),
        replica(address, page_size=4, stream_tokens=2, max_open_samples=MAX_OPEN) as (process, stub),
    ):
        manifest = manifest_of(seed=0, step=0)
        reply = serve_version(peer, stub, manifest, tensors_of(trainer_decoder("float32", 0)))
        assert reply.manifest_digest == manifest.version.digest
        yield peer, process, stub


@pytest.fixture
def version0(served):
    """The replica with version 0 committed, whatever the test before did."""
    peer, process, stub = served
    manifest = manifest_of(seed=0, step=0)
    serve_version(peer, stub, manifest, tensors_of(trainer_decoder("float32", 0)))
    return peer, process, stub, manifest.version.digest


def code_of(call) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as error:
        call()
    return error.value.code(), error.value.details()


def wait_until_open(stub, num_open: int) -> None:
    """Status until so many sequences are open; bounded by the deadline of each call and their number."""
    for _ in range(100_000):
        status = stub.Status(pb.StatusRequest(), timeout=DEADLINE_S)
        if status.num_running + status.num_waiting == num_open:
            return
    raise AssertionError(f"never saw {num_open} open sequences: {status}")


def test_registration_names_address_and_capacity_and_heartbeats_the_digest(version0):
    peer, process, _, digest = version0
    registration = peer.registered.get(timeout=DEADLINE_S)
    peer.registered.put(registration)
    assert registration.replica == "r0"
    assert registration.address == next(line["address"] for line in process.log if line["event"] == "ready")
    assert registration.kv_capacity_tokens == 16384
    peer.heartbeat_of(digest)


def test_generate_streams_what_an_engine_in_process_samples(version0):
    _, _, stub, digest = version0
    got = collect(stub.Generate(request_of(digest, PROMPT, samples=3, max_tokens=9), timeout=DEADLINE_S))
    driver = Driver()
    driver.submit(PROMPT, samples=3, max_tokens=9)
    expected = driver.run()
    for i in range(3):
        t, e = got[f"demo.0.{i}"], expected[f"0.{i}"]
        assert (t["tokens"], t["logprobs"], t["top1"], t["finish"]) == (e.tokens, e.bits, e.top1, "length")


def test_tokens_arrive_before_the_sample_is_finished(version0):
    _, _, stub, digest = version0
    chunks = list(stub.Generate(request_of(digest, PROMPT, max_tokens=9), timeout=DEADLINE_S))
    assert [c.start for c in chunks] == [0, 2, 4, 6, 8]
    assert [c.finish_reason for c in chunks] == ["", "", "", "", "length"]


def test_a_continuation_gives_the_rest_and_is_counted(version0):
    _, _, stub, digest = version0
    whole = collect(stub.Generate(request_of(digest, PROMPT, max_tokens=9), timeout=DEADLINE_S))["demo.0.0"]
    before = stub.Status(pb.StatusRequest(), timeout=DEADLINE_S).num_continued_tokens
    request = request_of(digest, PROMPT, max_tokens=9, continued={0: whole["tokens"][:4]})
    rest = collect(stub.Generate(request, timeout=DEADLINE_S))["demo.0.0"]
    assert rest["start"] == 4
    assert rest["tokens"] == whole["tokens"][4:]
    assert rest["logprobs"] == whole["logprobs"][16:]
    after = stub.Status(pb.StatusRequest(), timeout=DEADLINE_S).num_continued_tokens
    assert after - before == 5


def test_a_continuation_that_is_at_its_end_finishes_at_once(version0):
    _, _, stub, digest = version0
    request = request_of(digest, PROMPT, max_tokens=2, continued={0: [1, 2]})
    t = collect(stub.Generate(request, timeout=DEADLINE_S))["demo.0.0"]
    assert (t["start"], t["tokens"], t["finish"]) == (2, [], "length")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": []}, "prompt_token_ids is empty"),
        ({"prompt": [61]}, "must be in [0, 61)"),
        ({"prompt": [-1]}, "must be in [0, 61)"),
        ({"prompt": list(range(60)) * 2, "max_tokens": 41}, "max_model_len"),
        ({"max_tokens": 0}, "max_tokens must be >= 1"),
        ({"temperature": -1.0}, "temperature must be finite"),
        ({"temperature": float("nan")}, "temperature must be finite"),
        ({"temperature": 0.0}, "belongs to evaluations"),
        ({"top_p": 0.5}, "refused for training"),
        ({"top_k": 5}, "refused for training"),
        ({"top_p": 1.5}, "top_p must be in"),
        ({"stop": [""]}, "must not be empty"),
        ({"stop": ["a\ufffd"]}, "replacement character"),
        ({"stop": ["x"]}, "tokenizer of '/no/such/model'"),
        ({"samples": 0}, "without samples"),
        ({"samples": 5000}, "may be open"),
        ({"continued": {0: [1] * 9}}, "continues 9 tokens"),
    ],
)
def test_a_request_that_no_replica_can_serve_is_refused(version0, change, words):
    _, _, stub, digest = version0
    prompt = change.pop("prompt", PROMPT)
    code, details = code_of(lambda: list(stub.Generate(request_of(digest, prompt, **change), timeout=DEADLINE_S)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert words in details


def test_bytes_that_are_no_int32_values_are_refused(version0):
    _, _, stub, digest = version0
    request = request_of(digest, PROMPT)
    request.prompt_token_ids = b"\x00" * 7
    code, details = code_of(lambda: list(stub.Generate(request, timeout=DEADLINE_S)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "got 7 bytes" in details


def test_another_digest_or_run_is_refused_with_what_is_held(version0):
    _, _, stub, digest = version0
    code, details = code_of(lambda: list(stub.Generate(request_of("f" * 64, PROMPT), timeout=DEADLINE_S)))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert digest in details
    request = request_of(digest, PROMPT)
    request.run = "other"
    assert code_of(lambda: list(stub.Generate(request, timeout=DEADLINE_S)))[0] is grpc.StatusCode.FAILED_PRECONDITION


def test_evaluations_may_be_greedy_and_truncated(version0):
    _, _, stub, digest = version0
    request = request_of(digest, PROMPT, temperature=0.0)
    request.evaluation = True
    t = collect(stub.Generate(request, timeout=DEADLINE_S))["demo.0.0"]
    assert t["tokens"] == t["top1"]


def test_abort_ends_samples_with_what_they_have(version0):
    _, _, stub, digest = version0
    stream = stub.Generate(request_of(digest, PROMPT, samples=2, max_tokens=140), timeout=DEADLINE_S)
    first = next(stream)
    reply = stub.Abort(pb.AbortRequest(trajectory_ids=[first.trajectory_id, "unknown"]), timeout=DEADLINE_S)
    assert reply.num_aborted == 1
    rest = collect([first, *stream])
    assert rest[first.trajectory_id]["finish"] == "aborted"
    assert 0 < len(rest[first.trajectory_id]["tokens"]) < 140
    (other,) = rest.keys() - {first.trajectory_id}
    assert (rest[other]["finish"], len(rest[other]["tokens"])) == ("length", 140)


def test_a_client_that_goes_away_takes_its_samples_with_it(version0):
    _, _, stub, digest = version0
    stream = stub.Generate(request_of(digest, PROMPT, samples=4, max_tokens=140), timeout=DEADLINE_S)
    next(stream)
    stream.cancel()
    wait_until_open(stub, 0)
    assert stub.Status(pb.StatusRequest(), timeout=DEADLINE_S).kv_usage == 0


def test_score_gives_the_trainers_bits(version0):
    _, _, stub, digest = version0
    sequences = [np.arange(2), np.arange(1), np.arange(50)]
    request = pb.ScoreRequest(token_ids=[int32_bytes(s) for s in sequences], temperature=0.8)
    reply = stub.Score(request, timeout=DEADLINE_S)
    expected = trainer_logprobs(trainer_decoder("float32", 0), sequences, 0.8)
    assert [float32_array(l).tobytes() for l in reply.logprobs] == [l.tobytes() for l in expected]
    assert reply.manifest_digest == digest
    too_long = pb.ScoreRequest(token_ids=[int32_bytes([0] * 161)])
    assert code_of(lambda: stub.Score(too_long, timeout=DEADLINE_S))[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_prepare_goes_on_beside_generation_and_commit_recomputes_what_runs(version0):
    peer, _, stub, digest = version0
    manifest = manifest_of(seed=1, step=1)
    peer.versions[manifest.version.digest] = manifest, tensors_of(trainer_decoder("float32", 1))
    stream = stub.Generate(request_of(digest, PROMPT, samples=2, max_tokens=140), timeout=DEADLINE_S)
    chunks = [next(stream)]
    reply = stub.PrepareWeights(pb.PrepareWeightsRequest(manifest=manifest), timeout=DEADLINE_S)
    assert reply.manifest_digest == manifest.version.digest
    assert stub.Status(pb.StatusRequest(), timeout=DEADLINE_S).staged_digest == manifest.version.digest
    commit = stub.CommitWeights(pb.CommitWeightsRequest(manifest_digest=manifest.version.digest), timeout=DEADLINE_S)
    assert (commit.probe_tokens, commit.probe_differing) == (52, 0)
    got = collect([*chunks, *stream])
    assert len(got) == 2
    for t in got.values():
        assert t["finish"] == "length"
        for step in sorted(set(t["steps"])):
            scored = trainer_logprobs(trainer_decoder("float32", step), [PROMPT + t["tokens"]])[0][-140:]
            mask = np.array(t["steps"]) == step
            assert scored[mask].tobytes() == np.frombuffer(t["logprobs"], "<f4")[mask].tobytes()
    assert any(set(t["steps"]) == {0, 1} for t in got.values())
    peer.heartbeat_of(manifest.version.digest)


def test_drain_lets_what_runs_end_under_its_version_and_refuses_what_is_new(version0):
    peer, _, stub, digest = version0
    manifest = manifest_of(seed=1, step=1)
    peer.versions[manifest.version.digest] = manifest, tensors_of(trainer_decoder("float32", 1))
    stub.PrepareWeights(pb.PrepareWeightsRequest(manifest=manifest), timeout=DEADLINE_S)
    stream = stub.Generate(request_of(digest, PROMPT, samples=2, max_tokens=140), timeout=DEADLINE_S)
    first = next(stream)
    commit = stub.CommitWeights.future(
        pb.CommitWeightsRequest(manifest_digest=manifest.version.digest, mode="drain"), timeout=DEADLINE_S
    )
    got = collect([first, *stream])
    assert all(set(t["steps"]) == {0} for t in got.values())
    assert commit.result().manifest_digest == manifest.version.digest


def test_abort_weights_gives_up_a_drain_and_drops_staging(version0):
    peer, _, stub, digest = version0
    manifest = manifest_of(seed=1, step=1)
    peer.versions[manifest.version.digest] = manifest, tensors_of(trainer_decoder("float32", 1))
    stub.PrepareWeights(pb.PrepareWeightsRequest(manifest=manifest), timeout=DEADLINE_S)
    stream = stub.Generate(request_of(digest, PROMPT, samples=8, max_tokens=140), timeout=DEADLINE_S)
    first = next(stream)
    commit = stub.CommitWeights.future(
        pb.CommitWeightsRequest(manifest_digest=manifest.version.digest, mode="drain"), timeout=DEADLINE_S
    )
    refused = code_of(lambda: [list(stub.Generate(request_of(digest, PROMPT), timeout=DEADLINE_S)) for _ in range(100)])
    assert refused[0] is grpc.StatusCode.FAILED_PRECONDITION
    assert "drains" in refused[1]
    stub.AbortWeights(pb.AbortWeightsRequest(manifest_digest=manifest.version.digest), timeout=DEADLINE_S)
    assert code_of(commit.result)[0] is grpc.StatusCode.ABORTED
    assert all(t["finish"] == "length" for t in collect([first, *stream]).values())
    assert collect(stub.Generate(request_of(digest, PROMPT), timeout=DEADLINE_S))
    status = stub.Status(pb.StatusRequest(), timeout=DEADLINE_S)
    assert (status.staged_digest, status.manifest_digest) == ("", digest)


def test_abort_weights_reaches_a_version_that_is_still_being_fetched(version0):
    peer, _, stub, _ = version0
    manifest = manifest_of(seed=2, step=2)
    peer.versions[manifest.version.digest] = manifest, tensors_of(trainer_decoder("float32", 2))
    peer.hold_fetch.set()
    prepare = stub.PrepareWeights.future(pb.PrepareWeightsRequest(manifest=manifest), timeout=DEADLINE_S)
    assert peer.fetching.wait(DEADLINE_S)
    stub.AbortWeights(pb.AbortWeightsRequest(), timeout=DEADLINE_S)
    peer.hold_fetch.clear()
    peer.go_on.set()
    assert code_of(prepare.result)[0] is grpc.StatusCode.ABORTED
    commit = pb.CommitWeightsRequest(manifest_digest=manifest.version.digest)
    code, details = code_of(lambda: stub.CommitWeights(commit, timeout=DEADLINE_S))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "prepare it first" in details


def test_prepare_and_commit_are_idempotent_on_the_digest(version0):
    peer, _, stub, digest = version0
    manifest = manifest_of(seed=0, step=0)
    del peer.versions[digest]  # nothing needs to be fetched again
    stub.PrepareWeights(pb.PrepareWeightsRequest(manifest=manifest), timeout=DEADLINE_S)
    for _ in range(2):
        reply = stub.CommitWeights(pb.CommitWeightsRequest(manifest_digest=digest), timeout=DEADLINE_S)
        assert (reply.manifest_digest, reply.probe_differing) == (digest, 0)


def test_going_back_to_an_older_version_works(version0):
    peer, _, stub, digest = version0
    for seed, step in ((1, 1), (0, 0)):
        reply = serve_version(
            peer, stub, manifest_of(seed=seed, step=step), tensors_of(trainer_decoder("float32", seed))
        )
        assert reply.probe_differing == 0
    status = stub.Status(pb.StatusRequest(), timeout=DEADLINE_S)
    assert (status.manifest_digest, status.policy_step) == (digest, 0)


def test_a_flipped_bit_in_the_probe_keeps_the_replica_out_until_the_next_good_version(version0):
    peer, process, stub, digest = version0
    manifest = manifest_of(seed=1, step=1)
    flipped = bytearray(manifest.probe_logprobs[0])
    flipped[0] ^= 1
    manifest.probe_logprobs[0] = bytes(flipped)
    reply = serve_version(peer, stub, manifest, tensors_of(trainer_decoder("float32", 1)))
    assert reply.probe_differing == 1
    code, details = code_of(
        lambda: list(stub.Generate(request_of(manifest.version.digest, PROMPT), timeout=DEADLINE_S))
    )
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "1 of 52 probe logprobs differ" in details
    address = next(line["address"] for line in process.log if line["event"] == "ready")
    with rpc.channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        ready = health.Check(health_pb2.HealthCheckRequest(service=HEALTH_SERVICE), timeout=DEADLINE_S)
        assert ready.status == health_pb2.HealthCheckResponse.NOT_SERVING
        serve_version(peer, stub, manifest_of(seed=0, step=0), tensors_of(trainer_decoder("float32", 0)))
        assert collect(stub.Generate(request_of(digest, PROMPT), timeout=DEADLINE_S))
        ready = health.Check(health_pb2.HealthCheckRequest(service=HEALTH_SERVICE), timeout=DEADLINE_S)
        assert ready.status == health_pb2.HealthCheckResponse.SERVING


def test_damaged_tensors_are_never_staged(version0):
    peer, _, stub, digest = version0
    manifest = manifest_of(seed=2, step=2)
    tensors = tensors_of(trainer_decoder("float32", 2))
    name, tensor = next(iter(tensors.items()))
    damaged = bytearray(tensor.data.tobytes())
    damaged[5] ^= 1
    peer.versions[manifest.version.digest] = (
        manifest,
        {**tensors, name: type(tensor)(tensor.dtype, tensor.shape, damaged)},
    )
    request = pb.PrepareWeightsRequest(manifest=manifest)
    code, details = code_of(lambda: stub.PrepareWeights(request, timeout=DEADLINE_S))
    assert code is grpc.StatusCode.DATA_LOSS
    assert name in details
    assert stub.Status(pb.StatusRequest(), timeout=DEADLINE_S).manifest_digest == digest


@pytest.mark.parametrize("field", ["model_config_json", "run_config_json"])
def test_a_manifest_that_makes_no_sense_is_refused_and_the_replica_lives_on(version0, field):
    _, _, stub, digest = version0
    manifest = manifest_of(seed=2, step=2)
    setattr(manifest, field, '{"what": 1}')
    request = pb.PrepareWeightsRequest(manifest=manifest)
    assert code_of(lambda: stub.PrepareWeights(request, timeout=DEADLINE_S))[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert collect(stub.Generate(request_of(digest, PROMPT), timeout=DEADLINE_S))


def test_status_and_metrics_say_what_ran(version0):
    _, process, stub, digest = version0
    before = stub.Status(pb.StatusRequest(), timeout=DEADLINE_S)
    collect(stub.Generate(request_of(digest, PROMPT, samples=4, max_tokens=6), timeout=DEADLINE_S))
    status = stub.Status(pb.StatusRequest(), timeout=DEADLINE_S)
    assert status.num_sampled_tokens - before.num_sampled_tokens == 24
    assert status.num_prefix_hit_tokens - before.num_prefix_hit_tokens >= 3 * 16
    assert (status.replica, status.max_model_len, status.policy_step) == ("r0", 160, 0)
    assert status.kernels["attention"] == "attention.attention"
    assert status.fingerprint.startswith("mode=exact")
    port = next(line["metrics_port"] for line in process.log if line["event"] == "ready")
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S).text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(lines['timzero_sampled_tokens_total{replica="r0"}']) >= status.num_sampled_tokens
    assert 'attention="attention.attention"' in next(k for k in lines if k.startswith("timzero_kernels_info"))


def test_a_full_line_is_refused_and_empties_again(version0):
    _, _, stub, digest = version0
    stream = stub.Generate(request_of(digest, PROMPT, samples=MAX_OPEN, max_tokens=140), timeout=DEADLINE_S)
    next(stream)
    call = stub.Generate(request_of(digest, PROMPT, number=1), timeout=DEADLINE_S)
    assert code_of(lambda: list(call))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    stream.cancel()
    wait_until_open(stub, 0)
    assert collect(stub.Generate(request_of(digest, PROMPT, number=1), timeout=DEADLINE_S))


def test_sigterm_ends_streams_with_what_they_have_and_waits_for_no_fetch():
    with weight_sync_peer() as (peer, address), replica(address) as (process, stub):
        first = manifest_of(seed=0, step=0)
        serve_version(peer, stub, first, tensors_of(trainer_decoder("float32", 0)))
        second = manifest_of(seed=1, step=1)
        peer.versions[second.version.digest] = second, tensors_of(trainer_decoder("float32", 1))
        peer.hold_fetch.set()
        prepare = stub.PrepareWeights.future(pb.PrepareWeightsRequest(manifest=second), timeout=DEADLINE_S)
        assert peer.fetching.wait(DEADLINE_S)
        request = request_of(first.version.digest, PROMPT, samples=4, max_tokens=140)
        stream = stub.Generate(request, timeout=DEADLINE_S)
        chunks = [next(stream)]
        process.process.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.RpcError) as error:
            chunks.extend(stream)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "continue elsewhere" in error.value.details()
        assert process.exit_code() == 0
        assert peer.deregistered.is_set()
        peer.go_on.set()
        assert code_of(prepare.result)[0] in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        # What arrived is a prefix of what an undisturbed replica samples, to the last flushed token.
        driver = Driver()
        driver.submit(PROMPT, samples=4, max_tokens=140)
        expected = driver.run()
        for trajectory_id, t in collect(chunks).items():
            assert t["tokens"] == expected[trajectory_id.removeprefix("demo.")].tokens[: len(t["tokens"])]


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


def test_many_clients_at_once_each_get_their_own(version0):
    _, _, stub, digest = version0
    results: dict[int, dict] = {}

    def client(number: int) -> None:
        request = request_of(digest, PROMPT[: number + 1], number=number, samples=2, max_tokens=12)
        results[number] = collect(stub.Generate(request, timeout=DEADLINE_S))

    threads = [threading.Thread(target=client, args=(n,)) for n in range(12)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(DEADLINE_S)
    driver = Driver()
    for n in range(12):
        driver.submit(PROMPT[: n + 1], number=n, samples=2, max_tokens=12)
    expected = driver.run()
    for n in range(12):
        for i in range(2):
            got = results[n][f"demo.{n}.{i}"]
            assert (got["tokens"], got["logprobs"]) == (expected[f"{n}.{i}"].tokens, expected[f"{n}.{i}"].bits)
