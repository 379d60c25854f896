"""The engine loop's own promises: commands in order, nothing enters a version that is being left, faults reach everyone."""

import asyncio
import threading
from collections import Counter

import pytest

from services.rollout.config import RolloutConfig
from services.rollout.engine import Engine
from services.rollout.loop import LEAST_CHUNKS, EngineLoop
from services.rollout.meters import Meters
from services.rollout.offline import group_of
from services.rollout.runner import ModelRunner
from services.rollout.samples import GivenUp, OtherVersion, Scoring, ShuttingDown
from shared.metrics import names
from shared.metrics.server import value
from shared.wire.types import SamplingParams
from tests.deadline import DEADLINE_S
from tests.integration.rollout_fixture import manifest_of, served_model


class Harness:
    """A running loop, held at its first command until `go`."""

    def __init__(self) -> None:
        self.chunks, self.failures = [], []
        self.sizes: list[int] = []
        """Chunks of each delivery."""
        self.num_ends = 0
        self.has_new_end = threading.Condition()
        self.ended: list[BaseException | None] = []
        self.over = threading.Event()
        self.loop = EngineLoop(Engine(RolloutConfig()), Meters("loop-test"), deliver=self._deliver, on_end=self._end)
        self.models = [served_model(manifest_of(seed=v, step=v), seed=v) for v in range(2)]
        self.loop.start()
        self.loop.commit(self.models[0], is_drain=False).result(DEADLINE_S)

    def _deliver(self, outputs) -> None:
        self.chunks += outputs.chunks
        self.failures += outputs.failures
        self.sizes.append(len(outputs.chunks))
        with self.has_new_end:
            self.num_ends += sum(chunk.finish_reason is not None for chunk in outputs.chunks)
            self.has_new_end.notify()

    def _end(self, fault) -> None:
        self.ended.append(fault)
        self.over.set()

    def hold(self) -> threading.Event:
        go, held = threading.Event(), threading.Event()

        def wait() -> None:
            held.set()
            assert go.wait(DEADLINE_S)

        self.loop.call(wait)
        assert held.wait(DEADLINE_S)
        return go

    def submit(self, model, *, max_tokens=5):
        samples, entered = self.submit_group(model, samples=1, max_tokens=max_tokens)
        return samples[0], entered

    def submit_group(self, model, *, samples, max_tokens):
        group = group_of([1, 2, 3], SamplingParams(max_tokens=max_tokens), samples=samples, number=0, seed=0)
        return group, self.loop.call(lambda: self.loop.engine.submit(group, model))

    def wait_for_ends(self, number) -> None:
        with self.has_new_end:
            assert self.has_new_end.wait_for(lambda: self.num_ends >= number, DEADLINE_S)


@pytest.fixture
def harness():
    h = Harness()
    yield h
    h.loop.stop(DEADLINE_S)


@pytest.mark.parametrize("is_drain", [False, True])
def test_a_request_behind_a_commit_does_not_enter_the_version_that_is_left(harness, is_drain):
    go = harness.hold()
    before = harness.submit(harness.models[0])
    commit = harness.loop.commit(harness.models[1], is_drain=is_drain)
    behind = harness.submit(harness.models[0])
    go.set()
    assert commit.result(DEADLINE_S).probe_differing == 0
    before[1].result(DEADLINE_S)
    with pytest.raises(OtherVersion, match="about to take another version"):
        behind[1].result(DEADLINE_S)
    with pytest.raises(OtherVersion, match="the replica holds"):
        harness.submit(harness.models[0])[1].result(DEADLINE_S)
    harness.submit(harness.models[1])[1].result(DEADLINE_S)


def test_a_commit_gives_up_one_that_still_drains(harness):
    go = harness.hold()
    harness.submit(harness.models[0], max_tokens=150)
    first = harness.loop.commit(harness.models[1], is_drain=True)
    second = harness.loop.commit(harness.models[1], is_drain=False)
    go.set()
    with pytest.raises(GivenUp, match="another Commit"):
        first.result(DEADLINE_S)
    assert second.result(DEADLINE_S).digest == harness.models[1].version.digest


def test_a_caller_that_no_longer_waits_takes_its_drain_back(harness):
    go = harness.hold()
    harness.submit(harness.models[0], max_tokens=150)
    commit = harness.loop.commit(harness.models[1], is_drain=True)
    commit.cancel()
    go.set()
    _, entered = harness.submit(harness.models[0])
    entered.result(DEADLINE_S)
    assert harness.loop.engine.model is harness.models[0]


def test_giving_up_another_version_leaves_a_drain_alone(harness):
    go = harness.hold()
    harness.submit(harness.models[0])
    commit = harness.loop.commit(harness.models[1], is_drain=True)
    harness.loop.give_up_commit("some other digest")
    go.set()
    assert commit.result(DEADLINE_S).digest == harness.models[1].version.digest


def test_a_caller_that_gives_up_its_score_does_no_harm(harness):
    go = harness.hold()
    scoring = Scoring.of([1, 2, 3, 4], 1.0)
    entered = harness.loop.call(lambda: harness.loop.engine.submit_scoring([scoring], harness.models[0]))
    assert not scoring.done.cancel()
    go.set()
    entered.result(DEADLINE_S)
    assert len(scoring.done.result(DEADLINE_S)) == 3
    assert harness.loop.call(lambda: harness.loop.engine.abort([scoring])).result(DEADLINE_S) == 0


def test_a_score_never_mixes_versions(harness):
    go = harness.hold()
    scoring = Scoring.of([i % 61 for i in range(160)], 1.0)
    harness.loop.call(lambda: harness.loop.engine.submit_scoring([scoring], harness.models[0]))
    commit = harness.loop.commit(harness.models[1], is_drain=False)
    go.set()
    commit.result(DEADLINE_S)
    with pytest.raises(OtherVersion, match="the replica took"):
        scoring.done.result(DEADLINE_S)


def test_stop_ends_open_samples_and_refuses_what_comes(harness):
    go = harness.hold()
    sample, _ = harness.submit(harness.models[0], max_tokens=150)
    go.set()
    assert harness.loop.stop(DEADLINE_S)
    assert harness.over.wait(DEADLINE_S)
    assert harness.ended == [None]
    assert [f.sample for f in harness.failures] == [sample]
    with pytest.raises(ShuttingDown):
        harness.submit(harness.models[0])[1].result(DEADLINE_S)


def test_a_fault_ends_the_loop_and_everything_that_waits_for_it(harness):
    go = harness.hold()

    def fail() -> None:
        raise MemoryError("no more")

    failing = harness.loop.call(fail)
    waiting = harness.loop.call(lambda: None)
    commit = harness.loop.commit(harness.models[1], is_drain=True)
    go.set()
    with pytest.raises(MemoryError):
        failing.result(DEADLINE_S)
    for future in (waiting, commit):
        with pytest.raises(ShuttingDown):
            future.result(DEADLINE_S)
    assert harness.over.wait(DEADLINE_S)
    assert isinstance(harness.ended[0], MemoryError)


def test_the_engine_waits_for_nobody_who_takes_its_tokens(monkeypatch):
    """The server's event loop stands still until the last token is sampled; then everything is there, in order."""
    event_loop = asyncio.new_event_loop()
    deliver = Harness._deliver
    monkeypatch.setattr(
        Harness, "_deliver", lambda self, outputs: event_loop.call_soon_threadsafe(deliver, self, outputs)
    )
    harness = Harness()
    sample, submitted = harness.submit(harness.models[0], max_tokens=30)
    submitted.result(DEADLINE_S)
    harness.loop.commit(harness.models[1], is_drain=True).result(DEADLINE_S)
    assert sample.num_sampled_tokens == 30
    assert not harness.chunks, "nobody has taken one"
    event_loop.call_soon(event_loop.stop)
    event_loop.run_forever()
    assert [i for chunk in harness.chunks for i in chunk.token_ids] == sample.token_ids[3:].tolist()
    harness.loop.stop(DEADLINE_S)
    event_loop.close()


def test_every_step_is_counted_and_on_a_cpu_none_replays_a_graph():
    def counted() -> list[float]:
        return [value(names.ENGINE_STEPS, replica="loop-test", mode=mode) for mode in ("graph", "eager")]

    before = counted()
    harness = Harness()
    harness.submit(harness.models[0])[1].result(DEADLINE_S)
    harness.loop.commit(harness.models[1], is_drain=True).result(DEADLINE_S)
    # Runs in the round behind the one that swapped, which has been counted by then.
    num_steps = harness.loop.call(lambda: harness.loop.engine.times.num_steps).result(DEADLINE_S)
    assert num_steps >= 5
    assert [now - then for now, then in zip(counted(), before, strict=True)] == [0, num_steps]
    assert value(names.CAPTURED_GRAPHS, replica="loop-test") == 0
    harness.loop.stop(DEADLINE_S)


def test_samples_that_end_together_are_delivered_little_by_little_while_a_device_has_work(harness, monkeypatch):
    monkeypatch.setattr(ModelRunner, "computes_at_launch", False)
    go = harness.hold()
    harness.submit(harness.models[0], max_tokens=150)
    harness.submit_group(harness.models[0], samples=100, max_tokens=3)
    go.set()
    harness.wait_for_ends(101)
    assert LEAST_CHUNKS <= max(harness.sizes) <= 100 // 4
    tokens = Counter()
    for chunk in harness.chunks:
        assert chunk.start == tokens[chunk.sample]
        tokens[chunk.sample] += len(chunk.token_ids)
    assert Counter(tokens.values()) == {3: 100, 150: 1}


@pytest.mark.parametrize("computes_at_launch", [False, True])
def test_what_the_last_step_read_is_delivered_at_once(harness, monkeypatch, computes_at_launch):
    monkeypatch.setattr(ModelRunner, "computes_at_launch", computes_at_launch)
    go = harness.hold()
    harness.submit_group(harness.models[0], samples=100, max_tokens=3)
    go.set()
    harness.wait_for_ends(100)
    assert max(harness.sizes) > 100 // 4


def test_where_a_launch_computes_every_round_delivers_all_that_it_read(harness):
    go = harness.hold()
    harness.submit(harness.models[0], max_tokens=150)
    harness.submit_group(harness.models[0], samples=100, max_tokens=3)
    go.set()
    harness.wait_for_ends(101)
    assert max(harness.sizes) > 100 // 4
