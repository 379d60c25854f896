"""Attention: bits across batches, chunks, pages and neighbours; values and gradients against the reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shared.kernels import AttentionLayout, build_ops, reference
from shared.models import packed_layout, paged_layout, prefix_shared_layout
from tests.kernels.kernel_testing import DTYPES, ranges_layout, same_bits, wide

OPS = build_ops("exact")
OPTIONS = [{}, {"sliding_window": 50}, {"softcap": 3.0}, {"sliding_window": 7, "softcap": 5.0}]


def qkv(length: int, heads: tuple[int, int, int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    h, kv, d = heads
    return (
        wide(length, h, d, dtype=dtype),
        wide(length, kv, d, dtype=dtype, seed=1),
        wide(length, kv, d, dtype=dtype, seed=2),
    )


def random_ranges(length: int, generator: torch.Generator, largest: int) -> list[tuple[int, int]]:
    ranges, begin = [], 0
    while begin < length:
        end = min(length, begin + int(torch.randint(1, largest + 1, (), generator=generator)))
        ranges.append((begin, end))
        begin = end
    return ranges


@settings(max_examples=15)
@given(
    length=st.integers(1, 300),
    heads=st.sampled_from([(9, 3, 64), (4, 4, 16), (8, 1, 32), (1, 1, 24), (4, 4, 10), (3, 3, 6)]),
    dtype=st.sampled_from(DTYPES),
    options=st.sampled_from(OPTIONS),
    largest=st.sampled_from([1, 7, 70, 300]),
    seed=st.integers(0, 99),
)
def test_chunks_and_pages_do_not_change_bits(
    length: int, heads: tuple[int, int, int], dtype: torch.dtype, options: dict, largest: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = qkv(length, heads, dtype)
    expected = OPS.attention(q, k, v, packed_layout([length]), 0.3, **options)
    ranges = random_ranges(length, generator, largest)
    slots = torch.randperm(length + 40, generator=generator)[:length]
    stores = [torch.full((length + 40, *x.shape[1:]), torch.nan, dtype=dtype).index_copy_(0, slots, x) for x in (k, v)]
    assert same_bits(OPS.attention(q, *stores, ranges_layout(ranges, slots), 0.3, **options), expected)
    picked = sorted(torch.randperm(len(ranges), generator=generator)[: max(1, len(ranges) // 2)].tolist())
    rows = torch.cat([torch.arange(*ranges[i]) for i in picked])
    some = OPS.attention(q[rows], *stores, ranges_layout([ranges[i] for i in picked], slots), 0.3, **options)
    assert same_bits(some, expected[rows])


@pytest.mark.parametrize("page_size", [1, 16, 64, 100])
def test_page_size_does_not_change_bits(page_size: int) -> None:
    lengths = [200, 3, 65]
    q, k, v = qkv(sum(lengths), (6, 2, 32))
    expected = OPS.attention(q, k, v, packed_layout(lengths), 0.2)
    num_pages = [-(-n // page_size) for n in lengths]
    free = torch.randperm(sum(num_pages) + 3, generator=torch.Generator().manual_seed(3)).tolist()
    tables = [[free.pop() for _ in range(n)] for n in num_pages]
    layout = paged_layout(tables, page_size, lengths, lengths)
    stores = [torch.zeros((sum(num_pages) + 3) * page_size, 2, 32).index_copy_(0, layout.query_rows, x) for x in (k, v)]
    assert same_bits(OPS.attention(q, *stores, layout, 0.2), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prefix_sharing_does_not_change_bits(dtype: torch.dtype) -> None:
    prompt, completions = 70, [5, 1, 90]
    shared = prefix_shared_layout([prompt, 3], [completions, [4]])
    q, k, v = qkv(shared.num_queries, (6, 2, 32), dtype)
    together = OPS.attention(q, k, v, shared, 0.2)
    begin = prompt
    for n in completions:
        rows = torch.cat((torch.arange(prompt), torch.arange(begin, begin + n)))
        alone = OPS.attention(q[rows], k[rows], v[rows], packed_layout([prompt + n]), 0.2)
        assert same_bits(together[rows], alone)
        begin += n


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e38])
def test_what_a_row_does_not_see_cannot_reach_it(bad: float) -> None:
    q, k, v = qkv(150, (6, 2, 32))
    expected = OPS.attention(q, k, v, packed_layout([100, 50]), 0.2)
    for which in range(3):
        poisoned = [x.clone() for x in (q, k, v)]
        poisoned[which][60] = bad
        out = OPS.attention(*poisoned, packed_layout([100, 50]), 0.2)
        assert same_bits(out[:60], expected[:60])
        assert same_bits(out[100:], expected[100:])
        alone = OPS.attention(*(x[:61] for x in poisoned), packed_layout([61]), 0.2)
        assert torch.equal(out[60].isnan(), alone[60].isnan())
    v[60, 0, 3] = torch.nan
    assert OPS.attention(q, k, v, packed_layout([100, 50]), 0.2)[60:100, :3, 3].isnan().all()


def test_autograd_does_not_change_bits() -> None:
    q, k, v = qkv(130, (6, 2, 32))
    leaf = q.clone().requires_grad_()
    assert same_bits(
        OPS.attention(leaf, k, v, packed_layout([130]), 0.2).detach(), OPS.attention(q, k, v, packed_layout([130]), 0.2)
    )


def test_narrow_products_show_the_row() -> None:
    """Negative control: why head sizes are padded to 16 columns."""
    probs, values = wide(1, 48, 64), wide(1, 64, 10, seed=1)
    shifted = torch.bmm(probs[:, 1:33].contiguous(), values)
    assert not same_bits(shifted, torch.bmm(probs, values)[:, 1:33])


def test_library_attention_shows_the_phase() -> None:
    """Negative control: one-token decode and full prefill of the fast mode differ."""
    q, k, v = qkv(100, (6, 2, 32))
    fast = build_ops("fast")
    full = fast.attention(q, k, v, packed_layout([100]), 0.2)
    decode = fast.attention(q, k, v, ranges_layout([(i, i + 1) for i in range(100)], torch.arange(100)), 0.2)
    assert not same_bits(full, decode)
    torch.testing.assert_close(full, decode, rtol=1e-4, atol=1e-5)


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    heads=st.sampled_from([(6, 2, 16), (3, 3, 8), (5, 1, 10)]),
    options=st.sampled_from(OPTIONS),
)
def test_values_match_the_reference(lengths: list[int], heads: tuple[int, int, int], options: dict) -> None:
    q, k, v = qkv(sum(lengths), heads)
    layout = packed_layout(lengths)
    out = OPS.attention(q, k, v, layout, 0.3, **options)
    torch.testing.assert_close(out, reference.attention(q, k, v, layout, 0.3, **options), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_accumulate_over_shared_rows(options: dict) -> None:
    layout = prefix_shared_layout([30, 70], [[3, 1, 20], [6]])
    inputs = qkv(layout.num_queries, (4, 2, 8))
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = OPS.attention(*leaves, layout, 0.3, **options)
    weights = wide(*out.shape, seed=5)
    out.backward(weights)
    exact = [x.double().requires_grad_() for x in inputs]
    reference.attention(*exact, layout, 0.3, **options).backward(weights.double())
    for got, want in zip(leaves, exact, strict=True):
        torch.testing.assert_close(got.grad.double(), want.grad, rtol=2e-4, atol=2e-4)


def test_gradients_are_deterministic() -> None:
    layout = prefix_shared_layout([30], [[3, 1, 20]])
    inputs = qkv(layout.num_queries, (4, 2, 8), torch.bfloat16)

    def run() -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        OPS.attention(*leaves, layout, 0.3).backward(wide(*inputs[0].shape, dtype=torch.bfloat16, seed=5))
        return [leaf.grad for leaf in leaves]

    assert all(same_bits(a, b) for a, b in zip(run(), run(), strict=True))


def test_layouts_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="1 <= q_len <= context_len"):
        AttentionLayout(q_lens=torch.tensor([2]), context_lens=torch.tensor([1]), kv_rows=torch.tensor([[0, 1]]))
    with pytest.raises(ValueError, match="widen kv_rows"):
        AttentionLayout(q_lens=torch.tensor([1]), context_lens=torch.tensor([3]), kv_rows=torch.tensor([[0, 1]]))
    with pytest.raises(ValueError, match="allot pages"):
        paged_layout([[0]], 4, [1], [5])
    with pytest.raises(ValueError, match="one row per query"):
        OPS.attention(torch.zeros(3, 2, 4), torch.zeros(2, 2, 4), torch.zeros(2, 2, 4), packed_layout([2]), 1.0)
