"""One Valkey for the tests of a module, empty at the start of each, and the trainer's side of its queue."""

from __future__ import annotations

import pytest

from shared.wire.queue import TrainQueue
from tests.integration.wire_testing import empty, valkey_server


@pytest.fixture(scope="module")
def server_url(tmp_path_factory):
    with valkey_server(tmp_path_factory.mktemp("valkey")) as server:
        yield server.url


@pytest.fixture
def url(server_url):
    empty(server_url)
    return server_url


@pytest.fixture
def queue(url):
    queue = TrainQueue.connect(url)
    yield queue
    queue.close()
