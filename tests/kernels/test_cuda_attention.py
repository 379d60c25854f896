"""CUDA attention under the interpreter: one function, whichever kernel computes it; values and gradients against float64."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.kernels import AttentionLayout, reference
from shared.kernels.cuda import attention as attention_module
from shared.kernels.cuda.attention import attention
from shared.kernels.cuda.attention_packed import FORWARD, ForwardShape, pack, packed_forward
from shared.models import packed_layout, paged_layout, prefix_shared_layout
from tests.kernels.cuda_testing import in_pages, interpreted_ops, qkv, relative_error
from tests.kernels.kernel_testing import same_bits, wide

SHAPES = [
    ((1, 1, 64), {}),
    ((4, 2, 80), {"sliding_window": 50}),
    ((3, 1, 96), {"softcap": 3.0}),
    ((8, 1, 16), {"sliding_window": 7, "softcap": 5.0}),
]
"""(query heads, KV heads, head dim), options: groups of 1, 2, 3 and 8."""
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3}


def chunked(
    q: Tensor, k: Tensor, v: Tensor, lens: list[int], cuts: list[int], page_size: int, **options: float
) -> Tensor:
    """Rows of packed sequences, each cut at `cuts`, every piece in a call as a sequence of its own over pages."""
    stores, tables = in_pages(k, v, lens, page_size)
    pieces = [
        (s, begin, end)
        for s, n in enumerate(lens)
        for begin, end in zip([0, *(c for c in cuts if c < n)], [*(c for c in cuts if c < n), n], strict=True)
    ]
    layout = paged_layout(
        [tables[s] for s, _, _ in pieces], page_size, [e - b for _, b, e in pieces], [e for _, _, e in pieces]
    )
    return attention(q, *stores, layout, 0.2, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "options"), SHAPES, ids=str)
def test_values_and_gradients_match_float64(heads: tuple[int, int, int], options: dict, dtype: torch.dtype) -> None:
    lens = [70, 1, 13]
    layout = packed_layout(lens)
    inputs = qkv(sum(lens), heads, dtype)
    leaves = [x.clone().requires_grad_() for x in inputs]
    exact = [x.double().requires_grad_() for x in inputs]
    out = attention(*leaves, layout, 0.2, **options)
    expected = reference.attention(*exact, layout, 0.2, **options)
    assert relative_error(out, expected) < TOLERANCE[dtype]
    weights = wide(*out.shape, dtype=dtype, seed=9)
    out.backward(weights)
    expected.backward(weights.double())
    for got, want in zip(leaves, exact, strict=True):
        assert relative_error(got.grad, want.grad) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize(("heads", "options"), SHAPES, ids=str)
def test_chunks_and_pages_do_not_change_bits(heads: tuple[int, int, int], options: dict) -> None:
    """One token at a time at the edges of blocks, odd chunks, whole prompts; pages of 1 to 64 tokens, unused slots NaN."""
    lens = [130, 1, 66]
    q, k, v = qkv(sum(lens), heads, torch.float32)
    expected = attention(q, k, v, packed_layout(lens), 0.2, **options)
    for page_size, cuts in ((1, [64]), (4, [1, 2, 17]), (16, [63, 64, 65, 129]), (64, [])):
        assert same_bits(chunked(q, k, v, lens, cuts, page_size, **options), expected), page_size


@pytest.mark.parametrize(("heads", "options"), [((2, 1, 16), {}), ((1, 1, 16), {"sliding_window": 1030})], ids=str)
def test_chunks_in_parallel_merge_to_the_bits_of_the_serial_walk(heads: tuple[int, int, int], options: dict) -> None:
    """Contexts beyond one and two chunks of 1024 keys: decode splits them, prefill and training walk them."""
    lens = [2100, 1025]
    q, k, v = qkv(sum(lens), heads, torch.float32)
    stores, tables = in_pages(k, v, lens, 64)
    ends = [0, 1000, 1023, 1024, 2047, 2048, 2099]
    rows = [*ends, 2100 + 1024]
    pages = [tables[0]] * len(ends) + [tables[1]]
    decode = paged_layout(pages, 64, [1] * len(rows), [e + 1 for e in ends] + [1025])
    split = attention(q[rows], *stores, decode, 0.2, **options)
    assert any(x.partials for plan in decode._plans.values() for x in plan.launches)
    few = paged_layout([tables[0]], 64, [3], [2100])
    assert same_bits(attention(q[2097:2100], *stores, few, 0.2, **options)[2:], split[6:7])
    serial = paged_layout([tables[0], tables[1]], 64, [60, 60], [2100, 1025])
    walked = attention(torch.cat((q[2040:2100], q[-60:])), *stores, serial, 0.2, **options)
    assert same_bits(walked[[7, 8, 59, 119]], split[[4, 5, 6, 7]])


def test_the_packed_kernel_merges_chunks_like_the_others() -> None:
    """The last queries of a long context: whatever carries gradients takes the packed kernel."""
    _, k, v = qkv(1060, (1, 1, 16), torch.float32)
    q, _, _ = qkv(70, (1, 1, 16), torch.float32, seed=1)
    stores, tables = in_pages(k, v, [1060], 16)
    expected = attention(q, *stores, paged_layout(tables, 16, [70], [1060]), 0.2)
    rows = AttentionLayout(
        q_lens=torch.tensor([70]), context_lens=torch.tensor([1060]), kv_rows=torch.arange(1060)[None]
    )
    assert same_bits(attention(q.requires_grad_(), k, v, rows, 0.2).detach(), expected)


@pytest.mark.parametrize("window", [0, 1030])
def test_how_the_forward_is_compiled_does_not_change_bits(window: int) -> None:
    """Chunks walked in loops of their own or in one, row sums through 16 columns or 8."""
    _, k, v = qkv(1110, (1, 1, 16), torch.float32)
    q, _, _ = qkv(80, (1, 1, 16), torch.float32, seed=1)
    packed = pack([70, 10], 1, q.device, context_lens=[1100, 10])
    expected, *others = (
        packed_forward(q, k, v, packed, scale=0.2, window=window, softcap=0.0, shape=shape)[0]
        for shape in (FORWARD, ForwardShape(16, False), ForwardShape(8, False), ForwardShape(8, True))
    )
    assert all(same_bits(out, expected) for out in others)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("options", [{}, {"sliding_window": 20}], ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
def test_what_a_row_does_not_see_cannot_reach_it(bad: float, options: dict) -> None:
    """Neither another sequence's rows, nor its own later ones, nor those before its window."""
    q, k, v = qkv(100, (2, 1, 16), torch.float32)
    expected = attention(q, k, v, packed_layout([80, 20]), 0.2, **options)
    for which in (1, 2):
        poisoned = [x.clone() for x in (q, k, v)]
        poisoned[which][30] = bad
        for out in (
            attention(*poisoned, packed_layout([80, 20]), 0.2, **options),
            chunked(*poisoned, [80, 20], [31, 40], 16, **options),
        ):
            end = 50 if options else 80
            assert same_bits(out[:30], expected[:30])
            assert same_bits(out[end:], expected[end:])
            if bad != bad:
                assert not out[30:end].isfinite().all(-1).any(), "who sees a NaN has one"


@pytest.mark.parametrize("options", [{}, {"sliding_window": 20}, {"softcap": 5.0}], ids=str)
def test_shared_prompts_give_the_bits_and_gradients_of_whole_sequences(options: dict) -> None:
    prompt, completions = 70, [5, 1, 20]
    shared = prefix_shared_layout([prompt, 3], [completions, [4]])
    q, k, v = inputs = qkv(shared.num_queries, (2, 1, 16), torch.float32)
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = attention(*leaves, shared, 0.2, **options)
    assert same_bits(attention(q, k, v, shared, 0.2, **options), out.detach())
    begin = prompt
    for n in completions:
        rows = torch.cat((torch.arange(prompt), torch.arange(begin, begin + n)))
        assert same_bits(
            attention(q[rows], k[rows], v[rows], packed_layout([prompt + n]), 0.2, **options), out.detach()[rows]
        )
        begin += n
    exact = [x.double().requires_grad_() for x in inputs]
    weights = wide(*out.shape, seed=9)
    out.backward(weights)
    reference.attention(*exact, shared, 0.2, **options).backward(weights.double())
    for got, want in zip(leaves, exact, strict=True):
        assert relative_error(got.grad, want.grad) < 4e-5


def test_gradients_reach_rows_of_a_store_that_is_not_this_forwards() -> None:
    """Arbitrary rows of a larger store, some shared, some not seen by anyone."""
    q, _, _ = qkv(6, (4, 2, 16), torch.float32)
    _, k, v = qkv(40, (4, 2, 16), torch.float32, seed=1)
    rows = torch.tensor([[3, 9, 11, 0, 38], [3, 9, 1, 2, 0]])
    layout = AttentionLayout(q_lens=torch.tensor([4, 2]), context_lens=torch.tensor([5, 4]), kv_rows=rows)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    attention(*leaves, layout, 0.2).square().sum().backward()
    reference.attention(*exact, layout, 0.2).square().sum().backward()
    for got, want in zip(leaves, exact, strict=True):
        assert relative_error(got.grad, want.grad) < 4e-5
    assert not leaves[1].grad[4:9].any()


def test_autograd_and_repetition_do_not_change_bits() -> None:
    q, k, v = qkv(50, (2, 1, 16), torch.float32)
    layout = prefix_shared_layout([30], [[3, 1, 16]])

    def run() -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, layout, 0.2)
        out.backward(wide(*out.shape, seed=5))
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    assert all(same_bits(a, b) for a, b in zip(run(), run(), strict=True))


def test_a_plan_is_made_once_per_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for name in ("_packed_plan", "_cached_plan"):
        made = getattr(attention_module, name)
        monkeypatch.setattr(attention_module, name, lambda *a, made=made: calls.append(made) or made(*a))
    q, k, v = qkv(20, (4, 2, 16), torch.float32)
    layout = packed_layout([20])
    stores, tables = in_pages(k, v, [20], 16)
    paged = paged_layout(tables, 16, [20], [20])
    for _ in range(3):
        attention(q, k, v, layout, 0.2)
        attention(q, *stores, paged, 0.2)
    assert len(calls) == 2


def test_keys_and_values_are_written_to_their_slots(tmp_path: Path) -> None:
    ops = interpreted_ops(tmp_path)
    _, k, v = qkv(21, (4, 2, 24), torch.float16)
    layout = paged_layout([[3, 1], [0]], 16, [18, 3], [20, 3])
    stores = tuple(torch.zeros(80, 2, 24, dtype=torch.float16) for _ in range(2))
    written = ops.write_kv(k, v, stores, layout)
    assert written is stores
    for store, x in zip(stores, (k, v), strict=True):
        assert same_bits(store[layout.query_rows], x)
        assert int((store != 0).any(-1).any(-1).sum()) == 21


def test_shapes_without_a_kernel_are_refused() -> None:
    for heads in ((2, 2, 12), (2, 2, 8), (2, 2, 264), (129, 1, 16)):
        with pytest.raises(ValueError, match="use device 'cpu' or mode 'fast'"):
            attention(*qkv(3, heads, torch.float32), packed_layout([3]), 0.2)
    with pytest.raises(ValueError, match="one row per query"):
        attention(*qkv(3, (2, 2, 16), torch.float32), packed_layout([2]), 0.2)
    assert attention(*qkv(0, (2, 2, 16), torch.float32), packed_layout([]), 0.2).shape == (0, 2, 16)
