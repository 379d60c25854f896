"""Joins rewards: closes complete groups into the training queue, and pauses the run when a reward stays away."""

from __future__ import annotations

import asyncio
import time

import structlog

from shared.metrics import names
from shared.metrics.server import metric
from shared.wire.lifecycle import Closed, Lifecycle
from shared.wire.reader import RunReader
from shared.wire.run import RunState
from shared.wire.types import Group

log = structlog.get_logger()

MAX_WAIT_S = 10.0


def exact_match(text: str, answer: str) -> float:
    """1 when the texts are equal apart from surrounding white space, else 0."""
    return float(text.strip() == answer.strip())


class RewardJoin:
    def __init__(self, store: RunReader) -> None:
        self._store = store
        self._lifecycle = Lifecycle(store)
        self.wake = asyncio.Event()
        """Set by whoever sees a reward, a checkpoint or a change of the run."""

    async def follow(self) -> None:
        """consumes: groups whose samples are all rewarded, deadlines of missing rewards
        produces: entries of the training queue; a paused run
        waits for: `wake`, or the next deadline, 10 s at most
        unblocked by: rewards and checkpoints (through the run's events), and the clock
        """
        while True:
            self.wake.clear()
            run = await self._store.newest_run()
            wait_s = MAX_WAIT_S
            if run is not None and not run.state.is_over:
                await self._close_groups(run.run)
                if run.state is RunState.RUNNING:
                    wait_s = min(wait_s, await self._watch_deadlines(run.run))
            try:
                async with asyncio.timeout(wait_s):
                    await self.wake.wait()
            except TimeoutError:
                pass

    async def _close_groups(self, run: str) -> None:
        for number in await self._lifecycle.closable(run):
            answer, group = await self._lifecycle.close_group(run, number)
            if answer is Closed.QUEUED and group is not None:
                _observe_waits(group)
            elif answer is Closed.FULL:
                log.warning("the training queue is full", run=run, number=number)
                return
            elif answer is Closed.CHANGED:
                self.wake.set()

    async def _watch_deadlines(self, run: str) -> float:
        """Pauses the run if a reward is overdue. Returns the seconds until the next deadline."""
        first = await self._lifecycle.first_deadline(run)
        if first is None:
            return MAX_WAIT_S
        deadline, trajectory_id = first
        now = time.time()
        if deadline > now:
            return deadline - now
        overdue = await self._lifecycle.num_overdue(run, now)
        detail = f"{overdue} trajectories wait for a reward past their deadline, the first is {trajectory_id}; "
        detail += "post the rewards, then resume the run"
        if await self._lifecycle.pause(run, reason="missing_reward", detail=detail):
            log.error("paused: missing reward", run=run, overdue=overdue, trajectory_id=trajectory_id)
        return MAX_WAIT_S


def _observe_waits(group: Group) -> None:
    for trajectory in group.trajectories:
        times = trajectory.timestamps
        wait_s = times["rewarded"] - times["awaiting_reward"]
        metric(names.REWARD_WAIT_SECONDS).labels(run=group.run).observe(max(0.0, wait_s))
