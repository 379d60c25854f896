"""`pytest -m gpu`: the row contract of the whole engine on the device, in small; a million tokens are `benchmarks.contract`'s."""

from dataclasses import replace

import pytest
import torch

from benchmarks.contract import PLANS, problems
from benchmarks.engine_cases.arms import Arms, Plan
from benchmarks.engine_cases.drive import Weights

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def as_services_run(uninitialised_memory_is_nan: None) -> None:
    """Without the fills and the other kernels that deterministic algorithms bring into captured steps."""
    torch.use_deterministic_algorithms(False)


def small(plan: Plan) -> Plan:
    """Four layers, short answers and few rows: every arm, in seconds. Answers cross several pages, or none would be preempted."""
    return replace(
        plan, model=replace(plan.model, num_layers=4), num_requests=45, new_tokens=48, batch_sizes=(1, 2, 8, 32, 44),
        least_requests=6, prompt_tokens=(1, 150), page_size=16,
    )  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", list(PLANS))
def test_no_company_changes_a_bit_and_the_library_does(name: str) -> None:
    plan = small(PLANS[name])
    arms = Arms(plan, Weights(plan.model, plan.device, plan.dtype))
    found, controls = list(arms.run()), list(arms.controls())
    assert problems({name: found}, {name: controls}, is_proof=False) == []
