"""Decode over pages under the interpreter: a row's bits whatever shape its launch compiles to, and which one that is."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from shared.kernels.cuda import attention_cached
from shared.kernels.cuda.attention import attention
from shared.kernels.cuda.attention_cached import (
    FEW,
    MANY,
    MANY_PROGRAMS,
    CachedRows,
    CachedShape,
    allocate_partials,
    attend_cached,
    block_rows,
    choose_shape,
    chunk_pages,
)
from shared.kernels.cuda.attention_math import BLOCK, CHUNK, Tiles, cut_tiles, to_device
from shared.models import paged_layout
from tests.kernels.cuda_testing import IS_INTERPRETED, in_pages, qkv
from tests.kernels.kernel_testing import same_bits

# a tile of padding divides zero by zero
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CPU = torch.device("cpu")
HEADS = (2, 1, 16)


def decode(
    q: Tensor, stores: tuple[Tensor, Tensor], tables: list[list[int]], contexts: list[int], page_size: int,
    shape: CachedShape | None, *, is_split: bool, **options: float,
) -> Tensor:  # fmt: skip
    """One query of each context, and a tile of padding that has neither queries nor keys."""
    count = len(contexts)
    pages = torch.zeros(count + 1, max(map(len, tables)), dtype=torch.int32)
    for i, table in enumerate(tables):
        pages[i, : len(table)] = torch.tensor(table)
    where = CachedRows(to_device([*contexts, 0], CPU), to_device([*range(count + 1), count], CPU), pages, page_size)
    tiles = Tiles(to_device([*range(count + 1)], CPU), to_device([0] * (count + 1), CPU), 1, 16)
    (_, heads, dim), kv_heads = q.shape, stores[0].shape[1]
    scratch = allocate_partials(tiles, heads, kv_heads, dim, max(contexts)) if is_split else None
    out = torch.empty_like(q)
    return attend_cached(q, *stores, where, tiles, scale=0.2, out=out, partials=scratch, shape=shape, **options)


@pytest.mark.parametrize(
    ("heads", "page_size", "dtype", "options"),
    [
        (HEADS, 1, torch.float32, {}),
        ((4, 2, 80), 16, torch.float16, {"window": 50}),
        ((3, 1, 24), 64, torch.float32, {"softcap": 3.0}),
        ((1, 1, 64), 256, torch.float16, {}),
        (HEADS, 2048, torch.float32, {"window": 1030}),
    ],
    ids=str,
)
def test_how_decode_is_compiled_does_not_change_bits(
    heads: tuple[int, int, int], page_size: int, dtype: torch.dtype, options: dict
) -> None:
    """Contexts at the edges of blocks, pages and chunks, serially and split; unused slots are NaN."""
    lens = [1, 64, 65, CHUNK, CHUNK + 70]
    q, k, v = qkv(sum(lens), heads, dtype)
    stores, tables = in_pages(k, v, lens, page_size)
    q = q[-len(lens) :]
    few, many = (decode(q, stores, tables, lens, page_size, s, is_split=True, **options) for s in (FEW, MANY))
    assert few.isfinite().all()
    assert same_bits(many, few)
    short = (q[:4], stores, tables[:4], lens[:4], page_size)
    assert same_bits(decode(*short, MANY, is_split=False, **options), few[:4])


@triton.jit
def look_up_kernel(table, out, chunk, limit, PAGE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Store rows of a chunk's positions, and of two more blocks."""
    rn = tl.arange(0, BLOCK)
    ids = chunk_pages(table, chunk, limit, PAGE, CHUNK)
    for n in range(0, CHUNK + 2 * BLOCK, BLOCK):
        row, offset = block_rows(table, chunk, ids, chunk + n, rn, limit, PAGE, True)
        tl.store(out + n + rn, row + offset)


@pytest.mark.skipif(not IS_INTERPRETED, reason="a GPU reads behind its shared memory where the interpreter raises")
@pytest.mark.parametrize("page_size", [1, 4, 32, 64, 2048])
def test_blocks_that_are_only_looked_ahead_for_need_no_page_behind_the_chunk(page_size: int) -> None:
    """A compiled loop computes addresses, from ids in shared memory, for the block behind its last one too. Where nothing is
    loaded by them, ids that the chunk does not have were an illegal access all the same."""
    table = torch.randperm(4 * CHUNK // page_size, dtype=torch.int32)
    rows = torch.empty(CHUNK + 2 * BLOCK, dtype=torch.int64)
    look_up_kernel[(1,)](table, rows, CHUNK, 2 * CHUNK, PAGE=page_size, CHUNK=CHUNK, BLOCK=BLOCK)
    at = torch.arange(CHUNK, 2 * CHUNK)
    assert torch.equal(rows[:CHUNK], table[at // page_size].long() * page_size + at % page_size)
    assert (rows >= 0).all()
    assert (rows < 4 * CHUNK).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_broken_keys_break_the_same_rows_however_decode_is_compiled(bad: float) -> None:
    """A whole block whose scores are all -inf is one of the few places where a mask could show."""
    q, k, v = qkv(200, HEADS, torch.float32)
    k[:64], k[150] = bad, bad
    stores, tables = in_pages(k, v, [200], 16)
    contexts = [30, 64, 100, 200]
    few, many = (decode(q[:4].abs(), stores, tables * 4, contexts, 16, shape, is_split=False) for shape in (FEW, MANY))
    assert few[2].isnan().all()
    assert torch.equal(few.isnan(), many.isnan())
    assert same_bits(many.nan_to_num(), few.nan_to_num())


def test_a_row_among_many_has_the_bits_it_has_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short and long contexts whose launches pass the bound, and single ones that don't."""
    monkeypatch.setattr(attention_cached, "MANY_PROGRAMS", 6)
    shapes = []
    monkeypatch.setattr(
        attention_cached, "choose_shape", lambda *a, **k: shapes.append(choose_shape(*a, **k)) or shapes[-1]
    )
    length = CHUNK + 80
    q, k, v = qkv(length, (4, 2, 16), torch.float32)
    stores, tables = in_pages(k, v, [length], 16)
    contexts = [1, 70, CHUNK, CHUNK + 1, CHUNK + 66, length]
    picked = q[[n - 1 for n in contexts]]
    many = attention(picked, *stores, paged_layout(tables * 6, 16, [1] * 6, contexts), 0.2)
    assert shapes == [MANY, MANY]
    for i, n in enumerate(contexts):
        assert same_bits(attention(picked[i : i + 1], *stores, paged_layout(tables, 16, [1], [n]), 0.2)[0], many[i])
    assert shapes[2:] == [FEW] * 6


def test_many_query_heads_a_kv_head_walk_long_prompts_one_query_a_tile() -> None:
    q, k, v = qkv(CHUNK + 20, (40, 1, 16), torch.float32)
    stores, tables = in_pages(k, v, [CHUNK + 20], 16)
    walked = attention(q[-3:], *stores, paged_layout(tables, 16, [3], [CHUNK + 20]), 0.2)
    assert same_bits(attention(q[-1:], *stores, paged_layout(tables, 16, [1], [CHUNK + 20]), 0.2), walked[-1:])


def test_a_context_that_nobody_walks_to_its_end_is_nan() -> None:
    q, k, v = qkv(CHUNK + 1, HEADS, torch.float32)
    stores, tables = in_pages(k, v, [CHUNK + 1], 16)
    for shape in (FEW, MANY):
        out = decode(q[:2], stores, tables * 2, [CHUNK, CHUNK + 1], 16, shape, is_split=False)
        assert out[0].isfinite().all()
        assert out[1].isnan().all()


def test_a_launch_is_shaped_by_its_size_alone() -> None:
    def tiles(count: int, rows: int = 16, queries: int = 1) -> Tiles:
        return cut_tiles([queries] * count, 1, rows, CPU, queries=queries)

    bound = MANY_PROGRAMS // 8
    assert choose_shape(tiles(bound), 8, 128) == MANY
    assert choose_shape(tiles(bound), 8, 256, chunk=256) == MANY
    assert choose_shape(tiles(bound, rows=128), 8, 128) == CachedShape(8, 2, at_once=True)
    assert choose_shape(tiles(bound - 1), 8, 128) == FEW
    assert choose_shape(tiles(bound), 8, 128, walks=True) == FEW
    assert choose_shape(tiles(bound), 8, 128, chunk=2 * CHUNK) == FEW
    assert choose_shape(tiles(bound, queries=4), 8, 128) == FEW
    assert choose_shape(tiles(bound, rows=64, queries=4), 8, 256) == CachedShape(4, 2)
