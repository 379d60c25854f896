"""GPU kernels: bits first (a red check refuses to time), then speed against cuBLAS, SDPA, plain torch and the machine's ceilings.

`python -m benchmarks.kernels [--out FILE] [--only attention logprob rowwise grouped gemm]`
"""

from __future__ import annotations

import math
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from types import ModuleType

import torch

from benchmarks.harness import Record, Recorder, arguments, ceilings, report
from benchmarks.kernel_cases import attention, gemm, grouped, head, rowwise

SECTIONS: dict[str, ModuleType] = {
    "attention": attention,
    "logprob": head,
    "rowwise": rowwise,
    "grouped": grouped,
    "gemm": gemm,
}


def is_red(record: Record) -> bool:
    """Whether a check forbids to time what it checked."""
    return (record.metric == "differing_bits" and record.value > 0) or (
        record.metric == "gradient_error_ratio" and not record.value <= 1.0
    )


def take(name: str, part: Callable[[], Iterable[Record]], recorder: Recorder) -> list[Record]:
    """The records of one part of a section; prints how long it took, whatever becomes of it."""
    begin = time.monotonic()
    try:
        return [recorder.add(record) for record in part()]
    finally:
        recorder.save()
        print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)


def run_section(name: str, section: ModuleType, limits: dict[str, float], recorder: Recorder) -> bool:
    """Checks, then times if nothing is red. Returns whether all was well."""
    checks = take(f"{name} check", section.check, recorder)
    red = [r for r in checks if is_red(r)]
    differing = sum(r.value for r in checks if r.metric == "differing_bits")
    print(f"{name}: {len(checks)} checks, {differing:.0f} differing bits, {len(red)} red", flush=True)
    for record in red:
        print(f"{name}: red: {record.case} {record.params} {record.metric} {record.value:g}", flush=True)
    if red:
        return False
    timed = take(f"{name} time", lambda: section.time(limits), recorder)
    for metric in sorted({r.metric for r in timed if r.ratio}):
        ratios = [r.ratio for r in timed if r.ratio and r.metric == metric]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(
            f"{name}: {metric}: geometric mean of {len(ratios)} ratios {mean:.3f}, lowest {min(ratios):.3f}", flush=True
        )
    return True


def main() -> int:
    args = arguments(__doc__ or "")
    if not torch.cuda.is_available():
        print("benchmarks.kernels needs a CUDA device, found none", file=sys.stderr)
        return 2
    unknown = set(args.only or ()) - SECTIONS.keys()
    if unknown:
        print(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}", file=sys.stderr)
        return 2
    limits = ceilings()
    recorder = Recorder(args.out)
    recorder.add_ceilings("kernels", limits)
    is_well = True
    for name in args.only or SECTIONS:
        try:
            is_well &= run_section(name, SECTIONS[name], limits, recorder)
        except Exception:
            # what other sections find is still worth the device's time
            traceback.print_exc()
            is_well = False
    report(recorder.records)
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
