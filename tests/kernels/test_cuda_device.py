"""`pytest -m gpu` on a CUDA machine: the row contract of every operation on raw bits, graphs, gradients, and what refuses."""

import itertools
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shared.kernels import SamplingParams, build_ops, fast, fingerprint, reference, self_check
from shared.kernels.cuda.grouped import combine, grouped_linear, route
from shared.kernels.cuda.ops import CudaOps
from shared.kernels.cuda.rowwise import kv_write, rms_norm
from shared.models import packed_layout, paged_layout, prefix_shared_layout
from tests.kernels.cuda_testing import (
    DEVICE,
    HALF,
    assert_rows_stand_alone,
    device_ops,
    in_pages,
    qkv,
    relative_error,
    replayed,
)
from tests.kernels.kernel_testing import same_bits, wide

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def ops(tmp_path_factory: pytest.TempPathFactory) -> CudaOps:
    return device_ops(tmp_path_factory.mktemp("table"))


def on_device(*shape: int, seed: int = 0, dtype: torch.dtype = HALF) -> Tensor:
    return wide(*shape, seed=seed, dtype=dtype).to(DEVICE)


@pytest.mark.parametrize(
    ("k", "n", "dtype"),
    [(576, 576, HALF), (1536, 192, HALF), (3072, 1024, HALF), (200, 131, HALF), (576, 192, torch.float16)],
)
def test_linear_rows_stand_alone(ops: CudaOps, k: int, n: int, dtype: torch.dtype) -> None:
    x, weight, bias = (on_device(*s, seed=i, dtype=dtype) for i, s in enumerate(((300, k), (n, k), (n,))))
    assert_rows_stand_alone(lambda x: ops.linear(x, weight), x)
    assert_rows_stand_alone(lambda x: ops.linear(x, weight, bias), x)
    if dtype == HALF:
        assert_rows_stand_alone(lambda x: ops.table.linear(x.detach(), weight, out_dtype=torch.float32), x)
    assert relative_error(ops.linear(x, weight, bias), reference.linear(x, weight, bias)) < 1e-2


def test_linear_rows_stand_alone_above_the_last_bucket(ops: CudaOps) -> None:
    x, weight = on_device(9000, 576), on_device(192, 576, seed=1)
    expected = ops.linear(x, weight)
    for count in (513, 777, 1024, 4096, 8191):
        assert same_bits(ops.linear(x[-count:], weight), expected[-count:]), count


def test_fused_columns_stand_alone(ops: CudaOps) -> None:
    """An engine may fuse what the trainer keeps apart."""
    x, weight = on_device(70, 576), on_device(960, 576, seed=1)
    fused = ops.linear(x, weight)
    for begin, end in ((0, 576), (576, 768), (768, 960)):
        assert same_bits(ops.linear(x, weight[begin:end].contiguous()), fused[:, begin:end])


@pytest.mark.parametrize("size", [64, 128, 576, 1000, 4096])
def test_rows_of_the_small_operations_stand_alone(ops: CudaOps, size: int) -> None:
    x, weight = on_device(300, size), on_device(size, seed=1)
    assert_rows_stand_alone(lambda x: ops.rms_norm(x, weight, 1e-6), x)
    assert_rows_stand_alone(lambda x: torch.cat(rms_norm(x, x.roll(1, dims=1), weight, 1e-6), 1), x)
    assert_rows_stand_alone(lambda x: ops.silu_mul(x, x.roll(1, dims=1)), x)
    half = size // 2
    assert_rows_stand_alone(lambda x: ops.rope(x[:, None], x[:, :half], x[:, half : 2 * half]), x)
    y, total = rms_norm(x, x.roll(1, dims=1), weight, 1e-6)
    assert same_bits(ops.rms_norm(total, weight, 1e-6), y), "fused and apart"


ATTENTION = [
    ((16, 8, 128), 64, {}),
    ((9, 3, 64), 16, {}),
    ((16, 8, 128), 1, {}),
    ((32, 4, 128), 256, {}),
    ((8, 1, 80), 4, {}),
    ((4, 4, 96), 1, {"sliding_window": 100}),
    ((4, 1, 256), 64, {}),
    ((9, 3, 64), 128, {"softcap": 30.0}),
]


@pytest.mark.parametrize(("heads", "page_size", "options"), ATTENTION, ids=str)
def test_attention_is_one_function(ops: CudaOps, heads: tuple, page_size: int, options: dict) -> None:
    """Packed, chunked and decoded rows over random lengths and pages; unused slots hold NaN."""
    rng = random.Random(page_size)
    for case in range(4):
        lens = [rng.choice([1, 2, 63, 64, 65, rng.randint(3, 300), rng.randint(900, 3000)]) for _ in range(3)]
        q, k, v = qkv(sum(lens), heads, HALF, seed=case)
        scale = heads[2] ** -0.5
        expected = ops.attention(q, k, v, packed_layout(lens), scale, **options)
        stores, tables = in_pages(k, v, lens, page_size, seed=case)
        for chunk in (1, rng.choice([2, 7, 33]), 64, 512, max(lens)):
            pieces = [(s, b, min(b + chunk, n)) for s, n in enumerate(lens) for b in range(0, n, chunk)]
            layout = paged_layout(
                [tables[s] for s, _, _ in pieces], page_size, [e - b for _, b, e in pieces], [e for _, _, e in pieces]
            )
            assert same_bits(ops.attention(q, *stores, layout, scale, **options), expected), (lens, chunk)
        leaf = q.clone().requires_grad_()
        trained = ops.attention(leaf, k, v, packed_layout(lens), scale, **options)
        assert same_bits(trained.detach(), expected)


@pytest.mark.parametrize(("heads", "page_size", "options"), ATTENTION, ids=str)
def test_decodes_of_many_sequences_have_the_bits_of_few(
    ops: CudaOps, heads: tuple, page_size: int, options: dict
) -> None:
    """Every few-row launch compiles to another shape than the one launch of all rows, which graphs replay too."""
    rng = random.Random(page_size)
    lens = [rng.choice([1, 64, 65, 1023, 1024, 1025, rng.randint(2, 1000), rng.randint(2000, 2100)]) for _ in range(24)]
    q, k, v = qkv(sum(lens), heads, HALF)
    stores, tables = in_pages(k, v, lens, page_size)
    owners = [s % len(lens) for s in range(600)]
    contexts = [rng.randint(1, lens[s]) if i >= len(lens) else lens[s] for i, s in enumerate(owners)]

    def decode(rows: slice) -> Tensor:
        layout = paged_layout([tables[s] for s in owners[rows]], page_size, [1] * len(owners[rows]), contexts[rows])
        return ops.attention(picked[rows], *stores, layout, heads[2] ** -0.5, **options)

    picked = q[torch.arange(600, device=DEVICE) % q.shape[0]].contiguous()
    many = decode(slice(0, 600))
    assert many.isfinite().all()
    for begin in range(0, 600, 20):
        few = slice(begin, begin + 20)
        assert same_bits(decode(few), many[few]), few
    with torch.no_grad():
        whole = paged_layout([tables[s] for s in owners], page_size, [1] * 600, contexts)
        assert same_bits(replayed(lambda: ops.attention(picked, *stores, whole, heads[2] ** -0.5, **options)), many)


def test_mixed_batches_and_shared_prompts_give_the_same_bits(ops: CudaOps) -> None:
    """Long and short decodes, few and many queries in one call; prompts packed once."""
    shared = prefix_shared_layout([1500, 40], [[300, 1, 70], [5, 900]])
    q, k, v = qkv(shared.num_queries, (16, 8, 128), HALF)
    expected = ops.attention(q, k, v, shared, 0.1)
    assert same_bits(ops.attention(q.clone().requires_grad_(), k, v, shared, 0.1).detach(), expected)
    whole = [torch.arange(1500), torch.arange(1500, 1800)]
    rows = torch.cat(whole).to(DEVICE)
    alone = ops.attention(q[rows], k[rows], v[rows], packed_layout([1800]), 0.1)
    assert same_bits(alone, expected[rows])
    stores, tables = in_pages(k[rows], v[rows], [1800], 32)
    ends = [(0, 1), (1023, 1024), (1024, 1025), (1799, 1800), (1796, 1800), (100, 400), (40, 48)]
    layout = paged_layout(tables * len(ends), 32, [e - b for b, e in ends], [e for _, e in ends])
    picked = torch.cat([torch.arange(b, e) for b, e in ends]).to(DEVICE)
    assert same_bits(ops.attention(q[rows][picked], *stores, layout, 0.1), alone[picked])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
def test_what_a_row_does_not_see_cannot_reach_it(ops: CudaOps, bad: float) -> None:
    q, k, v = qkv(400, (6, 2, 64), HALF)
    layout = packed_layout([300, 100])
    expected = ops.attention(q, k, v, layout, 0.2)
    for which in (1, 2):
        poisoned = [x.clone() for x in (q, k, v)]
        poisoned[which][130] = bad
        out = ops.attention(*poisoned, layout, 0.2)
        assert same_bits(out[:130], expected[:130])
        assert same_bits(out[300:], expected[300:])


VOCAB, HIDDEN = 9001, 256


def head(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, head weight and temperatures."""
    hidden, weight = on_device(rows, HIDDEN), (wide(VOCAB, HIDDEN, seed=1) * 0.1).to(DEVICE, HALF)
    return hidden, weight, torch.tensor([1.0, 0.6, 0.0, 1.3], device=DEVICE).repeat(rows)[:rows]


def keys(rows: int, **filters: list) -> SamplingParams:
    index = list(range(rows))
    return SamplingParams.of(
        seed=[2**64 - 3] * rows,
        prompt=[i // 7 for i in index],
        sample=[i % 7 for i in index],
        position=[3 * i for i in index],
        temperature=[(1.0, 0.6, 0.0, 1.3)[i % 4] for i in index],
        **filters,
    )


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": [0, 5, 50] * 100, "top_p": [1.0, 0.9, 0.5] * 100}], ids=["all", "some"]
)
def test_draws_do_not_depend_on_the_batch(ops: CudaOps, filters: dict) -> None:
    hidden, weight, _ = head(300)
    params = keys(300, **filters)
    whole = ops.sample(hidden, weight, params)
    for rows in (slice(0, 1), slice(7, 9), slice(44, 89), slice(3, 260)):
        part = ops.sample(hidden[rows], weight, params.rows(rows))
        assert all(same_bits(a, b[rows]) for a, b in zip(part, whole, strict=True))
    greedy = params.temperature == 0
    assert torch.equal(whole.token.cpu()[greedy], whole.top1.cpu()[greedy])


def test_sampling_and_scoring_agree_and_rows_stand_alone(ops: CudaOps) -> None:
    hidden, weight, temperature = head(300)
    drawn = ops.sample(hidden, weight, keys(300))
    scored = ops.lm_logprob(hidden.clone().requires_grad_(), weight, drawn.token, temperature)
    assert same_bits(scored.logprob.detach(), drawn.logprob)
    assert same_bits(scored.top1, drawn.top1)
    logits = hidden.double() @ weight.double().t() / torch.where(temperature == 0, 1.0, temperature)[:, None]
    exact = logits.log_softmax(-1).gather(1, drawn.token[:, None].long()).squeeze(1)
    torch.testing.assert_close(scored.logprob.double().detach(), exact, rtol=1e-4, atol=1e-4)
    expected = tuple(x.detach() for x in scored)
    for count in (1, 2, 45, 257):
        part = ops.lm_logprob(hidden[-count:], weight, drawn.token[-count:], temperature[-count:])
        assert all(same_bits(a, b[-count:]) for a, b in zip(part, expected, strict=True)), count


def test_experts_do_not_depend_on_the_batch() -> None:
    x, weight = on_device(300, 256), on_device(16, 128, 256, seed=1)
    chosen = torch.rand(300, 16, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0)).topk(4, dim=-1)

    def run(rows: slice, block: int) -> Tensor:
        routing = route(chosen.indices[rows].contiguous(), 16, block)
        return combine(grouped_linear(x[rows], weight, routing, gather=True), chosen.values[rows].contiguous(), routing)

    whole = run(slice(0, 300), 64)
    for block, rows in itertools.product((16, 32, 128), (slice(0, 300), slice(299, 300), slice(3, 47))):
        assert same_bits(run(rows, block), whole[rows]), (block, rows)


def test_graphs_replay_what_was_computed(ops: CudaOps) -> None:
    x, weight, norm = on_device(45, 576), on_device(576, 576, seed=1), on_device(576, seed=2)
    q, k, v = qkv(2500, (9, 3, 64), HALF)
    stores, tables = in_pages(k, v, [2500], 16)
    mixed = paged_layout(tables * 4, 16, [1, 1, 3, 200], [2500, 700, 2000, 1300])
    picked = torch.cat((torch.tensor([2499, 699]), torch.arange(1997, 2000), torch.arange(1100, 1300))).to(DEVICE)
    some = q[picked]
    slots = torch.tensor([5, -1, 80], device=DEVICE)

    def write() -> Tensor:
        kv_write(k[:3].contiguous(), v[:3].contiguous(), *stores, slots)
        return stores[0]

    hidden, head_weight, temperature = head(45)
    params = keys(45).to(DEVICE)
    calls: dict[str, Callable[[], Tensor]] = {
        "linear": lambda: ops.linear(x, weight),
        "rms_norm": lambda: ops.rms_norm(x, norm, 1e-6),
        "silu_mul": lambda: ops.silu_mul(x, x),
        "rope": lambda: ops.rope(x[:, None], x[:, :288], x[:, 288:]),
        "attention": lambda: ops.attention(some, *stores, mixed, 0.125),
        "sample": lambda: ops.sample(hidden, head_weight, params).logprob,
        "lm_logprob": lambda: ops.lm_logprob(hidden, head_weight, params.position, temperature).logprob,
        "packed": lambda: ops.attention(q, k, v, packed, 0.125),
    }
    packed = packed_layout([2500])
    with torch.no_grad():
        for name, call in calls.items():
            expected = call().clone()
            assert same_bits(replayed(call), expected), name
        before = stores[0].clone()
        write()
        assert same_bits(stores[0][[5, 80]], k[[0, 2]])
        assert int((stores[0].view(torch.int16) != before.view(torch.int16)).any(-1).any(-1).sum()) <= 2


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one sequence in the dtype given."""
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * 0.125
    future = torch.ones(q.shape[0], q.shape[0], dtype=torch.bool, device=q.device).triu(1)
    p = torch.softmax(scores.masked_fill(future, -torch.inf).to(torch.promote_types(q.dtype, torch.float32)), -1)
    return torch.einsum("hqk,khd->qhd", p.to(q.dtype), v.repeat_interleave(group, 1))


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide_x = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide_x * torch.rsqrt(wide_x.square().mean(-1, True) + 1e-6)).to(x.dtype)


def plain_logprob(hidden: Tensor, weight: Tensor) -> Tensor:
    targets = torch.arange(hidden.shape[0], device=hidden.device) * 37 % weight.shape[0]
    return torch.log_softmax(hidden @ weight.t(), -1).gather(1, targets[:, None]).squeeze(1)


def plain_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return reference.rope(x, cos.to(x.dtype), sin.to(x.dtype))


def test_gradients_are_no_further_from_float64_than_plain_ones(ops: CudaOps) -> None:
    def normal(*shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(sum(shape))
        return torch.randn(shape, generator=generator).to(DEVICE, HALF)

    targets = torch.arange(300, device=DEVICE) * 37 % 2003
    ones = torch.ones(300, device=DEVICE)
    packing = packed_layout([300])
    cos, sin = normal(300, 32), normal(300, 32)
    ids = torch.arange(300, device=DEVICE) % 7
    cases: list[tuple[str, Callable[..., Tensor], Callable[..., Tensor], tuple[Tensor, ...]]] = [
        ("linear", ops.linear, F.linear, (normal(300, 576), normal(192, 576), normal(192))),
        ("rms_norm", lambda x, w: ops.rms_norm(x, w, 1e-6), plain_norm, (normal(300, 576), normal(576))),
        ("silu_mul", ops.silu_mul, lambda g, u: F.silu(g) * u, (normal(300, 576), normal(300, 576))),
        ("rope", lambda x: ops.rope(x, cos, sin), lambda x: plain_rope(x, cos, sin), (normal(300, 9, 64),)),
        ("attention", lambda *x: ops.attention(*x, packing, 0.125), plain_attention,
         (normal(300, 9, 64), normal(300, 3, 64), normal(300, 3, 64))),
        ("lm_logprob", lambda h, w: ops.lm_logprob(h, w, targets, ones).logprob, plain_logprob,
         (normal(300, 256), normal(2003, 256))),
        ("embedding", lambda w: ops.embedding(ids, w), lambda w: F.embedding(ids, w), (normal(50, 64),)),
    ]  # fmt: skip
    for name, op, plain, inputs in cases:

        def gradients(run: Callable[..., Tensor], dtype: torch.dtype, inputs: tuple = inputs) -> list[Tensor]:
            leaves = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
            out = run(*leaves)
            out.backward(normal(*out.shape).to(out.dtype))
            return [x.grad for x in leaves]

        exact, theirs, ours = gradients(plain, torch.float64), gradients(plain, HALF), gradients(op, HALF)
        for i, (e, p, o, again) in enumerate(zip(exact, theirs, ours, gradients(op, HALF), strict=True)):
            assert relative_error(o, e) <= 1.02 * relative_error(p, e) + 1e-7, (name, i)
            assert same_bits(o, again), f"{name}: gradient {i} is not deterministic"


def test_the_device_passes_its_check_and_says_what_it_is() -> None:
    ops = build_ops("exact", "cuda")
    self_check(ops, HALF)
    text = fingerprint(ops, HALF)
    assert text == fingerprint(build_ops("exact", "cuda"), HALF)
    assert torch.cuda.get_device_name() in text
    assert "driver=" in text
    assert "cublaslt=" in text


def test_the_libraries_attention_shows_the_phase() -> None:
    """Negative control: one-token decode and full prefill of SDPA differ."""
    q, k, v = qkv(300, (6, 2, 64), HALF)
    full = fast.attention(q, k, v, packed_layout([300]), 0.125)
    stores, tables = in_pages(k, v, [300], 16)
    stores = tuple(x.nan_to_num() for x in stores)
    layout = paged_layout(tables * 300, 16, [1] * 300, list(range(1, 301)))
    assert not same_bits(fast.attention(q, *stores, layout, 0.125), full)
