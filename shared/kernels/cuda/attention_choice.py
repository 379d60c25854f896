"""Which kernel runs the packed forward: `attention_packed`, whose bits are the definition, or on Hopper `attention_hopper`, which
is faster and has to show the same bits on the device before it is used.

Legend as in `attention_math`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import torch
import triton
from torch import Tensor
from triton.errors import TritonError

from shared.kernels.cuda.attention_packed import pack, packed_forward
from shared.kernels.cuda.attention_schedule import HEAD_DIM, ROWS, deal, num_multiprocessors

log = logging.getLogger(__name__)

Forward = Callable[..., tuple[Tensor, Tensor]]
"""`attention_hopper.hopper_forward`: (q, k, v, schedule, scale=) -> output and log-sum-exp."""

TRITON = "3.6."
"""The release that it was made for. Gluon is no settled language: 3.9 spills registers, and a kernel that another compiler makes
wait for ever can't be found out by trying."""
CAPABILITY = (9, 0)
CASES: Sequence[tuple[list[int], list[int] | None]] = (
    ([1, 63, 64, 65, 127, 128, 129, 1024, 1025, 1, 2200], None),
    ([4096, 33, 2048, 1088, 960], None),
    ([7, 300, 1300, 5], None),
    ([31], None),
    ([32, 1087], None),
    ([70, 1, 300, 129, 1024], [1100, 65, 300, 2200, 1025]),
)
"""(queries, keys of each sequence; None: as many) that are compared."""
FEW = 7
"""Programs of every second comparison, so that each takes tile after tile whatever the device."""
PLAIN, HOPPER = "cuda.attention_packed.packed_kernel", "cuda.attention_hopper.hopper_kernel"

_FAILURES = (ImportError, AttributeError, TypeError, ValueError, AssertionError, RuntimeError, TritonError)
"""What a compiler, a launcher or a device answers to what it does not take."""

_refusals: dict[tuple[torch.device, int, int], str] = {}
"""(device, query heads, KV heads) -> why the plain kernel runs; empty where the other one does."""


def takes(q: Tensor, k: Tensor, window: int, softcap: float) -> bool:
    """Whether `attention_hopper` computes this forward; q [T, H, D] and k [E, Hkv, D] contiguous.

    The first forward of its kind compares bits, unless a graph is being captured, which can't wait for that.
    """
    heads = q.shape[1], k.shape[1], q.shape[2]
    # the tensor memory accelerator reads from multiples of 16 bytes
    if window or softcap or q.data_ptr() % 16 or not _is_covered(q.device, q.dtype, heads):
        return False
    if (q.device, *heads[:2]) not in _refusals and torch.cuda.is_current_stream_capturing():
        return False
    return _is_chosen(q.device, *heads[:2])


def settle(device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int]) -> None:
    """Chooses for a model of (H, Hkv, D) heads, before its first forward."""
    if _is_covered(device, dtype, heads):
        index = torch.cuda.current_device() if device.index is None else device.index
        _is_chosen(torch.device("cuda", index), *heads[:2])


def describe() -> str:
    """The kernels that run this process's packed forwards, with the reason where the plain one does and the other could."""
    return ", ".join(sorted({f"{PLAIN} ({why})" if why else HOPPER for why in _refusals.values()})) or PLAIN


def difference(forward: Forward, device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int]) -> str:
    """Where `forward` has other bits than `packed_forward` over (H, Hkv, D) heads; empty if nowhere."""
    num_heads, num_kv_heads, dim = heads
    for seed, (lens, contexts) in enumerate(CASES):
        contexts = contexts or lens
        for is_poisoned in (False, True):
            # A fresh seed each: what was left unwritten must not hold the right bits from the time before.
            q, k, v = _draw(lens, contexts, heads, 2 * seed + is_poisoned, device, dtype)
            if is_poisoned:
                # what only later queries, and no other sequence, may notice
                at = k.shape[0] - 1 - contexts[-1] // 4
                k[at, 0], v[at, 1 % num_kv_heads], v[at, 2 % num_kv_heads, 5] = torch.nan, torch.nan, torch.inf
            num_programs = FEW if is_poisoned else num_multiprocessors(device)
            schedule = deal(lens, contexts, num_heads, num_kv_heads, device, num_programs=num_programs)
            packed = pack(lens, num_heads // num_kv_heads, device, context_lens=contexts)
            expected = packed_forward(q, k, v, packed, scale=dim**-0.5, window=0, softcap=0.0)
            found = forward(q, k, v, schedule, scale=dim**-0.5)
            wrong = sum(map(_num_differing, found, expected))
            if wrong:
                where = f"{lens} queries over {contexts} keys, heads {heads}"
                return f"{wrong} of {sum(x.numel() for x in expected)} values differ from those of {PLAIN} at {where}"
    return ""


def _is_covered(device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int]) -> bool:
    """Whether the kernel is written for (H, Hkv, D) heads."""
    num_heads, num_kv_heads, dim = heads
    is_known = device.type == "cuda" and dtype == torch.bfloat16 and dim == HEAD_DIM
    return is_known and ROWS % (num_heads // num_kv_heads) == 0


def _is_chosen(device: torch.device, heads: int, kv_heads: int) -> bool:
    key = device, heads, kv_heads
    if key not in _refusals:
        why = _refusals[key] = _refusal(*key)
        is_failure = why and torch.cuda.get_device_capability(device) == CAPABILITY
        text = f"{PLAIN}: {why}" if why else HOPPER
        log.log(
            logging.WARNING if is_failure else logging.INFO,
            "packed attention of %d and %d heads on %s runs %s", heads, kv_heads, device, text,
        )  # fmt: skip
    return not _refusals[key]


@torch.no_grad()
def _refusal(device: torch.device, heads: int, kv_heads: int) -> str:
    capability = torch.cuda.get_device_capability(device)
    if capability != CAPABILITY:
        return f"{HOPPER} is for compute capability {CAPABILITY}, not {capability}"
    if not triton.__version__.startswith(TRITON):
        return f"{HOPPER} is for triton {TRITON}x, not {triton.__version__}"
    try:
        # Gluon is not in every triton.
        from shared.kernels.cuda.attention_hopper import hopper_forward

        with torch.cuda.device(device):
            return difference(hopper_forward, device, torch.bfloat16, (heads, kv_heads, HEAD_DIM))
    except _FAILURES as error:
        return f"{HOPPER} does not run: {type(error).__name__}: {str(error)[:500]}"


def _draw(
    lens: list[int],
    contexts: list[int],
    heads: tuple[int, int, int],
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[Tensor]:
    """q [T, H, D], k and v [E, Hkv, D]."""
    num_heads, num_kv_heads, dim = heads
    generator = torch.Generator(device).manual_seed(seed)
    for rows, h in ((sum(lens), num_heads), (sum(contexts), num_kv_heads), (sum(contexts), num_kv_heads)):
        yield 2 * torch.randn(rows, h, dim, generator=generator, device=device, dtype=dtype)


def _num_differing(a: Tensor, b: Tensor) -> int:
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    return int((a.view(kind) != b.view(kind)).sum())
