"""Deltas of real training: a replica that computes nothing follows a job's versions and verifies every one of them."""

from __future__ import annotations

import statistics
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc

from benchmarks.harness import Record
from shared.wire import rpc
from shared.wire.delta import decoded
from shared.wire.pb import weight_sync_pb2 as pb
from shared.wire.pb.weight_sync_pb2_grpc import WeightSyncStub
from shared.wire.tensors import RawTensor, collect
from timzero import model
from timzero.connect import connect
from timzero.display import TerminalDisplay
from timzero.job import Job, load_job
from timzero.local import stack_of
from timzero.outcome import Outcome
from timzero.train import Driver

CALL_S = 300.0


class Follower:
    """Fetches every version as a delta against the one before, in a thread, until the end of the block.

    Args:
        address: of weight_sync.
    """

    def __init__(self, address: str) -> None:
        self._channel = rpc.channel(address)
        self._stub = WeightSyncStub(self._channel)
        self._tensors: dict[str, RawTensor] = {}
        self._held = pb.Version()
        self.received: dict[str, tuple[int, bool]] = {}
        """By digest: bytes on the wire, and whether they were a delta. What is here was verified."""
        self.failure = ""
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._guarded, daemon=True)

    def __enter__(self) -> Follower:
        self._fleets = self._stub.Watch(pb.WatchRequest(), wait_for_ready=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._fleets.cancel()
        self._thread.join(CALL_S)
        self._channel.close()

    def wait_for(self, digest: str) -> None:
        """Until this version was verified, or could not be had."""
        with self._changed:
            self._changed.wait_for(lambda: digest in self.received or self.failure, CALL_S)

    def _guarded(self) -> None:
        try:
            for fleet in self._fleets:
                for version in sorted(fleet.versions, key=lambda v: v.step):
                    if version.digest not in self.received:
                        self._take(fleet.run, version)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.CANCELLED:
                self._fail(f"{error.code().name}: {error.details()}")
        except ValueError as error:
            self._fail(str(error))

    def _fail(self, reason: str) -> None:
        with self._changed:
            self.failure = reason
            self._changed.notify_all()

    def _take(self, run: str, version: pb.Version) -> None:
        """Raises DigestMismatch unless every tensor has the digest that the manifest names."""
        manifest = self._stub.GetManifest(pb.GetManifestRequest(run=run, digest=version.digest), timeout=CALL_S)
        is_delta = bool(manifest.base_digest) and manifest.base_digest == self._held.digest
        request = pb.FetchRequest(run=run, digest=version.digest, base_digest=manifest.base_digest if is_delta else "")
        num_bytes = 0

        def counted() -> Iterator[pb.TensorChunk]:
            nonlocal num_bytes
            for chunk in self._stub.Fetch(request, timeout=CALL_S):
                num_bytes += chunk.ByteSize()
                yield chunk

        self._tensors = collect(manifest.tensors, decoded(counted(), manifest, base=self._tensors))
        self._held = version
        with self._changed:
            self.received[version.digest] = num_bytes, is_delta
            self._changed.notify_all()


def run(job: Job, directory: Path) -> tuple[Outcome, Follower]:
    with (
        TerminalDisplay("delta") as display,
        stack_of(job.local, directory, announce=display.note) as stack,
        Follower(stack.weight_sync_address) as follower,
        connect(stack.base_url) as client,
    ):
        outcome = Driver(client, job, display, check=stack.check).drive()
        follower.wait_for(outcome.digest)
    return outcome, follower


def training(config: Path, words: Sequence[str]) -> list[Record]:
    """Bytes of every publish of a job, as the trainer sent them and as the follower received and verified them.

    Raises AssertionError when a version was not verified, or arrived with another number of bytes than were sent.
    """
    job = load_job(config, [*words, "trainer.transport=grpc", "trainer.delta=true", "evaluation.num_tasks=0"])
    job = job.with_run(model=str(model.get(job.run.model)))
    with tempfile.TemporaryDirectory(prefix="timzero-delta-") as directory:
        outcome, follower = run(job, Path(directory) / "run")
    assert not outcome.problems, outcome.problems
    assert not follower.failure, follower.failure
    rows = [s.metrics for s in outcome.steps]
    params: dict[str, Any] = {"model": Path(job.run.model).name, "lr": job.run.optimizer.lr, "steps": len(rows)}
    records, shares = [], []
    for row in rows:
        sent, full = row["publish_bytes"], row["full_bytes"]
        received, is_delta = follower.received[row["weights_digest"]]
        assert is_delta, f"step {row['step']}: version {row['weights_digest']} came whole"
        assert received == sent, f"step {row['step']}: {sent} bytes were sent, {received} arrived"
        here = params | {"version": row["policy_step"], "full_bytes": full}
        records.append(
            Record(
                "weight_sync", "training", here, "delta", "publish_bytes", sent, "B", baseline="full", ratio=full / sent
            )
        )
        shares.append(sent / full)
    spread = [min(shares), max(shares)]
    records.append(
        Record(
            "weight_sync",
            "training",
            params,
            "delta",
            "bytes_share",
            statistics.median(shares),
            "of full",
            spread=spread,
        )
    )
    num_verified = sum(row["weights_digest"] in follower.received for row in rows)
    records.append(Record("weight_sync", "training", params, "delta", "verified_versions", num_verified, "versions"))
    return records
