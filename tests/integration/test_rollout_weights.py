"""Versions on a real replica process: prepared beside generation, committed between steps, given up, refused."""

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from services.rollout.server import HEALTH_SERVICE
from shared.wire import rpc
from shared.wire.pb import rollout_pb2 as pb
from tests.integration.rollout_fixture import manifest_of, tensors_of, trainer_decoder, trainer_logprobs
from tests.integration.rollout_process import (
    DEADLINE_S,
    code_of,
    collect,
    request_of,
    serve_version,
)

pytest_plugins = ("tests.integration.replica_fixtures",)

PROMPT = list(range(20))


def test_prepare_goes_on_beside_generation_and_commit_recomputes_what_runs(version0):
    peer, _, stub, digest = version0
    manifest = manifest_of(seed=1, step=1)
    peer.versions[manifest.version.digest] = manifest, tensors_of(trainer_decoder("float32", 1))
    stream = stub.Generate(request_of(digest, PROMPT, samples=8, max_tokens=140), timeout=DEADLINE_S)
    replies = [next(stream)]
    reply = stub.PrepareWeights(pb.PrepareWeightsRequest(manifest=manifest), timeout=DEADLINE_S)
    assert reply.manifest_digest == manifest.version.digest
    assert stub.Status(pb.StatusRequest(), timeout=DEADLINE_S).staged_digest == manifest.version.digest
    commit = stub.CommitWeights(pb.CommitWeightsRequest(manifest_digest=manifest.version.digest), timeout=DEADLINE_S)
    assert (commit.probe_tokens, commit.probe_differing) == (52, 0)
    assert set(commit.pause_parts) == {"drain", "requeue", "copy", "digest", "probe"}
    assert sum(commit.pause_parts.values()) == pytest.approx(commit.pause_seconds)
    got = collect([*replies, *stream])
    status = stub.Status(pb.StatusRequest(), timeout=DEADLINE_S)
    assert not status.is_recomputing
    assert status.recompute_seconds > 0
    assert len(got) == 8
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
    stream = stub.Generate(request_of(digest, PROMPT, samples=12, max_tokens=140), timeout=DEADLINE_S)
    first = next(stream)
    commit = stub.CommitWeights.future(
        pb.CommitWeightsRequest(manifest_digest=manifest.version.digest, mode="drain"), timeout=DEADLINE_S
    )
    refused = code_of(lambda: [list(stub.Generate(request_of(digest, PROMPT), timeout=DEADLINE_S)) for _ in range(100)])
    assert refused[0] is grpc.StatusCode.FAILED_PRECONDITION
    assert "about to take another version" in refused[1]
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


def with_a_flipped_bit(manifest):
    """The same version, with a probe that nobody computes."""
    flipped = bytearray(manifest.probe_logprobs[0])
    flipped[0] ^= 1
    manifest.probe_logprobs[0] = bytes(flipped)
    return manifest


def test_a_flipped_bit_in_the_probe_keeps_the_replica_out_until_the_next_good_version(version0):
    peer, process, stub, digest = version0
    manifest = with_a_flipped_bit(manifest_of(seed=1, step=1))
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


def test_what_runs_when_the_probe_differs_ends_as_what_is_not_to_be_believed(version0):
    peer, _, stub, digest = version0
    manifest = with_a_flipped_bit(manifest_of(seed=1, step=1))
    stream = stub.Generate(request_of(digest, PROMPT, samples=8, max_tokens=140), timeout=DEADLINE_S)
    assert next(stream).chunks[0].token_ids
    assert serve_version(peer, stub, manifest, tensors_of(trainer_decoder("float32", 1))).probe_differing == 1
    code, details = code_of(lambda: list(stream))
    assert code is grpc.StatusCode.DATA_LOSS
    assert "1 of 52 probe logprobs differ" in details


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


def test_a_new_step_with_equal_weights_is_stamped_with_its_own_name(version0):
    peer, _, stub, digest = version0
    manifest = manifest_of(seed=0, step=7)
    assert manifest.version.digest == digest
    assert serve_version(peer, stub, manifest, {}).manifest_digest == digest
    assert stub.Status(pb.StatusRequest(), timeout=DEADLINE_S).policy_step == 7
    t = collect(stub.Generate(request_of(digest, PROMPT), timeout=DEADLINE_S))["demo.0.0"]
    assert set(t["steps"]) == {7}


def test_another_run_takes_over_with_its_own_tokenizer_and_ends_what_ran(version0, tmp_path):
    peer, _, stub, digest = version0
    words = {f"w{i} ": i for i in range(61)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0 "))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    stream = stub.Generate(request_of(digest, PROMPT, samples=24, max_tokens=140), timeout=DEADLINE_S)
    replies = [next(stream)]
    manifest = manifest_of(seed=0, step=0, run="other", model=str(tmp_path))
    serve_version(peer, stub, manifest, tensors_of(trainer_decoder("float32", 0)))
    code, details = code_of(lambda: replies.extend(stream))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "from run demo to other" in details

    def generate(**sampling):
        request = request_of(digest, PROMPT, max_tokens=140, **sampling)
        request.run = "other"
        return collect(stub.Generate(request, timeout=DEADLINE_S))["demo.0.0"]

    free = generate()
    assert collect(replies)["demo.0.0"]["tokens"] == free["tokens"][: len(collect(replies)["demo.0.0"]["tokens"])]
    # Crosses the border of two tokens, and ends the sample where the text has it for the first time.
    text = "".join(f"w{i} " for i in free["tokens"])
    third = "".join(f"w{i} " for i in free["tokens"][8:11])
    stop = third[1:-1]
    ended = generate(stop=["never", stop])
    assert ended["finish"] == "stop"
    assert ended["tokens"] == free["tokens"][: len(ended["tokens"])]
    so_far = "".join(f"w{i} " for i in ended["tokens"])
    assert stop in so_far
    assert stop not in so_far[: -len(f"w{ended['tokens'][-1]} ")]
    assert so_far in text


def test_keep_goes_on_behind_the_old_keys_and_says_so(version0):
    peer, _, stub, digest = version0
    manifest = manifest_of(seed=1, step=1)
    peer.versions[manifest.version.digest] = manifest, tensors_of(trainer_decoder("float32", 1))
    stream = stub.Generate(request_of(digest, PROMPT, samples=8, max_tokens=140), timeout=DEADLINE_S)
    replies = [next(stream)]
    stub.PrepareWeights(pb.PrepareWeightsRequest(manifest=manifest), timeout=DEADLINE_S)
    commit = stub.CommitWeights(
        pb.CommitWeightsRequest(manifest_digest=manifest.version.digest, mode="keep"), timeout=DEADLINE_S
    )
    assert (commit.probe_tokens, commit.probe_differing) == (52, 0)
    replies += stream
    assert {(r.version.step, c.kv) for r in replies for c in r.chunks if c.token_ids} == {(0, "fresh"), (1, "mixed")}
    num_preempted = stub.Status(pb.StatusRequest(), timeout=DEADLINE_S).num_preemptions
    for chunk in (c for r in replies for c in r.chunks):
        chunk.kv = "fresh"
    num_equal = {0: 0, 1: 0}
    for t in (got := collect(replies)).values():
        assert t["finish"] == "length"
        for step in (0, 1):
            scored = trainer_logprobs(trainer_decoder("float32", step), [PROMPT + t["tokens"]])[0][-140:]
            mask = np.array(t["steps"]) == step
            equal = scored[mask].view("<u4") == np.frombuffer(t["logprobs"], "<u4")[mask]
            assert step == 1 or equal.all()
            num_equal[step] += int(equal.sum())
    assert num_equal[1] < sum(t["steps"].count(1) for t in got.values()), "no version samples behind another one's keys"
    fresh = collect(stub.Generate(request_of(manifest.version.digest, PROMPT, samples=2), timeout=DEADLINE_S))
    for t in fresh.values():
        scored = trainer_logprobs(trainer_decoder("float32", 1), [PROMPT + t["tokens"]])[0][-8:]
        assert scored.tobytes() == t["logprobs"], "nothing of the old version is found in the prefix cache"
    assert num_preempted == stub.Status(pb.StatusRequest(), timeout=DEADLINE_S).num_preemptions
