"""What changes with every token, by slot: a step's bookkeeping is arithmetic over all running sequences, not a visit to each.

While a sequence has a place, these are true here and stale in its object:

- how far it is computed (`num_computed`), and how many of its tokens are in flight (`num_pending`),
- the tokens that were sampled since it was settled last, with their logprobs (the ends of `token_ids`, `logprobs`, `top1`).

Everything else (pages, state, request) is in the object alone. `settle` brings the object up to date; it is called when something
happens to the sequence: a page is full, a chunk of its stream is due, it may have ended, it loses its place. Thresholds by slot
tell in one comparison to whom something happens.

Legend: N slots; S sequences of a step, in ascending order of slot; R those of them that are sampled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from services.rollout.samples import Sample
from services.rollout.sequence import Sequence

Array = np.ndarray

NEVER = np.iinfo(np.int64).max
MOST_TAIL = 256
"""Tokens that wait in a slot, at most."""
MOST_STOP_IDS = 4
"""Compared for all rows at once; the rule of a sample with more is asked at every token."""
NO_TOKEN = -1


class Chunk(NamedTuple):
    """One sequence's share of a step: its tokens [start, end)."""

    seq: Sequence
    start: int
    end: int
    is_last: bool
    """Whether the sequence is computed to its end, so that its next token can be sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Every sequence's share of a step. All [S]; int64 where nothing else is said.

    `token_ids` of a sequence with no pending token are up to date.
    """

    slots_S: Array
    starts_S: Array
    ends_S: Array
    is_last_S: Array
    """bool: `Chunk.is_last`."""
    is_pending_S: Array
    """bool: the one token of the share is sampled, and its id not known yet."""
    seqs_S: Array
    """Objects."""
    stints_S: Array
    """`Slots.stints`."""
    changed: list[Sequence]
    """Those that got pages."""

    def __len__(self) -> int:
        return len(self.slots_S)

    def __iter__(self) -> Iterator[Chunk]:
        columns = (self.seqs_S, self.starts_S, self.ends_S, self.is_last_S)
        return map(Chunk._make, zip(*(column.tolist() for column in columns), strict=True))


class Slots:
    """Places of running sequences. All counters are int64 [N], 0 where nobody runs.

    - `stints`: a number for each stay in a slot: a row in flight knows by it whether its sequence is still there
    - `computed`, `pending`: `Sequence.num_computed`, `num_pending`
    - `known`: tokens whose ids are here or in the object
    - `limits`, `capacities`: tokens that a sequence may have; that its pages hold
    - `share_at`: tokens, both computed and known, with which its next page is full; NEVER where it shares none
    - `look_at`: known tokens with which a chunk is due or it may have ended; one of a few stop ids is seen without
    """

    def __init__(self, num_slots: int, *, tokens_per_chunk: int) -> None:
        """Args: tokens_per_chunk, sampled tokens of one sample that are sent together, at most."""
        self.num_slots, self.tokens_per_chunk = num_slots, tokens_per_chunk
        self.seqs = np.full(num_slots, None, object)
        self._counters = np.zeros((6, num_slots), np.int64)
        self.stints, self.computed, self.known, self.pending, self.limits, self.capacities = self._counters
        self._thresholds = np.full((2, num_slots), NEVER)
        self.share_at, self.look_at = self._thresholds
        self._flags = np.zeros((2, num_slots), bool)
        self.runs, self.is_continued = self._flags
        self._stop_ids = np.full((MOST_STOP_IDS, num_slots), NO_TOKEN, np.int32)
        self._settled = np.zeros(num_slots, np.int64)
        """Tokens that the object has."""
        self._tails = np.zeros((3, num_slots, min(tokens_per_chunk, MOST_TAIL)), np.int32)
        """Sampled since: ids, bits of logprobs, top-1 ids."""
        self._tail_bytes = self._tails.reshape(-1).data.cast("B")
        self._free = list(reversed(range(num_slots)))
        self._num_stints = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def enter(self, seq: Sequence) -> None:
        """Gives a place to a sequence that just got its pages."""
        slot = seq.slot = self._free.pop()
        self._num_stints += 1
        self.seqs[slot], self.stints[slot], self.runs[slot] = seq, self._num_stints, True
        self.known[slot] = self._settled[slot] = len(seq.token_ids)
        self.computed[slot], self.pending[slot], self.limits[slot] = seq.num_computed, seq.num_pending, seq.limit
        if isinstance(seq, Sample):
            self.is_continued[slot] = seq.num_continued_tokens > 0
            ids = seq.stop_rule.stop_ids
            if len(ids) <= MOST_STOP_IDS:
                self._stop_ids[: len(ids), slot] = list(ids)
        self.watch(seq)

    def leave(self, seq: Sequence) -> None:
        """Takes the place away; the object is up to date."""
        slot = seq.slot
        self.settle(seq)
        self.seqs[slot], self._counters[:, slot], self._thresholds[:, slot] = None, 0, NEVER
        self._flags[:, slot], self._stop_ids[:, slot] = False, NO_TOKEN
        self._free.append(slot)
        seq.slot = -1

    def watch(self, seq: Sequence) -> None:
        """Decides with which token a settled sequence is looked at next."""
        room = self._tails.shape[2]
        if isinstance(seq, Sample):
            rule = seq.stop_rule
            is_seen_here = not rule.has_strings and len(rule.stop_ids) <= MOST_STOP_IDS
            room = min(room, self.room(seq)) if is_seen_here else 1
        self.look_at[seq.slot] = min(seq.limit, len(seq.token_ids) + room)

    def settle(self, seq: Sequence) -> None:
        """Brings the object up to date; one without a place is."""
        slot = seq.slot
        if slot < 0:
            return
        num_known = self.known.item(slot)
        tail = num_known - self._settled.item(slot)
        if tail:
            seq.token_ids.frombytes(self._tail(0, slot, tail))
            if isinstance(seq, Sample):
                seq.logprobs.frombytes(self._tail(1, slot, tail))
                seq.top1.frombytes(self._tail(2, slot, tail))
            self._settled[slot] = num_known
        seq.num_computed, seq.num_pending = self.computed.item(slot), self.pending.item(slot)

    def _tail(self, kind: int, slot: int, num_tokens: int) -> memoryview:
        begin = (kind * self.num_slots + slot) * self._tails.strides[1]
        return self._tail_bytes[begin : begin + 4 * num_tokens]

    def num_tokens(self, seq: Sequence) -> int:
        """Of one that has a place, pending ones included."""
        return int(self.known[seq.slot] + self.pending[seq.slot])

    def step(self, slots_S: Array, sizes_S: Array, changed: list[Sequence]) -> Step:
        """So many tokens of each from where it is computed to; settles those that have nothing pending."""
        starts_S, pending_S = self.computed[slots_S], self.pending[slots_S]
        ends_S, is_pending_S, seqs_S = starts_S + sizes_S, pending_S > 0, self.seqs[slots_S]
        if not is_pending_S.all():
            for seq in seqs_S[~is_pending_S].tolist():
                self.settle(seq)
        return Step(
            slots_S=slots_S,
            starts_S=starts_S,
            ends_S=ends_S,
            is_last_S=ends_S == self.known[slots_S] + pending_S,
            is_pending_S=is_pending_S,
            seqs_S=seqs_S,
            stints_S=self.stints[slots_S],
            changed=changed,
        )

    def extend(self, slots_R: Array, drawn_3R: Array) -> Array:
        """One pending token less and one known more in each slot. Returns the slots whose sample has to be looked at.

        Args:
            drawn_3R: int32: ids, bits of logprobs, top-1 ids.
        """
        known_R = self.known[slots_R]
        self._tails[:, slots_R, known_R - self._settled[slots_R]] = drawn_3R
        known_R += 1
        self.known[slots_R] = known_R
        self.pending[slots_R] -= 1
        is_due_R = known_R >= self.look_at[slots_R]
        is_due_R |= (self._stop_ids.take(slots_R, axis=1) == drawn_3R[0]).any(0)
        return slots_R[is_due_R]

    def room(self, sample: Sample) -> int:
        """Tokens until the next chunk of a settled sample; 0: it is due.

        Chunks of a call's samples end at the same tokens and leave in one message; those of other calls end at other tokens, or
        all of them would fall into one step. What fits into the chunk that ends a sample waits for it.
        """
        most, held = self.tokens_per_chunk, len(sample.logprobs)
        num_left = sample.limit - len(sample.token_ids)
        if held + num_left <= most:
            return num_left
        to_next = -(sample.num_sampled_tokens + sample.request.prompt_number) % most
        return min(to_next, most - held) if held else to_next or most
