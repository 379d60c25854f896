"""Who runs in the next step: continuous batching in arrival order under a token budget. No tensors.

Every step gives each running sequence, oldest first, one chunk: its next token in decode, up to `max_chunk_tokens` of
what is not computed in prefill. Then waiting sequences are admitted in arrival order, `most_at_once` at most. Pages are
allotted optimistically, for the tokens that exist; when they run out the youngest running sequence is preempted: it gives
up its pages, keeps its tokens and its place in the queue, and is computed again later. The oldest that runs is never
preempted for another and one sequence of full length fits in the cache, so it always advances. Nobody overtakes a waiting
sequence, except while it waits for the prompt pages of an older sibling.

Where budget and pages suffice for everybody that runs, as they nearly always do in decode, a step is made by arithmetic over the
slots (`slots.py`); otherwise sequence by sequence, oldest first.

Legend: S sequences of a step, in ascending order of slot.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from services.rollout.kv_cache import PagePool
from services.rollout.sequence import Sequence, SequenceState
from services.rollout.slots import NEVER, Slots, Step

Array = np.ndarray


LEAST_AT_ONCE = 32
"""`Scheduler.most_at_once` of one with few places."""


class Scheduler:
    """NEW -> WAITING -> RUNNING -> FINISHED, with RUNNING -> WAITING on preemption.

    Usage: `schedule`, launch the step, `complete` it, extend the slots by what it sampled, `finish` what is done; repeat. Steps
    run in the order of their launch, so the next ones may be scheduled while sampled tokens are pending (`Slots.pending`).
    """

    def __init__(
        self,
        pages: PagePool,
        *,
        max_running: int,
        max_step_tokens: int,
        max_chunk_tokens: int,
        tokens_per_chunk: int = 32,
    ) -> None:
        """Args: tokens_per_chunk, of a sample's stream (`Slots`)."""
        self.pages = pages
        self.max_running, self.max_step_tokens, self.max_chunk_tokens = max_running, max_step_tokens, max_chunk_tokens
        self.most_at_once = max(LEAST_AT_ONCE, max_running // 8)
        """Sequences that get a place, or samples that are looked at for their end, between two launches. Each takes the host tens
        of microseconds; where hundreds come or go together, the device would be out of work before the next launch."""
        self.waiting: list[Sequence] = []
        """Ascending arrival."""
        self.running: list[Sequence] = []
        """Ascending arrival."""
        self.slots = Slots(max_running, tokens_per_chunk=tokens_per_chunk)
        self.num_preemptions = 0
        self.num_prefix_hit_tokens = 0
        self._changed: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        """Puts a sequence in line. It must fit in an empty cache with every token it may ever have."""
        seq.state = SequenceState.WAITING
        self.waiting.insert(_position(self.waiting, seq), seq)

    def schedule(self) -> Step:
        """The next step: at most `max_step_tokens` tokens, one or more if there is work and none is in flight or being read."""
        num_preemptions = self.num_preemptions
        slots_S, sizes_S = self._everybody() or self._oldest_first()
        budget = self.max_step_tokens - int(sizes_S.sum())
        if self.waiting and budget > 0 and self.num_preemptions == num_preemptions:
            admitted = self._admit(budget)
            if admitted:
                slots, sizes = zip(*admitted, strict=True)
                slots_S, sizes_S = _sorted(np.append(slots_S, slots), np.append(sizes_S, sizes))
        changed, self._changed = self._changed, []
        return self.slots.step(slots_S, sizes_S, changed)

    def complete(self, step: Step) -> None:
        """The step's keys and values are in the cache, or will be before anything launched from now on reads them."""
        slots = self.slots
        slots.computed[step.slots_S] = step.ends_S
        is_full_S = np.minimum(step.ends_S, slots.known[step.slots_S]) >= slots.share_at[step.slots_S]
        if is_full_S.any():
            for seq in step.seqs_S[is_full_S].tolist():
                slots.settle(seq)
                self.pages.advance(seq, seq.num_computed)
                self._set_share_at(seq)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, whoever runs or waits now stays where it is, and only what is added is scheduled."""
        running, waiting = self.running, self.waiting
        self.running, self.waiting = [], []
        for seq in running:
            self.slots.runs[seq.slot] = False
        try:
            yield
        finally:
            for seq in running:
                self.slots.runs[seq.slot] = True
            self.running = sorted([*running, *self.running], key=_arrival)
            self.waiting = sorted([*waiting, *self.waiting], key=_arrival)

    def _everybody(self) -> tuple[Array, Array] | None:
        """(slots, sizes) of a step of everybody that runs; None, changing nothing, where budget or pages don't suffice."""
        slots = self.slots
        totals_N = slots.known + slots.pending
        # Who has `limit` tokens has its end in flight.
        slots_S = np.flatnonzero((slots.computed < totals_N) & (totals_N < slots.limits) & slots.runs)
        totals_S = totals_N[slots_S]
        sizes_S = np.minimum(totals_S - slots.computed[slots_S], self.max_chunk_tokens)
        if int(sizes_S.sum()) > self.max_step_tokens:
            return None
        is_short_S = totals_S > slots.capacities[slots_S]
        if is_short_S.any():
            page_size, short, totals = self.pages.page_size, slots_S[is_short_S], totals_S[is_short_S]
            if int((-(-totals // page_size) - slots.capacities[short] // page_size).sum()) > self.pages.num_free:
                return None
            for seq in sorted(slots.seqs[short].tolist(), key=_arrival):
                grown = self._grow(seq)
                assert grown, "pages were counted"
        return slots_S, sizes_S

    def _oldest_first(self) -> tuple[Array, Array]:
        """(slots, sizes) of as many as budget and pages allow, oldest first."""
        slots, budget, position = self.slots, self.max_step_tokens, 0
        chosen: list[tuple[int, int]] = []
        # Preemption takes from the end of the list, so it never meets a sequence that already has its chunk.
        while position < len(self.running) and budget > 0:
            seq = self.running[position]
            position += 1
            start, end = int(slots.computed[seq.slot]), slots.num_tokens(seq)
            if start == end or end >= seq.limit:
                continue
            if end > len(seq.pages) * self.pages.page_size and not self._grow_or_leave(seq):
                break
            size = min(end - start, self.max_chunk_tokens, budget)
            chosen.append((seq.slot, size))
            budget -= size
        found = np.array(chosen, np.int64).reshape(-1, 2)
        return _sorted(found[:, 0], found[:, 1])

    def _grow(self, seq: Sequence) -> bool:
        """Pages for every token of a running sequence; False if too few are free."""
        if not self.pages.grow(seq, self.slots.num_tokens(seq)):
            return False
        self.slots.capacities[seq.slot] = len(seq.pages) * self.pages.page_size
        self._changed.append(seq)
        return True

    def _grow_or_leave(self, seq: Sequence) -> bool:
        """As `_grow`, taking pages from the youngest if need be; False if that was itself."""
        while not self._grow(seq):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is seq:
                return False
        return True

    def _set_share_at(self, seq: Sequence) -> None:
        next_full = (seq.num_shared_pages + 1) * self.pages.page_size
        self.slots.share_at[seq.slot] = next_full if self.pages.may_share(seq) else NEVER

    def finish(self, seq: Sequence) -> None:
        """Takes a sequence out, wherever it is."""
        if seq.state is SequenceState.RUNNING:
            self._leave(seq)
        elif seq.state is SequenceState.WAITING:
            self.waiting.remove(seq)
        seq.state = SequenceState.FINISHED

    def restart(self, manifest_digest: str) -> None:
        """Weights change: every running sequence waits, to be computed again, and all cached pages are forgotten."""
        while self.running:
            self._preempt(self.running[-1])
        self.pages.reset(manifest_digest)
        for seq in self.waiting:
            seq.page_keys, seq.is_mixed = [], False

    def keep(self, manifest_digest: str) -> None:
        """Weights change: running sequences go on behind what the old ones computed, for life; cached pages are forgotten."""
        self.pages.reset(manifest_digest, keeps_kv=True)
        for seq in (*self.running, *self.waiting):
            seq.page_keys = []
        for seq in self.running:
            seq.is_mixed = True
            self._set_share_at(seq)

    def make_room(self, num_tokens: int) -> None:
        """Preempts the youngest until a sequence of so many tokens could run beside the others."""
        num_pages = self.pages.num_pages_for(num_tokens)
        while self.running and not (self.slots.num_free and self.pages.num_free >= num_pages):
            self._preempt(self.running[-1])

    def _admit(self, budget: int) -> list[tuple[int, int]]:
        """Gives places to those that wait, oldest first. Returns (slot, size) of each."""
        admitted: list[tuple[int, int]] = []
        remaining: list[Sequence] = []
        for position, seq in enumerate(self.waiting):
            # One that was preempted while steps with it were in flight must have its tokens before it can be computed again.
            if budget == 0 or len(admitted) == self.most_at_once or not self.slots.num_free or seq.num_pending:
                remaining += self.waiting[position:]
                break
            hits = self.pages.lookup(seq)
            if self.pages.is_coming(seq, len(hits)):
                # A sibling computes this prompt right now; its pages are free of charge in a step or two.
                remaining.append(seq)
                continue
            # One spare page for each older one that runs: without it its next page boundary would preempt who just came in.
            num_older = _position(self.running, seq)
            if not self.pages.allocate(seq, hits, spare=num_older):
                remaining += self.waiting[position:]
                break
            self.num_prefix_hit_tokens += seq.num_computed
            self._enter(seq, num_older)
            size = min(len(seq.token_ids) - seq.num_computed, self.max_chunk_tokens, budget)
            admitted.append((seq.slot, size))
            budget -= size
        self.waiting = remaining
        return admitted

    def _preempt(self, seq: Sequence) -> None:
        self._leave(seq)
        self.num_preemptions += 1
        self.add(seq)

    def _enter(self, seq: Sequence, num_older: int) -> None:
        seq.state, seq.num_tabled_pages = SequenceState.RUNNING, 0
        self.running.insert(num_older, seq)
        self.slots.enter(seq)
        self.slots.capacities[seq.slot] = len(seq.pages) * self.pages.page_size
        self._set_share_at(seq)
        self._changed.append(seq)

    def _leave(self, seq: Sequence) -> None:
        del self.running[_position(self.running, seq)]
        self.slots.leave(seq)
        self.pages.release(seq)


def _arrival(seq: Sequence) -> int:
    return seq.arrival


def _position(seqs: list[Sequence], seq: Sequence) -> int:
    """Of a sequence, or where it belongs, among others of ascending arrival. The youngest are asked for most."""
    if not seqs or seqs[-1].arrival < seq.arrival:
        return len(seqs)
    return bisect_left(seqs, seq.arrival, key=_arrival)


def _sorted(slots_S: Array, sizes_S: Array) -> tuple[Array, Array]:
    order = np.argsort(slots_S)
    return slots_S[order], sizes_S[order]
