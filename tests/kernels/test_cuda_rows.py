"""CUDA operations that see one row at a time, under the interpreter: the CPU's rounding points, gradients, fixed order."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shared.kernels import build_ops, reference
from shared.kernels.cuda.rowwise import kv_write, rms_norm
from shared.kernels.cuda.segments import segment_sum, segments_of
from tests.kernels.cuda_testing import interpreted_ops
from tests.kernels.kernel_testing import same_bits, wide

CPU = build_ops("exact")
DTYPES = [torch.float32, torch.float16]


def gradients(op: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Gradients of a fixed random functional of op's output."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = op(*leaves)
    out.backward(wide(*out.shape, dtype=out.dtype, seed=9))
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [16, 63, 576])
def test_values_are_the_cpus(size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    ops = interpreted_ops(tmp_path)
    x, y = wide(37, size, dtype=dtype), wide(37, size, dtype=dtype, seed=1)
    tolerance = {"rtol": 2e-3, "atol": 1e-6} if dtype == torch.float16 else {"rtol": 1e-6, "atol": 1e-7}
    torch.testing.assert_close(ops.rms_norm(x, y[0], 1e-5), reference.rms_norm(x, y[0], 1e-5), **tolerance)
    torch.testing.assert_close(ops.silu_mul(x, y), CPU.silu_mul(x, y), **tolerance)
    q, cos, sin = wide(5, 3, 2 * size, dtype=dtype), wide(5, size, dtype=dtype), wide(5, size, dtype=dtype, seed=1)
    assert same_bits(ops.rope(q, cos, sin), reference.rope(q, cos, sin))
    assert same_bits(ops.rope(q, cos[:1].expand(5, -1), sin), reference.rope(q, cos[:1].expand(5, -1), sin))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_rows_stand_alone(tmp_path: Path) -> None:
    ops = interpreted_ops(tmp_path)
    x, weight = wide(40, 96), wide(96, seed=1)
    poisoned = x.clone()
    poisoned[::2] = torch.nan
    for op in (
        lambda x: ops.rms_norm(x, weight, 1e-6),
        lambda x: ops.rms_norm(x.view(-1, 3, 32), weight[:32], 1e-6).flatten(1),
        lambda x: ops.rms_norm(x[:, 8:40], weight[:32], 1e-6),
        lambda x: ops.linear(x[:, 8:40], weight.view(3, 32)),
        lambda x: ops.silu_mul(x, x.roll(1, dims=1)),
        lambda x: ops.rope(x.unflatten(1, (3, 32)), x[:, :16], x[:, 16:32]).flatten(1),
    ):
        expected = op(x)
        for rows in (slice(0, 1), slice(3, 20), slice(39, 40)):
            assert same_bits(op(x[rows]), expected[rows])
        assert same_bits(op(poisoned)[1::2], expected[1::2])


def test_the_fused_residual_is_the_sum_and_its_norm() -> None:
    for dtype in DTYPES:
        x, residual, weight = wide(7, 80, dtype=dtype), wide(7, 80, dtype=dtype, seed=1), wide(80, dtype=dtype, seed=2)
        y, total = rms_norm(x, residual, weight, 1e-6)
        assert same_bits(total, x + residual)
        assert same_bits(y, rms_norm(total, None, weight, 1e-6)[0])


@pytest.mark.parametrize("rows", [1, 21])
def test_gradients_match_float64(rows: int, tmp_path: Path) -> None:
    ops = interpreted_ops(tmp_path)
    x, y, weight = wide(rows, 20), wide(rows, 20, seed=1), wide(20, seed=2)
    cos, sin, q = wide(rows, 5, seed=4), wide(rows, 5, seed=5), wide(rows, 2, 10, seed=6)
    ids = torch.tensor([1, 4, 1, 1])

    def norm_of_sum(x: Tensor, residual: Tensor, w: Tensor) -> Tensor:
        total = x + residual
        return torch.cat((w * total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6), total), -1)

    cases: list[tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[Tensor, ...]]] = [
        (lambda x, r, w: torch.cat(rms_norm(x, r, w, 1e-6), -1), norm_of_sum, (x, y, weight)),
        (lambda x, w: ops.rms_norm(x, w, 1e-6), lambda x, w: norm_of_sum(x, torch.zeros(()), w)[:, :20], (x, weight)),
        (ops.silu_mul, lambda g, u: F.silu(g) * u, (x, y)),
        (lambda q: ops.rope(q, cos, sin), lambda q: reference.rope(q, cos.double(), sin.double()), (q,)),
        (lambda w: ops.embedding(ids, w), lambda w: w[ids], (wide(6, 20),)),
    ]
    for op, plain, inputs in cases:
        expected = gradients(plain, *(i.double() for i in inputs))
        for got, want in zip(gradients(op, *inputs), expected, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


def test_rows_of_one_key_are_added_in_their_order() -> None:
    """1e8 swallows what comes after it, not what came before."""
    x = torch.tensor([[1.0], [1e8], [1.0], [-1e8], [5.0]])
    keys = torch.tensor([2, 2, 2, 2, 0])
    sums = segment_sum(x, segments_of(keys, 4), torch.float32)
    assert sums.flatten().tolist() == [5.0, 0.0, 0.0, 0.0]
    sums = segment_sum(x[[1, 3, 0, 2, 4]], segments_of(keys, 4), torch.float32)
    assert sums.flatten().tolist() == [5.0, 0.0, 2.0, 0.0]
    wide_rows = wide(9, 1500)
    keys = torch.tensor([3, 0, 3, 3, 1, 0, 3, 1, 3])
    expected = torch.stack([wide_rows[keys == r].double().sum(0) for r in range(5)])
    sums = segment_sum(wide_rows, segments_of(keys, 5), torch.float32)
    torch.testing.assert_close(sums.double(), expected, rtol=1e-5, atol=1e-5)


def test_negative_slots_are_not_written() -> None:
    k, v = wide(4, 3, 24), wide(4, 3, 24, seed=1)
    before, slots = wide(10, 3, 24, seed=2), torch.tensor([7, -1, 0, -1])
    stores = [before.clone() for _ in range(2)]
    kv_write(k, v, *stores, slots)
    for store, x in zip(stores, (k, v), strict=True):
        assert same_bits(store, reference.write_kv(x, before, slots))
        assert int((store != before).any(-1).any(-1).sum()) == 2


def test_operations_on_no_rows_are_empty(tmp_path: Path) -> None:
    """A rank without work runs the layers on what it has."""
    ops = interpreted_ops(tmp_path)
    empty, weight = torch.zeros(0, 32), torch.ones(32, requires_grad=True)
    assert ops.rms_norm(empty, weight, 1e-6).shape == (0, 32)
    assert ops.silu_mul(empty, empty).shape == (0, 32)
    assert ops.rope(empty.view(0, 2, 16), empty[:, :8], empty[:, :8]).shape == (0, 2, 16)
    assert ops.linear(empty, torch.ones(5, 32)).shape == (0, 5)
    out = ops.lm_logprob(
        empty, torch.ones(40, 32, requires_grad=True), torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    )
    out.logprob.sum().backward()
    ops.rms_norm(empty, weight, 1e-6).sum().backward()
    assert not weight.grad.any()
