"""One run on this trainer: its learner, its files, and what a step does beyond computing.

{run_dir}/{run}/checkpoints/step-XXXXXXXX/            see checkpoint.py
{run_dir}/{run}/trajectories/step-XXXXXXXX.msgpack    the step's groups (shared.wire.archive)
{run_dir}/{run}/steps.jsonl                           one line a step; a step trained again after a restart appears again
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import structlog

from services.trainer import checkpoint, report
from services.trainer.admission import NonfiniteReward
from services.trainer.batch import Batch, BatchError, build_batch
from services.trainer.config import TrainerConfig
from services.trainer.copies import ForwardCopy
from services.trainer.export import export
from services.trainer.learner import Learner, StepResult
from services.trainer.link import Link, json_ready
from services.trainer.server import StatusBoard
from services.trainer.weights import arena_layout, describe, gather, probe_token_ids, score_probe
from shared.metrics import names
from shared.metrics.server import metric
from shared.models import resolve_model
from shared.wire.archive import step_path, write_step
from shared.wire.run import RunConfig, RunState
from shared.wire.tensor_file import fsync_directory
from shared.wire.types import Group

log = structlog.get_logger()


class Session:
    """Build it with `opening.open_session`."""

    def __init__(
        self,
        config: RunConfig,
        learner: Learner,
        link: Link,
        board: StatusBoard,
        directory: Path,
        numerics: str,
        durable_step: int,
        service: TrainerConfig,
    ) -> None:
        self.config, self.learner = config, learner
        self._link, self._board, self._directory, self._numerics = link, board, directory, numerics
        self._world = learner.world
        self._probe = probe_token_ids(config, learner.decoder.config.vocab_size)
        self._phases: dict[str, list[float]] = {}
        self.durable_step = durable_step
        self._service = service
        self._saver = checkpoint.Saver(
            directory / "checkpoints",
            learner.world,
            keep=config.keep_checkpoints,
            in_background=service.background_checkpoints,
        )

    def close(self) -> None:
        """Whatever ended the training."""
        self._saver.close()

    @property
    def step(self) -> int:
        """Next step to train."""
        return self.learner.copies.current.version.step

    def lease(self) -> Batch:
        """The next batch; a batch that can't be trained pauses the run. Raises Stopping, RunEnded, Refused."""
        step = self.step
        with self._phase("lease"):
            while True:
                groups = self._wait_for_batch(step)
                try:
                    return build_batch(
                        groups, self.config, step=step, vocab_size=self.learner.decoder.config.vocab_size
                    )
                except BatchError as error:
                    if isinstance(error, NonfiniteReward) and self._world.is_leader:
                        metric(names.NONFINITE).labels(run=self.config.run).inc()
                    log.error("batch refused", run=self.config.run, step=step, reason=str(error))
                    self._link.set_state(self.config.run, RunState.PAUSED, reason="poison", detail=str(error))

    def _wait_for_batch(self, step: int) -> list[Group]:
        """Its groups; waits for them, and while the run is paused."""
        held = {c.version.digest for c in self.learner.copies.held}
        while (groups := self._link.lease(self.config.run, step, digests=held)) is None:
            # The batch may be held back until a checkpoint frees the queue.
            self.settle_checkpoint()
            # A batch that needs a version which weight_sync lost would be waited for in vain.
            self.publish_lost()
        return groups

    def train(self, batch: Batch) -> StepResult:
        """Score, then update."""
        with self._phase("score"):
            scores = self.learner.score(batch)
        with self._phase("train"):
            read_ahead = partial(self._link.read_ahead, self.config.run)
            return self.learner.train(batch, scores, meanwhile=read_ahead if self._world.is_leader else None)

    def guard(self, batch: Batch, result: StepResult) -> None:
        """In exact mode one differing bit is an alarm: nothing of the step leaves this process until someone resumes the run.

        Raises Stopping, RunEnded, Refused.
        """
        if self._world.is_leader:
            report.count_mismatch(self.config.run, result)
        if self.config.numerics != "exact" or result.mismatch.is_exact:
            return
        m = result.mismatch
        detail = (
            f"step {batch.step}: {m.differing_tokens} of {m.compared_tokens} tokens differ, {m.uncompared_tokens} could not be "
            f"compared, largest |delta logprob| {m.delta.abs_max:.3g}"
        )
        log.error("training-inference mismatch", run=self.config.run, detail=detail)
        if self.config.on_mismatch == "stop":
            self._link.set_state(self.config.run, RunState.PAUSED, reason="mismatch", detail=detail)
            # A lease waits while the run is paused; the batch that it returns is the one in hand.
            while self._link.lease(self.config.run, batch.step) is None:
                pass

    def publish(self) -> None:
        """Cast, gather and hand over the weights as they are now, as the next version."""
        with self._phase("publish"):
            current = self.learner.copies.current.version
            self._publish(self.learner.copies.take(current.step + 1, lineage=current.lineage))
            self.export()

    def publish_lost(self, *, at_start: bool = False) -> None:
        """What weight_sync does not hold (any more) of the versions that a batch may need, oldest first: an evaluation whose
        version is missing below a newer one is dropped.

        Args:
            at_start: of a session: the current version in any case, which proves that the checkpoint holds it.
        """
        published = self._link.published(self.config.run)
        if published is None and not at_start:
            return
        held = self.learner.copies.held
        for copy in held:
            if copy.version.digest not in (published or ()) or (at_start and copy is held[-1]):
                self._publish(copy)

    def _publish(self, copy: ForwardCopy) -> None:
        learner = self.learner
        slot = self._link.room(arena_layout(learner.decoder, copy))
        tensors = gather(learner.decoder, copy, self._world, slot)
        logprobs = score_probe(learner.decoder_at(copy.version.step), self._probe, self._world.device)
        manifest = None
        if self._world.is_leader:
            manifest = describe(
                copy.version,
                tensors,
                config=self.config,
                model_config=learner.decoder.config,
                fingerprint=self._numerics,
                probe=self._probe,
                probe_logprobs=logprobs,
            )
        version = self._link.publish(manifest, tensors, expected_digest=copy.version.digest)
        learner.copies.name(version)
        self._board.set(lineage=version.lineage, manifest_digest=version.digest, step=self.step)
        log.info("published", run=self.config.run, step=version.step, lineage=version.lineage, digest=version.digest)

    def record(self, batch: Batch, result: StepResult) -> None:
        """Archive, metrics, steps.jsonl, and the run's own record of the step."""
        version = self.learner.copies.current.version
        row = report.step_row(
            batch,
            result,
            version=version,
            sent=self._link.sent,
            phases=self._phases,
            world_size=self._world.size,
        )
        self._phases = {}
        if self._world.is_leader:
            write_step(self._archive, batch.step, batch.leased)
            _sync_file(Path(step_path(self._archive, batch.step)))
            report.export(self.config.run, batch, result, row)
            with (self._directory / "steps.jsonl").open("a") as file:
                file.write(json.dumps(json_ready(row)) + "\n")
        self._link.record_step(self.config.run, batch.step, json_ready(row))
        self._board.set(last_step_timestamp=time.time())
        log.info("step", run=self.config.run, **report.headline(row))

    def checkpoint(self) -> None:
        """Begin one; it is durable at once unless checkpoints are written in the background."""
        with self._phase("checkpoint"):
            self.settle_checkpoint(wait=True)
            if self.durable_step == self.step:
                return
            self._saver.begin(self.learner)
            is_last = self.step >= self.config.num_steps
            self.settle_checkpoint(wait=is_last or not self._service.background_checkpoints)

    def settle_checkpoint(self, *, wait: bool = False) -> None:
        """Durable state first, then what it covers may be forgotten elsewhere."""
        step = self._saver.settle(wait=wait)
        if step is None:
            return
        self.durable_step = step
        self._link.commit_trained(self.config.run, durable_step=step, archive=self._archive)
        self._link.retain(self.config.run, max(0, step - self.config.oldest_lag))
        report.export_checkpoint(self.config.run, step)
        self._board.set(checkpoint_step=step)
        log.info("checkpoint durable", run=self.config.run, step=step)

    def export(self) -> None:
        """The current version as a Hugging Face directory, where the configuration asks for one."""
        service, step = self._service, self.step
        is_due = step >= self.config.num_steps or (service.export_interval and step % service.export_interval == 0)
        if service.export_dir is None or not is_due:
            return
        path = Path(service.export_dir) / self.config.run / f"step-{step:08d}"
        learner = self.learner
        export(
            learner.decoder, learner.copies.current, self._world, path, companions_from=resolve_model(self.config.model)
        )
        log.info("exported", run=self.config.run, step=step, path=str(path))

    def complete(self) -> None:
        """All steps are trained, durable and published."""
        self._link.settle()
        self._link.set_state(self.config.run, RunState.COMPLETED)
        digest = self.learner.copies.current.version.digest
        log.info("run completed", run=self.config.run, step=self.step, digest=digest)

    @property
    def _archive(self) -> str:
        return str(self._directory / "trajectories")

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Shown in Status while it lasts, timed for the step's row."""
        self._board.set(phase={"lease": "leasing", "score": "scoring", "train": "training", "publish": "publishing",
                               "checkpoint": "checkpointing"}[name])  # fmt: skip
        start = time.time()
        yield
        self._phases[name] = [start, time.time()]


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    fsync_directory(path.parent)
