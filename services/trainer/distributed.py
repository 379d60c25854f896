"""The ranks of one trainer: one program on all of them, one of them talking to the world outside.

Every rank runs the same loop. What only rank 0 can know (a lease, a run's state, a signal) it finds out alone and tells the
others, so that all take the same branch and meet in the same collectives. Nothing is pickled: what is told is msgpack.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgpack
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class Rank0Failed(RuntimeError):
    """Rank 0 raised something while the others waited for its answer; its log says what."""


class TellAll(RuntimeError):
    """Base of the errors that rank 0 passes on, so that every rank raises them. One text argument."""


@dataclass(frozen=True)
class World:
    """Who takes part. Built by `join`."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def from_leader(self, ask: Callable[[], Any]) -> Any:
        """Calls `ask` on rank 0 and returns its answer on every rank.

        Args:
            ask: returns what msgpack can carry; a TellAll error is raised on every rank. Its time must stay below the
                collective timeout: cut long waits into slices.

        Raises:
            Rank0Failed: on the others, when rank 0 raised anything else.
        """
        if self.size == 1:
            return ask()
        if not self.is_leader:
            return self._hear()
        try:
            answer = ask()
        except TellAll as error:
            self._tell({"error": type(error).__name__, "text": str(error)})
            raise
        except BaseException:
            self._tell({"error": ""})
            raise
        self._tell({"answer": answer})
        return answer

    def _tell(self, message: dict[str, Any]) -> None:
        data = torch.frombuffer(bytearray(msgpack.packb(message, use_bin_type=True)), dtype=torch.uint8)
        dist.broadcast(torch.tensor([len(data)]), src=0)
        dist.broadcast(data, src=0)

    def _hear(self) -> Any:
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, src=0)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, src=0)
        message = msgpack.unpackb(data.numpy().tobytes(), raw=False)
        if "error" in message:
            kinds = {cls.__name__: cls for cls in TellAll.__subclasses__()}
            raise kinds[message["error"]](message["text"]) if message["error"] else Rank0Failed("see the log of rank 0")
        return message["answer"]

    def merge(self, parts: Tensor) -> Tensor:
        """Add up int32 arrays in place; where each element is set by one rank and 0 on all others, exact whatever the bits mean.

        Args:
            parts: int32 on the CPU.
        """
        if self.size > 1:
            dist.all_reduce(parts)
        return parts

    def count(self, is_so: bool) -> int:
        """On how many ranks it is so."""
        return int(self.merge(torch.tensor([int(is_so)], dtype=torch.int32)))

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


def join(device: str, *, timeout_s: float) -> World:
    """Enter the process group that torchrun describes, or a world of one.

    Args:
        device: cpu | cuda | auto.
        timeout_s: after which a collective that some rank never joins fails.

    Raises:
        ValueError: more ranks than GPUs on this machine.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    timeout = timedelta(seconds=timeout_s)
    where = torch.device(device)
    if device == "cuda":
        index, num_gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if index >= num_gpus:
            raise ValueError(
                f"rank {rank} would compute on GPU {index} of this machine, which shows {num_gpus}; start as many ranks here as "
                "there are GPUs in CUDA_VISIBLE_DEVICES, or set device=cpu"
            )
        where = torch.device("cuda", index)
        torch.cuda.set_device(where)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        store = dist.HashStore() if size == 1 else None
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    return World(
        rank=rank,
        size=size,
        device=where,
        mesh=init_device_mesh(device, (size,), mesh_dim_names=("shard",)),
    )


def leave() -> None:
    """The inverse of `join`."""
    if dist.is_initialized():
        dist.destroy_process_group()
