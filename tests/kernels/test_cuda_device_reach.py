"""`pytest -m gpu` on a CUDA machine: head dims with all options, 128k keys, stores beyond 32 bits, what else graphs capture."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from shared.kernels import AttentionLayout
from shared.kernels.cuda.attention import attention
from shared.kernels.cuda.grouped import combine, grouped_linear, route
from shared.kernels.cuda.merged import MergedRows, silu_mul_halves
from shared.kernels.cuda.ops import CudaOps
from shared.kernels.cuda.rowwise import kv_write, rms_norm
from shared.models import packed_layout, paged_layout
from tests.kernels.cuda_testing import DEVICE, HALF, device_ops, in_pages, qkv, relative_error, replayed
from tests.kernels.kernel_testing import same_bits, wide
from tests.kernels.test_cuda_reach import HEAD_DIMS, LONGEST

pytestmark = pytest.mark.gpu
OPTIONS = [{}, {"sliding_window": 100}, {"softcap": 5.0}, {"sliding_window": 1100, "softcap": 5.0}]


@pytest.fixture(scope="module")
def ops(tmp_path_factory: pytest.TempPathFactory) -> CudaOps:
    return device_ops(tmp_path_factory.mktemp("table"))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, HALF)


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
    """Causal attention of one sequence in the dtype given."""
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
    if window is not None:
        hidden |= torch.ones_like(hidden).tril(-window)
    p = torch.softmax(scores.masked_fill(hidden, -torch.inf).to(torch.promote_types(q.dtype, torch.float32)), -1)
    return torch.einsum("hqk,khd->qhd", p.to(q.dtype), v.repeat_interleave(group, 1))


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_head_dim_with_every_option_is_one_function_in_all_three_uses(dim: int, options: dict) -> None:
    length, scale = 1500, dim**-0.5
    inputs = normal(length, 4, dim), normal(length, 2, dim, seed=1), normal(length, 2, dim, seed=2)
    q, k, v = inputs
    packing = packed_layout([length])

    def gradients(run: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
        out = run(*leaves)
        out.backward(normal(length, 4, dim, seed=3).to(dtype))
        return [out.detach(), *(x.grad for x in leaves)]

    def by_definition(*x: Tensor) -> Tensor:
        return plain(*x, scale, options.get("sliding_window"), options.get("softcap"))

    exact, theirs = gradients(by_definition, torch.float64), gradients(by_definition, HALF)
    ours = gradients(lambda *x: attention(*x, packing, scale, **options), HALF)
    for i, (e, p, o) in enumerate(zip(exact, theirs, ours, strict=True)):
        assert relative_error(o, e) <= 1.02 * relative_error(p, e), i
    stores, tables = in_pages(k, v, [length], 32)
    for cuts in ([0, 700, length], [0, 1, 3, 64, 130, 1023, 1024, 1090, length]):
        pieces = list(pairwise(cuts))
        layout = paged_layout(tables * len(pieces), 32, [e - b for b, e in pieces], [e for _, e in pieces])
        assert same_bits(attention(q, *stores, layout, scale, **options), ours[0]), cuts
    decode = paged_layout(tables * length, 32, [1] * length, list(range(1, length + 1)))
    assert same_bits(attention(q, *stores, decode, scale, **options), ours[0])


@pytest.mark.parametrize("heads", [(16, 8, 128), (9, 3, 64)], ids=str)
def test_128k_keys_are_one_function_in_all_three_uses(heads: tuple[int, int, int]) -> None:
    q, k, v = qkv(LONGEST, heads, HALF)
    q, scale, count = q[-70:].contiguous(), heads[2] ** -0.5, 70
    rows = AttentionLayout(
        q_lens=torch.tensor([count]), context_lens=torch.tensor([LONGEST]), kv_rows=torch.arange(LONGEST)[None]
    )
    trained = attention(q.clone().requires_grad_(), k, v, rows, scale)
    stores, tables = in_pages(k, v, [LONGEST], 64)
    prompt = paged_layout(tables, 64, [count], [LONGEST])
    assert same_bits(attention(q, *stores, prompt, scale), trained.detach())
    decode = paged_layout(tables * count, 64, [1] * count, list(range(LONGEST - count + 1, LONGEST + 1)))
    assert same_bits(attention(q, *stores, decode, scale), trained.detach())
    scores = torch.einsum("hd,khd->hk", q[-1].double(), k.repeat_interleave(heads[0] // heads[1], 1).double()) * scale
    exact = torch.einsum("hk,khd->hd", scores.softmax(-1), v.repeat_interleave(heads[0] // heads[1], 1).double())
    assert relative_error(trained[-1], exact) < 1e-2
    trained.backward(torch.ones_like(trained))


@pytest.mark.parametrize("page", [16, 64])
def test_rows_beyond_two_billion_elements_are_written_and_read_where_they_are(page: int) -> None:
    heads, length = (16, 8, 128), 5000
    width = heads[1] * heads[2]
    vast = torch.zeros((2**31 + 2**26) // width, heads[1], heads[2], dtype=HALF, device=DEVICE)
    q, k, _ = qkv(length, heads, HALF)
    (store, _), (table,) = in_pages(k, k, [length], page)
    last = vast.shape[0] // page - 1
    high = [last - p for p in table]
    rows = paged_layout([high], page, [length], [length]).query_rows.to(DEVICE)
    assert int(rows.min()) * width > 2**31
    kv_write(k[:4000], k[:4000], vast, vast, rows[:4000])
    merged = MergedRows(heads, HALF, DEVICE, has_norms=False)
    angles = torch.ones(1000, 64, dtype=HALF, device=DEVICE), torch.zeros(1000, 64, dtype=HALF, device=DEVICE)
    qkv_rows = torch.cat((q[4000:], k[4000:], k[4000:]), 1).flatten(1).contiguous()
    merged.place_qkv(qkv_rows, None, 0.0, angles, (vast, vast), rows[4000:])
    assert same_bits(vast[rows], k)
    many = list(range(1, length, 20))
    for q_lens, contexts in (
        ([1, 1, 3, 60, 300], [length, 500, length, 1000, 4321]),
        ([1], [length]),
        ([1] * len(many), many),
    ):
        picked = torch.cat([torch.arange(c - n, c) for n, c in zip(q_lens, contexts, strict=True)]).to(DEVICE)
        far, near = (paged_layout([t] * len(q_lens), page, q_lens, contexts) for t in (high, table))
        assert same_bits(attention(q[picked], vast, vast, far, 0.125), attention(q[picked], store, store, near, 0.125))


def test_graphs_replay_what_the_engine_and_mixtures_run(ops: CudaOps) -> None:
    """What `test_cuda_device` does not capture: operations over merged projections, the cache, the embedding, experts."""
    heads, tokens = (4, 2, 64), 45
    x, residual, norm = (wide(*s, seed=i, dtype=HALF).to(DEVICE) for i, s in enumerate([(tokens, 576)] * 2 + [(576,)]))
    merged = MergedRows(heads, HALF, DEVICE, has_norms=True)
    qkv_rows, head_norm = x[:, :512].contiguous(), norm[:64].contiguous()
    angles = x[:, :32].contiguous(), x[:, 32:64].contiguous()
    stores = [torch.zeros(100, 2, 64, dtype=HALF, device=DEVICE) for _ in range(2)]
    slots = torch.arange(tokens, device=DEVICE) * 2
    slots[3] = -1
    k = x[:, :128].reshape(tokens, 2, 64).contiguous()
    ids = torch.arange(tokens, device=DEVICE) * 7 % 30
    weight, back = (wide(16, *s, seed=4, dtype=HALF).to(DEVICE) for s in ((128, 576), (576, 128)))
    chosen = torch.rand(tokens, 16, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0)).topk(4, dim=-1)

    def stored(write: Callable[[], object]) -> Tensor:
        for store in stores:
            store.zero_()
        write()
        return torch.cat(stores)

    def mixture() -> Tensor:
        routing = route(chosen.indices, 16, 16)
        rows = grouped_linear(x, weight, routing, gather=True)
        return combine(grouped_linear(rows, back, routing, gather=False), chosen.values, routing)

    calls: dict[str, Callable[[], Tensor]] = {
        "add_norm": lambda: torch.cat(merged.add_norm(x, residual, norm, 1e-6)),
        "fused norm": lambda: torch.cat(rms_norm(x, residual, norm, 1e-6)),
        "silu_mul_halves": lambda: silu_mul_halves(x),
        "place_qkv": lambda: merged.place_qkv(qkv_rows, (head_norm, head_norm), 1e-6, angles, tuple(stores), slots),
        "placed": lambda: stored(
            lambda: merged.place_qkv(qkv_rows, (head_norm, head_norm), 1e-6, angles, tuple(stores), slots)
        ),
        "kv_write": lambda: stored(lambda: kv_write(k, k, *stores, slots)),
        "embedding": lambda: ops.embedding(ids, x),
        "mixture": mixture,
    }
    with torch.no_grad():
        for name, call in calls.items():
            expected = call().clone()
            assert expected.isfinite().all()
            assert same_bits(replayed(call), expected), name
