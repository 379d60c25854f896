"""Tokens and logprob bits depend on the weights, the prompt and the key of the generator, and on nothing else."""

import numpy as np
import pytest
import torch

from services.rollout.kv_cache import PagePool
from services.rollout.offline import group_of
from shared.wire.types import SamplingParams
from tests.integration.rollout_fixture import (
    PROBES,
    Driver,
    Result,
    manifest_of,
    served_model,
    trainer_decoder,
    trainer_logprobs,
)

DTYPES = ["float32", "bfloat16"]


def prompts():
    """Groups as (number, prompt, samples, max_tokens): short and long, two with a common prefix."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 61, 40).tolist()
    return [
        (0, rng.integers(0, 61, 33).tolist(), 4, 20),
        (1, [7], 2, 30),
        (2, [*shared, 1, 2, 3], 3, 12),
        (3, [*shared, 4], 3, 40),
        (4, rng.integers(0, 61, 90).tolist(), 2, 50),
    ]


def generate(dtype, *, order=None, temperature=1.0, mode="exact", **config):
    driver = Driver(dtype, mode=mode, **config)
    groups = prompts()
    for i in order or range(len(groups)):
        number, prompt, samples, max_tokens = groups[i]
        driver.submit(prompt, number=number, samples=samples, max_tokens=max_tokens, temperature=temperature)
    return driver, driver.run()


@pytest.fixture(scope="module", params=DTYPES)
def reference(request):
    """Every sample alone, in an engine of its own that computes each prompt in one chunk."""
    results = {}
    for number, prompt, samples, max_tokens in prompts():
        for index in range(samples):
            driver = Driver(request.param)
            continued = {i: [0] * max_tokens for i in range(samples) if i != index}
            driver.submit(prompt, number=number, samples=samples, max_tokens=max_tokens, continued=continued)
            results[f"{number}.{index}"] = driver.run()[f"{number}.{index}"]
    return request.param, results


def assert_same(results, reference):
    assert results.keys() == reference.keys()
    different = [t for t in results if not results[t].same(reference[t])]
    assert not different


def test_samples_end_at_their_length_and_siblings_differ(reference):
    _, results = reference
    for number, _, samples, max_tokens in prompts():
        siblings = [results[f"{number}.{i}"] for i in range(samples)]
        assert all(len(r.tokens) == max_tokens and r.finish == "length" for r in siblings)
        assert len({tuple(r.tokens) for r in siblings}) == samples


def test_batched_equals_alone(reference):
    dtype, results = reference
    assert_same(generate(dtype)[1], results)


@pytest.mark.parametrize("chunk", [1, 3, 17, 64, 1000])
def test_chunk_size_does_not_matter(reference, chunk):
    dtype, results = reference
    assert_same(generate(dtype, max_chunk_tokens=chunk)[1], results)


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_page_size_does_not_matter(reference, page_size):
    dtype, results = reference
    assert_same(generate(dtype, page_size=page_size)[1], results)


@pytest.mark.parametrize("budget", [5, 37, 150])
def test_step_budget_and_number_of_places_do_not_matter(reference, budget):
    dtype, results = reference
    assert_same(generate(dtype, max_step_tokens=budget, max_running=5)[1], results)


@pytest.mark.parametrize("page_size", [4, 16])
def test_preemption_does_not_matter(reference, page_size):
    dtype, results = reference
    driver, preempted = generate(dtype, page_size=page_size, kv_cache_tokens=176)
    assert driver.engine.scheduler.num_preemptions > 0
    assert driver.engine.scheduler.num_prefix_hit_tokens > 0, "who comes back finds cached pages"
    assert_same(preempted, results)


def test_order_of_arrival_does_not_matter(reference):
    dtype, results = reference
    assert_same(generate(dtype, order=[4, 2, 0, 3, 1])[1], results)


def test_a_prefix_hit_equals_a_cold_start(reference, monkeypatch):
    dtype, results = reference
    driver, warm = generate(dtype)
    assert driver.engine.scheduler.num_prefix_hit_tokens > 0
    monkeypatch.setattr(PagePool, "lookup", lambda self, seq: [])
    monkeypatch.setattr(PagePool, "is_coming", lambda self, seq, num_hits: False)
    monkeypatch.setattr(PagePool, "advance", lambda self, seq, end: setattr(seq, "num_computed", end))
    driver, cold = generate(dtype)
    assert driver.engine.scheduler.num_prefix_hit_tokens == 0
    assert_same(warm, cold)
    assert_same(warm, results)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_continuation_on_another_engine_goes_on_as_if_never_interrupted(dtype):
    _, prompt, samples, max_tokens = prompts()[0]
    whole = Driver(dtype)
    ids = whole.submit(prompt, samples=samples, max_tokens=max_tokens)
    expected = whole.run()
    for split in range(max_tokens + 1):
        # Warm from other splits or not, and each sibling cut elsewhere.
        cuts = {i: (split + 5 * i) % (max_tokens + 1) for i in range(samples)}
        other = Driver(dtype, page_size=4, max_chunk_tokens=7)
        continued = {i: expected[t].tokens[: cuts[i]] for i, t in enumerate(ids)}
        other.submit(prompt, samples=samples, max_tokens=max_tokens, continued=continued)
        for i, t in enumerate(ids):
            result = other.run()[t]
            assert result.tokens == expected[t].tokens[cuts[i] :]
            assert result.bits == expected[t].bits[4 * cuts[i] :]
            assert result.finish == expected[t].finish
        assert other.engine.counters.continued_tokens == sum(max_tokens - c for c in cuts.values() if c)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_logprobs_are_the_trainers(dtype, temperature):
    _, results = generate(dtype, temperature=temperature, kv_cache_tokens=400, max_chunk_tokens=13)
    groups = {number: prompt for number, prompt, _, _ in prompts()}
    sequences = {t: groups[int(t.split(".")[0])] + r.tokens for t, r in results.items()}
    scored = trainer_logprobs(trainer_decoder(dtype, 0), list(sequences.values()), temperature)
    for (t, result), logprobs in zip(results.items(), scored, strict=True):
        assert logprobs[-len(result.tokens) :].tobytes() == result.bits, t


def test_in_fast_mode_batching_shows_in_the_bits():
    alone = Driver(mode="fast")
    _, prompt, _, max_tokens = prompts()[4]
    alone.submit(prompt, number=4, samples=2, max_tokens=max_tokens)
    _, batched = generate("float32", mode="fast", max_chunk_tokens=17)
    results = alone.run()
    assert any(not results[t].same(batched[t]) for t in results)


def test_greedy_takes_the_argmax_and_reports_it():
    driver = Driver()
    driver.submit([1, 2, 3], temperature=0.0, max_tokens=15)
    result = driver.run()["0.0"]
    assert result.tokens == result.top1


def test_per_request_parameters_do_not_leak_into_neighbours(reference):
    dtype, results = reference
    driver = Driver(dtype)
    for number, prompt, samples, max_tokens in prompts():
        driver.submit(prompt, number=number, samples=samples, max_tokens=max_tokens)
        driver.submit(prompt, number=100 + number, temperature=0.0, max_tokens=9)
        driver.submit(prompt, number=200 + number, temperature=0.7, top_k=3, top_p=0.9, max_tokens=9)
    mixed = driver.run()
    assert_same({t: mixed[t] for t in results}, results)
    assert all(len(set(mixed[t].tokens)) >= 1 and mixed[t].finish for t in mixed)


def test_each_requests_seed_is_its_own():
    """Requests of equal prompts, numbers and samples, told apart by nothing else, side by side and alone."""
    seeds = (3, 4, 2**64 - 1)

    def tokens(*seeds):
        driver = Driver()
        groups = [group_of([1, 2, 3], SamplingParams(max_tokens=12), samples=1, number=0, seed=seed) for seed in seeds]
        for seed, group in zip(seeds, groups, strict=True):
            group[0].trajectory_id = str(seed)
            driver.results[str(seed)] = Result()
            driver.engine.submit(group, driver.engine.model)
        return [driver.run()[str(seed)].tokens for seed in seeds]

    together = tokens(*seeds)
    assert together == [*tokens(3), *tokens(4), *tokens(2**64 - 1)]
    assert len({tuple(t) for t in together}) == len(seeds)


def test_top_k_1_is_greedy_whatever_the_temperature():
    driver = Driver()
    driver.submit([5, 6], number=1, temperature=0.0)
    driver.submit([5, 6], number=2, temperature=1.5, top_k=1)
    results = driver.run()
    assert results["1.0"].tokens == results["2.0"].tokens
    assert results["2.0"].logprobs == [0.0] * 20, "the distribution sampled from has one token"


def test_a_stop_id_ends_a_sample_and_is_kept():
    driver = Driver()
    driver.submit([1, 2, 3], max_tokens=30)
    free = driver.run()["0.0"].tokens
    stop = free[7]
    other = Driver()
    other.submit([1, 2, 3], max_tokens=30, stop_token_ids=(99, stop))
    result = other.run()["0.0"]
    assert result.tokens == free[: free.index(stop) + 1]
    assert result.finish == "stop"


def test_a_swap_to_the_same_bytes_changes_nothing(reference):
    dtype, results = reference
    driver = Driver(dtype)
    for number, prompt, samples, max_tokens in prompts():
        driver.submit(prompt, number=number, samples=samples, max_tokens=max_tokens)
    for _ in range(6):
        driver.step()
    assert driver.swap(0, step=0).probe_differing == 0
    assert driver.engine.scheduler.running, "an equal digest interrupts nobody"
    driver.swap(1, step=1)
    driver.swap(0, step=2)
    for _ in range(3):
        driver.step()
    driver.swap(0, step=3)
    swapped = driver.run()
    assert_same(swapped, results)
    assert {s for r in swapped.values() for s in r.steps} == {0, 2, 3}


@pytest.mark.parametrize("dtype", DTYPES)
def test_after_a_swap_in_mid_generation_every_span_scores_equal_under_its_own_version(dtype):
    driver = Driver(dtype, seed=0, step=0, page_size=4)
    groups = {number: prompt for number, prompt, _, _ in prompts()}
    for number, prompt, samples, max_tokens in prompts():
        driver.submit(prompt, number=number, samples=samples, max_tokens=max_tokens)
    for version in (1, 2):
        for _ in range(7):
            driver.step()
        assert driver.swap(version, step=version).probe_differing == 0
    results = driver.run()
    assert any(set(r.steps) == {0, 1, 2} for r in results.values())
    for t, result in results.items():
        assert result.steps == sorted(result.steps)
        sequence = groups[int(t.split(".")[0])] + result.tokens
        for version in set(result.steps):
            scored = trainer_logprobs(trainer_decoder(dtype, version), [sequence])[0][-len(result.tokens) :]
            of_version = np.array(result.steps) == version
            assert scored[of_version].tobytes() == np.float32(result.logprobs)[of_version].tobytes()


def test_a_swap_forgets_every_cached_prefix():
    driver = Driver()
    driver.submit(list(range(40)), max_tokens=2)
    driver.run()
    assert driver.engine.pages.num_cached > 0
    driver.swap(1, step=1)
    assert driver.engine.pages.num_cached == 0
    hits = driver.engine.scheduler.num_prefix_hit_tokens
    driver.submit(list(range(40)), number=1, max_tokens=2)
    driver.run()
    assert driver.engine.scheduler.num_prefix_hit_tokens == hits


def test_the_probe_is_clean_and_one_flipped_bit_of_it_shows():
    driver = Driver()
    clean = driver.swap(1, step=1)
    assert (clean.probe_tokens, clean.probe_differing) == (sum(len(p) - 1 for p in PROBES), 0)
    assert clean.digest == driver.digest
    manifest = manifest_of(seed=2, step=2)
    flipped = bytearray(manifest.probe_logprobs[1])
    flipped[8] ^= 1
    manifest.probe_logprobs[1] = bytes(flipped)
    driver.submit([1, 2], number=9)
    with torch.inference_mode():
        result = driver.engine.swap(served_model(manifest, seed=2))
    driver.collect()
    assert result.probe_differing == 1
    assert "1 of 52 probe logprobs differ" in driver.engine.doubt
    assert driver.results["9.0"].failure == driver.engine.doubt, "nothing is sampled from weights in doubt"
    assert driver.swap(1, step=3).probe_differing == 0
    assert not driver.engine.doubt


def test_one_flipped_bit_of_one_served_weight_shows_in_digest_and_probe():
    driver = Driver()
    model = served_model(manifest_of(seed=1, step=1), seed=1)
    weight = model.decoder.model.layers[1].mlp.down_proj.weight
    weight.view(torch.int32)[3, 5] ^= 1 << 20
    with torch.inference_mode():
        result = driver.engine.swap(model)
    assert result.digest != model.version.digest
    assert result.probe_differing > 0


def test_probes_are_scored_while_others_wait_and_leave_no_pages_behind():
    driver = Driver(kv_cache_tokens=160)
    for number, prompt, samples, max_tokens in prompts():
        driver.submit(prompt, number=number, samples=samples, max_tokens=max_tokens)
    for _ in range(5):
        driver.step()
    driver.swap(0, step=1)
    results = driver.run()
    assert all(r.finish for r in results.values())
    assert driver.engine.pages.num_free == driver.engine.pages.num_pages


def test_aborted_samples_stream_what_they_have_and_free_their_pages():
    driver = Driver(stream_tokens=100)
    driver.submit([1, 2, 3], samples=3, max_tokens=50)
    for _ in range(10):
        driver.step()
    assert driver.engine.abort_ids({"0.0", "0.2", "unknown"}) == 2
    results = driver.run()
    assert [results[f"0.{i}"].finish for i in range(3)] == ["aborted", "length", "aborted"]
    assert len(results["0.0"].tokens) > 0
    assert driver.engine.pages.num_free == driver.engine.pages.num_pages
