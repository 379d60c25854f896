"""cuBLAS and split-K are for a weight's gradient alone: settings of the process that must be back whatever becomes of one."""

from typing import Any

import pytest
import torch

from shared.kernels.cuda.linear import library_products


def settings() -> tuple[Any, ...]:
    cuda, flags = torch.backends.cuda, torch._C
    return (
        cuda.preferred_blas_library(),
        flags._get_cublas_allow_bf16_reduced_precision_reduction(),
        flags._get_cublas_allow_fp16_reduced_precision_reduction(),
    )


def set_all(library: Any, bf16: tuple[bool, bool], fp16: tuple[bool, bool]) -> None:
    torch.backends.cuda.preferred_blas_library(library)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = bf16
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = fp16


@pytest.mark.parametrize("flags", [(False, False), (True, True)])
def test_settings_hold_for_the_product_and_are_then_as_they_were(flags: tuple[bool, bool]) -> None:
    whole, seen = settings(), []

    def product() -> None:
        with library_products(is_cuda=True):
            seen.append(settings())
            raise RuntimeError("out of memory")

    try:
        # A build for CPUs has no other library.
        set_all("cublaslt" if torch.backends.cuda.is_built() else "cublas", flags, flags)
        before = settings()
        with pytest.raises(RuntimeError, match="out of memory"):
            product()
        assert seen == [(torch._C._BlasBackend.Cublas, (flags[0], True), (flags[0], True))]
        assert settings() == before
    finally:
        set_all(*whole)
