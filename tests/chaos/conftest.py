"""One stack with its proxies for the tests of a file: a run that is over leaves nothing that the next one would see."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.chaos_testing import Chaos, chaos


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chaos]:
    with chaos(tmp_path_factory.mktemp("chaos")) as rig:
        yield rig


@pytest.fixture(autouse=True)
def _no_fault_outlives_its_test(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for proxy in request.getfixturevalue("rig").proxies if "rig" in request.fixturenames else ():
        proxy.disarm()


@pytest.fixture(scope="module")
def undisturbed(rig: Chaos) -> str:
    """Digest of the weights after a run to which nothing happens."""
    return rig.run("undisturbed").digest
