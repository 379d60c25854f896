"""GPU kernels: bits first (a red check refuses to time), then speed against cuBLAS, SDPA, plain torch and the machine's ceilings.

`python -m benchmarks.kernels [--out FILE] [--only gemm attention logprob rowwise grouped]`
"""

from __future__ import annotations

import math
import sys

import torch

from benchmarks.harness import Record, arguments, cuda_time, report, save
from benchmarks.kernel_cases import attention, gemm, grouped, head, rowwise

SECTIONS = {"gemm": gemm, "attention": attention, "logprob": head, "rowwise": rowwise, "grouped": grouped}


def ceilings() -> dict[str, float]:
    """Copy bandwidth in bytes/s (read and written) and bf16 matrix rate in FLOP/s, measured now."""
    a = torch.empty(2**30, dtype=torch.bfloat16, device="cuda")
    b = torch.empty_like(a)
    bandwidth = 2 * a.numel() * 2 / (cuda_time(lambda: b.copy_(a), rep_ms=60).median * 1e-6)
    a = b = torch.empty(0)
    x, y = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    rate = 2 * 8192**3 / (cuda_time(lambda: x @ y, rep_ms=60).median * 1e-6)
    return {"bandwidth": bandwidth, "matmul": rate}


def main() -> int:
    args = arguments(__doc__ or "")
    if not torch.cuda.is_available():
        print("benchmarks.kernels needs a CUDA device, found none", file=sys.stderr)
        return 2
    limits = ceilings()
    records = [
        Record("kernels", "ceiling", {}, "peer", "bytes_per_s", limits["bandwidth"], "B/s"),
        Record("kernels", "ceiling", {}, "peer", "flop_per_s", limits["matmul"], "FLOP/s"),
    ]
    status = 0
    for name in args.only or SECTIONS:
        section = SECTIONS[name]
        checks = section.check()
        records += checks
        save(records, args.out)
        differing = sum(r.value for r in checks if r.metric == "differing_bits")
        failed = [r for r in checks if r.metric == "differing_bits" and r.value]
        failed += [r for r in checks if r.metric == "gradient_error_ratio" and not r.value <= 1.0]
        print(f"{name}: {len(checks)} checks, {differing:.0f} differing bits, {len(failed)} red", flush=True)
        if failed:
            status = 1
            continue
        timed = section.time(limits)
        records += timed
        save(records, args.out)
        for metric in sorted({r.metric for r in timed if r.ratio}):
            ratios = [r.ratio for r in timed if r.ratio and r.metric == metric]
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            print(
                f"{name}: {metric}: geometric mean of {len(ratios)} ratios {mean:.3f}, lowest {min(ratios):.3f}",
                flush=True,
            )
    report(records)
    return status


if __name__ == "__main__":
    sys.exit(main())
