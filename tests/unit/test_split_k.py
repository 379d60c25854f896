"""Split-K is for the products of a weight's gradient alone: a flag of the process that must be back whatever becomes of one."""

import pytest
import torch

from shared.kernels.cuda.linear import split_k_allowed


@pytest.mark.parametrize("before", [(False, False), (True, True)])
def test_the_flag_is_set_for_the_product_and_then_as_it_was(before: tuple[bool, bool]) -> None:
    flags, read = torch.backends.cuda.matmul, torch._C._get_cublas_allow_bf16_reduced_precision_reduction
    whole, seen = read(), []

    def product() -> None:
        with split_k_allowed(is_cuda=True):
            seen.append(read())
            raise RuntimeError("out of memory")

    try:
        flags.allow_bf16_reduced_precision_reduction = before
        with pytest.raises(RuntimeError, match="out of memory"):
            product()
        assert seen == [(before[0], True)]
        assert read() == before
    finally:
        flags.allow_bf16_reduced_precision_reduction = whole
