"""One real replica process for the tests of a module, on version 0 at the start of each."""

from __future__ import annotations

import pytest

from tests.integration.rollout_fixture import manifest_of, tensors_of, trainer_decoder
from tests.integration.rollout_process import replica, serve_version, weight_sync_peer


@pytest.fixture(scope="module")
def served():
    with (
        weight_sync_peer() as (peer, address),
        replica(address, page_size=4, stream_tokens=2, max_open_samples=24) as (process, stub),
    ):
        manifest = manifest_of(seed=0, step=0)
        reply = serve_version(peer, stub, manifest, tensors_of(trainer_decoder("float32", 0)))
        assert reply.manifest_digest == manifest.version.digest
        yield peer, process, stub


@pytest.fixture
def version0(served):
    """The replica with version 0 committed, whatever the test before did."""
    peer, process, stub = served
    manifest = manifest_of(seed=0, step=0)
    serve_version(peer, stub, manifest, tensors_of(trainer_decoder("float32", 0)))
    return peer, process, stub, manifest.version.digest
