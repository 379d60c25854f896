"""How long it takes, after a swap, until everything that ran has its keys and values again."""

from __future__ import annotations

import time

import numpy as np

from services.rollout.scheduler import Scheduler


class Recompute:
    """Begun at the end of a swap, looked at after each step until it is over."""

    def __init__(self) -> None:
        self.is_going_on = False
        self.seconds = 0.0
        """Of the last one; 0 while it goes on, and where nobody ran."""
        self._begin = 0.0
        self._num_arrivals = 0

    def begin(self, scheduler: Scheduler, num_arrivals: int) -> None:
        """Args:
        num_arrivals: so far; who comes later was not there at the swap.
        """
        self._begin, self._num_arrivals, self.seconds = time.monotonic(), num_arrivals, 0.0
        self.is_going_on = bool(scheduler.waiting)

    def look(self, scheduler: Scheduler) -> None:
        """After a launch: over when nobody of then waits, and those that run have nothing left to launch but their next token."""
        waiting, slots = scheduler.waiting, scheduler.slots
        if waiting and waiting[0].arrival < self._num_arrivals:
            return
        behind = np.flatnonzero(slots.known + slots.pending - slots.computed > 1)
        if any(seq.arrival < self._num_arrivals for seq in slots.seqs[behind].tolist()):
            return
        # In this order: another thread reads them.
        self.seconds = time.monotonic() - self._begin
        self.is_going_on = False
