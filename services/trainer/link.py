"""The trainer's two connections to the outside: the training queue in Valkey and weight_sync.

Rank 0 makes every call; every rank gets the answer, or the same error. Long waits are cut into slices of `poll_s`, between
which the stop signal is seen and the other ranks hear that rank 0 is alive.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import structlog

from services.trainer.batch import PolicyVersion
from services.trainer.config import TrainerConfig
from services.trainer.distributed import TellAll, World
from services.trainer.offers import Offers, Slot
from shared.config import structure, unstructure
from shared.metrics import names
from shared.metrics.server import metric
from shared.transfer.arena import ArenaLayout
from shared.wire import weights
from shared.wire.codec import decode_group, encode_group
from shared.wire.pb.weight_sync_pb2 import Manifest
from shared.wire.queue import Fenced, RunOver, TrainQueue
from shared.wire.records import IllegalTransition
from shared.wire.run import RunConfig, RunState
from shared.wire.tensors import RawTensor
from shared.wire.types import Group

log = structlog.get_logger()


class RunEnded(TellAll):
    """The run is over (stopped by someone, usually). The text is its state."""


class Refused(TellAll):
    """This process must not go on with this run; the text says why and what to do."""


class Stopping(TellAll):
    """SIGTERM came while waiting."""


class Link:
    """Built on every rank; connected on rank 0.

    Args:
        config: where they are.
        world: of ranks.
    """

    def __init__(self, config: TrainerConfig, world: World) -> None:
        self._config, self._world, self._stop = config, world, threading.Event()
        self._epoch = 0
        self._is_interruptible = False
        if world.is_leader:
            self._queue = TrainQueue.connect(config.redis_url)
            self._publisher = weights.Publisher(
                config.weight_sync,
                transport="directory" if config.directory else "grpc",
                directory=config.directory,
                delta=config.delta,
            )
            self._slot: Slot | None = None
            is_in_memory = config.transport in ("shm", "ipc", "broadcast")
            self._offers = Offers(config, world.device) if is_in_memory else None

    def close(self) -> None:
        if self._world.is_leader:
            self._queue.close()
            self._publisher.close()
            if self._offers:
                self._offers.close()

    def on_sigterm(self, *_: object) -> None:
        """Signal handler. Waits see the event within a slice; a publish, which may wait for minutes, is broken off."""
        self._stop.set()
        if self._is_interruptible:
            raise Stopping("SIGTERM")

    @property
    def epoch(self) -> int:
        """Fencing epoch of the run taken over last."""
        return self._epoch

    def wait_for_run(self) -> RunConfig:
        """The run to train. Raises Stopping."""

        def ask() -> dict[str, Any] | None:
            config = self._queue.wait_for_run(self._config.poll_s)
            if config is not None and self._config.run not in (None, config.run):
                raise Refused(
                    f"the run that is not over is {config.run!r}, this trainer is for {self._config.run!r} only"
                )
            return None if config is None else unstructure(config)

        while (config := self._slice(ask)) is None:
            pass
        return structure(RunConfig, config)

    def durable_step(self, run: str) -> int:
        """Batches below it are covered by a checkpoint, as far as Valkey knows."""
        return self._ask(lambda: self._queue.get_run(run).durable_step)

    def take_over(self, run: str, *, next_step: int) -> None:
        """Fence whoever trained the run before. Raises RunEnded, Refused."""

        def ask() -> int:
            try:
                return self._queue.take_over(run, next_step=next_step)
            except IllegalTransition as error:
                raise Refused(
                    f"the newest checkpoint of run {run} under {self._config.run_dir} stands before step {next_step}, but more "
                    f"was durable: {error}. Give the run_dir that holds its checkpoints"
                ) from error

        self._epoch = self._ask(ask)

    def lease(self, run: str, step: int, *, digests: Collection[str] | None = None) -> list[Group] | None:
        """The complete batch; None if it is not there, or the run is paused, after `poll_s`.

        Args:
            digests: of the versions held here; under max_lag a group with tokens of another one is dropped. None: any.

        Raises Stopping, RunEnded, Refused.
        """

        is_alone = self._world.size == 1

        def ask() -> list[Group] | list[bytes] | None:
            groups = self._queue.lease(run, step, epoch=self._epoch, deadline_s=self._config.poll_s, digests=digests)
            return groups if groups is None or is_alone else [encode_group(g) for g in groups]

        groups = self._slice(ask)
        return groups if groups is None or is_alone else [decode_group(data) for data in groups]

    def read_ahead(self, run: str) -> None:
        """On rank 0: reads for the next lease what is queued or comes within a moment. If the run is over, that lease says so."""
        with contextlib.suppress(RunOver, Fenced):
            self._queue.read_ahead(run, epoch=self._epoch)

    def publish(
        self, manifest: Manifest | None, tensors: Mapping[str, RawTensor], *, expected_digest: str
    ) -> PolicyVersion:
        """Hand a version to weight_sync; under a new lineage where the step exists with other weights.

        Args:
            manifest, tensors: on rank 0.
            expected_digest: of a version that was published before; empty for a new one.

        Raises: Stopping, Refused, weights.WeightSyncError.
        """

        def ask() -> list[Any]:
            assert manifest is not None
            if expected_digest not in ("", manifest.version.digest):
                raise Refused(
                    f"the newest checkpoint of run {manifest.run} does not hold the weights of version "
                    f"{manifest.version.step} ({expected_digest}); move it away to go on from the one before"
                )
            log.debug("publishing", step=manifest.version.step, lineage=manifest.version.lineage)
            if self._offers and self._slot:
                self._offers.offer(manifest, self._slot)
            while True:
                try:
                    v = self._publisher.publish(
                        manifest, tensors, epoch=self._epoch, deadline_s=self._config.publish_deadline_s
                    )
                    metric(names.PUBLISH_BYTES).labels(run=manifest.run).inc(self.sent.num_bytes)
                    metric(names.PUBLISH_FULL_BYTES).labels(run=manifest.run).inc(self.sent.full_bytes)
                    return [v.lineage, v.step, v.digest]
                except weights.VersionConflict as error:
                    manifest.version.lineage += 1
                    metric(names.LINEAGE_FORKS).labels(run=manifest.run).inc()
                    log.warning(
                        "new lineage", lineage=manifest.version.lineage, step=manifest.version.step, reason=str(error)
                    )

        return PolicyVersion(*self._ask_weight_sync(ask))

    def room(self, layout: ArenaLayout) -> Slot | None:
        """Memory on rank 0 to gather the next version into, where replicas read from there; the last version's bytes have
        left for weight_sync before.

        Raises: Stopping, Refused, weights.WeightSyncError.
        """
        self.settle()
        if self._world.is_leader and self._offers:
            self._slot = self._offers.room(layout)
            return self._slot
        return None

    def settle(self) -> None:
        """weight_sync has the bytes of every version. Raises Stopping, Refused, weights.WeightSyncError."""
        self._ask_weight_sync(lambda: self._publisher.settle(self._config.publish_deadline_s))

    @property
    def sent(self) -> weights.Sent:
        """What the last publish took, on rank 0."""
        return self._publisher.sent if self._world.is_leader else weights.Sent(0, 0)

    def published(self, run: str) -> set[str] | None:
        """Digests of the versions that weight_sync holds; None when it does not answer within `poll_s`."""

        def ask() -> list[str] | None:
            try:
                return [v.version.digest for v in self._publisher.versions(run, deadline_s=self._config.poll_s)]
            except weights.WeightSyncError:
                return None

        digests = self._ask_weight_sync(ask)
        return None if digests is None else set(digests)

    def retain(self, run: str, oldest_step: int) -> None:
        """Versions below will not be asked for again."""
        self._ask_weight_sync(
            lambda: self._publisher.retain(
                run, oldest_step, epoch=self._epoch, deadline_s=self._config.publish_deadline_s
            )
        )

    def record_step(self, run: str, step: int, metrics: Mapping[str, Any]) -> None:
        self._ask(lambda: self._queue.record_step(run, step, metrics, epoch=self._epoch))

    def commit_trained(self, run: str, *, durable_step: int, archive: str) -> None:
        self._ask(
            lambda: self._queue.commit_trained(run, durable_step=durable_step, epoch=self._epoch, archive=archive)
        )

    def set_state(self, run: str, state: RunState, *, reason: str = "", detail: str = "") -> None:
        """Raises RunEnded, Refused."""
        self._ask(lambda: self._queue.set_state(run, state, epoch=self._epoch, reason=reason, detail=detail))

    def _slice(self, ask: Callable[[], Any]) -> Any:
        """Asks once. Raises Stopping."""

        def unless_stopped() -> Any:
            if self._stop.is_set():
                raise Stopping("SIGTERM")
            return ask()

        return self._ask(unless_stopped)

    def _ask_weight_sync(self, ask: Callable[[], Any]) -> Any:
        """Raises Stopping, Refused, weights.WeightSyncError."""

        def interruptible() -> Any:
            self._is_interruptible = True
            try:
                if self._stop.is_set():
                    raise Stopping("SIGTERM")
                return ask()
            finally:
                self._is_interruptible = False

        return self._ask(interruptible)

    def _ask(self, ask: Callable[[], Any]) -> Any:
        def translated() -> Any:
            with _translated():
                return ask()

        return self._world.from_leader(translated)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except RunOver as error:
        raise RunEnded(str(error.state)) from error
    except (Fenced, weights.Fenced) as error:
        raise Refused(f"another trainer has taken this run over ({error}); stop one of the two") from error


def json_ready(value: Any) -> Any:
    """The same value, with None in place of numbers that JSON does not have."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)
