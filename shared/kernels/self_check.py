"""Whether the kernels keep the row contract here and now.

What a CPU library does with a row is an observation, not a guarantee, so every process observes it before it starts.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shared.kernels.attention_layout import AttentionLayout
from shared.kernels.ops import InexactKernelError, Ops, linear_candidates
from shared.kernels.sampling import SamplingParams

LINEAR_SHAPES = ((576, 576), (576, 192), (576, 1536), (1536, 576))
"""(K, N) checked unless the caller names its model's."""

_COUNTS = (*range(1, 18), 31, 40)
_PAGE_SIZE = 16
LONGEST_WINDOW = 8192
"""Checked to its end; a longer one is compiled, and hides nothing."""


def self_check(
    ops: Ops,
    dtype: torch.dtype,
    *,
    linear_shapes: Sequence[tuple[int, int]] = LINEAR_SHAPES,
    heads: tuple[int, int, int] = (9, 3, 64),
    sliding_window: int | None = None,
) -> None:
    """Compare bits across row counts, orders, chunkings and poisoned neighbours; takes about a second.

    When the matrix product fails, the next slower one is taken, then one thread; `ops` is changed in place.

    Args:
        ops: of mode 'exact'; in mode 'fast' nothing is promised, and nothing checked but what there is a choice of kernels for.
        dtype: of the model's activations and weights.
        linear_shapes: (K, N) of the model's projections (`ModelConfig.linear_shapes()`).
        heads: (H, Hkv, D) of its attention.
        sliding_window: of those layers that have one; checked beside the attention that sees everything.

    Raises:
        InexactKernelError: an operation failed and no slower implementation is left.
    """
    ops.settle_attention(dtype, heads)
    if ops.mode != "exact":
        return
    generator = torch.Generator().manual_seed(0)
    if ops.keeps_table:
        _certify_linear(ops, dtype, linear_shapes, generator)
    else:
        _settle_linear(ops, dtype, linear_shapes, generator)
    hidden_size = linear_shapes[0][0]
    # Elementwise leaks live in the tail of a vector, which a multiple of 32 does not have.
    for size in (hidden_size, hidden_size - hidden_size % 32 + 6):
        _check_row_ops(ops, dtype, size, generator)
    # A device merges chunks of 1024 keys, so its check must span some.
    length = 2200 if ops.keeps_table else 150
    _check_attention(ops, dtype, heads, length, generator)
    if sliding_window is not None:
        # Compiled into the kernels of a device; a CPU's see it as a mask, and any window will do.
        window = sliding_window if ops.keeps_table else min(sliding_window, length // 3)
        _check_attention(ops, dtype, heads, max(length, min(window, LONGEST_WINDOW) + 200), generator, window)
    # Wide enough for a single row to be split over threads (beyond 32,768 columns); on a device, a slice of the model's head.
    _check_head(ops, dtype, hidden_size, linear_shapes[-1][1] if ops.keeps_table else 33001, generator)


def _settle_linear(ops: Ops, dtype: torch.dtype, shapes: Sequence[tuple[int, int]], generator: torch.Generator) -> None:
    problem = ""
    for threads in dict.fromkeys((torch.get_num_threads(), 1)):
        torch.set_num_threads(threads)
        for linear in linear_candidates():
            ops.use_linear(linear)
            # The head's product is float32 whatever the model's dtype.
            problem = next(
                filter(None, (_linear_problem(ops, d, shapes, generator) for d in {dtype, torch.float32})), ""
            )
            if not problem:
                return
    raise _error("linear", ops, problem)


def _certify_linear(
    ops: Ops, dtype: torch.dtype, shapes: Sequence[tuple[int, int]], generator: torch.Generator
) -> None:
    ops.certify_linear(dtype, shapes)
    problem = _linear_problem(ops, dtype, shapes, generator)
    if problem:
        raise _error("linear", ops, problem)


def _linear_problem(ops: Ops, dtype: torch.dtype, shapes: Sequence[tuple[int, int]], generator: torch.Generator) -> str:
    for k, n in dict.fromkeys(shapes):
        weight = _wide((n, k), dtype, generator).to(ops.device)
        x = _wide((48, k), dtype, generator).to(ops.device)
        problem = _row_problem(functools.partial(ops.linear, weight_NK=weight), x)
        if problem:
            return f"K {k}, N {n}, {dtype}, {problem}"
    return ""


def _row_problem(op: Callable[[Tensor], Tensor], x: Tensor) -> str:
    """Where rows of op(x) change with their company; empty if nowhere."""
    expected = op(x)
    order = torch.randperm(x.shape[0], generator=torch.Generator().manual_seed(1)).to(x.device)
    if not _same_bits(op(x[order]), expected[order]):
        return "rows permuted"
    for count in _COUNTS:
        start = (7 * count) % (x.shape[0] - count)
        if not _same_bits(op(x[start : start + count]), expected[start : start + count]):
            return f"{count} rows from row {start}"
    poisoned = x.clone()
    poisoned[::3], poisoned[1::3] = torch.nan, torch.inf
    if not _same_bits(op(poisoned)[2::3], expected[2::3]):
        return "neighbours NaN and inf"
    return ""


def _check_row_ops(ops: Ops, dtype: torch.dtype, size: int, generator: torch.Generator) -> None:
    weight = _wide((size,), dtype, generator).to(ops.device)
    cos, sin = (_wide((size // 2,), dtype, generator).to(ops.device) for _ in range(2))
    row_ops: dict[str, Callable[[Tensor], Tensor]] = {
        "rms_norm": lambda x: ops.rms_norm(x, weight, 1e-6),
        "silu_mul": lambda x: ops.silu_mul(x, x.roll(1, dims=1)),
        "rope": lambda x: ops.rope(x[:, None], cos.expand(len(x), -1), sin.expand(len(x), -1)),
    }
    for name, op in row_ops.items():
        problem = _row_problem(op, _wide((48, size), dtype, generator).to(ops.device))
        if problem:
            raise _error(name, ops, f"row size {size}, {dtype}, {problem}")


def _check_attention(
    ops: Ops,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    length: int,
    generator: torch.Generator,
    window: int | None = None,
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    q = _wide((length, num_heads, head_dim), dtype, generator).to(ops.device)
    k, v = (_wide((length, num_kv_heads, head_dim), dtype, generator).to(ops.device) for _ in range(2))
    attend = functools.partial(ops.attention, scale=head_dim**-0.5, sliding_window=window)
    expected = attend(q, k, v, _layout([(0, length)], torch.arange(length)))
    pages = torch.randperm(-(-length // _PAGE_SIZE), generator=generator)
    slots = (pages[:, None] * _PAGE_SIZE + torch.arange(_PAGE_SIZE)).flatten()[:length]
    k_store, v_store = (
        x.new_zeros(len(pages) * _PAGE_SIZE, *x.shape[1:]).index_copy_(0, slots.to(ops.device), x) for x in (k, v)
    )
    edges = [(0, 1), (5, 6), (63, 64), (64, 65), (length - 1, length)]
    for chunks in (edges, [(0, 3), (3, 20), (20, 130), (130, length)]):
        rows = torch.cat([torch.arange(begin, end) for begin, end in chunks])
        for layout in (_layout(chunks, slots), _layout(chunks, pages, _PAGE_SIZE)):
            out = attend(q[rows.to(ops.device)], k_store, v_store, layout)
            if not _same_bits(out, expected[rows.to(ops.device)]):
                raise _error("attention", ops, f"heads {heads}, window {window}, {dtype}, query ranges {chunks}")


def _layout(query_ranges: list[tuple[int, int]], pages: Tensor, page_size: int = 1) -> AttentionLayout:
    return AttentionLayout(
        q_lens=torch.tensor([end - begin for begin, end in query_ranges]),
        context_lens=torch.tensor([end for _, end in query_ranges]),
        pages=pages.expand(len(query_ranges), -1),
        page_size=page_size,
    )


def _check_head(ops: Ops, dtype: torch.dtype, hidden_size: int, vocab_size: int, generator: torch.Generator) -> None:
    weight = (torch.randn((vocab_size, hidden_size), generator=generator) / hidden_size**0.5).to(dtype).to(ops.device)
    hidden = torch.randn((33, hidden_size), generator=generator).to(dtype).to(ops.device)
    weight32 = ops.widen_head(weight)
    temperature = torch.full((33,), 0.7, device=ops.device)
    index = torch.arange(33, device=ops.device)
    params = SamplingParams(seed=index, prompt=index, sample=index, position=index, temperature=temperature)
    drawn = ops.sample(hidden, weight, params, weight32_VD=weight32)
    for rows in (slice(0, 33), slice(5, 6), slice(7, 12)):
        scored = ops.lm_logprob(hidden[rows], weight, drawn.token[rows], temperature[rows], weight32_VD=weight32)
        if not _same_bits(scored.logprob, drawn.logprob[rows]):
            raise _error("lm_logprob", ops, f"vocabulary {vocab_size}, {dtype}, rows {rows.start} to {rows.stop}")


def _wide(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Random data whose exponents vary, so that a different order of additions shows."""
    x = torch.randn(shape, generator=generator)
    return (x * torch.exp2(torch.randint(-6, 3, shape, generator=generator).float())).to(dtype)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    integers = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))


def _error(op: str, ops: Ops, where: str) -> InexactKernelError:
    return InexactKernelError(
        f"{op} ({ops.describe()[op]}) does not give a row the same bits in any company on {ops.machine()}: {where}. "
        "Start with OMP_NUM_THREADS=1, or another torch build, or mode 'fast', which promises nothing"
    )


def fingerprint(ops: Ops, dtype: torch.dtype) -> str:
    """Everything the bits are a property of; equal fingerprints are necessary for equal bits.

    Call it after `self_check`, which may change the implementations.
    """
    name = str(dtype).removeprefix("torch.")
    return f"mode={ops.mode} torch={torch.__version__} dtype={name} {ops.identity(dtype)}"
