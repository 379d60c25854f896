"""How far the CUDA kernels reach, interpreted: every head dim in every use, any page size, 128k keys, stores beyond 32 bits."""

import mmap
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from shared.kernels import reference
from shared.kernels.cuda import attention_cached
from shared.kernels.cuda.attention import attention
from shared.kernels.cuda.merged import MergedRows
from shared.kernels.cuda.rowwise import kv_write
from shared.models import packed_layout, paged_layout
from tests.kernels.cuda_testing import in_pages, qkv, relative_error
from tests.kernels.kernel_testing import same_bits, wide

HEAD_DIMS = [64, 80, 96, 128, 256]
OPTIONS = [{}, {"sliding_window": 20}, {"softcap": 4.0}, {"sliding_window": 70, "softcap": 4.0}]
LONGEST = 128 * 1024


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_head_dim_with_every_option_is_one_function_in_all_three_uses(dim: int, options: dict) -> None:
    """Training forward and backward against float64; chunks of a prompt and single queries over pages against the forward."""
    lens = [75, 3]
    q, k, v = inputs = qkv(sum(lens), (2, 1, dim), torch.float32)
    leaves, exact = ([x.to(t, copy=True).requires_grad_() for x in inputs] for t in (torch.float32, torch.float64))
    trained = attention(*leaves, packed_layout(lens), dim**-0.5, **options)
    expected = reference.attention(*exact, packed_layout(lens), dim**-0.5, **options)
    assert relative_error(trained, expected) < 2e-5
    weights = wide(*trained.shape, seed=9)
    trained.backward(weights)
    expected.backward(weights.double())
    for got, want in zip(leaves, exact, strict=True):
        assert relative_error(got.grad, want.grad) < 4e-5
    stores, tables = in_pages(k, v, lens, 16)
    prompts = paged_layout([tables[0], tables[0], tables[1]], 16, [33, 42, 3], [33, 75, 3])
    assert same_bits(attention(q, *stores, prompts, dim**-0.5, **options), trained.detach())
    rows = [0, 19, 63, 64, 70, 74]
    decode = paged_layout([tables[0]] * len(rows), 16, [1] * len(rows), [r + 1 for r in rows])
    assert same_bits(attention(q[rows], *stores, decode, dim**-0.5, **options), trained.detach()[rows])


@pytest.mark.parametrize("page_size", [2, 8, 32, 256, 2048, 8192])
def test_pages_of_any_power_of_two_give_the_same_bits(page_size: int) -> None:
    """Smaller than a block of keys, between block and chunk, larger than a chunk; a context that is split and one that is not."""
    lens = [1100, 30]
    _, k, v = qkv(sum(lens), (1, 1, 16), torch.float32)
    q, _, _ = qkv(22, (1, 1, 16), torch.float32, seed=1)
    stores, tables = in_pages(k, v, lens, page_size)
    pages = [tables[0], tables[1], tables[0]]
    out = attention(q, *stores, paged_layout(pages, page_size, [1, 1, 20], [1100, 30, 1090]), 0.2)
    rows = [list(range(1100)), list(range(1100, 1130)), list(range(1090))]
    assert same_bits(attention(q, k, v, paged_layout(rows, 1, [1, 1, 20], [1100, 30, 1090]), 0.2), out)


@pytest.mark.slow
def test_128k_keys_in_parallel_chunks_are_the_serial_walk() -> None:
    """One query of the longest context splits into 128 chunks; its row in a tile of a prompt's last queries does not."""
    _, k, v = qkv(LONGEST, (1, 1, 16), torch.float32)
    q, _, _ = qkv(20, (1, 1, 16), torch.float32, seed=1)
    pages = list(range(LONGEST // 1024))
    split = attention(q[-1:], k, v, paged_layout([pages], 1024, [1], [LONGEST]), 0.2)
    walked = attention(q, k, v, paged_layout([pages], 1024, [20], [LONGEST]), 0.2)
    assert same_bits(split, walked[-1:])
    scores = (k[:, 0].double() @ q[-1, 0].double()) * 0.2
    assert relative_error(split[0, 0], scores.softmax(0) @ v[:, 0].double()) < 1e-5


@pytest.fixture(scope="module")
def vast() -> Iterator[Tensor]:
    """[R, 2, 64] float16 of more than 2^31 elements, all zero. Only what is written to takes memory."""
    rows = (2**31 + 2**20) // 128
    with mmap.mmap(-1, rows * 128 * 2) as memory:
        store = torch.frombuffer(memory, dtype=torch.float16).view(rows, 2, 64)
        yield store
        del store


@pytest.mark.parametrize("page", [16, 64])
def test_rows_beyond_two_billion_elements_are_written_and_read_where_they_are(
    vast: Tensor, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row times stride does not fit 32 bits there: cut to them it points into nowhere, and the process dies.

    Keys and values share the store; queries split, walk, fill tiles, and are many.
    """
    length = 1090
    q, k, _ = qkv(length, (4, 2, 64), torch.float16)
    (store, _), (table,) = in_pages(k, k, [length], page)
    last = vast.shape[0] // page - 1
    high = [last - p for p in table]
    rows = paged_layout([high], page, [length], [length]).query_rows
    assert int(rows.min()) * vast.stride(0) > 2**31
    kv_write(k[:1000], k[:1000], vast, vast, rows[:1000])
    merged = MergedRows((4, 2, 64), torch.float16, vast.device, has_norms=False)
    angles = torch.ones(90, 32, dtype=torch.float16), torch.zeros(90, 32, dtype=torch.float16)
    qkv_rows = torch.cat((q[1000:], k[1000:], k[1000:]), 1).flatten(1)
    merged.place_qkv(qkv_rows, None, 0.0, angles, (vast, vast), rows[1000:])
    assert same_bits(vast[rows], k)
    monkeypatch.setattr(attention_cached, "MANY_PROGRAMS", 8)
    for q_lens, contexts in (
        ([1, 1, 3, 60], [length, 500, length, 1000]),
        ([1], [length]),
        ([1] * 5, [1, 64, 65, 300, length]),
    ):
        picked = torch.cat([torch.arange(c - n, c) for n, c in zip(q_lens, contexts, strict=True)])
        far, near = (paged_layout([t] * len(q_lens), page, q_lens, contexts) for t in (high, table))
        assert same_bits(attention(q[picked], vast, vast, far, 0.125), attention(q[picked], store, store, near, 0.125))
