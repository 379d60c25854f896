"""THE loop of a replica: a thread of its own that owns the engine.

    server (asyncio) --commands--> loop --outputs--> server
                                    |
                                  engine

Commands run between two steps, so nothing ever changes under a step. The loop never waits for the network: outputs are
handed over by a callback that only puts them into queues, each bounded by the tokens its samples may have.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog
import torch

from services.rollout.engine import CommitResult, Engine
from services.rollout.meters import Meters
from services.rollout.pipeline import Outputs
from services.rollout.samples import GivenUp, Refused, ShuttingDown
from services.rollout.times import own_stream
from services.rollout.weights import ServedModel
from shared.process import settle_heap

T = TypeVar("T")
log = structlog.get_logger()

LEAST_CHUNKS = 16
"""Delivered in a round. Where hundreds of samples end together, their messages would take the interpreter from the thread that
gives their places to others."""

STOPPED = "the replica is shutting down; continue elsewhere"


@dataclass(slots=True)
class Commit:
    """A swap that waits for its moment."""

    model: ServedModel
    is_drain: bool
    """Wait until nothing is open; otherwise what runs is computed again under the new weights,"""
    keeps_kv: bool
    """or goes on behind what the old ones computed."""
    done: Future[CommitResult]

    def is_due(self, engine: Engine) -> bool:
        return not self.is_drain or not engine.has_work or self.done.cancelled()


class EngineLoop:
    """Args:
    engine: from now on touched by this loop's thread only.
    deliver: called with what left the engine; must not block.
    on_end: called once, when the loop is over, with the error that ended it or None; must not block.
    """

    def __init__(
        self,
        engine: Engine,
        meters: Meters,
        *,
        deliver: Callable[[Outputs], None],
        on_end: Callable[[BaseException | None], None],
    ) -> None:
        self.engine = engine
        self._meters = meters
        self._deliver, self._on_end = deliver, on_end
        self._commands: deque[tuple[Future, Callable[[], Any]]] = deque()
        self._commit: Commit | None = None
        self._is_stopping = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._guarded, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Ends the loop after the step it is in. Returns whether it ended in time."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Runs `function` between two steps. A Refused goes to the caller; any other error is a fault of the loop too."""
        future: Future[T] = Future()
        with self._wake:
            if self._is_stopping:
                future.set_exception(ShuttingDown(STOPPED))
            else:
                self._commands.append((future, function))
                self._wake.notify()
        return future

    def commit(self, model: ServedModel, *, is_drain: bool, keeps_kv: bool = False) -> Future[CommitResult]:
        """Swaps between two steps, or once nothing is open; a caller that no longer waits cancels the future."""
        done: Future[CommitResult] = Future()

        def begin() -> None:
            if done.cancelled():
                return
            self._give_up(GivenUp("another Commit came first"))
            self._commit = Commit(model, is_drain, keeps_kv, done)
            self.engine.is_leaving = True

        def hand_on(begun: Future[None]) -> None:
            if (error := begun.exception()) is not None:
                _refuse(done, error)

        self.call(begin).add_done_callback(hand_on)
        return done

    def give_up_commit(self, digest: str) -> None:
        """Takes back a commit of this version (of any, if empty) that still waits for the replica to drain."""

        def give_up() -> None:
            if self._commit is not None and digest in ("", self._commit.model.version.digest):
                self._give_up(GivenUp("AbortWeights came while the replica drained"))

        self.call(give_up)

    def run(self) -> None:
        """Steps while there is work.

        consumes: commands (requests, aborts, commits)
        produces: chunks of sampled tokens, failures, results of commands
        waits for: a command, when there is nothing to compute
        unblocked by: `call`, `commit`, `stop`
        """
        while self._wait_for_work():
            while self._commands:
                self._execute(*self._commands.popleft())
            if self._commit is not None and self._commit.is_due(self.engine):
                self._swap(self._commit)
            begin = time.monotonic()
            # Behind the launch: who makes messages of outputs competes with this thread for the interpreter, and from then on the
            # device has work. Where the launch computes, they would only be late.
            has_computed = self.engine.step(lambda: self._hand_over(LEAST_CHUNKS))
            self._meters.observe(self.engine, time.monotonic() - begin if has_computed else None)
            if self.engine.computes_at_launch or not self.engine.has_work:
                self._hand_over()

    def _hand_over(self, least_chunks: int | None = None) -> None:
        """Delivers what left the engine: all of it, or of many chunks so many or a quarter, and the others in the next rounds."""
        self._deliver(self.engine.take_outputs(least_chunks))

    def _wait_for_work(self) -> bool:
        with self._wake:
            while not (self._commands or self.engine.has_work or self._commit or self._is_stopping):
                self._wake.wait()
            return not self._is_stopping

    def _swap(self, commit: Commit) -> None:
        self._commit = None
        self.engine.is_leaving = False
        self._execute(commit.done, lambda: self.engine.swap(commit.model, keeps_kv=commit.keeps_kv))

    def _give_up(self, reason: Refused) -> None:
        commit, self._commit = self._commit, None
        self.engine.is_leaving = False
        if commit is not None:
            _refuse(commit.done, reason)

    def _execute(self, future: Future[T], function: Callable[[], T]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(function())
        except Refused as refused:
            future.set_exception(refused)
        except BaseException as error:
            future.set_exception(error)
            raise

    def _guarded(self) -> None:
        fault: BaseException | None = None
        # Per thread: OpenMP starts a new thread with the machine's count, not with the process's setting.
        torch.set_num_threads(self.engine.config.threads)
        settle_heap()
        try:
            with own_stream(self.engine.config.device), torch.inference_mode():
                self.run()
                self.engine.fail_all(STOPPED)
        except BaseException as error:  # the loop's edge: the process ends
            fault = error
            log.exception("engine loop failed", replica=self.engine.config.replica)
        with self._wake:
            self._is_stopping = True
        for future, _ in self._commands:
            _refuse(future, ShuttingDown(STOPPED))
        self._give_up(ShuttingDown(STOPPED))
        self._hand_over()
        self._on_end(fault)


def _refuse(future: Future, error: BaseException) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
