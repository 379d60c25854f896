"""RMSNorm, RoPE and SiLU-mul: a row's bits do not depend on the row count; gradients; time against the copy bandwidth."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from benchmarks.harness import Record, cuda_time, gradient_errors
from shared.kernels import reference
from shared.kernels.cuda.embedding import Embedding
from shared.kernels.cuda.rowwise import Rope, SiluMul, rms_norm

COUNTS = (1, 2, 3, 7, 44, 45, 255, 256, 257, 777)


def check() -> Iterator[Record]:
    bits = 0
    for dim in (64, 128, 576, 2048, 4096):
        x, residual = (torch.randn(1024, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        weight = torch.randn(dim, device="cuda", dtype=torch.bfloat16)
        whole = rms_norm(x, residual, weight, 1e-6)
        plain = rms_norm(whole[1], None, weight, 1e-6)[0]
        bits += int((plain.view(torch.int16) != whole[0].view(torch.int16)).sum())
        for count in COUNTS:
            part = rms_norm(x[-count:].contiguous(), residual[-count:].contiguous(), weight, 1e-6)
            bits += sum(
                int((a.view(torch.int16) != b[-count:].view(torch.int16)).sum())
                for a, b in zip(part, whole, strict=True)
            )
    yield Record("kernels", "rms_norm", {"rows": list(COUNTS)}, "exact", "differing_bits", bits, "bits")
    yield from gradient_checks()


def plain_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The norm of x + residual beside the sum itself."""
    total = x + residual
    wide = total.to(torch.promote_types(total.dtype, torch.float32))
    return torch.cat((weight * (wide * torch.rsqrt(wide.square().mean(-1, True) + 1e-6)).to(x.dtype), total), -1)


def gradient_checks() -> Iterator[Record]:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def fused_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.cat(rms_norm(x, residual, weight, 1e-6), -1)

    cos, sin = normal(300, 32), normal(300, 32)
    ids = torch.randint(0, 50, (300,), device="cuda")
    pair = {"x": normal(300, 576), "residual": normal(300, 576), "weight": normal(576)}
    yield from gradient_errors("rms_norm_gradient", fused_norm, plain_norm, pair)
    pair = {"gate": normal(300, 576), "up": normal(300, 576)}
    yield from gradient_errors("silu_mul_gradient", SiluMul.apply, lambda gate, up: F.silu(gate) * up, pair)
    yield from gradient_errors(
        "rope_gradient",
        lambda x: Rope.apply(x, cos, sin),
        lambda x: reference.rope(x, cos.to(x.dtype), sin.to(x.dtype)),
        {"x": normal(300, 9, 64)},
    )
    yield from gradient_errors(
        "embedding_gradient",
        lambda weight: Embedding.apply(ids, weight),
        lambda weight: F.embedding(ids, weight),
        {"weight": normal(64, 576)},
    )


def time(limits: dict[str, float]) -> list[Record]:
    rows, dim, inner = 16384, 2048, 6144
    x, residual = (torch.randn(rows, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(dim, device="cuda", dtype=torch.bfloat16)
    gate, up = (torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(rows, 16, 128, device="cuda", dtype=torch.bfloat16)
    angles = torch.randn(rows, 64, device="cuda", dtype=torch.bfloat16)
    records = []
    for name, run, size in (
        ("rms_norm_add", lambda: rms_norm(x, residual, weight, 1e-6), 8 * rows * dim),
        ("silu_mul", lambda: SiluMul.apply(gate, up), 6 * rows * inner),
        ("rope", lambda: Rope.apply(q, angles, angles), 4 * q.numel() + 4 * angles.numel()),
    ):
        t = cuda_time(run)
        ratio = size / (t.median * 1e-6) / limits["bandwidth"]
        records.append(
            Record(
                "kernels",
                name,
                {"rows": rows},
                "exact",
                f"{name}_time_us",
                t.median,
                "us",
                "copy bandwidth",
                ratio,
                t.spread,
            )
        )
    return records
