"""One sequence on its way through the engine, as the scheduler and the page pool see it. No torch, no I/O."""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass, field
from enum import StrEnum


class SequenceState(StrEnum):
    NEW = "new"
    """Not in line yet; a refused one never is."""
    WAITING = "waiting"
    """In line for a place; holds no pages."""
    RUNNING = "running"
    """Has a place in the batch and pages for every token it knows."""
    FINISHED = "finished"

    @property
    def is_open(self) -> bool:
        return self in (SequenceState.WAITING, SequenceState.RUNNING)


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """Tokens, place in the queue and pages. The scheduler and the page pool alone change what is below `shares_pages`.

    While it has a slot, its newest tokens and the counters `num_pending` and `num_computed` are kept there (`slots.py`): what is
    here is as of the last `Slots.settle`.
    """

    arrival: int
    """Place in the queue, smallest first and nobody else's; kept for life, whatever preempts the sequence."""
    token_ids: array[int]
    """Prompt and sampled tokens, int32: everything whose keys and values the next step must have, but for what is pending. In a
    list every token would be an object: hundreds of samples that end together would drag megabytes through the caches of the
    thread that launches and of the one that makes messages."""
    shares_pages: bool = True
    """Whether it may read cached pages and leave its own behind. False where every row is wanted."""
    limit: int = sys.maxsize
    """Tokens at which it ends: none is computed behind them."""
    state: SequenceState = SequenceState.NEW
    num_pending: int = 0
    """Tokens sampled by steps in flight: they have a place, but no id here."""
    num_computed: int = 0
    """Tokens whose keys and values are in the pages, or will be before any later step runs."""
    pages: list[int] = field(default_factory=list)
    page_keys: list[bytes] = field(default_factory=list)
    """Keys of the full pages of `token_ids`, as far as they were needed."""
    slot: int = -1
    """Row of the engine's input tables while running."""
    num_shared_pages: int = 0
    """Leading pages whose full content was offered to others."""
    is_mixed: bool = False
    """Whether keys and values of an older version may be among those in its pages; such pages are shared with nobody."""
    num_tabled_pages: int = 0
    """Pages already in the engine's page table; the scheduler sets it back whenever `pages` starts anew."""

    @property
    def num_tokens(self) -> int:
        """Pending ones included."""
        return len(self.token_ids) + self.num_pending
