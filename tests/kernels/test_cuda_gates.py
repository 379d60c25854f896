"""The gate of the kernels' benchmark: what is red is not timed, and a wrong gradient is red."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import kernels
from benchmarks.harness import Record, Recorder, gradient_errors
from benchmarks.kernel_cases.fixed_tile import fixed_tile
from shared.kernels.cuda.gemm import REFERENCE, gemm
from tests.kernels.kernel_testing import same_bits, wide


class Section:
    """Checks that come to one number."""

    def __init__(self, metric: str, value: float) -> None:
        self.found = Record("kernels", "case", {}, "exact", metric, value, "")
        self.is_timed = False

    def check(self) -> list[Record]:
        return [self.found]

    def time(self, limits: dict[str, float]) -> Iterator[Record]:
        self.is_timed = True
        return iter(())


@pytest.mark.parametrize(
    ("metric", "value", "is_timed"),
    [
        ("differing_bits", 0, True),
        ("differing_bits", 1, False),
        ("gradient_error_ratio", 1.0, True),
        ("gradient_error_ratio", 1.1, False),
        ("gradient_error_ratio", float("nan"), False),
    ],
)
def test_a_section_is_timed_only_where_no_check_is_red(metric: str, value: float, is_timed: bool) -> None:
    section, recorder = Section(metric, value), Recorder(None)
    assert kernels.run_section("case", section, {}, recorder) is is_timed
    assert section.is_timed is is_timed
    assert section.found in recorder.records, "what was found is told either way"


@pytest.mark.parametrize("shape", [(3, 70, 40), (300, 260, 130)], ids=str)
def test_the_published_products_are_in_the_class_whichever_program_takes_a_tile(shape: tuple[int, int, int]) -> None:
    """More tiles than programs, and less; sizes that are no multiples of a tile's."""
    tokens, n, k = shape
    x, w = wide(tokens, k, dtype=torch.float16), wide(n, k, dtype=torch.float16, seed=1)
    expected = gemm(x, w, REFERENCE, bias=None, out=torch.empty(tokens, n, dtype=torch.float16))
    assert same_bits(fixed_tile(x, w, out=torch.empty_like(expected)), expected)


def test_each_gradient_is_measured_against_float64_and_a_wrong_one_is_red() -> None:
    inputs = {"gate": wide(9, 20, dtype=torch.float16), "up": wide(9, 20, dtype=torch.float16, seed=1)}

    def plain(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    def ours(gate: Tensor, up: Tensor) -> Tensor:
        return (F.silu(gate.float()) * up.float()).half()

    def wrong(gate: Tensor, up: Tensor) -> Tensor:
        return ours(gate, up + 0.01 * (up - up.detach()))

    for run, red in ((plain, []), (ours, []), (wrong, ["up"])):
        found = list(gradient_errors("silu_mul", run, plain, inputs))
        assert [r.params["gradient"] for r in found] == ["gate", "up"]
        assert [r.params["gradient"] for r in found if kernels.is_red(r)] == red
