"""The trainer's rank 0 and its replicas as a group of their own, for one membership; gloo on CPUs, NCCL on GPUs.

The group stands beside torch's default one and is not known to it. It is given up as a whole when a member dies or is late:
whoever is left makes a new one, under another epoch.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

POLL_S = 0.0005

_NCCL_ENVIRONMENT = {
    # A replica that dies must not take the trainer with it: we end what hangs ourselves.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
_NCCL_RESTRICTIONS = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_NTHREADS",
                      "NCCL_P2P_DISABLE")  # fmt: skip
"""What deterministic training may have set for its own group: a copy has no order of additions to keep."""


class GroupFailed(RuntimeError):
    """A member died, or did not come in time; the group is of no use any more."""


class BroadcastGroup:
    """Rank 0 sends. Every member makes it at about the same time; raises GroupFailed when one does not come.

    Args:
        store: of the trainer, reached by all.
        store_host: where it is; gloo listens on the interface that leads there (NCCL on the one that NCCL_SOCKET_IFNAME names).
        epoch: of this membership; never used twice with one store.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        store_host: str,
        epoch: int,
        rank: int,
        size: int,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self.epoch, self.rank, self.size, self._device = epoch, rank, size, device
        timeout = timedelta(seconds=timeout_s)
        store = dist.PrefixStore(f"epoch-{epoch}", store)
        try:
            # NCCL waits for members without end, so they are counted first.
            store.set(f"here-{rank}", "1")
            store.wait([f"here-{r}" for r in range(size)], timeout)
            if device.type == "cuda":
                self._group: Any = _connected_nccl(store, rank, size, device)
                self._stream = torch.cuda.Stream(device)
            else:
                self._group = dist.ProcessGroupGloo(store, rank, size, _gloo_options(store_host, timeout))
        except (RuntimeError, ValueError, OSError) as error:
            raise GroupFailed(f"no group of {size} members within {timeout_s} s: {error}") from error

    def broadcast(self, buckets: Iterator[Tensor], *, timeout_s: float) -> None:
        """Fills every member's buckets with those of rank 0, one after the other. Raises GroupFailed, and then it is closed.

        Args:
            buckets: equally many of the same sizes at every member, uint8 on the group's device.
        """
        end = time.monotonic() + timeout_s
        try:
            for bucket in buckets:
                self._broadcast(bucket, end)
        except RuntimeError as error:
            self.close()
            raise GroupFailed(f"broadcast of epoch {self.epoch} to {self.size - 1} replicas: {error}") from error

    def _broadcast(self, bucket: Tensor, end: float) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        left_s = max(0.001, end - time.monotonic())
        if self._device.type == "cpu":
            options.timeout = timedelta(seconds=left_s)
            self._group.broadcast([bucket], options).wait(timedelta(seconds=left_s))
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._group.broadcast([bucket], options).wait()
            done = torch.cuda.Event()
            done.record()
        # CUDA has no wait with a deadline.
        pause = threading.Event()
        while not done.query():
            if time.monotonic() > end:
                raise RuntimeError("a member did not take its bytes in time")
            pause.wait(POLL_S)

    def close(self) -> None:
        """Ends what is under way, here at least."""
        with contextlib.suppress(RuntimeError):
            self._group.abort()


def _connected_nccl(store: dist.Store, rank: int, size: int, device: torch.device) -> Any:
    """A group whose communicator stands: made at the first broadcast, it would be made in another environment, and the time of
    the bytes would go to it. NCCL refuses two members on one GPU here."""
    options = dist.ProcessGroupNCCL.Options()
    # Far beyond the deadline of any call, which ends it.
    options._timeout = timedelta(days=1)
    with torch.cuda.device(device), _nccl_environment():
        group = dist.ProcessGroupNCCL(store, rank, size, options)
        # With its number, by which the group finds the communicator again.
        group.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
    return group


def _gloo_options(store_host: str, timeout: timedelta) -> Any:
    """By default gloo listens on the address of the host's name, which may be another network's, or the loopback's."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address_towards(store_host))]
    options._timeout = timeout
    return options


def address_towards(host: str) -> str:
    """The address of this machine's interface that leads to another one. Raises OSError when there is none."""
    family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # Sends nothing: it only chooses the route.
        probe.connect(address)
        return str(probe.getsockname()[0])


@contextlib.contextmanager
def _nccl_environment() -> Iterator[None]:
    """What NCCL and torch read when a group is made."""
    before = {name: os.environ.get(name) for name in (*_NCCL_ENVIRONMENT, *_NCCL_RESTRICTIONS)}
    for name in _NCCL_RESTRICTIONS:
        os.environ.pop(name, None)
    os.environ.update(_NCCL_ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
