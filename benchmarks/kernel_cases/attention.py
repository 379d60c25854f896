"""Attention: equal bits between decode, chunked prefill and the packed training forward; then speed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial

import torch
from rich.progress import track
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness import Record, Timing, cuda_time, gradient_errors, graph_time
from shared.kernels.attention_layout import AttentionLayout
from shared.kernels.cuda import attention_choice
from shared.kernels.cuda.attention import attention
from shared.kernels.cuda.attention_cached import FEW, MANY, CachedRows, allocate_partials, attend_cached
from shared.kernels.cuda.attention_math import CHUNK, cut_tiles
from shared.kernels.cuda.attention_packed import ForwardShape, pack, packed_forward
from shared.models import packed_layout

DEVICE = torch.device("cuda")
NUM_CASES = 200
"""Random cases; each compares every query of every sequence under several cuts."""
SHAPES = (
    (16, 8, 128, 64, 0, 0.0),
    (16, 8, 128, 1, 0, 0.0),
    (9, 3, 64, 16, 0, 0.0),
    (32, 4, 128, 256, 0, 0.0),
    (8, 2, 80, 32, 0, 0.0),
    (4, 4, 96, 4, 0, 0.0),
    (4, 1, 256, 64, 0, 0.0),
    (16, 8, 128, 64, 100, 0.0),
    (9, 3, 64, 128, 0, 30.0),
)
"""(query heads, KV heads, head dim, page size, window, soft-cap)."""
GRADIENTS = (
    (16, 8, 128, 700, 0, 0.0),
    (9, 3, 64, 333, 0, 0.0),
    (8, 2, 80, 300, 100, 0.0),
    (4, 4, 96, 300, 0, 5.0),
    (4, 1, 256, 300, 70, 5.0),
)
"""(query heads, KV heads, head dim, tokens, window, soft-cap)."""
FORWARD_SHAPES = (
    ForwardShape(16, False),
    ForwardShape(8, False),
    ForwardShape(16, True),
    ForwardShape(8, True),
    ForwardShape(8, True, num_stages=2),
    ForwardShape(8, True, num_stages=4),
)
"""Ways to compile the plain training forward, all of one class; the fastest is to become `attention_packed.FORWARD`."""
DECODES = ((256, 768), (64, 2048), (4, 32768), (1, 32768), (1, 131072))
"""(sequences, context)."""
DECODE_SHAPES = (FEW, MANY, replace(FEW, num_stages=5), replace(MANY, num_stages=3))
"""Ways to compile decode, tried on the first and the fourth of them."""


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def paged(
    k: torch.Tensor, v: torch.Tensor, lens: list[int], page: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The packed rows in shuffled pages, and the page table on the CPU; every slot that holds no token is NaN."""
    counts = [-(-n // page) for n in lens]
    order = torch.randperm(sum(counts) + 3)
    table = torch.zeros(len(lens), max(counts), dtype=torch.int64)
    slots = []
    for s, (n, part) in enumerate(zip(lens, order[: sum(counts)].split(counts), strict=True)):
        table[s, : len(part)] = part
        at = torch.arange(n)
        slots.append(part[at // page] * page + at % page)
    where = torch.cat(slots).to(DEVICE)
    stores = [k.new_full(((sum(counts) + 3) * page, *x.shape[1:]), float("nan")) for x in (k, v)]
    for store, x in zip(stores, (k, v), strict=True):
        store[where] = x
    return stores[0], stores[1], table


def cut(lens: list[int], chunk: int, table: torch.Tensor, page: int) -> AttentionLayout:
    """Every chunk of `chunk` queries as a sequence of its own: its context ends where the chunk does."""
    pieces = [(s, begin, min(begin + chunk, n)) for s, n in enumerate(lens) for begin in range(0, n, chunk)]
    return AttentionLayout(
        q_lens=torch.tensor([end - begin for _, begin, end in pieces]),
        context_lens=torch.tensor([end for _, _, end in pieces]),
        pages=table[[s for s, _, _ in pieces]],
        page_size=page,
    )


def differing(a: torch.Tensor, b: torch.Tensor) -> int:
    return int((a.view(torch.int16) != b.view(torch.int16)).sum())


def check() -> Iterator[Record]:
    rng = random.Random(0)
    bits = compared = sequences = shape_bits = packed_bits = 0
    for case in track(range(NUM_CASES), description="attention bits"):
        heads, kv_heads, dim, page, window, cap = SHAPES[case % len(SHAPES)]
        lens = [
            rng.choice([1, 2, 63, 64, 65, rng.randint(3, 300), rng.randint(900, 1300), rng.randint(2000, 2200)])
            for _ in range(rng.randint(1, 4))
        ]
        torch.manual_seed(case)
        q, k, v = (normal(sum(lens), h, dim) * 2 for h in (heads, kv_heads, kv_heads))
        packing = pack(lens, heads // kv_heads, DEVICE)
        options = {"scale": dim**-0.5, "window": window, "softcap": cap}
        packed, _ = packed_forward(q, k, v, packing, **options)
        keys, values, table = paged(k, v, lens, page)
        attend = partial(attention, scale=dim**-0.5, sliding_window=window or None, softcap=cap or None)
        packed_bits += differing(attend(q, k, v, packed_layout(lens)), packed)
        for chunk in (1, rng.choice([2, 7, 17, 33]), 64, 512, max(lens)):
            layout = cut(lens, chunk, table, page)
            got = attend(q, keys, values, layout)
            bits += differing(got, packed)
            compared += sum(lens)
            sequences += len(lens)
        if case % len(SHAPES) == 0:
            for shape in FORWARD_SHAPES:
                shape_bits += differing(packed_forward(q, k, v, packing, **options, shape=shape)[0], packed)
    params = {"batches": NUM_CASES, "sequences_compared": sequences, "queries_compared": compared}
    yield Record("kernels", "attention_phases", params, "exact", "differing_bits", bits, "bits")
    of_kernel = {"cases": NUM_CASES, "kernel": attention_choice.describe()}
    yield Record("kernels", "attention_packed_forward", of_kernel, "exact", "differing_bits", packed_bits, "bits")
    params = {"shapes": len(FORWARD_SHAPES)}
    yield Record("kernels", "attention_forward_shapes", params, "exact", "differing_bits", shape_bits, "bits")
    yield from gradient_checks()


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int, softcap: float) -> torch.Tensor:
    """Causal attention of one sequence, [T, H, D], in the dtype given."""
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    hidden = torch.ones(q.shape[0], q.shape[0], dtype=torch.bool, device=q.device).triu(1)
    if window:
        hidden |= torch.ones_like(hidden).tril(-window)
    p = torch.softmax(scores.masked_fill(hidden, -float("inf")).to(torch.promote_types(q.dtype, torch.float32)), -1)
    return torch.einsum("hqk,khd->qhd", p.to(q.dtype), v.repeat_interleave(group, 1))


def gradient_checks() -> Iterator[Record]:
    for heads, kv_heads, dim, tokens, window, cap in GRADIENTS:
        torch.manual_seed(tokens)
        inputs = {n: normal(tokens, h, dim) for n, h in zip("qkv", (heads, kv_heads, kv_heads), strict=True)}
        options = (dim**-0.5, window, cap)
        attend = partial(
            attention,
            layout=packed_layout([tokens]),
            scale=dim**-0.5,
            sliding_window=window or None,
            softcap=cap or None,
        )
        params = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "tokens": tokens, "window": window, "softcap": cap}
        yield from gradient_errors(
            "attention_gradient",
            attend,
            lambda q, k, v, o=options: dense(q, k, v, *o),
            inputs,
            params,
        )


def decode_time(limits: dict[str, float]) -> Iterator[Record]:
    heads, kv_heads, dim, page = 16, 8, 128, 64
    for sequences, length in DECODES:
        size = sequences * length * kv_heads * dim * 4
        # several GB in all, as the layers of a model: neither the L2 nor the TLB may remember the last call
        copies = max(4, min(12, int(6e9 // size)))
        runs = [decode_call(sequences, length, heads, kv_heads, dim, page) for _ in range(copies)]
        params = {
            "sequences": sequences,
            "context": length,
            "heads": heads,
            "kv_heads": kv_heads,
            "dim": dim,
            "page": page,
        }
        params |= {"buffers": copies}
        for metric, t in (("decode_in_graph_time_us", graph_time(runs)), ("decode_alone_time_us", cuda_time(runs[0]))):
            yield against_bandwidth("decode_attention", params, metric, t, size, limits)
        if (sequences, length) in (DECODES[0], DECODES[3]):
            for shape in DECODE_SHAPES:
                t = graph_time([partial(run, shape=shape) for run in runs])
                yield against_bandwidth(
                    "decode_attention", params | asdict(shape), "decode_option_time_us", t, size, limits
                )


def decode_call(sequences: int, length: int, heads: int, kv_heads: int, dim: int, page: int) -> partial[torch.Tensor]:
    """One decode step over a store of its own."""
    pages = length // page
    keys = normal(sequences * length, kv_heads, dim)
    values, q = torch.randn_like(keys), normal(sequences, heads, dim)
    table = torch.randperm(sequences * pages, device=DEVICE, dtype=torch.int32).view(sequences, pages)
    q_start = torch.arange(sequences + 1, dtype=torch.int32, device=DEVICE)
    where = CachedRows(ints([length] * sequences), q_start, table, page)
    tiles = cut_tiles([1] * sequences, heads // kv_heads, 16, DEVICE, queries=1)
    scratch = allocate_partials(tiles, heads, kv_heads, dim, length) if length > CHUNK else None
    return partial(
        attend_cached, q, keys, values, where, tiles, scale=dim**-0.5, out=torch.empty_like(q), partials=scratch
    )


def against_bandwidth(case: str, params: dict, metric: str, t: Timing, size: float, limits: dict[str, float]) -> Record:
    """Bytes that must move over the time, over the copy bandwidth."""
    ratio = size / (t.median * 1e-6) / limits["bandwidth"]
    return Record("kernels", case, params, "exact", metric, t.median, "us", "copy bandwidth", ratio, t.spread)


def chunked_prefill_time(limits: dict[str, float]) -> Iterator[Record]:
    """Chunks of 512 queries at the end of 4,096 keys, in tiles of 64 and of 128 rows, against the matrix rate."""
    sequences, queries, length, heads, kv_heads, dim, page = 8, 512, 4096, 16, 8, 128, 64
    keys, q = normal(sequences * length, kv_heads, dim), normal(sequences * queries, heads, dim)
    values, out = torch.randn_like(keys), torch.empty_like(q)
    table = torch.randperm(sequences * length // page, device=DEVICE, dtype=torch.int32).view(sequences, -1)
    q_start = torch.arange(0, sequences * queries + 1, queries, dtype=torch.int32, device=DEVICE)
    where = CachedRows(ints([length] * sequences), q_start, table, page)
    flop = 4 * sequences * heads * dim * queries * (length - queries / 2)
    for rows, ones in itertools.product((64, 128), (16, 8)):
        tiles = cut_tiles([queries] * sequences, heads // kv_heads, rows, DEVICE)
        t = cuda_time(
            partial(attend_cached, q, keys, values, where, tiles, scale=dim**-0.5, out=out, walks=True, ones=ones)
        )
        params = {"sequences": sequences, "queries": queries, "context": length, "rows": rows, "ones": ones}
        ratio = flop / (t.median * 1e-6) / limits["matmul"]
        yield Record(
            "kernels", "chunked_prefill", params, "exact", "chunked_prefill_time_us", t.median, "us", "large matmul", ratio,
            t.spread,
        )  # fmt: skip


def time(limits: dict[str, float]) -> Iterator[Record]:
    yield from decode_time(limits)
    yield from chunked_prefill_time(limits)
    batch, length, heads, kv_heads, dim = 4, 4096, 16, 8, 128
    q, k, v = (normal(batch * length, h, dim).requires_grad_() for h in (heads, kv_heads, kv_heads))
    packing = pack([length] * batch, 2, DEVICE)
    attend = partial(attention, q, k, v, packed_layout([length] * batch), dim**-0.5)
    grad = torch.randn_like(q)
    params = {"sequences": batch, "context": length, "heads": heads, "kv_heads": kv_heads, "dim": dim}
    peers = list(peer_times(q, k, v, grad, batch))
    with torch.no_grad():
        ours = cuda_time(attend, rep_ms=40)
        of_kernel = params | {"kernel": attention_choice.describe()}
        for name, forward, _ in peers:
            yield against_peer(of_kernel | {"part": "forward"}, f"forward_{name}_time_us", ours, name, forward)
        for shape in FORWARD_SHAPES:
            options = {"ones": shape.ones, "flat": shape.is_flat, "stages": shape.num_stages}
            plain = partial(packed_forward, q, k, v, packing, scale=dim**-0.5, window=0, softcap=0.0, shape=shape)
            t = cuda_time(plain, rep_ms=40)
            for name, forward, _ in peers:
                part = {"part": "forward"}
                yield against_peer(params | options | part, f"forward_option_{name}_time_us", t, name, forward)
    out = attend()
    ours = cuda_time(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
    for name, _, backward in peers:
        yield against_peer(params | {"part": "backward"}, f"backward_{name}_time_us", ours, name, backward)


def against_peer(params: dict, metric: str, t: Timing, name: str, peer: Timing) -> Record:
    """The peer's time over ours."""
    ratio = peer.median / t.median
    return Record("kernels", "prefill_attention", params, "exact", metric, t.median, "us", name, ratio, t.spread)


def peer_times(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, batch: int
) -> Iterator[tuple[str, Timing, Timing]]:
    """(name, forward, backward) of torch's backends on the same batch."""
    heads, dim = q.shape[1:]
    peer_q, peer_k, peer_v = peers = [
        x.detach()
        .view(batch, -1, x.shape[1], dim)
        .transpose(1, 2)
        .repeat_interleave(heads // x.shape[1], 1)
        .requires_grad_()
        for x in (q, k, v)
    ]
    peer_grad = grad.view(batch, -1, heads, dim).transpose(1, 2)
    for backend, name in ((SDPBackend.FLASH_ATTENTION, "flash"), (SDPBackend.CUDNN_ATTENTION, "cudnn")):
        with sdpa_kernel(backend):
            attend = partial(torch.nn.functional.scaled_dot_product_attention, peer_q, peer_k, peer_v, is_causal=True)
            forward = cuda_time(attend, rep_ms=40)
            result = attend()
            backward = cuda_time(lambda: torch.autograd.grad(result, peers, peer_grad, retain_graph=True))
        yield name, forward, backward
