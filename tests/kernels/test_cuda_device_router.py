"""`pytest -m gpu` on a CUDA machine: routers and replayed mixtures, on raw bits."""

import pytest
import torch

from shared.kernels.cuda.ops import CudaOps
from shared.kernels.router import route_softmax
from tests.kernels.cuda_testing import DEVICE, HALF, device_ops, relative_error
from tests.kernels.kernel_testing import same_bits, wide
from tests.kernels.mixture_testing import ROUTERS, Mixture, Sizes, plain, records, route_by

pytestmark = pytest.mark.gpu
SIZES = Sizes(experts=96, top_k=8, hidden=256, inner=128)
TOKENS = 300


@pytest.fixture(scope="module")
def ops(tmp_path_factory: pytest.TempPathFactory) -> CudaOps:
    return device_ops(tmp_path_factory.mktemp("table"))


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)
def test_rows_of_a_router_stand_alone(name: str, dtype: torch.dtype) -> None:
    """bfloat16 logits have ties in nearly every row."""
    logits = wide(5000, 384, dtype=dtype).to(DEVICE)
    for recorded in (None, records(5000, sizes=Sizes(384, 8, 0, 0)).to(DEVICE)):
        whole = route_by(name, logits, 8, recorded)
        for rows in (slice(0, 1), slice(4999, 5000), slice(7, 40), slice(1000, 4097)):
            part = route_by(name, logits[rows], 8, None if recorded is None else recorded[rows])
            assert all(same_bits(a[rows], b) for a, b in zip(whole, part, strict=True)), rows
        on_host = route_by(name, logits.cpu(), 8, whole[0].cpu())
        torch.testing.assert_close(whole[1].cpu(), on_host[1], rtol=1e-4, atol=1e-6)
    if name == "softmax":
        assert torch.equal(route_softmax(logits, 8)[0].cpu(), route_softmax(logits.cpu(), 8)[0]), (
            "comparing rounds nothing"
        )


@pytest.mark.parametrize("name", ROUTERS)
def test_replaying_the_native_experts_changes_no_bit_and_neither_does_recomputing(ops: CudaOps, name: str) -> None:
    mixture, x = Mixture(ops, name, HALF, SIZES, block=64), wide(TOKENS, SIZES.hidden, dtype=HALF).to(DEVICE)
    native = mixture.graded(x, None, recompute=False)
    for recorded in (None, native[0].to(torch.uint8), native[0].to(torch.int16).cpu()):
        for recompute in (False, True):
            again = mixture.graded(x, recorded, recompute=recompute)
            assert all(same_bits(a, b) for a, b in zip(native, again, strict=True)), (recorded, recompute)


@pytest.mark.parametrize("name", ROUTERS)
def test_a_replayed_mixture_has_the_values_and_gradients_of_its_definition(ops: CudaOps, name: str) -> None:
    mixture, x = Mixture(ops, name, HALF, SIZES), wide(TOKENS, SIZES.hidden, dtype=HALF).to(DEVICE)
    experts, *got = mixture.graded(x, records(TOKENS, sizes=SIZES), recompute=True)
    for i, (ours, exact) in enumerate(zip(got, plain(mixture, x, experts), strict=True)):
        assert relative_error(ours, exact) < 3e-2, i
