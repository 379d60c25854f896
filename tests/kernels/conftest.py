"""Kernel tests run on one thread, with uninitialised memory filled with NaN so that an unwritten output shows."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan() -> Iterator[None]:
    """`torch.empty` yields NaN under deterministic algorithms."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    assert torch.empty(4).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
