"""Whether the kernels keep the row contract here and now.

What a CPU library does with a row is an observation, not a guarantee, so every process observes it before it starts.
"""

import functools
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from shared.kernels.attention_layout import AttentionLayout
from shared.kernels.ops import Ops, linear_candidates
from shared.kernels.sampling import SamplingParams

LINEAR_SHAPES = ((576, 576), (576, 192), (576, 1536), (1536, 576))
"""(K, N) checked unless the caller names its model's."""

_COUNTS = (*range(1, 18), 31, 40)


class InexactKernelError(RuntimeError):
    """A kernel's output row depends on more than its input row; exact mode must not start."""


def self_check(
    ops: Ops,
    dtype: torch.dtype,
    *,
    linear_shapes: Sequence[tuple[int, int]] = LINEAR_SHAPES,
    heads: tuple[int, int, int] = (9, 3, 64),
) -> None:
    """Compare bits across row counts, orders, chunkings and poisoned neighbours; takes about a second.

    When the matrix product fails, the next slower one is taken, then one thread; `ops` is changed in place.

    Args:
        ops: of mode 'exact'; in mode 'fast' nothing is promised and nothing is checked.
        dtype: of the model's activations and weights.
        linear_shapes: (K, N) of the model's projections (`ModelConfig.linear_shapes()`).
        heads: (H, Hkv, D) of its attention.

    Raises:
        InexactKernelError: an operation failed and no slower implementation is left.
    """
    if ops.mode != "exact":
        return
    generator = torch.Generator().manual_seed(0)
    _settle_linear(ops, dtype, linear_shapes, generator)
    hidden_size = linear_shapes[0][0]
    # Elementwise leaks live in the tail of a vector, which a multiple of 32 does not have.
    for size in (hidden_size, hidden_size - hidden_size % 32 + 6):
        _check_row_ops(ops, dtype, size, generator)
    _check_attention(ops, dtype, heads, generator)
    _check_head(ops, dtype, hidden_size, generator)


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


def _linear_problem(ops: Ops, dtype: torch.dtype, shapes: Sequence[tuple[int, int]], generator: torch.Generator) -> str:
    for k, n in dict.fromkeys(shapes):
        weight = _wide((n, k), dtype, generator)
        problem = _row_problem(functools.partial(ops.linear, weight_NK=weight), _wide((48, k), dtype, generator))
        if problem:
            return f"K {k}, N {n}, {dtype}, {problem}"
    return ""


def _row_problem(op: Callable[[Tensor], Tensor], x: Tensor) -> str:
    """Where rows of op(x) change with their company; empty if nowhere."""
    expected = op(x)
    order = torch.randperm(x.shape[0], generator=torch.Generator().manual_seed(1))
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
    weight = _wide((size,), dtype, generator)
    cos, sin = _wide((size // 2,), dtype, generator), _wide((size // 2,), dtype, generator)
    row_ops: dict[str, Callable[[Tensor], Tensor]] = {
        "rms_norm": lambda x: ops.rms_norm(x, weight, 1e-6),
        "silu_mul": lambda x: ops.silu_mul(x, x.roll(1, dims=1)),
        "rope": lambda x: ops.rope(x[:, None], cos.expand(len(x), -1), sin.expand(len(x), -1)),
    }
    for name, op in row_ops.items():
        problem = _row_problem(op, _wide((48, size), dtype, generator))
        if problem:
            raise _error(name, ops, f"row size {size}, {dtype}, {problem}")


def _check_attention(ops: Ops, dtype: torch.dtype, heads: tuple[int, int, int], generator: torch.Generator) -> None:
    num_heads, num_kv_heads, head_dim = heads
    length = 150
    q = _wide((length, num_heads, head_dim), dtype, generator)
    k, v = (_wide((length, num_kv_heads, head_dim), dtype, generator) for _ in range(2))
    expected = ops.attention(q, k, v, _layout([(0, length)], torch.arange(length)), head_dim**-0.5)
    shuffled = torch.randperm(length, generator=generator)
    paged_k, paged_v = torch.empty_like(k), torch.empty_like(v)
    paged_k[shuffled], paged_v[shuffled] = k, v
    for chunks in ([(0, 1), (5, 6), (63, 64), (64, 65), (149, 150)], [(0, 3), (3, 20), (20, 130), (130, 150)]):
        rows = torch.cat([torch.arange(begin, end) for begin, end in chunks])
        out = ops.attention(q[rows], paged_k, paged_v, _layout(chunks, shuffled), head_dim**-0.5)
        if not _same_bits(out, expected[rows]):
            raise _error("attention", ops, f"heads {heads}, {dtype}, query ranges {chunks}")


def _layout(query_ranges: list[tuple[int, int]], rows: Tensor) -> AttentionLayout:
    return AttentionLayout(
        q_lens=torch.tensor([end - begin for begin, end in query_ranges]),
        context_lens=torch.tensor([end for _, end in query_ranges]),
        kv_rows=rows.expand(len(query_ranges), -1),
    )


def _check_head(ops: Ops, dtype: torch.dtype, hidden_size: int, generator: torch.Generator) -> None:
    # Wide enough for a single row to be split over threads (beyond 32,768 columns).
    weight = (torch.randn((33001, hidden_size), generator=generator) / hidden_size**0.5).to(dtype)
    hidden = torch.randn((33, hidden_size), generator=generator).to(dtype)
    weight32 = weight.float()
    temperature = torch.full((33,), 0.7)
    index = torch.arange(33)
    params = SamplingParams(seed=index, prompt=index, sample=index, position=index, temperature=temperature)
    drawn = ops.sample(hidden, weight, params, weight32_VD=weight32)
    for rows in (slice(0, 33), slice(5, 6), slice(7, 12)):
        scored = ops.lm_logprob(hidden[rows], weight, drawn.token[rows], temperature[rows], weight32_VD=weight32)
        if not _same_bits(scored.logprob, drawn.logprob[rows]):
            raise _error("lm_logprob", ops, f"vocabulary 33001, {dtype}, rows {rows.start} to {rows.stop}")


def _wide(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Random data whose exponents vary, so that a different order of additions shows."""
    x = torch.randn(shape, generator=generator)
    return (x * torch.exp2(torch.randint(-6, 3, shape, generator=generator).float())).to(dtype)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    integers = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))


def _error(op: str, ops: Ops, where: str) -> InexactKernelError:
    return InexactKernelError(
        f"{op} ({ops.describe()[op]}) does not give a row the same bits in any company on {cpu_model()}: {where}. "
        "Start with OMP_NUM_THREADS=1, or another torch build, or mode 'fast', which promises nothing"
    )


def fingerprint(ops: Ops, dtype: torch.dtype) -> str:
    """Everything the bits are a property of; equal fingerprints are necessary for equal bits.

    Call it after `self_check`, which may change the implementations.
    """
    implementations = " ".join(f"{op}={name}" for op, name in ops.describe().items())
    device = cpu_model() if ops.device.type == "cpu" else torch.cuda.get_device_name(ops.device)
    return (
        f"mode={ops.mode} device={device!r} isa={torch.backends.cpu.get_cpu_capability()} torch={torch.__version__} "
        f"threads={torch.get_num_threads()} dtype={str(dtype).removeprefix('torch.')} {implementations}"
    )


def default_dtype() -> torch.dtype:
    """bfloat16 where the CPU multiplies it natively (elsewhere it is slower than float32), otherwise float32."""
    native = {"avx512_bf16", "amx_bf16", "bf16"}
    return torch.bfloat16 if native & set(_cpu_info().get("flags", "").split()) else torch.float32


def cpu_model() -> str:
    """The CPU's name, family, model and stepping."""
    info = _cpu_info()
    parts = [info.get("model name", platform.processor() or platform.machine())]
    parts += [f"{key.split()[-1]} {info[key]}" for key in ("cpu family", "model", "stepping") if key in info]
    return ", ".join(parts)


@functools.cache
def _cpu_info() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty where there is none."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    lines = path.read_text().split("\n\n")[0].splitlines()
    info = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return {"flags": info.get("Features", ""), **info}
