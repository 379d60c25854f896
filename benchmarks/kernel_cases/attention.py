"""Attention: equal bits between decode, chunked prefill and the packed training forward; then speed."""

from __future__ import annotations

import itertools
import random

import torch
from rich.progress import track
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness import Record, cuda_time, graph_time
from shared.kernels.cuda.attention_cached import CachedRows, allocate_partials, attend_cached
from shared.kernels.cuda.attention_math import CHUNK, cut_tiles
from shared.kernels.cuda.attention_packed import PackedAttention, pack

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


def starts(lens: list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32, device=DEVICE)


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def paged(
    k: torch.Tensor, v: torch.Tensor, lens: list[int], page: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The packed rows in shuffled pages; every slot that holds no token is NaN."""
    counts = [-(-n // page) for n in lens]
    order = torch.randperm(sum(counts) + 3, device=DEVICE, dtype=torch.int32)
    stores = [
        torch.full(((sum(counts) + 3) * page, *x.shape[1:]), float("nan"), dtype=x.dtype, device=DEVICE) for x in (k, v)
    ]
    table = torch.zeros(len(lens), max(counts), dtype=torch.int32, device=DEVICE)
    used = row = 0
    for s, (n, count) in enumerate(zip(lens, counts, strict=True)):
        table[s, :count] = order[used : used + count]
        at = torch.arange(n, device=DEVICE)
        slots = table[s, at // page].long() * page + at % page
        for store, x in zip(stores, (k, v), strict=True):
            store[slots] = x[row : row + n]
        used, row = used + count, row + n
    return stores[0], stores[1], table


def chunked(
    q: torch.Tensor,
    stores: tuple[torch.Tensor, ...],
    lens: list[int],
    page: int,
    chunk: int,
    *,
    split: bool,
    window: int,
    cap: float,
) -> torch.Tensor:
    """Every chunk of `chunk` queries as a sequence of its own: its context ends where the chunk does."""
    keys, values, table = stores
    group = q.shape[1] // keys.shape[1]
    pieces = [(s, begin, min(chunk, n - begin)) for s, n in enumerate(lens) for begin in range(0, n, chunk)]
    q_lens = [n for _, _, n in pieces]
    context = [begin + n for _, begin, n in pieces]
    rows = 16 if chunk * group <= 16 else 64
    tiles = cut_tiles(q_lens, group, rows, DEVICE)
    chunks = -(-max(context) // CHUNK)
    part = allocate_partials(tiles.seq.shape[0], keys.shape[1], chunks, rows, q.shape[2], DEVICE) if split else None
    where = CachedRows(ints(context), starts(q_lens), table[[s for s, _, _ in pieces]].contiguous(), page)
    out = torch.full_like(q, float("nan"))
    scale = q.shape[2] ** -0.5
    return attend_cached(q, keys, values, where, tiles, scale=scale, out=out, partials=part, window=window, softcap=cap)


def check() -> list[Record]:
    rng = random.Random(0)
    bits = compared = 0
    for case in track(range(NUM_CASES), description="attention bits"):
        heads, kv_heads, dim, page, window, cap = SHAPES[case % len(SHAPES)]
        lens = [
            rng.choice([1, 2, 63, 64, 65, rng.randint(3, 300), rng.randint(900, 1300)])
            for _ in range(rng.randint(1, 4))
        ]
        total, scale = sum(lens), dim**-0.5
        torch.manual_seed(case)
        q, k, v = (
            torch.randn(total, h, dim, device=DEVICE, dtype=torch.bfloat16) * 2 for h in (heads, kv_heads, kv_heads)
        )
        packed = PackedAttention.apply(q, k, v, pack(lens, heads // kv_heads, DEVICE), scale, window, cap)
        stores = paged(k, v, lens, page)
        for chunk in (1, rng.choice([7, 17, 33]), 64, 512, max(lens)):
            for split in (False, True):
                got = chunked(q, stores, lens, page, chunk, split=split, window=window, cap=cap)
                bits += int((got.view(torch.int16) != packed.view(torch.int16)).sum())
                compared += sum(lens)
    params = {"cases": NUM_CASES, "queries_compared": compared}
    return [Record("kernels", "attention_phases", params, "exact", "differing_bits", bits, "bits"), *gradient_checks()]


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of one sequence, [T, H, D], in the dtype given."""
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * scale
    future = torch.ones(q.shape[0], q.shape[0], dtype=torch.bool, device=q.device).triu(1)
    p = torch.softmax(
        scores.masked_fill(future, -float("inf")).to(torch.float64 if q.dtype == torch.float64 else torch.float32), -1
    )
    return torch.einsum("hqk,khd->qhd", p.to(q.dtype), v.repeat_interleave(group, 1))


def gradient_checks() -> list[Record]:
    """Our gradient's error against float64, over that of plain PyTorch in bf16: at most 1."""
    records = []
    for heads, kv_heads, dim, tokens in ((16, 8, 128, 700), (9, 3, 64, 333)):
        torch.manual_seed(tokens)
        base = [torch.randn(tokens, h, dim, device=DEVICE, dtype=torch.bfloat16) for h in (heads, kv_heads, kv_heads)]
        grad = torch.randn(tokens, heads, dim, device=DEVICE, dtype=torch.bfloat16)
        scale = dim**-0.5

        def gradients(run, dtype):  # type: ignore[no-untyped-def]
            leaves = [x.to(dtype, copy=True).requires_grad_() for x in base]
            run(*leaves).backward(grad.to(dtype))
            return [x.grad.double() for x in leaves]

        exact = gradients(lambda *x: dense(*x, scale), torch.float64)
        plain = gradients(lambda *x: dense(*x, scale), torch.bfloat16)
        packing = pack([tokens], heads // kv_heads, DEVICE)
        ours = gradients(lambda *x: PackedAttention.apply(*x, packing, scale, 0, 0.0), torch.bfloat16)
        for name, e, p, o in zip(("dq", "dk", "dv"), exact, plain, ours, strict=True):
            ratio = float((o - e).norm() / (p - e).norm())
            params = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "tokens": tokens, "gradient": name}
            records.append(
                Record(
                    "kernels", "attention_gradient", params, "exact", "gradient_error_ratio", ratio, "", "torch bf16"
                )
            )
    return records


def decode_time(limits: dict[str, float]) -> list[Record]:
    heads, kv_heads, dim, page = 16, 8, 128, 64
    records = []
    for sequences, length in ((256, 768), (64, 2048), (4, 32768), (1, 32768), (1, 131072)):
        pages = length // page
        size = sequences * length * kv_heads * dim * 4
        runs = []
        for _ in range(max(2, min(8, int(2e9 // size)))):
            keys = torch.randn(sequences * pages * page, kv_heads, dim, device=DEVICE, dtype=torch.bfloat16)
            values = torch.randn_like(keys)
            table = torch.randperm(sequences * pages, device=DEVICE, dtype=torch.int32).view(sequences, pages)
            q = torch.randn(sequences, heads, dim, device=DEVICE, dtype=torch.bfloat16)
            where = CachedRows(
                ints([length] * sequences), torch.arange(sequences + 1, dtype=torch.int32, device=DEVICE), table, page
            )
            tiles = cut_tiles([1] * sequences, 2, 16, DEVICE)
            chunks = -(-length // CHUNK)
            part = allocate_partials(sequences, kv_heads, chunks, 16, dim, DEVICE) if chunks > 1 else None
            out = torch.empty_like(q)
            runs.append(
                lambda a=(q, keys, values, where, tiles), o=out, p=part: attend_cached(
                    *a, scale=dim**-0.5, out=o, partials=p
                )
            )
        warm = graph_time(runs)
        cold = cuda_time(runs[0])
        params = {
            "sequences": sequences,
            "context": length,
            "heads": heads,
            "kv_heads": kv_heads,
            "dim": dim,
            "page": page,
        }
        for metric, t in (("decode_in_graph_time_us", warm), ("decode_alone_time_us", cold)):
            ratio = size / (t.median * 1e-6) / limits["bandwidth"]
            records.append(
                Record(
                    "kernels",
                    "decode_attention",
                    params,
                    "exact",
                    metric,
                    t.median,
                    "us",
                    "copy bandwidth",
                    ratio,
                    t.spread,
                )
            )
    return records


def time(limits: dict[str, float]) -> list[Record]:
    records = decode_time(limits)
    batch, length, heads, kv_heads, dim = 4, 4096, 16, 8, 128
    q, k, v = (
        torch.randn(batch * length, h, dim, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        for h in (heads, kv_heads, kv_heads)
    )
    packing = pack([length] * batch, 2, DEVICE)
    grad = torch.randn_like(q)
    run = lambda: PackedAttention.apply(q, k, v, packing, dim**-0.5, 0, 0.0)  # noqa: E731
    forward = cuda_time(run)
    out = run()
    backward = cuda_time(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
    peers = [
        x.detach()
        .view(batch, length, -1, dim)
        .transpose(1, 2)
        .repeat_interleave(heads // x.shape[1], 1)
        .requires_grad_()
        for x in (q, k, v)
    ]
    peer_grad = grad.view(batch, length, heads, dim).transpose(1, 2)
    params = {"sequences": batch, "context": length, "heads": heads, "kv_heads": kv_heads, "dim": dim}
    for backend, name in ((SDPBackend.FLASH_ATTENTION, "flash"), (SDPBackend.CUDNN_ATTENTION, "cudnn")):
        with sdpa_kernel(backend):
            attend = lambda: torch.nn.functional.scaled_dot_product_attention(*peers, is_causal=True)  # noqa: E731
            peer = cuda_time(attend)
            result = attend()
            peer_back = cuda_time(lambda: torch.autograd.grad(result, peers, peer_grad, retain_graph=True))
        for part, ours, theirs in (("forward", forward, peer), ("backward", backward, peer_back)):
            records.append(
                Record(
                    "kernels",
                    "prefill_attention",
                    params | {"part": part},
                    "exact",
                    f"{part}_{name}_time_us",
                    ours.median,
                    "us",
                    name,
                    theirs.median / ours.median,
                    ours.spread,
                )
            )
    return records
