"""What the trainer's tests share for a module: a model, a world of one, a rig of two batches, and Valkey with weight_sync."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.trainer.distributed import World
from shared.wire.embedded import EmbeddedValkey
from tests.integration.algorithm_testing import Rig, make_rig
from tests.integration.trainer_service import Process
from tests.integration.trainer_testing import one_rank, tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with one_rank() as world:
        yield world


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, world: World) -> Rig:
    return make_rig(tmp_path_factory.mktemp("model"), world)


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """URL of Valkey, address of weight_sync."""
    directory = tmp_path_factory.mktemp("services")
    with (
        EmbeddedValkey(directory / "valkey") as valkey,
        Process(sys.executable, "-m", "services.weight_sync", "port=0", f"data_dir={directory / 'weights'}") as weights,
    ):
        yield valkey.url, f"127.0.0.1:{weights.wait_for('ready')['port']}"
