"""LM head: sampling and scoring agree to the bit for any row count; time and memory of forward and backward at 16k tokens."""

from __future__ import annotations

import torch

from benchmarks.harness import Record, cuda_time, gradient_errors
from benchmarks.kernel_cases.gemm import table
from shared.kernels.cuda.head import GRADIENT_ROWS, ROWS, Draw, LmLogprob, accumulate, read_head

VOCAB, HIDDEN, TOKENS = 151936, 2048, 16384


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return table().linear(x, w, out_dtype=torch.float32)


def check() -> list[Record]:
    torch.manual_seed(0)
    h = torch.randn(300, HIDDEN, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(VOCAB, HIDDEN, device="cuda", dtype=torch.bfloat16) * 0.05
    temperature = torch.tensor([1.0, 0.6, 1.3], device="cuda").repeat(100)
    rows = torch.arange(300, device="cuda")
    draw = Draw(torch.full_like(rows, 7), rows, rows % 8, rows * 3)
    whole = read_head(product(h, w), temperature, draw=draw)
    scored, top1, _ = LmLogprob.apply(h, w, whole.token, temperature, product)
    bits = int((scored.view(torch.int32) != whole.logprob.view(torch.int32)).sum()) + int((top1 != whole.top1).sum())
    for count in (1, 2, 7, 44, 45, 255, 257):
        part = read_head(
            product(h[-count:], w),
            temperature[-count:].contiguous(),
            draw=Draw(*(x[-count:].contiguous() for x in draw)),
        )
        bits += int((part.token != whole.token[-count:]).sum()) + int(
            (part.logprob.view(torch.int32) != whole.logprob[-count:].view(torch.int32)).sum()
        )
    records = [Record("kernels", "logprob", {"v": VOCAB, "rows": 300}, "exact", "differing_bits", bits, "bits")]
    targets = torch.randint(0, 5000, (64,), device="cuda")
    ones = torch.ones(64, device="cuda")

    def ours(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return LmLogprob.apply(hidden, weight, targets, ones, product)[0]

    def plain(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(hidden @ weight.t(), -1).gather(1, targets[:, None]).squeeze(1)

    small = {
        "hidden": torch.randn(64, 256, device="cuda", dtype=torch.bfloat16),
        "weight": torch.randn(5000, 256, device="cuda", dtype=torch.bfloat16) * 0.1,
    }
    return [*records, *gradient_errors("logprob_gradient", ours, plain, small)]


def time(limits: dict[str, float]) -> list[Record]:
    h = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16).requires_grad_()
    w = (torch.randn(VOCAB, HIDDEN, device="cuda", dtype=torch.bfloat16) * 0.05).requires_grad_()
    targets = torch.randint(0, VOCAB, (TOKENS,), device="cuda")
    ones = torch.ones(TOKENS, device="cuda")

    def step() -> None:
        h.grad = w.grad = None
        LmLogprob.apply(h, w, targets, ones, product)[0].sum().backward()

    step()
    torch.cuda.synchronize()
    h.grad = w.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    # the float32 accumulator of dW and its bf16 copy are gradients
    gradients = VOCAB * HIDDEN * (4 + 2) + TOKENS * HIDDEN * 2
    peak = torch.cuda.max_memory_allocated() - before - gradients
    ours = cuda_time(step, rep_ms=300)

    x, weight = h.detach(), w.detach()
    total = torch.zeros(VOCAB, HIDDEN, device="cuda")
    grad = torch.randn(GRADIENT_ROWS, VOCAB, device="cuda", dtype=torch.bfloat16)

    def bare() -> None:
        """As often, and of as many rows, as forward and backward call them."""
        for r in range(0, TOKENS, ROWS):
            product(x[r : r + ROWS], weight)
            product(x[r : r + ROWS], weight)
        for r in range(0, TOKENS, GRADIENT_ROWS):
            grad @ weight
            accumulate(total, grad.t(), x[r : r + GRADIENT_ROWS])

    gemms = cuda_time(bare, rep_ms=300)
    params = {"tokens": TOKENS, "d": HIDDEN, "v": VOCAB}
    return [
        Record(
            "kernels",
            "logprob",
            params,
            "exact",
            "logprob_time_us",
            ours.median,
            "us",
            "its GEMMs alone",
            gemms.median / ours.median,
            ours.spread,
        ),
        Record("kernels", "logprob", params, "exact", "peak_bytes_beyond_gradients", peak, "B"),
    ]
