"""RMSNorm, RoPE and SiLU-mul: a row's bits do not depend on the row count; gradients; time against the copy bandwidth."""

from __future__ import annotations

import torch

from benchmarks.harness import Record, cuda_time, gradient_errors
from shared.kernels.cuda.rowwise import Rope, SiluMul, rms_norm

COUNTS = (1, 2, 3, 7, 44, 45, 255, 256, 257, 777)


def check() -> list[Record]:
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
    records = [Record("kernels", "rms_norm", {"rows": list(COUNTS)}, "exact", "differing_bits", bits, "bits")]
    base = [
        torch.randn(300, 576, device="cuda", dtype=torch.bfloat16),
        torch.randn(576, device="cuda", dtype=torch.bfloat16),
    ]
    grad = torch.randn(300, 576, device="cuda", dtype=torch.bfloat16)

    def gradients(dtype: torch.dtype, ours: bool) -> list[torch.Tensor]:
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in base]
        x, weight = leaves
        wide = x if dtype == torch.float64 else x.float()
        y = (
            rms_norm(x, None, weight, 1e-6)[0]
            if ours
            else weight * (wide * torch.rsqrt(wide.square().mean(-1, True) + 1e-6)).to(dtype)
        )
        y.backward(grad.to(dtype))
        return [leaf.grad.double() for leaf in leaves]  # type: ignore[union-attr]

    found = zip(
        gradients(torch.float64, False), gradients(torch.bfloat16, False), gradients(torch.bfloat16, True), strict=True
    )
    return [*records, *gradient_errors("rms_norm_gradient", dict(zip(("x", "weight"), found, strict=True)))]


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
