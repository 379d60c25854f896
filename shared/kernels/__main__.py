"""`python -m shared.kernels [NxK ...]`: what exact mode is on this machine: device, bit class, on a GPU the table of products.

Shapes are those of weights; ones that the table lacks are certified first, for bfloat16.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from shared.kernels import InexactKernelError, build_ops, default_dtype, fingerprint, self_check

if TYPE_CHECKING:
    from shared.kernels.certify import Table


def lines(table: Table) -> Iterator[str]:
    """Every entry, bucket by bucket."""
    from shared.kernels.certify import BUCKETS, LARGE

    yield f"{len(table.entries)} shapes in {table.path}"
    for key, entry in sorted(table.entries.items()):
        yield f"{key}: {entry.checked} products compared, {len(entry.rejected)} candidates rejected"
        for top, name, us in zip(BUCKETS, entry.members, entry.times_us, strict=True):
            yield f"    to {top:>5} rows {us:>9.1f} us  {name}"
        yield f"    to {entry.limit:>5} rows in multiples of {LARGE}  {entry.large}"


def main(words: Sequence[str]) -> int:
    is_gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if is_gpu else default_dtype()
    try:
        shapes = [(int(k), int(n)) for n, k in (word.split("x") for word in words)]
    except ValueError:
        print(f"shapes must be like 4096x2048, got {' '.join(words)}", file=sys.stderr)
        return 2
    ops = build_ops("exact", "cuda" if is_gpu else "cpu")
    try:
        if shapes:
            self_check(ops, dtype, linear_shapes=shapes)
        else:
            self_check(ops, dtype)
    except InexactKernelError as error:
        print(error, file=sys.stderr)
        return 1
    print(fingerprint(ops, dtype))
    table = getattr(ops, "table", None)
    if table is not None:
        print(*lines(table), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
