"""The ways between GPU memories, on a GPU: needs one, and a second for NCCL."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from services.rollout.sources import Sources, SourceUnavailable
from services.trainer.offers import Offers
from shared.transfer.digests import checksum
from tests.deadline import DEADLINE_S
from tests.integration.source_testing import byte_sum, layout_of, offer, offers, readers, weights

pytestmark = pytest.mark.gpu

ELEMENTS = 40_000_000


def test_another_process_copies_from_this_ones_gpu_and_maps_a_buffer_once() -> None:
    gpu = torch.device("cuda")
    with (
        offers("ipc", device=gpu) as made,
        readers("r0", "r1", device="cuda") as both,
    ):
        for step in range(5):
            manifest = offer(made, step, elements=ELEMENTS, device=gpu)
            for reader in both:
                reader.ask("copy", manifest)
            assert [reader.answer() for reader in both] == 2 * [("copied", byte_sum(step, elements=ELEMENTS))]


def test_the_gpu_of_another_machine_is_refused_and_nothing_is_left_open() -> None:
    gpu = torch.device("cuda")
    with offers("ipc", device=gpu) as made:
        manifest = offer(made, 0, device=gpu)
        slot = made._slots[0]
        assert slot.exported is not None
        slot.exported.message.uuid = "GPU-of-another-machine"
        with pytest.raises(SourceUnavailable, match="is not visible here") as error:
            Sources("r0", gpu).copy(manifest, deadline_s=DEADLINE_S)
        assert error.value.reason == "unreachable"


def test_buffers_of_another_layout_are_gone_from_the_gpu_whether_or_not_somebody_mapped_them() -> None:
    gpu = torch.device("cuda")
    before = torch.cuda.memory_allocated(gpu)
    with offers("ipc", device=gpu) as made, readers("r0", device="cuda") as (reader,):
        for step, elements in enumerate(6 * (ELEMENTS, 2 * ELEMENTS)):
            manifest = offer(made, step, elements=elements, device=gpu)
            if step % 2:
                reader.ask("copy", manifest)
                assert reader.answer() == ("copied", byte_sum(step, elements=elements))
        # Two buffers at most, where a lease was not over yet; six that nobody mapped would be more.
        largest = made._slots[-1].layout.nbytes
        assert torch.cuda.memory_allocated(gpu) - before <= 2 * largest + 2**20


def test_a_buffer_that_was_mapped_by_more_than_one_reader_is_gone_from_the_gpu_though_they_left_first() -> None:
    gpu = torch.device("cuda")

    def all_copy(made: Offers, step: int) -> None:
        manifest = offer(made, step, elements=ELEMENTS, device=gpu)
        for reader in both:
            reader.ask("copy", manifest)
            assert reader.answer() == ("copied", byte_sum(step, elements=ELEMENTS))

    def all_copy_from_another() -> None:
        """Which makes them unmap what they had of the first one."""
        with offers("ipc", device=gpu) as other:
            all_copy(other, 1)

    before = torch.cuda.memory_allocated(gpu)
    with offers("ipc", device=gpu) as made, readers("r0", "r1", device="cuda") as both:
        all_copy(made, 0)
        all_copy_from_another()
        pause, end = threading.Event(), time.monotonic() + DEADLINE_S
        while made._slots[0].readers and time.monotonic() < end:
            pause.wait(0.01)
        offer(made, 2, elements=2 * ELEMENTS, device=gpu)
        (slot,) = made._slots
        assert torch.cuda.memory_allocated(gpu) - before <= slot.layout.nbytes + 2**20


@pytest.mark.parametrize("transport", ["shm", "ipc", "broadcast"])
def test_a_slot_holds_on_the_host_what_was_gathered_on_the_gpu(transport: str) -> None:
    gpu = torch.device("cuda")
    with offers(transport, device=gpu) as made:
        manifest = offer(made, 3, elements=ELEMENTS, device=gpu)
        slot = made._slots[0]
        views = slot.layout.views(slot.host.flat)
        assert all(torch.equal(views[n], t) for n, t in weights(3, elements=ELEMENTS).items())
        assert manifest.source.transport == transport


def test_a_checksum_is_the_same_on_both_devices_and_sees_one_bit() -> None:
    tensors = weights(1, elements=ELEMENTS)
    on_gpu = {name: t.cuda() for name, t in tensors.items()}
    expected = checksum(tensors)
    assert torch.equal(checksum(on_gpu).cpu(), expected)
    on_gpu["a"].view(torch.int16)[-1, 3] ^= -(2**15)
    assert (checksum(on_gpu).cpu() != expected).tolist() == [True, False]
    assert layout_of(tensors).nbytes >= ELEMENTS * 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL has one GPU a member")
def test_nccl_rounds_reach_a_replica_on_another_gpu() -> None:
    with offers("broadcast", device=torch.device("cuda:0")) as made, readers("r0", device="cuda:1") as (reader,):
        for step in range(4):
            reader.ask("copy", offer(made, step, elements=ELEMENTS, device=torch.device("cuda:0")))
            assert reader.answer() == ("copied", byte_sum(step, elements=ELEMENTS))
