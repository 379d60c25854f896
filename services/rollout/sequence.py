"""One sequence on its way through the engine, as the scheduler and the page pool see it. No torch, no I/O."""

from __future__ import annotations

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
    """Tokens, place in the queue and pages. The scheduler and the page pool alone change what is below `shares_pages`."""

    arrival: int
    """Place in the queue, smallest first; kept for life, whatever preempts the sequence."""
    token_ids: list[int]
    """Prompt and sampled tokens: everything whose keys and values the next step must have."""
    shares_pages: bool = True
    """Whether it may read cached pages and leave its own behind. False where every row is wanted."""
    state: SequenceState = SequenceState.NEW
    num_computed: int = 0
    """Tokens whose keys and values are in the pages."""
    pages: list[int] = field(default_factory=list)
    page_keys: list[bytes] = field(default_factory=list)
    """Keys of the full pages of `token_ids`, as far as they were needed."""
    slot: int = -1
    """Row of the engine's input tables while running."""
    num_tabled_pages: int = 0
    """Pages already in the engine's page table; the scheduler sets it back whenever `pages` starts anew."""
