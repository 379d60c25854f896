"""What the tests of the CUDA kernels share, on a device (`-m gpu`) and under Triton's interpreter (everywhere else).

The interpreter is right in float32 and float16 only; on a device the kernels take bfloat16 and float16.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from shared.kernels.certify import BUCKETS, Entry, Table, shape_key
from shared.kernels.cuda.gemm import REFERENCE
from shared.kernels.cuda.ops import CudaOps
from tests.kernels.kernel_testing import same_bits, wide

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
HALF = torch.float16 if IS_INTERPRETED else torch.bfloat16


def reference_entry() -> Entry:
    """An entry that dispatches to the reference at every row count."""
    return Entry([REFERENCE.name] * len(BUCKETS), [0.0] * len(BUCKETS), REFERENCE.name, limit=16384)


class ReferenceTable(Table):
    """A table that has certified the reference, and nothing else, for every shape."""

    def entry(self, n: int, k: int, dtype: torch.dtype, out_dtype: torch.dtype, *, has_bias: bool = False) -> Entry:
        return self.entries.setdefault(shape_key(n, k, dtype, out_dtype, has_bias), reference_entry())


def interpreted_ops(directory: Path) -> CudaOps:
    """The device's operations, on the CPU."""
    return CudaOps(DEVICE, ReferenceTable(directory))


def device_ops(directory: Path) -> CudaOps:
    """The device's operations over products certified now; interpreted, to try out a test, over the reference."""
    return interpreted_ops(directory) if IS_INTERPRETED else CudaOps(DEVICE, Table(directory))


def qkv(length: int, heads: tuple[int, int, int], dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q [length, H, D] and k, v [length, Hkv, D] of wide exponents."""
    h, kv, d = heads
    shapes = ((length, h, d), (length, kv, d), (length, kv, d))
    q, k, v = (wide(*shape, dtype=dtype, seed=3 * seed + i).to(DEVICE) for i, shape in enumerate(shapes))
    return q, k, v


def in_pages(
    k: Tensor, v: Tensor, lens: list[int], page_size: int, seed: int = 0
) -> tuple[tuple[Tensor, Tensor], list[list[int]]]:
    """Stores that hold packed rows in shuffled pages, and the page tables; every slot without a token is NaN."""
    counts = [-(-n // page_size) for n in lens]
    free = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
    tables = [[free.pop() for _ in range(n)] for n in counts]
    slots = torch.cat(
        [
            torch.tensor(table)[torch.arange(n) // page_size] * page_size + torch.arange(n) % page_size
            for table, n in zip(tables, lens, strict=True)
        ]
    ).to(k.device)
    shape = ((sum(counts) + 3) * page_size, *k.shape[1:])
    k_store, v_store = (torch.full(shape, torch.nan, dtype=x.dtype, device=x.device) for x in (k, v))
    k_store[slots], v_store[slots] = k, v
    return (k_store, v_store), tables


def relative_error(got: Tensor, exact: Tensor) -> float:
    """|got - exact| / |exact| over all elements, in float64."""
    return float(((got.double() - exact.double()).norm() / exact.double().norm()).detach())


COUNTS = (1, 2, 3, 7, 16, 17, 32, 44, 45, 64, 65, 100, 128, 129, 200, 255, 256, 257, 299, 300)
"""Row counts around the buckets of the table and the tiles of the kernels."""


def assert_rows_stand_alone(op: Callable[[Tensor], Tensor], x: Tensor, counts: Sequence[int] = COUNTS) -> None:
    """Every count from a shifted start, another order, NaN and inf neighbours, autograd on and off."""
    expected = op(x)
    assert expected.isfinite().any()
    num_rows = x.shape[0]
    for count in counts:
        start = 13 * count % (num_rows - count + 1)
        assert same_bits(op(x[start : start + count]), expected[start : start + count]), (count, start)
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(1)).to(x.device)
    assert same_bits(op(x[order]), expected[order])
    poisoned = x.clone()
    poisoned[::3], poisoned[1::3] = torch.nan, torch.inf
    assert same_bits(op(poisoned)[2::3], expected[2::3])
    assert same_bits(op(x.clone().requires_grad_()).detach(), expected)


def replayed(op: Callable[[], Tensor]) -> Tensor:
    """What a CUDA graph of the call leaves in its output, which is poisoned before the replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        op()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op()
    out.view(torch.uint8).fill_(0xFF)
    graph.replay()
    torch.cuda.synchronize()
    return out
