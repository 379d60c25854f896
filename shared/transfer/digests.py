"""Whether a flat buffer holds the bytes that a manifest names: by the digests themselves, or by a checksum made where they lie.

A digest walks along a tensor, which takes too long between two steps. So a buffer is verified by its digests while it is in
staging, its checksum taken; after it was copied on the device the checksums are compared.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
import xxhash
from torch import Tensor

from shared.kernels import current_device
from shared.transfer import xxh3
from shared.transfer.arena import ArenaLayout, Place
from shared.wire.pb.weight_sync_pb2 import Manifest
from shared.wire.tensors import DigestMismatch, tensor_digest

SLICE_BYTES = 4 * 2**20
"""What of a GPU's memory is on the CPU at once, for each thread, where digests are made there. Copies to the CPU run one behind
another whatever their stream: a step's results wait for what all threads have under way."""
_CHECKSUM_SLICE = 2**24
"""Words; bounds the temporary memory of a checksum."""
_WEIGHT = -1640531535
"""2^32 over the golden ratio, as int32: odd, and multiples of it look like noise."""


def verify_flat(manifest: Manifest, layout: ArenaLayout, flat: Tensor, *, num_threads: int = 1) -> None:
    """Digests every tensor of the buffer, on a GPU in the current stream where it can. Raises DigestMismatch.

    Args:
        flat: [layout.nbytes] uint8 on any device, complete.
        num_threads: on a CPU. Hashing releases the interpreter's lock, so they help until the memory is the limit.
    """
    places = {p.name: p for p in layout.places}
    if flat.is_cuda and xxh3.is_trusted(flat.device):
        with current_device(flat.device):
            found = xxh3.digests(flat, [(places[e.name].offset, e.nbytes) for e in manifest.tensors])
        for e, got in zip(manifest.tensors, found, strict=True):
            if got != e.digest:
                raise DigestMismatch(e.name, e.digest, got)
        return
    _verify_on_cpu(manifest, places, flat, num_threads)


def describe(device: torch.device) -> str:
    """What digests the bytes there."""
    return "xxh3.sum_kernel" if device.type == "cuda" and xxh3.is_trusted(device) else "xxhash"


def _verify_on_cpu(manifest: Manifest, places: Mapping[str, Place], flat: Tensor, num_threads: int) -> None:
    local = threading.local()

    def digest(name: str) -> str:
        data = flat[places[name].offset :][: places[name].nbytes]
        if data.device.type == "cpu":
            return tensor_digest(data.numpy())
        total = xxhash.xxh3_128()
        # A thread of the pool begins on the first GPU, and would take memory there when it goes back to it.
        with torch.cuda.device(data.device):
            if not hasattr(local, "buffer"):
                local.buffer = torch.empty(SLICE_BYTES, dtype=torch.uint8, pin_memory=True)
                local.stream = torch.cuda.Stream(data.device)
            for part in data.split(SLICE_BYTES):
                host = local.buffer[: len(part)]
                with torch.cuda.stream(local.stream):
                    host.copy_(part, non_blocking=True)
                local.stream.synchronize()
                total.update(memoryview(host.numpy()))
        return total.hexdigest()

    # The longest first, so that no thread is left alone with it at the end.
    entries = sorted(manifest.tensors, key=lambda e: -e.nbytes)
    with ThreadPoolExecutor(num_threads) as pool:
        for e, got in zip(entries, pool.map(digest, [e.name for e in entries]), strict=True):
            if got != e.digest:
                raise DigestMismatch(e.name, e.digest, got)


def checksum(tensors: Mapping[str, Tensor]) -> Tensor:
    """[number of tensors] int64, one for each in name order, on their device; any changed bit changes it.

    Each word of 32 bits (of 16, where a tensor is no whole number of those) is multiplied modulo 2^32 by an odd number of its
    place, so a change of it alone can't cancel, and an exchange of two is seen; sums of integers have no order.
    """
    words = [_words(tensor.detach()) for _, tensor in sorted(tensors.items())]
    device = words[0].device
    if device.type == "cuda" and xxh3.is_trusted(device):
        from shared.kernels.cuda.checksum import weighted_sums

        with current_device(device):
            return weighted_sums(words, _WEIGHT)
    return torch.stack([_weighted_sum(w) for w in words])


def _weighted_sum(words: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for begin in range(0, len(words), _CHECKSUM_SLICE):
        part = words[begin : begin + _CHECKSUM_SLICE]
        places = torch.arange(begin, begin + len(part), dtype=torch.int32, device=words.device)
        total += (part * places.mul_(_WEIGHT).bitwise_or_(1)).sum(dtype=torch.int64)
    return total


def _words(tensor: Tensor) -> Tensor:
    """[n] int32."""
    flat = tensor.reshape(-1)
    size = flat.element_size()
    if flat.nbytes % 4:
        return flat.view(torch.int16).int()
    # How the bytes are read is theirs alone, not a matter of where they lie.
    return (flat if flat.storage_offset() * size % 4 == 0 else flat.clone()).view(torch.int32)
