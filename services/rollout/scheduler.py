"""Who runs in the next step: continuous batching in arrival order under a token budget. Pure Python, no tensors.

Every step gives each running sequence, oldest first, one chunk: its next token in decode, up to `max_chunk_tokens` of
what is not computed in prefill. Then waiting sequences are admitted in arrival order. Pages are allotted optimistically,
for the tokens that exist; when they run out the youngest running sequence is preempted: it gives up its pages, keeps its
tokens and its place in the queue, and is computed again later. The oldest that runs is never preempted for another and one
sequence of full length fits in the cache, so it always advances. Nobody overtakes a waiting sequence, except while it waits
for the prompt pages of an older sibling.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

from services.rollout.kv_cache import PagePool
from services.rollout.sequence import Sequence, SequenceState


class Chunk(NamedTuple):
    """One sequence's share of a step: its tokens [start, end)."""

    seq: Sequence
    start: int
    end: int
    is_last: bool
    """Whether the sequence is computed to its end, so that its next token can be sampled."""


class Scheduler:
    """NEW -> WAITING -> RUNNING -> FINISHED, with RUNNING -> WAITING on preemption.

    Usage: `schedule`, launch the chunks, `complete` them, append sampled tokens, `finish` what is done; repeat. Steps run in the
    order of their launch, so the next one may be scheduled while the sampled tokens are still pending (`Sequence.num_pending`).
    """

    def __init__(self, pages: PagePool, *, max_running: int, max_step_tokens: int, max_chunk_tokens: int) -> None:
        self.pages = pages
        self.max_running, self.max_step_tokens, self.max_chunk_tokens = max_running, max_step_tokens, max_chunk_tokens
        self.waiting: list[Sequence] = []
        """Ascending arrival."""
        self.running: list[Sequence] = []
        """Ascending arrival."""
        self.num_preemptions = 0
        self.num_prefix_hit_tokens = 0
        self._slots = list(reversed(range(max_running)))

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        """Puts a sequence in line. It must fit in an empty cache with every token it may ever have."""
        seq.state = SequenceState.WAITING
        insort(self.waiting, seq, key=_arrival)

    def schedule(self) -> list[Chunk]:
        """The next step's chunks: at most `max_step_tokens` tokens, at least one if there is work and nothing is pending."""
        chunks: list[Chunk] = []
        budget = self.max_step_tokens
        num_preemptions = self.num_preemptions
        position = 0
        page_size, most = self.pages.page_size, self.max_chunk_tokens
        # Preemption takes from the end of the list, so it never meets a sequence that already has its chunk.
        while position < len(self.running) and budget > 0:
            seq = self.running[position]
            position += 1
            start, end = seq.num_computed, len(seq.token_ids) + seq.num_pending
            if start == end or end >= seq.limit:
                # Its end is in flight.
                continue
            if end > len(seq.pages) * page_size and not self._grow(seq):
                break
            size = min(end - start, most, budget)
            chunks.append(Chunk(seq, start, start + size, start + size == end))
            budget -= size
        if self.waiting and budget > 0 and self.num_preemptions == num_preemptions:
            self._admit(chunks, budget)
        assert chunks or not self.has_work or self._is_any_pending, "work but no step: a sequence exceeds the cache"
        return chunks

    def complete(self, chunks: list[Chunk]) -> None:
        """The chunks' keys and values are in the cache, or will be before anything launched from now on reads it."""
        # Most decode steps fill no page, and then there is nothing to share.
        page_size = self.pages.page_size
        for seq, _, end, _ in chunks:
            seq.num_computed = end
            if end >= (seq.num_shared_pages + 1) * page_size:
                self.pages.advance(seq, end)

    def _grow(self, seq: Sequence) -> bool:
        """Pages for every token of a running sequence, taken from the youngest if need be; False if that was itself."""
        while not self.pages.grow(seq):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is seq:
                return False
        return True

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

    def make_room(self, num_tokens: int) -> None:
        """Preempts the youngest until a sequence of so many tokens could run beside the others."""
        num_pages = self.pages.num_pages_for(num_tokens)
        while self.running and not (self._slots and self.pages.num_free >= num_pages):
            self._preempt(self.running[-1])

    @property
    def _is_any_pending(self) -> bool:
        return any(seq.num_pending for seq in (*self.running, *self.waiting))

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        remaining: list[Sequence] = []
        for position, seq in enumerate(self.waiting):
            if budget == 0 or not self._slots:
                remaining += self.waiting[position:]
                break
            hits = self.pages.lookup(seq)
            if self.pages.is_coming(seq, len(hits)):
                # A sibling computes this prompt right now; its pages are free of charge in a step or two.
                remaining.append(seq)
                continue
            # One spare page for each older one that runs: without it its next page boundary would preempt who just came in.
            if not self.pages.allocate(seq, hits, spare=bisect_left(self.running, seq.arrival, key=_arrival)):
                remaining += self.waiting[position:]
                break
            self.num_prefix_hit_tokens += seq.num_computed
            seq.state, seq.slot, seq.num_tabled_pages = SequenceState.RUNNING, self._slots.pop(), 0
            insort(self.running, seq, key=_arrival)
            start, end = seq.num_computed, len(seq.token_ids)
            size = min(end - start, self.max_chunk_tokens, budget)
            chunks.append(Chunk(seq, start, start + size, start + size == end))
            budget -= size
        self.waiting = remaining

    def _preempt(self, seq: Sequence) -> None:
        self._leave(seq)
        self.num_preemptions += 1
        seq.state = SequenceState.WAITING
        insort(self.waiting, seq, key=_arrival)

    def _leave(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.pages.release(seq)
        self._slots.append(seq.slot)
        seq.slot = -1


def _arrival(seq: Sequence) -> int:
    return seq.arrival
