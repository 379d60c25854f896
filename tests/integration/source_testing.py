"""The trainer's side of a weight source in the test's process, and replicas' sides in processes of their own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import torch

from services.trainer.config import TrainerConfig
from services.trainer.offers import Offers, Slot
from shared.transfer.arena import ArenaLayout
from shared.wire.pb.weight_sync_pb2 import Manifest
from shared.wire.tensors import RawTensor
from tests.deadline import DEADLINE_S
from tests.integration.weight_sync_testing import manifest_of

CPU = torch.device("cpu")

READER = """
import os, signal, sys, threading
import torch, torch.distributed as dist
from datetime import timedelta
from services.rollout.sources import Sources, SourceUnavailable
from shared.transfer.group import BroadcastGroup
from shared.wire import rpc
from shared.wire.pb import trainer_pb2 as pb
from shared.wire.pb.trainer_pb2_grpc import WeightSourceStub
from shared.wire.pb.weight_sync_pb2 import Manifest

sources = Sources(sys.argv[1], torch.device(sys.argv[2]))
print("ready", flush=True)
for line in sys.stdin:
    how, data = line.split()
    manifest = Manifest.FromString(bytes.fromhex(data))
    if how == "copy":
        try:
            tensors = sources.copy(manifest, deadline_s={deadline})
            print("copied", sum(int(t.view(torch.uint8).long().sum()) for t in tensors.values()), flush=True)
        except SourceUnavailable as error:
            print("failed", error.reason, flush=True)
        continue
    # Takes its place in the group, and is gone when the bytes come.
    with rpc.channel(manifest.source.address) as channel:
        request = pb.AcquireRequest(manifest_digest=manifest.version.digest, replica=sys.argv[1],
                                    member=sources._member)
        round_ = next(WeightSourceStub(channel).Acquire(request, timeout={deadline})).broadcast
        host, port = round_.store.rsplit(":", 1)
        store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds={deadline}))
        BroadcastGroup(store, store_host=host, epoch=round_.epoch, rank=round_.rank, size=round_.size,
                       device=torch.device("cpu"), timeout_s={deadline})
        print("in", flush=True)
        os.kill(os.getpid(), signal.SIGKILL if how == "die" else signal.SIGSTOP)
"""


class Reader:
    """A replica's side: `copy` as a replica does it; `die` or `stop` in the middle of a round."""

    def __init__(self, name: str, device: str = "cpu") -> None:
        script = READER.replace("{deadline}", str(DEADLINE_S))
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, name, device], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, how: str, manifest: Manifest) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{how} {manifest.SerializeToString().hex()}\n")
        self.process.stdin.flush()

    def copy(self, manifest: Manifest) -> tuple[str, ...]:
        """The answer to `copy`; again where a slow machine made the round miss its deadline."""
        for _ in range(10):
            self.ask("copy", manifest)
            if (answer := self.answer())[0] != "failed":
                break
        return answer

    def answer(self) -> tuple[str, ...]:
        assert self.process.stdout is not None
        return tuple(self.process.stdout.readline().split())


@contextlib.contextmanager
def readers(*names: str, device: str = "cpu") -> Iterator[list[Reader]]:
    found = [Reader(name, device) for name in names]
    try:
        for reader in found:
            assert reader.answer() == ("ready",)
        yield found
    finally:
        for reader in found:
            reader.process.kill()
            reader.process.communicate()


@contextlib.contextmanager
def offers(transport: str, *, device: torch.device = CPU, **config: object) -> Iterator[Offers]:
    made = Offers(TrainerConfig(transport=transport, **config), device)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()


def weights(step: int, *, elements: int = 200_000) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "a": torch.randn(elements, generator=generator).bfloat16().view(-1, 8),
        "b": torch.randn(3, generator=generator),
    }


def fill(slot: Slot, tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        slot.fill(name, tensor)
    slot.finish()


def layout_of(tensors: dict[str, torch.Tensor]) -> ArenaLayout:
    return ArenaLayout.of((n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items())


def offer(made: Offers, step: int, *, elements: int = 200_000, device: torch.device = CPU) -> Manifest:
    """The weights of a step, in a slot and on offer."""
    tensors = {name: t.to(device) for name, t in weights(step, elements=elements).items()}
    slot = made.room(layout_of(tensors))
    assert slot is not None
    fill(slot, tensors)
    manifest = manifest_of(step, slot.tensors())
    made.offer(manifest, slot)
    return manifest


def byte_sum(step: int, *, elements: int = 200_000) -> str:
    return str(sum(int(t.view(torch.uint8).long().sum()) for t in weights(step, elements=elements).values()))


def raw(tensors: dict[str, torch.Tensor]) -> dict[str, RawTensor]:
    return {
        n: RawTensor(str(t.dtype).removeprefix("torch."), tuple(t.shape), t.view(torch.uint8).numpy())
        for n, t in tensors.items()
    }
