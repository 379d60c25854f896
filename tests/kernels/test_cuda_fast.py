"""The CUDA kernels in fast mode, interpreted: close to the plain definition whatever the cut, and free to differ in bits."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.kernels import SamplingParams, reference
from shared.kernels.cuda import fast
from shared.kernels.cuda.attention_math import BLOCK
from shared.kernels.cuda.fast import FastCudaOps
from shared.models import packed_layout, paged_layout
from tests.kernels.cuda_testing import in_pages, interpreted_ops, qkv, relative_error
from tests.kernels.kernel_testing import same_bits, wide


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> FastCudaOps:
    monkeypatch.setattr(fast, "num_multiprocessors", lambda device: 4)
    return FastCudaOps(torch.device("cpu"))


@given(num_programs=st.integers(1, 5000), longest=st.integers(1, 200_000))
def test_chunks_are_powers_of_two_that_hold_blocks(num_programs: int, longest: int) -> None:
    chunk = FastCudaOps(torch.device("cpu")).choose_chunk(num_programs, longest)
    assert chunk % BLOCK == 0
    assert chunk & (chunk - 1) == 0


def test_attention_cut_by_load_is_the_same_function_in_other_bits(ops: FastCudaOps, tmp_path: Path) -> None:
    length = 600
    q, k, v = qkv(length, (2, 1, 16), torch.float32)
    stores, tables = in_pages(k, v, [length], 16)
    exact = interpreted_ops(tmp_path)
    for count, is_cut in ((1, True), (40, False)):
        layout = paged_layout(tables * count, 16, [1] * count, list(range(length - count + 1, length + 1)))
        assert (ops.choose_chunk(count, length) < length) is is_cut
        ours = ops.attention(q[-count:], *stores, layout, 0.25)
        theirs = exact.attention(q[-count:], *stores, layout, 0.25)
        expected = reference.attention(q.double(), k.double(), v.double(), packed_layout([length]), 0.25)[-count:]
        assert relative_error(ours, expected) < 1e-5
        assert same_bits(ours, theirs) is not is_cut


def test_head_and_products_match_float64(ops: FastCudaOps) -> None:
    hidden, weight = wide(6, 32), wide(300, 32, seed=1) * 0.3
    targets, temperature = torch.arange(6) * 37, torch.tensor([1.0, 0.7, 1.3]).repeat(2)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    out = ops.lm_logprob(*leaves, targets, temperature)
    logprob, top1, _ = reference.lm_logprob(hidden.double(), weight.double(), targets, temperature)
    torch.testing.assert_close(out.logprob.double(), logprob, rtol=1e-4, atol=1e-4)
    assert torch.equal(out.top1.long(), top1)
    out.logprob.sum().backward()
    assert all(x.grad.isfinite().all() for x in leaves)
    bias = wide(300, seed=2)
    torch.testing.assert_close(ops.linear(hidden, weight, bias), hidden @ weight.t() + bias, rtol=1e-5, atol=1e-4)


def test_logits_are_rounded_to_the_weights_dtype_and_sampled_from(ops: FastCudaOps) -> None:
    hidden, weight = wide(4, 32, dtype=torch.float16), (wide(300, 32, seed=1) * 0.3).half()
    fields = {"seed": [1] * 4, "prompt": range(4), "sample": [0] * 4, "position": [0] * 4}
    drawn = ops.sample(hidden, weight, SamplingParams.of(**fields, temperature=[0.0, 1.0, 1.0, 0.7]))
    logits = (hidden @ weight.t()).float() / torch.tensor([1.0, 1.0, 1.0, 0.7])[:, None]
    expected = logits.log_softmax(-1).gather(1, drawn.token[:, None].long()).squeeze(1)
    torch.testing.assert_close(drawn.logprob, expected, rtol=1e-4, atol=1e-4)
    assert drawn.token[0] == logits[0].argmax()


def test_it_says_what_it_is_and_promises_nothing(ops: FastCudaOps) -> None:
    assert ops.mode == "fast"
    assert "cublas" in ops.describe()["linear"]
    assert ops.widen_head(wide(3, 3)) is None
    assert "class=" not in ops.identity(torch.bfloat16)
