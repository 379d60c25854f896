"""The CUDA head and sampler under the interpreter: the CPU's tokens, one function of a row, gradients against float64."""

from pathlib import Path

import pytest
import torch

from shared.kernels import SamplingParams, build_ops, reference
from shared.kernels.cuda import head as head_module
from shared.kernels.cuda.head import read_head
from shared.kernels.cuda.ops import CudaOps
from shared.kernels.cuda.sampling import count_kept
from shared.kernels.sampling import kept_support
from tests.kernels.cuda_testing import interpreted_ops, relative_error
from tests.kernels.kernel_testing import same_bits, wide

CPU = build_ops("exact")
VOCAB = 4500
"""More than one segment of 4096."""


@pytest.fixture
def ops(tmp_path: Path) -> CudaOps:
    return interpreted_ops(tmp_path)


def head(rows: int, vocab: int = VOCAB, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    hidden, weight = wide(rows, 32, dtype=dtype), (wide(vocab, 32, seed=1) * 0.3).to(dtype)
    temperature = torch.tensor([1.0, 0.7, 0.0, 1.3]).repeat(-(-rows // 4))[:rows]
    return hidden, weight, torch.arange(rows) * 37 % vocab, temperature


def params(rows: int, **changes: list) -> SamplingParams:
    fields: dict = {
        "seed": [2**64 - 5, 7, 2**40 + 3][:rows] + [11] * (rows - 3),
        "prompt": [i // 3 for i in range(rows)],
        "sample": [i % 3 for i in range(rows)],
        "position": list(range(50, 50 + rows)),
        "temperature": [1.0] * rows,
    }
    return SamplingParams.of(**{**fields, **changes})


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_values_and_gradients_match_float64(ops: CudaOps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_module, "ROWS", 3)
    monkeypatch.setattr(head_module, "GRADIENT_ROWS", 4)
    hidden, weight, targets, temperature = head(6)
    ours = [x.clone().requires_grad_() for x in (hidden, weight)]
    theirs = [x.double().requires_grad_() for x in (hidden, weight)]
    out = ops.lm_logprob(*ours, targets, temperature)
    logprob, top1, entropy = reference.lm_logprob(*theirs, targets, temperature)
    torch.testing.assert_close(out.logprob.double(), logprob, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out.entropy.double(), entropy, rtol=1e-4, atol=1e-4)
    assert torch.equal(out.top1.long(), top1)
    a, b = wide(6, seed=3), wide(6, seed=4)
    ((out.logprob * a).sum() + (out.entropy * b).sum()).backward()
    ((logprob * a).sum() + (entropy * b).sum()).backward()
    for got, want in zip(ours, theirs, strict=True):
        assert relative_error(got.grad, want.grad) < 1e-4
    frozen = ops.lm_logprob(hidden.clone().requires_grad_(), weight, targets, temperature)
    frozen.logprob.sum().backward()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_head_rows_stand_alone(ops: CudaOps) -> None:
    hidden, weight, targets, temperature = head(9)
    expected = ops.lm_logprob(hidden, weight, targets, temperature)
    poisoned = hidden.clone()
    poisoned[::2, 3] = torch.inf
    for rows in (slice(0, 1), slice(3, 8)):
        out = ops.lm_logprob(hidden[rows], weight, targets[rows], temperature[rows])
        assert all(same_bits(a, b[rows]) for a, b in zip(out, expected, strict=True))
    out = ops.lm_logprob(poisoned, weight, targets, temperature)
    assert all(same_bits(a[1::2], b[1::2]) for a, b in zip(out, expected, strict=True))
    assert out.logprob[::2].isnan().all(), "what is not a number stays none"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_sampled_logprob_has_the_bits_of_the_trainers(ops: CudaOps, dtype: torch.dtype) -> None:
    hidden, weight, _, temperature = head(9, dtype=dtype)
    drawn = ops.sample(hidden, weight, params(9, temperature=temperature.tolist()))
    scored = ops.lm_logprob(hidden.clone().requires_grad_(), weight, drawn.token, temperature)
    assert same_bits(drawn.logprob, scored.logprob.detach())
    assert same_bits(drawn.top1, scored.top1)
    greedy = temperature == 0
    assert torch.equal(drawn.token[greedy], drawn.top1[greedy])
    assert not torch.equal(drawn.token, drawn.top1)


def test_tokens_are_those_of_the_cpu(ops: CudaOps) -> None:
    hidden, weight, _, temperature = head(12)
    mixed = params(12, temperature=temperature.tolist())
    ours, theirs = ops.sample(hidden, weight, mixed), CPU.sample(hidden, weight, mixed)
    assert torch.equal(ours.token, theirs.token)
    assert torch.equal(ours.top1, theirs.top1)
    torch.testing.assert_close(ours.logprob, theirs.logprob, rtol=1e-5, atol=1e-5)


FILTERS = {"top_k": [0, 5, 1, 7] * 2, "top_p": [1.0, 0.9, 0.5, 0.8] * 2, "min_p": [0.0, 0.01, 0.0, 0.2] * 2}


@pytest.mark.parametrize("names", [["top_k"], ["top_p"], ["min_p"], ["top_k", "top_p", "min_p"]], ids="+".join)
def test_filters_are_those_of_the_cpu(ops: CudaOps, names: list[str]) -> None:
    hidden, weight, _, temperature = head(8)
    filtered = params(8, temperature=temperature.tolist(), **{name: FILTERS[name] for name in names})
    ours, theirs = ops.sample(hidden, weight, filtered), CPU.sample(hidden, weight, filtered)
    assert torch.equal(ours.token, theirs.token)
    assert torch.equal(ours.top1, theirs.top1)
    torch.testing.assert_close(ours.logprob, theirs.logprob, rtol=1e-4, atol=1e-5)


def test_a_draw_does_not_depend_on_the_batch(ops: CudaOps) -> None:
    hidden, weight, _, _ = head(8)
    full = params(8, temperature=[0.0, 1.0, 0.5, 2.0] * 2, **FILTERS)
    expected = ops.sample(hidden, weight, full)
    for rows in (slice(7, 8), slice(3, 6)):
        out = ops.sample(hidden[rows], weight, full.rows(rows))
        assert all(same_bits(a, b[rows]) for a, b in zip(out, expected, strict=True))


def test_a_row_without_filters_is_drawn_alike_beside_rows_that_have_some(ops: CudaOps) -> None:
    hidden, weight, _, temperature = head(8)
    plain = params(8, temperature=temperature.tolist())
    expected = ops.sample(hidden, weight, plain)
    neutral = {"top_k": [0, 0, 5, 3], "top_p": [1.0, 1.0, 0.5, 1.0], "min_p": [0.0, 0.0, 0.0, 0.3]}
    beside = params(8, temperature=temperature.tolist(), **{name: 2 * values for name, values in neutral.items()})
    rows = torch.tensor([0, 1, 4, 5])
    out = ops.sample(hidden, weight, beside)
    assert all(same_bits(a[rows], b[rows]) for a, b in zip(out, expected, strict=True))
    assert not same_bits(out.logprob, expected.logprob)


def test_filters_keep_what_they_say() -> None:
    """More entries than one segment; the counts of the CPU's support where no sum lies at the edge."""
    z = torch.randn(4, 9000, generator=torch.Generator().manual_seed(0)).sort(dim=-1, descending=True).values
    cases = [
        {"top_k": torch.tensor([0, 1, 5000, 20000])},
        {"top_p": torch.tensor([1.0, 1e-6, 0.37, 0.9999])},
        {"min_p": torch.tensor([0.0, 1.0, 0.5, 1e-3])},
        {"top_k": torch.tensor([0, 50, 5000, 0]), "top_p": torch.tensor([0.5, 0.5, 0.99, 1.0])},
    ]
    for filters in cases:
        full = [filters.get(name) for name in ("top_k", "top_p", "min_p")]
        assert count_kept(z, *full).tolist() == kept_support(z, *full).sum(-1).tolist(), filters


def test_equal_logits_yield_the_lowest_id_across_segments() -> None:
    logits = torch.zeros(2, 3 * 4096 + 5)
    logits[0, [5000, 9000, 12290]] = 1.0
    out = read_head(logits, torch.ones(2), targets=torch.tensor([9000, 3]))
    assert out.top1.tolist() == [5000, 0]


def test_what_is_excluded_adds_nothing() -> None:
    """Whole segments of -inf, the first one too."""
    logits = torch.full((1, 3 * 4096), -torch.inf)
    logits[0, 5000:5010] = torch.arange(10.0)
    out = read_head(logits, torch.ones(1), targets=torch.tensor([5003]))
    kept = logits[0, 5000:5010].double().log_softmax(0)
    torch.testing.assert_close(out.logprob.double(), kept[3:4], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out.entropy.double(), -(kept.exp() * kept).sum()[None], rtol=1e-5, atol=1e-5)
    assert out.top1.tolist() == [5009]
