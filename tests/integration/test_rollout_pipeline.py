"""Steps in flight: what ends, is aborted, preempted, scored or swapped between launch and reading loses and adds nothing."""

import random

import numpy as np
import pytest
import torch

from services.rollout import pipeline
from services.rollout.runner import ModelRunner
from services.rollout.samples import Scoring
from tests.integration.rollout_fixture import Driver, trainer_decoder, trainer_logprobs

PROMPTS = {0: [1, 2, 3], 1: [*range(30)], 2: [*range(30), 7], 3: [9] * 18}


@pytest.fixture(params=[2, 3], ids=["2 in flight", "3 in flight"])
def depth(request, monkeypatch):
    monkeypatch.setattr(ModelRunner, "most_in_flight", request.param)
    return request.param


@pytest.fixture(scope="module")
def expected():
    """Every sample undisturbed."""
    driver = Driver()
    for number, prompt in PROMPTS.items():
        driver.submit(prompt, number=number, samples=2, max_tokens=15)
    return driver.run()


def assert_prefixes(results, expected):
    for t, result in results.items():
        n = len(result.tokens)
        assert result.tokens == expected[t].tokens[:n], t
        assert result.bits == expected[t].bits[: 4 * n], t


def test_steps_are_launched_before_the_one_before_them_is_read(depth):
    driver = Driver(stream_tokens=1)
    driver.submit([1, 2, 3], max_tokens=4)
    sample = driver.samples["0.0"]
    seen = []
    while driver.engine.has_work:
        driver.step()
        driver.engine.scheduler.slots.settle(sample)
        seen.append((len(driver.results["0.0"].tokens), sample.num_pending))
    if depth == 2:
        assert seen == [(0, 1), (1, 1), (2, 1), (3, 1), (4, 0)]
    else:
        assert seen == [(0, 1), (0, 2), (1, 2), (2, 2), (3, 1), (4, 0)]


def test_rows_behind_an_end_that_was_not_known_are_dropped_and_counted(expected, depth):
    stop = expected["1.0"].tokens[6]
    driver = Driver()
    driver.submit(PROMPTS[1], number=1, max_tokens=15, stop_token_ids=(stop,))
    result = driver.run()["1.0"]
    assert result.tokens == expected["1.0"].tokens[: expected["1.0"].tokens.index(stop) + 1]
    assert driver.engine.counters.dropped_rows == depth - 1
    assert driver.engine.counters.sampled_tokens == len(result.tokens)
    at_length = Driver()
    at_length.submit(PROMPTS[1], number=1, max_tokens=15)
    at_length.run()
    assert at_length.engine.counters.dropped_rows == 0, "an end by length is known beforehand"


def test_an_abort_drops_what_is_in_flight_and_frees_every_page(expected, depth):
    driver = Driver(stream_tokens=100)
    driver.submit(PROMPTS[1], number=1, samples=2, max_tokens=15)
    for _ in range(6):
        driver.step()
    assert driver.engine.scheduler.slots.pending[driver.samples["1.0"].slot] == depth - 1
    assert driver.engine.abort_ids({"1.0"}) == 1
    results = driver.run()
    assert_prefixes(results, expected)
    assert (results["1.0"].finish, results["1.1"].finish) == ("aborted", "length")
    assert 0 < len(results["1.0"].tokens) < 15
    assert driver.engine.counters.dropped_rows == depth - 1
    assert driver.engine.pages.num_free == driver.engine.pages.num_pages


def test_where_many_end_together_those_who_wait_begin_before_the_others_are_looked_at(depth, monkeypatch):
    events = []
    launch, end = ModelRunner.launch, pipeline.Pipeline.end
    monkeypatch.setattr(ModelRunner, "launch", lambda self, step: (events.append("launch"), launch(self, step))[1])
    monkeypatch.setattr(pipeline.Pipeline, "end", lambda self, *args: (events.append("end"), end(self, *args))[1])
    driver = Driver(max_running=6, shares_prefixes=False)
    for number in range(2):
        driver.submit([1, 2, 3], number=number, samples=6, max_tokens=4)
    driver.step()
    driver.engine.scheduler.most_at_once = 2
    while "end" not in events:
        driver.step()
    first = events.index("end")
    assert events[first : first + 6] == ["end", "end", "launch"] * 2
    driver.run()
    assert events.count("end") == 12


def test_more_than_are_looked_at_between_two_launches_may_end_together_with_nobody_waiting(depth):
    driver = Driver(max_running=6)
    driver.submit([1, 2, 3], samples=6, max_tokens=4)
    driver.step()
    driver.engine.scheduler.most_at_once = 2
    assert [len(result.tokens) for result in driver.run().values()] == [4] * 6
    assert driver.engine.pages.num_free == driver.engine.pages.num_pages


@pytest.mark.parametrize("most_at_once", [1, 32])
@pytest.mark.parametrize("seed", range(6))
def test_whatever_comes_between_launch_and_reading_changes_no_bit(seed, expected, depth, most_at_once):
    rng = random.Random(seed)
    driver = Driver(
        page_size=4, kv_cache_tokens=176, stream_tokens=rng.choice([1, 3]), max_running=5, max_chunk_tokens=11
    )
    scorings, aborted, version = [], set(), 0
    todo = list(PROMPTS.items())
    while todo or driver.engine.has_work:
        # Admitted together and looked at in parts, as where cohorts of several steps end in one.
        driver.engine.scheduler.most_at_once = rng.choice([most_at_once, 32])
        action = rng.random()
        if todo and action < 0.2:
            number, prompt = todo.pop()
            driver.submit(prompt, number=number, samples=2, max_tokens=15)
        elif action < 0.24 and driver.samples:
            victim = rng.choice(sorted(driver.samples))
            aborted.add(victim)
            driver.engine.abort_ids({victim})
        elif action < 0.3:
            # The same bytes under another name: everything is computed again, and nothing may differ.
            version += 2
            driver.swap(version % 4 // 2, step=version)
            driver.swap(0, step=version + 1)
        elif action < 0.36:
            scoring = Scoring.of([rng.randrange(61) for _ in range(rng.randrange(2, 60))], 1.0)
            scorings.append(scoring)
            driver.engine.submit_scoring([scoring], driver.engine.model)
        else:
            driver.step()
    assert_prefixes(driver.results, expected)
    assert all(r.finish == "length" for t, r in driver.results.items() if t not in aborted)
    assert driver.engine.pages.num_free == driver.engine.pages.num_pages
    assert all(s.num_pending == 0 for s in driver.samples.values())
    done = [s for s in scorings if s.done.exception() is None]
    sequences = [np.array([*s.token_ids, s.targets[-1]]) for s in done]
    if sequences:
        scored = trainer_logprobs(trainer_decoder("float32", 0), sequences)
        assert all(a.tobytes() == s.done.result().tobytes() for a, s in zip(scored, done, strict=True))


def test_a_logprob_that_is_not_finite_ends_the_engine_when_it_is_read():
    driver = Driver()
    with torch.inference_mode():
        driver.engine.model.decoder.model.norm.weight[0] = torch.nan
    driver.submit([1, 2, 3])
    driver.step()
    with pytest.raises(RuntimeError, match=r"not finite in 1 of 1 samples \(0\.0\)"):
        driver.step()


def test_the_time_of_steps_is_split_into_its_parts():
    driver = Driver()
    driver.engine.times.reset()
    driver.submit([1, 2, 3], samples=3, max_tokens=6)
    driver.run()
    times = driver.engine.times
    assert (times.num_steps, times.num_sampled) == (6, 18)
    parts = (times.schedule_s, times.prepare_s, times.read_s, times.device_s, times.sample_s, times.idle_s)
    assert all(part > 0 for part in parts)
    assert 0 < times.idle_share < 1


@pytest.mark.parametrize("max_running", [3, 4])
def test_the_time_of_steps_with_every_place_taken_is_told_apart(max_running):
    driver = Driver(max_running=max_running)
    driver.engine.times.reset()
    driver.submit([1, 2, 3], samples=3, max_tokens=6)
    driver.run()
    times = driver.engine.times
    if max_running > 3:
        assert (times.full_s, times.full_idle_s) == (0, 0)
    else:
        assert times.full_s == pytest.approx(times.device_s + times.sample_s)
        assert times.full_idle_s == pytest.approx(times.idle_s)


def test_failures_are_taken_behind_every_chunk():
    driver = Driver(stream_tokens=100)
    driver.submit([1, 2, 3], samples=9, max_tokens=15)
    with torch.inference_mode():
        for _ in range(4):
            driver.engine.step()
        driver.engine.fail_all("no reason")
    taken = []
    while not taken or taken[-1].chunks:
        taken.append(driver.engine.take_outputs(2))
    assert [len(outputs.chunks) for outputs in taken] == [2, 2, 2, 2, 1, 0]
    assert [len(outputs.failures) for outputs in taken] == [0, 0, 0, 0, 9, 0]
