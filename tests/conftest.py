"""Settings that every test shares."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

# Set before torch is imported anywhere: two processes with two threads each on two cores lose half to contention.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]

# Neither a deadline nor a complaint about slowness: on a shared machine both measure the neighbours. The ordinary suite
# tries the same examples every time, so that it says something about the change at hand; `thorough` looks for new ones.
settings.register_profile(
    "timzero", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", settings.get_profile("timzero"), derandomize=False, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "timzero"))

WITHOUT_TORCH = """
import sys
# Exactly what an absent package looks like: `import` fails and importlib.util.find_spec answers None.
sys.modules.update(dict.fromkeys(["torch", "triton", "torchvision", "shared.kernels", "shared.models"]))
"""


def pytest_configure(config: pytest.Config) -> None:
    """Without `-m gpu` there is no GPU, also where there is one, and the CUDA kernels run under Triton's interpreter.

    Triton decides about that when it is imported.
    """
    if not re.search(r"(?<!not )\bgpu\b", config.option.markexpr):
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="module", autouse=True)
def torch_as_it_was() -> Iterator[None]:
    """Which modules share a process depends on the machine's pace, so what one sets in torch ends with it."""
    yield
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture(scope="session")
def torch_free_environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a Python process, and of its children, in which torch and triton are not installed."""
    site = tmp_path_factory.mktemp("site")
    (site / "sitecustomize.py").write_text(WITHOUT_TORCH)
    return os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}"}
