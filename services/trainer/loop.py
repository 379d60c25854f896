"""THE loop: one batch in, one version out.

    queue --lease--> score --> train --> guard --> publish --> weight_sync
                                                  record  --> Valkey, steps.jsonl, archive
                                             (checkpoint  --> run_dir, then commit_trained, retain)

A crash between any two of these loses nothing: the step is trained again from the last checkpoint, to the same weights.
"""

from __future__ import annotations

import gc

import structlog

from services.trainer.config import TrainerConfig
from services.trainer.distributed import World
from services.trainer.link import Link, RunEnded
from services.trainer.opening import UnusableModel, open_session
from services.trainer.server import StatusBoard
from services.trainer.session import Session
from shared.process import settle_heap
from shared.wire.run import RunConfig, RunState

log = structlog.get_logger()


def train_run(session: Session) -> None:
    """Train a run to its end. Runs alike on every rank.

    consumes: leased batches, in number order
    produces: versions, step records, checkpoints, exports
    waits for: a complete batch (in slices of `poll_s`); weight_sync (up to `publish_deadline_s`); a paused run's resumption
    unblocked by: the dispatcher, weight_sync, an operator; SIGTERM (Stopping), the run's end (RunEnded), a newer trainer
        (Refused)
    """
    config = session.config
    while session.step < config.num_steps:
        batch = session.lease()
        result = session.train(batch)
        session.guard(batch, result)
        session.publish()
        session.record(batch, result)
        session.settle_checkpoint()
        if session.step % config.checkpoint_interval == 0:
            session.checkpoint()
    session.checkpoint()
    session.complete()


def serve(service: TrainerConfig, link: Link, board: StatusBoard, world: World) -> None:
    """Train run after run.

    consumes: runs that are not over
    produces: their ends
    waits for: a run (in slices of `poll_s`)
    unblocked by: a created run; SIGTERM (Stopping)
    """
    while True:
        board.set(phase="waiting", run="")
        config = link.wait_for_run()
        try:
            serve_run(config, service, link, board, world)
        except RunEnded as ended:
            log.info("run ended", run=config.run, state=str(ended))
        board.set(phase="completed")
        if service.exit_when_done:
            return
        # The model's modules refer to one another: without this the next run's would be loaded beside them.
        gc.collect()


def serve_run(config: RunConfig, service: TrainerConfig, link: Link, board: StatusBoard, world: World) -> None:
    """Load a run and train it; a run whose model no trainer could load is marked failed."""
    try:
        session = open_session(config, service, link, board, world)
    except UnusableModel as error:
        log.error("run failed", run=config.run, reason=str(error))
        link.take_over(config.run, next_step=link.durable_step(config.run))
        link.set_state(config.run, RunState.FAILED, reason="model", detail=str(error))
        return
    settle_heap()
    try:
        train_run(session)
    finally:
        session.close()
        gc.unfreeze()
