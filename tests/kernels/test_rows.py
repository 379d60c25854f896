"""The row contract of the operations that see one row at a time, their values and their gradients."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shared.kernels import build_ops, reference
from shared.kernels.linear import has_onednn_float32, onednn_linear, padded_linear
from tests.kernels.kernel_testing import DTYPES, same_bits, wide

OPS = build_ops("exact")
LINEARS = [padded_linear] + ([onednn_linear] if has_onednn_float32() else [])
SHAPES = [(64, 96), (577, 63), (1536, 576)]
Op = Callable[[Tensor], Tensor]


def assert_rows_stand_alone(op: Op, x: Tensor) -> None:
    """Every row count from 1 to all rows, shifted starts, another order, NaN and inf neighbours, autograd on and off."""
    expected = op(x)
    num_rows = x.shape[0]
    for count in (*range(1, 34), *range(35, num_rows, 23), num_rows):
        start = (13 * count) % (num_rows - count + 1)
        assert same_bits(op(x[start : start + count]), expected[start : start + count]), (count, start)
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(1))
    assert same_bits(op(x[order]), expected[order])
    poisoned = x.clone()
    poisoned[::3], poisoned[1::3] = torch.nan, torch.inf
    assert same_bits(op(poisoned)[2::3], expected[2::3])
    assert same_bits(op(x.clone().requires_grad_()).detach(), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("k", "n"), SHAPES)
@pytest.mark.parametrize("linear", LINEARS, ids=lambda f: f.__name__)
def test_linear_rows_stand_alone(linear: Callable, k: int, n: int, dtype: torch.dtype) -> None:
    weight, bias = wide(n, k, dtype=dtype), wide(n, dtype=dtype, seed=2)
    assert_rows_stand_alone(lambda x: linear(x, weight, bias), wide(300, k, dtype=dtype, seed=1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("linear", LINEARS, ids=lambda f: f.__name__)
def test_linear_columns_stand_alone(linear: Callable, dtype: torch.dtype) -> None:
    x, weight = wide(20, 192, dtype=dtype), wide(160, 192, dtype=dtype, seed=1)
    fused = linear(x, weight, None)
    assert same_bits(linear(x, weight[:96], None), fused[:, :96])
    assert same_bits(linear(x, weight[96:], None), fused[:, 96:])


def test_plain_linear_shows_its_row_count() -> None:
    """Negative control: the comparison above can fail."""
    x, weight = wide(64, 576), wide(576, 576, seed=1)
    assert not same_bits(F.linear(x[:1], weight), F.linear(x, weight)[:1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [16, 63, 576, 1536])
def test_elementwise_and_norm_rows_stand_alone(size: int, dtype: torch.dtype) -> None:
    weight = wide(size, dtype=dtype)
    x = wide(300, size, dtype=dtype, seed=1)
    assert_rows_stand_alone(lambda x: OPS.rms_norm(x, weight, 1e-6), x)
    assert_rows_stand_alone(lambda x: OPS.silu_mul(x, x.roll(1, dims=1)), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rope_and_embedding_rows_stand_alone(dtype: torch.dtype) -> None:
    table = wide(300, 20, dtype=dtype)

    def rotate(x: Tensor) -> Tensor:
        cos, sin = x[:, :10], x[:, 10:20]
        return OPS.rope(x[:, 20:].unflatten(1, (3, 20)), cos, sin)

    assert_rows_stand_alone(rotate, torch.cat((table, wide(300, 60, dtype=dtype, seed=1)), 1))
    weight, ids = wide(50, 24, dtype=dtype), torch.arange(300) % 50
    assert same_bits(OPS.embedding(ids, weight), weight[ids])


def test_library_silu_shows_its_place_in_memory() -> None:
    """Negative control: why silu is written as x / (1 + exp(-x))."""
    x = wide(400, 31)
    assert not all(same_bits(F.silu(x[i : i + 1]), F.silu(x)[i : i + 1]) for i in range(400))


@settings(max_examples=15)
@given(rows=st.integers(0, 40), k=st.integers(1, 70), n=st.integers(1, 70), dtype=st.sampled_from(DTYPES))
def test_linear_matches_the_reference(rows: int, k: int, n: int, dtype: torch.dtype) -> None:
    x, weight, bias = wide(rows, k, dtype=dtype), wide(n, k, dtype=dtype, seed=1), wide(n, dtype=dtype, seed=2)
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    for linear in LINEARS:
        y = linear(x, weight, bias)
        torch.testing.assert_close(y, reference.linear(x, weight, bias), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_ops_match_the_reference(dtype: torch.dtype) -> None:
    x, y = wide(37, 63, dtype=dtype), wide(37, 63, dtype=dtype, seed=1)
    assert same_bits(OPS.rms_norm(x, y[0], 1e-5), reference.rms_norm(x, y[0], 1e-5))
    q, cos, sin = wide(37, 3, 20, dtype=dtype), wide(37, 10, dtype=dtype), wide(37, 10, dtype=dtype, seed=1)
    assert same_bits(OPS.rope(q, cos, sin), reference.rope(q, cos, sin))
    torch.testing.assert_close(
        OPS.silu_mul(x, y), reference.silu_mul(x, y), rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-6
    )
    ids = torch.tensor([3, 0, 3])
    assert same_bits(OPS.embedding(ids, x), reference.embedding(ids, x))


def gradients(op: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Gradients of a fixed random functional of op's output."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = op(*leaves)
    out.backward(wide(*out.shape, dtype=out.dtype, seed=9))
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def silu_mul_any(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def rms_norm_any(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize("rows", [1, 16, 21])
def test_gradients_match_float64(rows: int) -> None:
    x, y, weight, bias = wide(rows, 20), wide(rows, 20, seed=1), wide(30, 20, seed=2), wide(30, seed=3)
    cos, sin, q = wide(rows, 5, seed=4), wide(rows, 5, seed=5), wide(rows, 2, 10, seed=6)
    cases: list[tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[Tensor, ...]]] = [
        (padded_linear, F.linear, (x, weight, bias)),
        (OPS.linear, F.linear, (x, weight, bias)),
        (lambda x, w: OPS.rms_norm(x, w, 1e-6), rms_norm_any, (x, y[0])),
        (OPS.silu_mul, silu_mul_any, (x, y)),
        (lambda q: OPS.rope(q, cos, sin), lambda q: reference.rope(q, cos.double(), sin.double()), (q,)),
        (lambda w: OPS.embedding(torch.tensor([1, 4, 1]), w), lambda w: w[torch.tensor([1, 4, 1])], (weight,)),
    ]
    for op, plain, inputs in cases:
        expected = gradients(plain, *(i.double() for i in inputs))
        for got, want in zip(gradients(op, *inputs), expected, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
