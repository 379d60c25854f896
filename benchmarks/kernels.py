"""GPU kernels: bits first (a red check refuses to time), then speed against cuBLAS, SDPA, plain torch and the machine's ceilings.

`python -m benchmarks.kernels [--out FILE] [--only attention logprob rowwise grouped gemm] [--seconds 200]`

`gemm:Qwen3-1.7B` is the section `gemm` for that model alone. `--seconds` is for `gemm`: what does not fit is recorded as not run.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch

from benchmarks.harness import GRADIENT_TOLERANCE, Record, Recorder, attempt, ceilings, parser, report
from benchmarks.kernel_cases import attention, gemm, grouped, head, rowwise

SECTIONS = {"attention": attention, "logprob": head, "rowwise": rowwise, "grouped": grouped, "gemm": gemm}


class Section(Protocol):
    """A module of `kernel_cases`, or what one of them builds from the arguments."""

    def check(self) -> Iterable[Record]: ...

    def time(self, limits: dict[str, float]) -> Iterable[Record]: ...


def chosen(only: Sequence[str] | None) -> dict[str, list[str]]:
    """Section -> its models, for `gemm` (none: all of them).

    Raises:
        ValueError: a section or model that does not exist.

    >>> chosen(["rowwise", "gemm:Qwen3-0.6B", "gemm:Qwen3-8B"])
    {'rowwise': [], 'gemm': ['Qwen3-0.6B', 'Qwen3-8B']}
    """
    found: dict[str, list[str]] = {}
    for word in only or SECTIONS:
        name, _, model = word.partition(":")
        if name not in SECTIONS or (model and (name != "gemm" or model not in gemm.MODELS)):
            raise ValueError(f"no section {word}; there are {', '.join(SECTIONS)} and gemm:{{{','.join(gemm.MODELS)}}}")
        found.setdefault(name, []).extend([model] if model else [])
    return found


def is_red(record: Record) -> bool:
    """Whether a check forbids to time what it checked."""
    return (record.metric == "differing_bits" and record.value > 0) or (
        record.metric == "gradient_error_ratio" and not record.value <= GRADIENT_TOLERANCE
    )


def take(name: str, part: Callable[[], Iterable[Record]], recorder: Recorder) -> list[Record]:
    """The records of one part of a section; prints how long it took, whatever becomes of it."""
    begin = time.monotonic()
    try:
        return [recorder.add(record) for record in part()]
    finally:
        recorder.save()
        print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)


def run_section(name: str, section: Section, limits: dict[str, float], recorder: Recorder) -> bool:
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
    for summary in take(f"{name} summary", lambda: summaries(timed), recorder):
        of, cases, lowest = (summary.params[key] for key in ("of", "cases", "lowest"))
        print(f"{name}: {of}: geometric mean of {cases} ratios {summary.value:.3f}, lowest {lowest[0]}", flush=True)
    return True


def summaries(timed: Sequence[Record]) -> Iterator[Record]:
    """The geometric mean of the ratios of each metric, and its ten slowest cases in words."""
    for metric in sorted({r.metric for r in timed if r.ratio}):
        found = sorted(((r.ratio, r) for r in timed if r.ratio and r.metric == metric), key=lambda pair: pair[0])
        mean = math.exp(sum(math.log(ratio) for ratio, _ in found) / len(found))
        lowest = [f"{ratio:.3f} {_words(r.params)}" for ratio, r in found[:10]]
        params = {"of": metric, "cases": len(found), "lowest": lowest}
        yield Record(
            "kernels", "summary", params, found[0][1].mode, "geometric_mean_ratio", mean, "", found[0][1].baseline
        )


def _words(params: Mapping[str, object]) -> str:
    """What tells a product apart, or all there is of another case."""
    named = [name for name in ("model", "part", "m", "member") if name in params]
    return (
        " ".join(str(params[name]) for name in named)
        if "m" in params
        else " ".join(f"{k}={v}" for k, v in params.items())
    )


def main() -> int:
    words = parser(__doc__ or "")
    words.add_argument("--seconds", type=float, help="that the section gemm may take")
    args = words.parse_args()
    try:
        sections = chosen(args.only)
    except ValueError as error:
        words.error(str(error))
    if not torch.cuda.is_available():
        print("benchmarks.kernels needs a CUDA device, found none", file=sys.stderr)
        return 2
    limits = ceilings()
    is_well = True
    with Recorder(args.out) as recorder:
        recorder.add_ceilings("kernels", limits)
        for name, models in sections.items():
            section: Section = SECTIONS[name] if name != "gemm" else gemm.Products(models, args.seconds)
            is_well &= attempt(partial(run_section, name, section, limits, recorder))
    report(recorder.records)
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
