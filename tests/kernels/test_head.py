"""The head and the sampler: bits, values, gradients, random numbers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.kernels import SamplingParams, build_ops, reference
from shared.kernels import logprob as logprob_module
from shared.kernels.philox import gumbel_noise, philox4x32
from shared.kernels.sampling import kept_support
from tests.kernels.kernel_testing import DTYPES, same_bits, wide

OPS = build_ops("exact")


def head(rows: int, size: int, vocab: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    hidden, weight = wide(rows, size, dtype=dtype), wide(vocab, size, dtype=dtype, seed=1)
    temperature = torch.tensor([1.0, 0.7, 0.0, 1.3]).repeat(-(-rows // 4))[:rows]
    return hidden, weight, torch.arange(rows) * 37 % vocab, temperature


def params(rows: int, **changes: list) -> SamplingParams:
    fields: dict = {
        "seed": [2**64 - 5] * rows,
        "prompt": [i // 3 for i in range(rows)],
        "sample": [i % 3 for i in range(rows)],
        "position": list(range(50, 50 + rows)),
        "temperature": [1.0] * rows,
    }
    return SamplingParams.of(**{**fields, **changes})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("size", "vocab"), [(64, 515), (48, 33001)])
def test_head_rows_stand_alone(size: int, vocab: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets, temperature = head(150, size, vocab, dtype)
    expected = OPS.lm_logprob(hidden, weight, targets, temperature)
    poisoned = hidden.clone()
    poisoned[::2] = torch.nan
    for count in (*range(1, 18), 33, 150):
        rows = slice(3 * count % (151 - count), 3 * count % (151 - count) + count)
        out = OPS.lm_logprob(hidden[rows], weight, targets[rows], temperature[rows], weight32_VD=weight.float())
        assert all(same_bits(a, b[rows]) for a, b in zip(out, expected, strict=True)), count
    out = OPS.lm_logprob(poisoned, weight, targets, temperature)
    assert all(same_bits(a[1::2], b[1::2]) for a, b in zip(out, expected, strict=True))
    monkeypatch.setattr(logprob_module, "CHUNK_ELEMENTS", 16 * vocab)
    out = OPS.lm_logprob(hidden.requires_grad_(), weight, targets, temperature)
    assert all(same_bits(a.detach(), b) for a, b in zip(out, expected, strict=True))


def test_head_matches_the_reference_with_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprob_module, "row_chunks", lambda n, v, **k: list(_small_chunks(n, k.get("begin", 0))))
    hidden, weight, targets, temperature = head(45, 24, 301)
    weight *= 0.3
    ours = [x.clone().requires_grad_() for x in (hidden, weight)]
    theirs = [x.double().requires_grad_() for x in (hidden, weight)]
    out = OPS.lm_logprob(*ours, targets, temperature)
    logprob, top1, entropy = reference.lm_logprob(*theirs, targets, temperature)
    torch.testing.assert_close(out.logprob.double(), logprob, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out.entropy.double(), entropy, rtol=1e-4, atol=1e-4)
    assert torch.equal(out.top1.long(), top1)
    a, b = wide(45, seed=3), wide(45, seed=4)
    ((out.logprob * a).sum() + (out.entropy * b).sum()).backward()
    ((logprob * a).sum() + (entropy * b).sum()).backward()
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got.grad.double(), want.grad, rtol=1e-3, atol=1e-4)


def _small_chunks(num_rows: int, begin: int) -> list[slice]:
    return [slice(i, min(i + 16, num_rows)) for i in range(begin, num_rows, 16)]


def test_equal_logits_yield_the_lowest_id() -> None:
    weight = torch.zeros(70001, 4)
    weight[[40, 69000]] = 1
    assert OPS.lm_logprob(torch.ones(1, 4), weight, torch.zeros(1), torch.ones(1)).top1.tolist() == [40]
    assert OPS.sample(torch.ones(1, 4), weight, params(1, temperature=[0.0])).token.tolist() == [40]


def test_philox_gives_the_published_answers() -> None:
    """Random123, kat_vectors, philox4x32 10."""
    ones, pi = 0xFFFFFFFF, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    answers = {
        ((0, 0, 0, 0), (0, 0)): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ((ones,) * 4, (ones,) * 2): (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        (pi, (0xA4093822, 0x299F31D0)): (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    }
    for (counter, key), answer in answers.items():
        assert reference.philox4x32(counter, key) == answer
        assert philox4x32(counter, key) == answer
        assert tuple(int(w) for w in philox4x32(tuple(torch.tensor([c]) for c in counter), key)) == answer


@settings(max_examples=15)
@given(st.tuples(st.integers(0, 2**64 - 1), *[st.integers(0, 2**32 - 1)] * 3), st.integers(1, 70))
def test_noise_is_a_function_of_its_key_and_entry(key: tuple[int, int, int, int], vocab: int) -> None:
    seed, prompt, sample, position = key
    columns = [torch.tensor([(x + 2**63) % 2**64 - 2**63]) for x in (seed, prompt, sample, position)]
    expected = torch.tensor([[reference.gumbel(seed, prompt, sample, position, v) for v in range(vocab)]])
    torch.testing.assert_close(gumbel_noise(*columns, vocab), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sampled_logprob_has_the_bits_of_the_trainers(dtype: torch.dtype) -> None:
    hidden, weight, _, temperature = head(90, 64, 2001, dtype)
    drawn = OPS.sample(hidden, weight, params(90, temperature=temperature.tolist()))
    scored = OPS.lm_logprob(hidden.requires_grad_(), weight, drawn.token, temperature)
    assert same_bits(drawn.logprob, scored.logprob.detach())
    assert same_bits(drawn.top1, scored.top1)
    greedy = temperature == 0
    assert torch.equal(drawn.token[greedy], drawn.top1[greedy])
    assert not torch.equal(drawn.token, drawn.top1)


def test_a_draw_does_not_depend_on_the_batch() -> None:
    hidden, weight, _, _ = head(40, 32, 1003)
    mixed = {"temperature": [0.0, 1.0, 0.5, 2.0] * 10, "top_k": [0, 5, 0, 7] * 10, "top_p": [1.0, 1.0, 0.8, 0.9] * 10}
    full = params(40, **mixed)
    expected = OPS.sample(hidden, weight, full)
    for rows in (torch.tensor([7]), torch.arange(40).flip(0), torch.arange(3, 23)):
        part = SamplingParams(**{name: value[rows] for name, value in vars(full).items() if value is not None})
        out = OPS.sample(hidden[rows], weight, part)
        assert all(same_bits(a, b[rows]) for a, b in zip(out, expected, strict=True))


def test_draws_follow_the_distribution() -> None:
    """Chi-square over 20,000 draws of an 8-token vocabulary, filtered and not."""
    num_draws, weight = 20000, torch.diag(torch.ones(8))
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -3.0, 1.5, 0.0])
    for changes in ({}, {"top_k": [3] * num_draws}):
        fields = {
            "seed": [11] * num_draws,
            "sample": list(range(num_draws)),
            "position": [4] * num_draws,
            "temperature": [0.8] * num_draws,
        }
        out = OPS.sample(logits.expand(num_draws, 8), weight, params(num_draws, **fields, **changes))
        z = logits / 0.8
        if changes:
            z = z.masked_fill(~kept_support(z[None], torch.tensor([3]), None, None)[0], -torch.inf)
        expected = z.softmax(0) * num_draws
        counts = torch.bincount(out.token.long(), minlength=8)
        assert counts[expected == 0].sum() == 0
        chi_square = ((counts - expected).square() / expected)[expected > 0].sum()
        # The 0.1 % point for 7 degrees of freedom.
        assert chi_square < 24.3
        torch.testing.assert_close(out.logprob, z.log_softmax(0)[out.token.long()])


def test_filters_keep_what_they_say() -> None:
    z = torch.tensor([[0.5, 0.2, 0.2, 0.1]]).log()

    def kept(top_k: int | None = None, top_p: float | None = None, min_p: float | None = None) -> list[int]:
        as_row = [None if x is None else torch.tensor([x]) for x in (top_k, top_p, min_p)]
        return kept_support(z, *as_row)[0].nonzero().squeeze(1).tolist()

    assert kept(top_k=2) == [0, 1]
    assert kept(top_k=0) == [0, 1, 2, 3]
    assert kept(top_p=0.45) == [0]
    assert kept(top_p=0.6) == [0, 1]
    assert kept(min_p=0.3) == [0, 1, 2]
    assert kept(min_p=1.0) == [0]


def test_sampling_parameters_out_of_range_are_refused() -> None:
    for changes, text in (
        ({"temperature": [-1.0]}, "temperature must be"),
        ({"top_p": [0.0]}, "top_p must be"),
        ({"top_k": [-1]}, "top_k must be"),
        ({"seed": [1, 2]}, "different lengths"),
    ):
        with pytest.raises(ValueError, match=text):
            params(1, **changes)
