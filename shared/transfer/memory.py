"""A buffer of one process read by another one of the same host: in the CPU's memory, or on a GPU.

The owner keeps a buffer for as long as it lives, so a reader maps it once. That a reader copies only what is not being
overwritten is the business of whoever hands the buffers out; if it fails, the digests show it.
"""

from __future__ import annotations

import mmap
import os
import weakref
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from shared.wire.pb.trainer_pb2 import DeviceMemory, SharedMemory

NUM_BUFFERS = 2
"""That an owner has: the version being trained from and the one before it."""
_NOT_COUNTED = b"/timzero-no-counter", 0
"""File of a reference counter that is not there: torch's way of leaving the counter of an owner that is gone alone."""
_NO_EVENT = bytes(64), False


class Unreachable(OSError):
    """The other process's memory can't be had from here; the text says why."""


@cache
def host_id() -> str:
    """The same in two processes that can open each other's files under /proc."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


class SharedArena:
    """A buffer without a name in the file system: it is gone when the last process that maps it is."""

    def __init__(self, nbytes: int) -> None:
        self._file = os.memfd_create("timzero-weights")
        os.ftruncate(self._file, nbytes)
        self.flat = torch.frombuffer(mmap.mmap(self._file, nbytes), dtype=torch.uint8)
        """[nbytes] uint8."""

    def message(self) -> SharedMemory:
        return SharedMemory(
            host=host_id(),
            path=f"/proc/{os.getpid()}/fd/{self._file}",
            nbytes=self.flat.numel(),
            inode=os.fstat(self._file).st_ino,
        )

    def pin(self) -> None:
        """Lets a GPU copy to it at full speed. Raises RuntimeError when that is not possible."""
        runtime, address = torch.cuda.cudart(), self.flat.data_ptr()
        torch.cuda.check_error(runtime.cudaHostRegister(address, self.flat.numel(), 0))
        # Before it is unmapped: what is mapped to its address next could not be pinned.
        weakref.finalize(self, runtime.cudaHostUnregister, address).atexit = False

    def close(self) -> None:
        """The memory stays until the last view of it is gone."""
        os.close(self._file)


def map_shared(message: SharedMemory) -> Tensor:
    """[nbytes] uint8; not to be written to. Raises Unreachable."""
    _require_same_host(message.host, "the trainer's memory")
    try:
        with open(message.path, "rb") as file:
            if os.fstat(file.fileno()).st_ino != message.inode:
                raise Unreachable(f"the trainer's memory {message.path} is another file by now")
            # Private: what nobody writes to is shared all the same, and torch wants memory that could be written.
            mapped = mmap.mmap(file.fileno(), message.nbytes, access=mmap.ACCESS_COPY)
    except Unreachable:
        raise
    except (OSError, ValueError) as error:
        raise Unreachable(f"the trainer's memory {message.path} can't be mapped: {error}") from error
    return torch.frombuffer(mapped, dtype=torch.uint8)


class DeviceExport:
    """A buffer on a GPU that any number of processes may map; made once for each buffer.

    torch counts the readers of a tensor that it shares, one for every export, and keeps the memory until the count is 0: not
    before a reader that died, and never again once more readers left than there were exports. So nobody counts here: the one
    reader that an export counts is this object, and the readers leave the counter alone (`map_device`).

    Args:
        flat: [nbytes] uint8 on a GPU, the whole of its storage.
    """

    def __init__(self, flat: Tensor) -> None:
        # (device, handle, bytes of the storage, its offset in the allocation, reference counter, an event of the owner's
        # stream, which is of no use: what a buffer holds is offered once it is there)
        shared = flat.untyped_storage()._share_cuda_()
        _, handle, storage_bytes, storage_offset, *self._counter, _, _ = shared
        self.message = DeviceMemory(
            host=host_id(),
            uuid=_uuid(flat.device.index),
            handle=handle,
            storage_bytes=storage_bytes,
            storage_offset=storage_offset,
            nbytes=flat.numel(),
        )

    def close(self) -> None:
        """From now on the memory is free with its tensor."""
        handle, offset = self._counter
        torch.UntypedStorage._release_ipc_counter(handle, offset, device="cuda")


def map_device(message: DeviceMemory) -> Tensor:
    """[nbytes] uint8 on the owner's GPU; not to be written to. Raises Unreachable."""
    if not torch.cuda.is_available():
        raise Unreachable("the trainer's weights lie on a GPU, and there is none here")
    _require_same_host(message.host, "the trainer's GPU memory")
    devices = {_uuid(i): i for i in range(torch.cuda.device_count())}
    if message.uuid not in devices:
        raise Unreachable(
            f"GPU {message.uuid} of the trainer is not visible here (visible: {', '.join(devices)}); "
            "CUDA IPC needs it in CUDA_VISIBLE_DEVICES of both, or use transport 'shm'"
        )
    try:
        torch.cuda.init()
        storage = torch.UntypedStorage._new_shared_cuda(
            devices[message.uuid],
            message.handle,
            message.storage_bytes,
            message.storage_offset,
            *_NOT_COUNTED,
            *_NO_EVENT,
        )
    except RuntimeError as error:
        raise Unreachable(f"the trainer's GPU memory can't be mapped: {error}") from error
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage, 0, (message.nbytes,), (1,))


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _require_same_host(host: str, what: str) -> None:
    if host != host_id():
        raise Unreachable(f"{what} is that of another host or container ({host}, this is {host_id()})")
