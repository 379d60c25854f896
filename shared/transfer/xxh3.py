"""xxh3-128 digests of parts of a buffer on a GPU, computed there: one kilobyte of each part comes to the CPU.

>>> digests(flat, [(0, 4096), (4096, 100)])  # the same as xxhash.xxh3_128_hexdigest of the bytes

Sources: XXH3_hashLong_128b and XXH3_mergeAccs of xxHash 0.8 (github.com/Cyan4973/xxHash, doc/xxhash_spec.md), seed 0.

Legend: L parts that have blocks of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import structlog
import torch
from torch import Tensor

from shared.kernels import current_device
from shared.wire.tensors import tensor_digest

log = structlog.get_logger()

WHOLE_BYTES = 8192
"""Parts up to so many bytes are hashed on the CPU."""
STRIPE_BYTES, BLOCK_BYTES = 64, 1024
END_BYTES = BLOCK_BYTES + STRIPE_BYTES
"""Of a longer part, what its last steps read: what is left behind the blocks, and the last stripe."""

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_P32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_P64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
_INITIAL = np.array([_P32[2], _P64[0], _P64[1], _P64[2], _P64[3], _P32[1], _P64[4], _P32[0]], np.uint64)
_MASK = 2**64 - 1


def digests(flat: Tensor, parts: Sequence[tuple[int, int]]) -> list[str]:
    """Hex xxh3-128 of each part; the device is waited for once. Needs triton.

    Args:
        flat: uint8, contiguous, on the current GPU, or on a CPU under Triton's interpreter; complete in the current stream.
        parts: (offset, length) in bytes; 8 divides the offsets.
    """
    from shared.kernels.cuda import xxh3

    is_long = np.array([length > WHOLE_BYTES for _, length in parts], bool)
    at = np.array(parts, np.int64).reshape(-1, 2)
    offsets_L, lengths_L = at[is_long].T
    states = xxh3.walk(flat, offsets_L, (lengths_L - 1) // BLOCK_BYTES, _INITIAL, _words(_SECRET[:192]))
    taken = [min(length, END_BYTES) if long else length for (_, length), long in zip(parts, is_long, strict=True)]
    ends = [flat[offset + length - n : offset + length] for (offset, length), n in zip(parts, taken, strict=True)]
    data = _to_host(torch.cat([states.view(torch.uint8).view(-1), *ends]))
    states_L8 = data[: states.nbytes].view(np.uint64).reshape(-1, 8)
    pieces = np.split(data[states.nbytes :], np.cumsum(taken)[:-1])
    long_ends = [piece for piece, long in zip(pieces, is_long, strict=True) if long]
    found = iter(_finish(states_L8, np.stack(long_ends), lengths_L) if long_ends else [])
    return [next(found) if long else tensor_digest(piece) for piece, long in zip(pieces, is_long, strict=True)]


@functools.cache
def is_trusted(device: torch.device) -> bool:
    """Whether `digests` runs there and comes to what the library does, tried once."""
    try:
        import triton
    except ImportError:
        return False
    lengths = (40, WHOLE_BYTES, WHOLE_BYTES + 1, 3 * 2**20, 2**20 + 77)
    offsets = np.cumsum([0, *(-(-n // 256) * 256 for n in lengths)]).tolist()
    data = np.random.default_rng(0).integers(0, 256, offsets[-1], np.uint8)
    parts = list(zip(offsets, lengths, strict=False))
    try:
        with current_device(device):
            got = digests(torch.from_numpy(data).to(device), parts)
    except (RuntimeError, triton.TritonError) as error:
        log.warning("weights are digested on the CPU", device=str(device), reason=str(error))
        return False
    expected = [tensor_digest(data[offset : offset + n]) for offset, n in parts]
    if got != expected:
        log.warning("weights are digested on the CPU", device=str(device), reason=f"expected {expected}, got {got}")
    return got == expected


def _finish(states_L8: np.ndarray, ends: np.ndarray, lengths_L: np.ndarray) -> list[str]:
    """What follows on the blocks: whole stripes, the last stripe, and both halves of the digest.

    Args:
        ends: [L, END_BYTES] uint8, the last bytes of each part.
    """
    acc = states_L8.copy()
    left_L = lengths_L - (lengths_L - 1) // BLOCK_BYTES * BLOCK_BYTES
    num_stripes_L = (left_L - 1) // STRIPE_BYTES
    for stripe in range(int(num_stripes_L.max())):
        first_L = np.minimum(END_BYTES - left_L + stripe * STRIPE_BYTES, END_BYTES - STRIPE_BYTES)
        data = np.take_along_axis(ends, first_L[:, None] + np.arange(STRIPE_BYTES), axis=1)
        acc += np.where((stripe < num_stripes_L)[:, None], _stripe(data, 8 * stripe), np.uint64(0))
    acc += _stripe(ends[:, -STRIPE_BYTES:], 192 - STRIPE_BYTES - 7)
    found = []
    for words, length in zip(acc.tolist(), lengths_L.tolist(), strict=True):
        low = _merge(words, 11, length * _P64[0] & _MASK)
        high = _merge(words, 192 - STRIPE_BYTES - 11, ~(length * _P64[1]) & _MASK)
        found.append(f"{high:016x}{low:016x}")
    return found


def _stripe(data: np.ndarray, at: int) -> np.ndarray:
    """[L, 8] uint64: what a stripe [L, 64] adds to the accumulators, with the secret from byte `at` on."""
    words = np.ascontiguousarray(data).view(np.uint64)
    keys = words ^ _words(_SECRET[at : at + STRIPE_BYTES])
    return (keys & np.uint64(0xFFFFFFFF)) * (keys >> np.uint64(32)) + words[:, np.arange(8) ^ 1]


def _merge(acc: list[int], at: int, start: int) -> int:
    key = _words(_SECRET[at : at + STRIPE_BYTES]).tolist()
    total = start
    for i in range(0, 8, 2):
        product = (acc[i] ^ key[i]) * (acc[i + 1] ^ key[i + 1])
        total += (product & _MASK) ^ (product >> 64)
    total &= _MASK
    total ^= total >> 37
    total = total * 0x165667919E3779F9 & _MASK
    return total ^ (total >> 32)


def _words(data: bytes) -> np.ndarray:
    return np.frombuffer(data, "<u8")


def _to_host(data: Tensor) -> np.ndarray:
    if not data.is_cuda:
        return data.numpy()
    host = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
    host.copy_(data, non_blocking=True)
    torch.cuda.current_stream(data.device).synchronize()
    return host.numpy()
