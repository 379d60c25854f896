"""Kernel tests run on one thread, with uninitialised memory filled with NaN so that an unwritten output shows."""

import os
import sys
from collections.abc import Iterator

import pytest
import torch

# triton exists for Linux alone
collect_ignore_glob = [] if sys.platform == "linux" else ["test_cuda_*.py"]


@pytest.fixture(autouse=True)
def interpreted_products_walk_k_upwards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter multiplies by numpy, whose BLAS rounds a row by the number of rows; the matrix unit does not."""
    if not request.path.name.startswith("test_cuda_") or "TRITON_INTERPRET" not in os.environ:
        return
    from triton.runtime import interpreter

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):  # type: ignore[no-untyped-def]
        total = d.data.copy()
        left, right = a.data.astype(total.dtype), b.data.astype(total.dtype)
        for k in range(left.shape[1]):
            total += left[:, k : k + 1] * right[k]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan(request: pytest.FixtureRequest) -> Iterator[None]:
    """`torch.empty` yields NaN under deterministic algorithms."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # On a device cuBLAS would be refused: what it promises is certified, not configured.
    torch.use_deterministic_algorithms(True, warn_only=request.node.get_closest_marker("gpu") is not None)
    assert torch.empty(4).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
