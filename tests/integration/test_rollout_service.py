"""The real replica process over gRPC: requests in, tokens out, refusals, aborts, and clients that go away."""

import threading

import grpc
import httpx
import numpy as np
import pytest

from shared.wire.pb import rollout_pb2 as pb
from shared.wire.types import float32_array, int32_bytes
from tests.integration.rollout_fixture import Driver, trainer_decoder, trainer_logprobs
from tests.integration.rollout_process import (
    DEADLINE_S,
    code_of,
    collect,
    request_of,
)

pytest_plugins = ("tests.integration.replica_fixtures",)

PROMPT = list(range(20))
MANY = 24
"""Samples that are far from their end when a call that follows the first token arrives; as many as may be open."""


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
    replies = stub.Generate(request_of(digest, PROMPT, max_tokens=9), timeout=DEADLINE_S)
    chunks = [chunk for reply in replies for chunk in reply.chunks]
    assert [c.start for c in chunks] == [0, 2, 4, 6, 8]
    assert [c.finish_reason for c in chunks] == ["", "", "", "", "length"]


def test_what_a_calls_samples_have_new_travels_together(version0):
    _, _, stub, digest = version0
    request = request_of(digest, PROMPT, samples=8, max_tokens=9)
    replies = list(stub.Generate(request, timeout=DEADLINE_S))
    assert sum(len(reply.chunks) for reply in replies) == 8 * 5
    # The first sample computes the prompt for the others, so that it is a step ahead of them.
    assert len(replies) <= 2 * 5
    assert {(reply.version.digest, reply.version.step) for reply in replies} == {(digest, 0)}
    assert len(collect(replies)) == 8


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
    stream = stub.Generate(request_of(digest, PROMPT, samples=MANY, max_tokens=140), timeout=DEADLINE_S)
    first = next(stream)
    ids = [f"demo.0.{i}" for i in range(MANY)]
    kept = ids.pop()
    reply = stub.Abort(pb.AbortRequest(trajectory_ids=[*ids, "unknown"]), timeout=DEADLINE_S)
    assert reply.num_aborted == len(ids)
    rest = collect([first, *stream])
    assert (rest[kept]["finish"], len(rest[kept]["tokens"])) == ("length", 140)
    assert {rest[i]["finish"] for i in ids} == {"aborted"}
    assert all(len(rest[i]["tokens"]) < 140 for i in ids)
    assert rest[first.chunks[0].trajectory_id]["tokens"]


def test_a_client_that_goes_away_takes_its_samples_with_it(version0):
    _, _, stub, digest = version0
    before = stub.Status(pb.StatusRequest(), timeout=DEADLINE_S).num_sampled_tokens
    stream = stub.Generate(request_of(digest, PROMPT, samples=MANY, max_tokens=140), timeout=DEADLINE_S)
    next(stream)
    stream.cancel()
    wait_until_open(stub, 0)
    status = stub.Status(pb.StatusRequest(), timeout=DEADLINE_S)
    assert status.kv_usage == 0
    assert status.num_sampled_tokens - before < MANY * 140, "they were not sampled to their end"


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
    kernels = next(k for k in lines if k.startswith("timzero_kernels_info"))
    assert 'attention="attention.attention"' in kernels
    assert f'fingerprint="{status.fingerprint}"' in kernels
    event = "kernels certified"
    line = next((line for line in process.log if line["event"] == event), None) or process.wait_for(event)
    assert (line["fingerprint"], line["products"]) == (status.fingerprint, status.kernels["linear"])


def test_a_full_line_is_refused_and_empties_again(version0):
    _, _, stub, digest = version0
    stream = stub.Generate(request_of(digest, PROMPT, samples=MANY, max_tokens=140), timeout=DEADLINE_S)
    next(stream)
    call = stub.Generate(request_of(digest, PROMPT, number=1), timeout=DEADLINE_S)
    assert code_of(lambda: list(call))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    stream.cancel()
    wait_until_open(stub, 0)
    assert collect(stub.Generate(request_of(digest, PROMPT, number=1), timeout=DEADLINE_S))


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


@pytest.mark.parametrize("trajectory_id", ["", "demo.0.0"])
def test_samples_without_a_name_of_their_own_are_refused(version0, trajectory_id):
    _, _, stub, digest = version0
    request = request_of(digest, PROMPT, samples=2)
    request.samples[1].trajectory_id = trajectory_id
    code, details = code_of(lambda: list(stub.Generate(request, timeout=DEADLINE_S)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "trajectory_id of its own" in details
