"""A step as arrays: what stays with a sequence is kept by slot, so that a step is array arithmetic over all of them.

Legend: S shares of sequences, in ascending order of slot; T tokens; R sampled rows; N slots (row N of a table belongs to nobody).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.rollout.samples import Sample
from services.rollout.sequence import Sequence
from services.rollout.slots import Step

Array = np.ndarray


@dataclass(frozen=True, slots=True)
class Batch:
    """One step."""

    step: Step
    q_lens_S: Array
    """int64; so are the others."""
    sampled_R: Array
    """Index of each sampled share."""
    slots_R: Array
    samples: Array
    """Objects, one per sampled row."""
    stints_R: Array
    num_tokens: int
    is_decode: bool
    """Whether every share is the one token that was sampled last."""
    new_pages: tuple[Array, Array]
    """Entries of the page tables that are new: flat index, page."""

    @property
    def slots_S(self) -> Array:
        return self.step.slots_S

    @property
    def ends_S(self) -> Array:
        return self.step.ends_S

    @property
    def firsts_S(self) -> Array:
        """Packed row of each share's first token."""
        return np.cumsum(self.q_lens_S) - self.q_lens_S

    @property
    def rows_R(self) -> Array:
        """Packed row behind which each sample's next token is drawn."""
        return (np.cumsum(self.q_lens_S) - 1)[self.sampled_R]

    @property
    def positions_T(self) -> Array:
        """Absolute position of each token."""
        return np.arange(self.num_tokens) + (self.step.starts_S - self.firsts_S).repeat(self.q_lens_S)

    def write_ids(self, ids_T: Array) -> None:
        """Token ids; -1 - slot where the token is pending on the device."""
        if self.is_decode:
            ids_T[:] = -1 - self.slots_S
            return
        step, firsts_S = self.step, self.firsts_S
        is_known_S = ~step.is_pending_S
        ids_T[firsts_S[step.is_pending_S]] = -1 - self.slots_S[step.is_pending_S]
        columns = (step.seqs_S, firsts_S, step.starts_S, step.ends_S)
        for seq, first, start, end in zip(*(column[is_known_S].tolist() for column in columns), strict=True):
            ids_T[first : first + end - start] = seq.token_ids[start:end]


class SlotTables:
    """Rows by slot: page table and sampling parameters of the sequence that runs there."""

    def __init__(self, *, num_slots: int, max_pages: int) -> None:
        self.num_slots, self.max_pages = num_slots, max_pages
        self.pages = np.zeros((num_slots + 1, max_pages), np.int32)
        self.num_prompt, self.seed, self.prompt, self.sample, self.top_k = (
            np.zeros(num_slots, np.int64) for _ in range(5)
        )
        self.temperature, self.top_p, self.min_p = (np.zeros(num_slots, np.float32) for _ in range(3))
        self.is_sample, self.is_filtered = (np.zeros(num_slots, bool) for _ in range(2))

    def batch(self, step: Step) -> Batch:
        """Brings the tables up to date with the step."""
        at: list[int] = []
        new: list[int] = []
        for seq in step.changed:
            first, row = seq.num_tabled_pages, seq.slot * self.max_pages
            if not first:
                self._enter(seq)
            seq.num_tabled_pages = len(seq.pages)
            at += range(row + first, row + seq.num_tabled_pages)
            new += seq.pages[first:]
        new_pages = np.array(at, np.int64), np.array(new, np.int32)
        self.pages.reshape(-1)[new_pages[0]] = new_pages[1]
        q_lens_S = step.ends_S - step.starts_S
        num_tokens = int(q_lens_S.sum())
        is_decode = num_tokens == len(step) and bool(step.is_pending_S.all())
        columns = (np.arange(len(step)), step.slots_S, step.seqs_S, step.stints_S)
        if not is_decode:
            is_sampled_S = step.is_last_S & self.is_sample[step.slots_S]
            columns = tuple(column[is_sampled_S] for column in columns)
        sampled_R, slots_R, samples, stints_R = columns
        return Batch(
            step=step,
            q_lens_S=q_lens_S,
            sampled_R=sampled_R,
            slots_R=slots_R,
            samples=samples,
            stints_R=stints_R,
            num_tokens=num_tokens,
            is_decode=is_decode,
            new_pages=new_pages,
        )

    def kv_slots(self, slots_T: Array, positions_T: Array, page_size: int) -> Array:
        """[T]: row of the cache for a token at a position of a slot's sequence."""
        pages_T = self.pages[slots_T, positions_T // page_size].astype(np.int64)
        return pages_T * page_size + positions_T % page_size

    def sampling(self, batch: Batch) -> dict[str, Array]:
        """The fields of SamplingParams, by sampled row. A token's index counts sampled tokens: the prompt number stands for the
        prompt."""
        slots = batch.slots_R
        return {
            "seed": self.seed[slots],
            "prompt": self.prompt[slots],
            "sample": self.sample[slots],
            "position": self.positions(batch),
            "temperature": self.temperature[slots],
        }

    def positions(self, batch: Batch) -> Array:
        """[R]: index of the token to draw among the sampled ones."""
        return batch.ends_S[batch.sampled_R] - self.num_prompt[batch.slots_R]

    def filters(self, batch: Batch) -> dict[str, Array]:
        """Those of top_k, top_p and min_p that a sampled row uses."""
        slots = batch.slots_R
        if not self.is_filtered[slots].any():
            return {}
        top_k, top_p, min_p = self.top_k[slots], self.top_p[slots], self.min_p[slots]
        used = {"top_k": top_k.any(), "top_p": (top_p < 1).any(), "min_p": min_p.any()}
        values = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
        return {name: values[name] for name, is_used in used.items() if is_used}

    def _enter(self, seq: Sequence) -> None:
        slot = seq.slot
        self.is_sample[slot] = isinstance(seq, Sample)
        if isinstance(seq, Sample):
            request, params = seq.request, seq.request.sampling
            self.num_prompt[slot] = seq.num_prompt_tokens
            self.seed[slot], self.prompt[slot] = _signed(request.seed), _signed(request.prompt_number)
            self.sample[slot] = seq.sample_index
            self.temperature[slot] = params.temperature
            self.top_k[slot], self.top_p[slot], self.min_p[slot] = params.top_k, params.top_p or 1.0, params.min_p
            self.is_filtered[slot] = params.is_truncated


def _signed(value: int) -> int:
    """64 bits in two's complement."""
    return (value + 2**63) % 2**64 - 2**63
