"""The language-model head after its product: float32 logits -> log-sum-exp, chosen logprob, argmax, entropy, a sample.

z = logits / temperature. The vocabulary is cut into segments of 4096; each is reduced by one program and the segments merge in
ascending order, so a row's bits depend on its logits alone, and sampling and scoring share every operation. Noise is that of
`shared.kernels.philox`: Gumbel-max, Philox4x32-10 keyed by the seed, counter (entry // 4, position, sample, prompt).

Legend: R rows, D hidden size, V vocabulary, n segments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

SEGMENT = 4096
ROWS = 1024
"""Rows whose logits exist at one time in training."""
GRADIENT_ROWS = 2048
"""Rows whose logits' gradients do: adding to the weight's gradient costs its whole traffic, once for all of them."""


class Head(NamedTuple):
    logprob: torch.Tensor
    """[R] float32."""
    top1: torch.Tensor
    """[R] int32, the lowest id among equals."""
    entropy: torch.Tensor
    """[R] float32, nats."""
    lse: torch.Tensor
    """[R] float32."""
    token: torch.Tensor
    """[R] int32: the sample, or the targets given."""


@triton.jit
def gumbel(seed, prompt, sample, position, first, SEG: tl.constexpr):
    """Noise of the entries first ... first + SEG - 1 of one row, [SEG] float32; `first` is a multiple of 4."""
    counter = (first // 4 + tl.arange(0, SEG // 4)).to(tl.uint32)
    zero = tl.zeros((SEG // 4,), tl.uint32)
    w0, w1, w2, w3 = tl.philox(
        seed, counter, zero + position.to(tl.uint32), zero + sample.to(tl.uint32), zero + prompt.to(tl.uint32)
    )
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (SEG,))
    u = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    u = tl.minimum(u, 1.0 - 5.9604644775390625e-08)
    # log1p by its series where 1 - u would lose the bits that make large noise
    small = u + u * u * 0.5 + u * u * u * 0.3333333432674408
    return -tl.log(tl.where(u < 0.0009765625, small, -tl.log(1.0 - u)))


@triton.jit
def segment_kernel(
    logits, temperature, seed, prompt, sample, position, part_f, part_i, V, stride, num_segments,
    SEG: tl.constexpr, DRAW: tl.constexpr,
):  # fmt: skip
    """part_f [R, n, 4]: max, sum of exp, sum of exp * z, best noisy z; part_i [R, n, 2]: argmax, noisy argmax."""
    row = tl.program_id(0)
    seg = tl.program_id(1)
    rv = seg * SEG + tl.arange(0, SEG)
    t = tl.load(temperature + row)
    z = tl.load(logits + row.to(tl.int64) * stride + rv, mask=rv < V, other=-float("inf")).to(tl.float32)
    z = tl.div_rn(z, tl.where(t == 0.0, 1.0, t) + tl.zeros_like(z))
    m = tl.max(z, 0)
    # a segment whose entries are all filtered out must add nothing
    e = tl.exp(z - tl.where(m == -float("inf"), 0.0, m))
    at = row.to(tl.int64) * num_segments + seg
    tl.store(part_f + at * 4, m)
    tl.store(part_f + at * 4 + 1, tl.sum(e, 0))
    tl.store(part_f + at * 4 + 2, tl.sum(e * tl.where(z == -float("inf"), 0.0, z), 0))
    tl.store(part_i + at * 2, seg * SEG + tl.argmax(z, 0, tie_break_left=True).to(tl.int32))
    if DRAW:
        noise = gumbel(
            tl.load(seed + row).to(tl.uint64),
            tl.load(prompt + row),
            tl.load(sample + row),
            tl.load(position + row),
            seg * SEG,
            SEG,
        )
        noisy = z + tl.where(t == 0.0, tl.zeros_like(z), noise)
        tl.store(part_f + at * 4 + 3, tl.max(noisy, 0))
        tl.store(part_i + at * 2 + 1, seg * SEG + tl.argmax(noisy, 0, tie_break_left=True).to(tl.int32))


@triton.jit
def row_kernel(
    logits, temperature, targets, part_f, part_i, logprob, top1, entropy, lse_out, token_out, stride,
    N: tl.constexpr, DRAW: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    base = row.to(tl.int64) * N
    m = -float("inf")
    s = 0.0
    x = 0.0
    best = tl.zeros((), tl.int32)
    noisy = -float("inf")
    token = tl.zeros((), tl.int32)
    for i in tl.static_range(N):
        mi = tl.load(part_f + (base + i) * 4)
        si = tl.load(part_f + (base + i) * 4 + 1)
        xi = tl.load(part_f + (base + i) * 4 + 2)
        # strictly greater: among equals the lowest id stays
        best = tl.where(mi > m, tl.load(part_i + (base + i) * 2), best)
        top = tl.maximum(m, mi)
        safe = tl.where(top == -float("inf"), 0.0, top)
        old = tl.exp(m - safe)
        new = tl.exp(mi - safe)
        s = tl.fma(s, old, si * new)
        x = tl.fma(x, old, xi * new)
        m = top
        if DRAW:
            gi = tl.load(part_f + (base + i) * 4 + 3)
            token = tl.where(gi > noisy, tl.load(part_i + (base + i) * 2 + 1), token)
            noisy = tl.maximum(noisy, gi)
    lse = m + tl.log(s)
    if not DRAW:
        token = tl.load(targets + row).to(tl.int32)
    t = tl.load(temperature + row)
    z = tl.load(logits + row.to(tl.int64) * stride + token).to(tl.float32)
    z = tl.div_rn(z, tl.where(t == 0.0, 1.0, t))
    tl.store(logprob + row, z - lse)
    tl.store(top1 + row, best)
    tl.store(entropy + row, lse - x / s)
    tl.store(lse_out + row, lse)
    tl.store(token_out + row, token)


class Draw(NamedTuple):
    """What each row's sample depends on besides its logits; all [R] int64 (the seed in two's complement)."""

    seed: torch.Tensor
    prompt: torch.Tensor
    sample: torch.Tensor
    position: torch.Tensor


def empty_head(rows: int, device: torch.device) -> Head:
    """Room for `read_head`."""
    logprob, entropy, lse = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(3))
    top1, token = (torch.empty(rows, dtype=torch.int32, device=device) for _ in range(2))
    return Head(logprob, top1, entropy, lse, token)


def read_head(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    *,
    targets: torch.Tensor | None = None,
    draw: Draw | None = None,
    out: Head | None = None,
) -> Head:
    """Reduce logits to what is asked of each row; `targets` or `draw`, one of the two.

    Args:
        logits: [R, V] float32 (in the fast mode of the weights' dtype), R >= 1; -inf excludes an entry, one at least must stay.
        temperature: [R] float32, 0 is greedy and reads as 1.
        targets: [R] integer ids to score.
        draw: keys of the samples to take.
        out: where the results go; None allocates.
    """
    assert (targets is None) != (draw is None)
    rows, vocab = logits.shape
    n = triton.cdiv(vocab, SEGMENT)
    part_f = torch.empty(rows, n, 4, dtype=torch.float32, device=logits.device)
    part_i = torch.empty(rows, n, 2, dtype=torch.int32, device=logits.device)
    out = empty_head(rows, logits.device) if out is None else out
    key = draw if draw is not None else Draw(temperature, temperature, temperature, temperature)
    segment_kernel[(rows, n)](
        logits, temperature, *key, part_f, part_i, vocab, logits.stride(0), n, SEG=SEGMENT, DRAW=draw is not None, num_warps=4,
    )  # fmt: skip
    row_kernel[(rows,)](
        logits, temperature, targets if targets is not None else temperature, part_f, part_i, *out, logits.stride(0), N=n,
        DRAW=draw is not None, num_warps=1,
    )  # fmt: skip
    return out


@triton.jit
def logit_gradient_kernel(
    logits,
    targets,
    temperature,
    lse,
    entropy,
    grad_logprob,
    grad_entropy,
    out,
    V,
    stride,
    stride_out,
    BLOCK: tl.constexpr,
):
    """d/d logits of logprob and entropy: (g (onehot - p) - h p (log p + H)) / temperature."""
    row = tl.program_id(0)
    rv = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    t = tl.load(temperature + row)
    t = tl.where(t == 0.0, 1.0, t)
    z = tl.load(logits + row.to(tl.int64) * stride + rv, mask=rv < V, other=-float("inf"))
    logp = z / t - tl.load(lse + row)
    p = tl.exp(logp)
    g = tl.load(grad_logprob + row)
    h = tl.load(grad_entropy + row)
    d = -g * p - tl.where(p > 0.0, h * p * (logp + tl.load(entropy + row)), 0.0)
    d = d + tl.where(rv == tl.load(targets + row), g, 0.0)
    tl.store(out + row.to(tl.int64) * stride_out + rv, (d / t).to(out.dtype.element_ty), mask=rv < V)


class LmLogprob(torch.autograd.Function):
    """(hidden [R, D], weight [V, D], targets [R], temperature [R], product) -> logprob, top1, entropy.

    `product(x, w) -> float32 [rows, V]` is the certified one. Logits exist for ROWS rows at a time and the backward recomputes
    them; the weight's gradient is accumulated in float32.
    """

    @staticmethod
    def forward(ctx: Any, hidden, weight, targets, temperature, product):  # type: ignore[no-untyped-def, override]
        out = empty_head(hidden.shape[0], hidden.device)
        for rows in _row_chunks(hidden.shape[0], ROWS):
            logits = product(hidden[rows], weight)
            read_head(logits, temperature[rows], targets=targets[rows], out=Head(*(x[rows] for x in out)))
        ctx.save_for_backward(hidden, weight, targets, temperature, out.lse, out.entropy)
        ctx.product = product
        ctx.mark_non_differentiable(out.top1)
        return out.logprob, out.top1, out.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob, _, grad_entropy):  # type: ignore[no-untyped-def, override]
        hidden, weight, targets, temperature, lse, entropy = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        vocab = weight.shape[0]
        grad_logprob, grad_entropy = grad_logprob.contiguous(), grad_entropy.contiguous()
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        total = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if needs_weight else None
        grads = torch.empty(min(GRADIENT_ROWS, hidden.shape[0]), vocab, dtype=hidden.dtype, device=hidden.device)
        for block in _row_chunks(hidden.shape[0], GRADIENT_ROWS):
            for chunk in _row_chunks(block.stop - block.start, ROWS):
                rows = slice(block.start + chunk.start, block.start + chunk.stop)
                logits, g = ctx.product(hidden[rows], weight), grads[chunk]
                logit_gradient_kernel[(logits.shape[0], triton.cdiv(vocab, 4096))](
                    logits, targets[rows], temperature[rows], lse[rows], entropy[rows], grad_logprob[rows], grad_entropy[rows],
                    g, vocab, logits.stride(0), g.stride(0), BLOCK=4096, num_warps=8,
                )  # fmt: skip
                del logits
            g = grads[: block.stop - block.start]
            if grad_hidden is not None:
                torch.mm(g, weight, out=grad_hidden[block])
            if total is not None:
                accumulate(total, g.t(), hidden[block])
        return grad_hidden, None if total is None else total.to(weight.dtype), None, None, None


def _row_chunks(rows: int, size: int) -> Iterator[slice]:
    return (slice(r, min(r + size, rows)) for r in range(0, rows, size))


def accumulate(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b in place, total float32, a and b of half that width."""
    if total.is_cuda and a.dtype != torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())
