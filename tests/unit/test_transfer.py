"""One layout for all memories, and what verifies a buffer."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.transfer.arena import ALIGNMENT, ArenaLayout
from shared.transfer.digests import checksum, verify_flat
from shared.transfer.memory import SharedArena, Unreachable, map_device, map_shared
from shared.wire.pb.trainer_pb2 import DeviceMemory, SharedMemory
from shared.wire.tensors import DigestMismatch, RawTensor, build_manifest
from tests.deadline import DEADLINE_S

SHAPES = st.dictionaries(
    st.text("abc.", min_size=1, max_size=6),
    st.tuples(st.sampled_from(["bfloat16", "float32"]), st.lists(st.integers(0, 40), max_size=2).map(tuple)),
    min_size=1,
    max_size=6,
)


def filled(shapes: dict, seed: int = 0):
    layout = ArenaLayout.of((n, d, s) for n, (d, s) in shapes.items())
    flat = torch.zeros(max(layout.nbytes, 1), dtype=torch.uint8)
    rng = np.random.default_rng(seed)
    for tensor in layout.views(flat).values():
        data = torch.from_numpy(rng.integers(0, 256, tensor.numel() * tensor.element_size(), dtype=np.uint8))
        tensor.view(-1).view(torch.uint8).copy_(data)
    return layout, flat


def manifest_of(layout: ArenaLayout, flat: torch.Tensor):
    return build_manifest(
        run="demo",
        lineage=0,
        step=0,
        tensors={n: RawTensor(t.dtype, t.shape, bytes(t.data)) for n, t in layout.raw(flat).items()},
        model_config_json="{}",
        run_config_json="{}",
        fingerprint="",
        probe_token_ids=[],
        probe_logprobs=[],
    )


@settings(deadline=None)
@given(shapes=SHAPES, bucket_bytes=st.integers(1, 999))
def test_every_tensor_has_a_place_of_its_own_and_buckets_cover_the_buffer_once(shapes, bucket_bytes) -> None:
    layout, flat = filled(shapes)
    ends = [p.offset + p.nbytes for p in layout.places]
    assert all(p.offset % ALIGNMENT == 0 for p in layout.places)
    assert all(end <= p.offset for end, p in zip(ends, layout.places[1:], strict=False))
    assert sum(len(b) for b in layout.buckets(flat, bucket_bytes)) == layout.nbytes
    assert all(len(b) <= bucket_bytes for b in layout.buckets(flat, bucket_bytes))
    manifest = manifest_of(layout, flat)
    assert ArenaLayout.of_manifest(manifest) == layout
    verify_flat(manifest, layout, flat, num_threads=2)


@settings(deadline=None, max_examples=30)
@given(shapes=SHAPES, data=st.data())
def test_one_flipped_bit_changes_the_digest_and_the_checksum(shapes, data) -> None:
    layout, flat = filled(shapes)
    places = [p for p in layout.places if p.nbytes]
    if not places:
        return
    manifest, before = manifest_of(layout, flat), checksum(layout.views(flat))
    place = data.draw(st.sampled_from(places))
    flat[place.offset + data.draw(st.integers(0, place.nbytes - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(DigestMismatch, match=place.name.replace(".", r"\.")):
        verify_flat(manifest, layout, flat)
    changed = [
        p.name for p, same in zip(layout.places, before == checksum(layout.views(flat)), strict=True) if not same
    ]
    assert changed == [place.name]


def test_a_checksum_sees_an_exchange_and_is_the_same_wherever_a_long_tensor_is_cut(monkeypatch) -> None:
    words = torch.arange(5000, dtype=torch.int32).view(torch.float32)
    exchanged = words.clone()
    exchanged[[10, 3000]] = words[[3000, 10]]
    assert not torch.equal(checksum({"w": words}), checksum({"w": exchanged}))
    whole = checksum({"w": words})
    monkeypatch.setattr("shared.transfer.digests._CHECKSUM_SLICE", 64)
    assert torch.equal(checksum({"w": words}), whole)
    shifted = torch.cat((words[64:128], words[:64], words[128:]))
    assert not torch.equal(checksum({"w": words}), checksum({"w": shifted}))


def test_a_checksum_is_of_the_bytes_and_not_of_where_they_lie() -> None:
    for numel in (6, 7):
        bits = torch.arange(1, 20, dtype=torch.int16).view(torch.bfloat16)
        assert torch.equal(checksum({"w": bits[1 : 1 + numel]}), checksum({"w": bits[1 : 1 + numel].clone()}))


def test_another_process_reads_the_memory_and_it_is_gone_with_its_owner() -> None:
    arena = SharedArena(70_000)
    arena.flat.copy_(torch.arange(70_000, dtype=torch.int64).to(torch.uint8))
    message = arena.message()
    script = (
        "import sys; from shared.transfer.memory import map_shared; from shared.wire.pb.trainer_pb2 import SharedMemory\n"
        "flat = map_shared(SharedMemory.FromString(bytes.fromhex(sys.argv[1]))); print(int(flat.long().sum()))"
    )
    words = [sys.executable, "-c", script, message.SerializeToString().hex()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert int(done.stdout) == int(arena.flat.long().sum())
    mapped = map_shared(message)
    arena.close()
    assert torch.equal(mapped, arena.flat), "what is mapped stays"
    with pytest.raises(Unreachable, match="can't be mapped"):
        map_shared(message)
    assert not os.path.exists(message.path)


def test_memory_of_another_host_is_refused_by_name() -> None:
    with pytest.raises(Unreachable, match="another host or container"):
        map_shared(SharedMemory(host="elsewhere", path="/proc/1/fd/3", nbytes=8))


def test_gpu_memory_without_a_gpu_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(Unreachable, match="none here"):
        map_device(DeviceMemory(host="elsewhere"))


def test_pinned_memory_is_unpinned_when_its_owner_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Runtime:
        """As much of the CUDA runtime as pins."""

        pinned: ClassVar[dict[int, int]] = {}

        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
            self.pinned[address] = nbytes
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            del self.pinned[address]
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    arena = SharedArena(4096)
    arena.pin()
    assert Runtime.pinned == {arena.flat.data_ptr(): 4096}
    arena.close()
    del arena
    assert Runtime.pinned == {}
