"""Joins rewards: closes groups into the training queue, and decides what becomes of a reward that stays away.

Under a fixed lag the run is paused, since no clock may change a batch. Under max_lag the sample is dropped, and its group is
trained with the others, or sampled again if too few are left.
"""

from __future__ import annotations

import asyncio
import time

import structlog

from shared.metrics import names
from shared.metrics.server import metric
from shared.wire.lifecycle import Closed, Lifecycle
from shared.wire.reader import RunReader
from shared.wire.records import RunRecord
from shared.wire.run import RunState
from shared.wire.types import Group

log = structlog.get_logger()

MAX_WAIT_S = 10.0
CLOSED_AT_ONCE = 16
"""Groups that are in memory together; one may be megabytes."""


def exact_match(text: str, answer: str) -> float:
    """1 when the texts are equal apart from surrounding white space, else 0."""
    return float(text.strip() == answer.strip())


class RewardJoin:
    def __init__(self, store: RunReader) -> None:
        self._store = store
        self._lifecycle = Lifecycle(store)
        self.wake = asyncio.Event()
        """Set by whoever sees a reward, a checkpoint or a change of the run."""
        self._running: tuple[str, float] | None = None
        """The run while it is running, and since when (unix time) it has been seen so."""

    async def follow(self) -> None:
        """consumes: groups whose samples are all rewarded or dropped, deadlines of missing rewards
        produces: entries of the training queue; a paused run, or dropped samples
        waits for: `wake`, or the next deadline, 10 s at most
        unblocked by: rewards and checkpoints (through the run's events), and the clock
        """
        while True:
            self.wake.clear()
            run = await self._store.newest_run()
            wait_s = MAX_WAIT_S
            if run is not None and not run.state.is_over:
                await self._close_groups(run.run)
                wait_s = min(wait_s, await self._watch_deadlines(run))
            try:
                async with asyncio.timeout(wait_s):
                    await self.wake.wait()
            except TimeoutError:
                pass

    async def _close_groups(self, run: str) -> None:
        numbers = await self._lifecycle.closable(run)
        for part in (numbers[i : i + CLOSED_AT_ONCE] for i in range(0, len(numbers), CLOSED_AT_ONCE)):
            closed = await self._lifecycle.close_groups(run, part)
            for number, (answer, group) in zip(part, closed, strict=True):
                if answer is Closed.QUEUED and group is not None:
                    _observe_waits(group)
                elif answer in (Closed.REPLACED, Closed.DROPPED):
                    log.warning("too few samples of a group are left", run=run, number=number, group=answer.value)
                elif answer is Closed.CHANGED:
                    self.wake.set()
            if full := [number for number, (answer, _) in zip(part, closed, strict=True) if answer is Closed.FULL]:
                log.warning("the training queue is full", run=run, number=full[0])
                return

    async def _watch_deadlines(self, run: RunRecord) -> float:
        """Pauses the run if a reward is overdue, or drops the sample. Returns the seconds until there may be something to do."""
        now = time.time()
        if run.state is not RunState.RUNNING:
            self._running = None
            return MAX_WAIT_S
        if self._running is None or self._running[0] != run.run:
            self._running = run.run, now
        first = await self._lifecycle.first_deadline(run.run)
        if first is None:
            return MAX_WAIT_S
        deadline, trajectory_id = first
        if run.config.max_lag is not None:
            # Nobody could or would put a reward while the gateway was down or the run was paused.
            deadline = max(deadline, self._running[1] + run.config.reward_deadline_s)
        if deadline > now:
            return deadline - now
        if run.config.max_lag is None:
            await self._pause(run.run, now, trajectory_id)
            return MAX_WAIT_S
        num_dropped = await self._lifecycle.expire(run.run)
        log.warning("dropped: missing reward", run=run.run, samples=num_dropped, first=trajectory_id)
        # There may be more of them, and groups to close.
        return 0.0 if num_dropped else MAX_WAIT_S

    async def _pause(self, run: str, now: float, trajectory_id: str) -> None:
        overdue = await self._lifecycle.num_overdue(run, now)
        detail = f"{overdue} trajectories wait for a reward past their deadline, the first is {trajectory_id}; "
        detail += "post the rewards, then resume the run"
        if await self._lifecycle.pause(run, reason="missing_reward", detail=detail):
            log.error("paused: missing reward", run=run, overdue=overdue, trajectory_id=trajectory_id)


def _observe_waits(group: Group) -> None:
    for trajectory in group.trajectories:
        times = trajectory.timestamps
        wait_s = times["rewarded"] - times["awaiting_reward"]
        metric(names.REWARD_WAIT_SECONDS).labels(run=group.run).observe(max(0.0, wait_s))
