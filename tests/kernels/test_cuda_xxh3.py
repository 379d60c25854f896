"""Digests made on the device are the library's, and checksums those of the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shared.kernels.cuda import xxh3 as kernels
from shared.kernels.cuda.checksum import BLOCK, BLOCKS, weighted_sums
from shared.transfer import digests, xxh3

PART = BLOCK * BLOCKS
"""Words of a tensor that one program sums up."""
SIZES = st.one_of(st.integers(1, 9000), st.integers(PART - 2, 3 * PART))
LENGTHS = st.one_of(st.integers(0, 3000), st.integers(8000, 80_000), st.integers(8, 78).map(lambda n: 1024 * n))


def buffer(lengths: list[int], seed: int) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    offsets = np.cumsum([0, *(-(-n // 256) * 256 for n in lengths)])
    data = np.random.default_rng(seed).integers(0, 256, max(8, offsets[-1]), np.uint8)
    return torch.from_numpy(data), list(zip(offsets.tolist(), lengths, strict=False))


def expected(flat: torch.Tensor, parts: list[tuple[int, int]]) -> list[str]:
    return [xxhash.xxh3_128_hexdigest(flat.numpy()[begin : begin + n].tobytes()) for begin, n in parts]


@settings(deadline=None, max_examples=15)
@given(lengths=st.lists(LENGTHS, min_size=1, max_size=4), seed=st.integers(0, 99))
def test_parts_of_every_length_have_the_digests_of_the_library(lengths: list[int], seed: int) -> None:
    flat, parts = buffer(lengths, seed)
    assert xxh3.digests(flat, parts) == expected(flat, parts)


def test_tensors_walked_in_rounds_and_extreme_words_have_the_digests_of_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "MOST_SUMS", 40)
    flat, parts = buffer([33_000, 20_000, 9000, 100_000, 12_000], 7)
    flat[:33_000] = 255
    assert xxh3.digests(flat, parts) == expected(flat, parts)


def test_another_byte_anywhere_is_another_digest() -> None:
    flat, parts = buffer([50_000], 3)
    before = xxh3.digests(flat, parts)
    for place in (0, 1023, 1024, 32_768, 48_999, 49_151, 49_152, 49_999):
        flat[place] ^= 1
        assert xxh3.digests(flat, parts) != before, place
        flat[place] ^= 1
    assert xxh3.digests(flat, parts) == before


def test_a_device_that_computes_something_else_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    xxh3.is_trusted.cache_clear()
    assert xxh3.is_trusted(torch.device("cpu"))
    xxh3.is_trusted.cache_clear()
    monkeypatch.setattr(xxh3, "digests", lambda flat, parts: ["0" * 32 for _ in parts])
    assert not xxh3.is_trusted(torch.device("cpu"))
    xxh3.is_trusted.cache_clear()


@settings(deadline=None, max_examples=10)
@given(sizes=st.lists(SIZES, min_size=1, max_size=4), seed=st.integers(0, 99))
@example(sizes=[3 * PART + 1, 1, 2 * PART, PART + BLOCK], seed=0)
def test_checksums_in_one_launch_are_those_of_tensor_after_tensor(sizes: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    words = [torch.from_numpy(rng.integers(-(2**31), 2**31, n, np.int32)) for n in sizes]
    expected = torch.stack([digests._weighted_sum(w) for w in words])
    assert torch.equal(weighted_sums(words, digests._WEIGHT), expected)


@pytest.mark.gpu
def test_checksums_on_the_gpu_are_those_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = {n: torch.randint(-(2**15), 2**15, (n,), generator=generator).short() for n in (3, 64, 2**25 + 2, 300_001)}
    tensors = {str(n): b.view(torch.bfloat16) for n, b in bits.items()}
    assert torch.equal(digests.checksum({n: t.cuda() for n, t in tensors.items()}).cpu(), digests.checksum(tensors))


@pytest.mark.gpu
def test_large_tensors_on_the_gpu_have_the_digests_of_the_library() -> None:
    assert xxh3.is_trusted(torch.device("cuda", 0))
    flat, parts = buffer([2**28 + 5, 4096, 77, 2**27, 12_582_912, 256], 1)
    assert xxh3.digests(flat.cuda(), parts) == expected(flat, parts)
