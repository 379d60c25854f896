"""Whether a flat buffer holds the bytes that a manifest names: by the digests themselves, or by a checksum made where they lie.

A digest of device memory needs every byte on the CPU, which takes too long between two steps. So a buffer is verified by its
digests while it is in staging, its checksum taken; after it was copied on the device the checksums are compared.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
import xxhash
from torch import Tensor

from shared.transfer.arena import ArenaLayout
from shared.wire.pb.weight_sync_pb2 import Manifest
from shared.wire.tensors import DigestMismatch, tensor_digest

SLICE_BYTES = 32 * 2**20
"""What of a GPU's memory is on the CPU at once, for each thread."""
_CHECKSUM_SLICE = 2**24
"""Elements; bounds the temporary memory of a checksum."""


def verify_flat(manifest: Manifest, layout: ArenaLayout, flat: Tensor, *, num_threads: int = 1) -> None:
    """Digests every tensor of the buffer. Raises DigestMismatch.

    Args:
        flat: [layout.nbytes] uint8 on any device.
        num_threads: hashing releases the interpreter's lock, so they help until the memory is the limit.
    """
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

    places = {p.name: p for p in layout.places}
    # The longest first, so that no thread is left alone with it at the end.
    entries = sorted(manifest.tensors, key=lambda e: -e.nbytes)
    with ThreadPoolExecutor(num_threads) as pool:
        for e, got in zip(entries, pool.map(digest, [e.name for e in entries]), strict=True):
            if got != e.digest:
                raise DigestMismatch(e.name, e.digest, got)


def checksum(tensors: Mapping[str, Tensor]) -> Tensor:
    """[number of tensors] int64, one for each in name order, on their device; any changed bit changes it.

    Each element, as an integer of 16 or 32 bits, is multiplied modulo 2^32 by an odd number of its place, so a change of it
    alone can't cancel, and an exchange of two is seen; sums of integers have no order.
    """
    device = next(iter(tensors.values())).device
    longest = min(_CHECKSUM_SLICE, max(t.numel() for t in tensors.values()))
    weight = torch.arange(longest, dtype=torch.int32, device=device).mul_(-1640531535).bitwise_or_(1)
    sums = []
    for _, tensor in sorted(tensors.items()):
        words = tensor.detach().reshape(-1).view(torch.int32 if tensor.element_size() == 4 else torch.int16)
        total = torch.zeros((), dtype=torch.int64, device=device)
        for index, part in enumerate(words.split(_CHECKSUM_SLICE)):
            total = total * 31 + (part.to(torch.int32) * weight[: len(part)]).sum(dtype=torch.int64) + index
        sums.append(total)
    return torch.stack(sums)
