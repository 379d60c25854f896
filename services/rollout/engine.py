"""What may be asked of the engine between two steps: samples and scores in line, aborts, a swap of weights and its proof.

Every method is called from one thread, the loop's (`loop.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from services.rollout.config import RolloutConfig
from services.rollout.kv_cache import PagePool
from services.rollout.pipeline import Counters, Outputs, Pipeline
from services.rollout.recompute import Recompute
from services.rollout.samples import (
    Full,
    InvalidRequest,
    OtherVersion,
    Sample,
    SampleFailed,
    Scoring,
)
from services.rollout.scheduler import Scheduler
from services.rollout.sequence import Sequence
from services.rollout.times import Laps, StepTimes
from services.rollout.weights import ServedModel, held_digest
from shared.wire.types import FinishReason, float32_bytes, int32_array

PROBE_TEMPERATURE = 1.0
"""Of the probe's logprobs, on the trainer's side as on this one."""


@dataclass(frozen=True, slots=True)
class CommitResult:
    digest: str
    """Of the weights in memory, read back."""
    probe_tokens: int
    probe_differing: int
    pause_s: float
    """Time that sampling stood still."""
    parts_s: dict[str, float] = field(default_factory=dict)
    """What the pause was spent on: drain (the step in flight), requeue, copy, digest, probe."""


class Engine:
    """Continuous batching over one model."""

    def __init__(self, config: RolloutConfig) -> None:
        self._pipeline = Pipeline(config)
        self.doubt = ""
        """Why the weights held may not be sampled from; empty when they may."""
        self.is_leaving = False
        """Whether a commit waits; until it is done nothing new may enter under the old version."""
        self._num_arrivals = 0
        self.recompute = Recompute()
        """Of what ran at the last swap."""

    @property
    def config(self) -> RolloutConfig:
        """As given, `auto` and measured sizes replaced by what they came to."""
        return self._pipeline.config

    @property
    def model(self) -> ServedModel | None:
        return self._pipeline.runner.model if self._pipeline.runner else None

    @property
    def scheduler(self) -> Scheduler:
        return self._pipeline.scheduler

    @property
    def pages(self) -> PagePool:
        return self._pipeline.pages

    @property
    def counters(self) -> Counters:
        return self._pipeline.counters

    @property
    def times(self) -> StepTimes:
        return self._pipeline.times

    @property
    def has_work(self) -> bool:
        """Whether anything is open or in flight."""
        return self._pipeline.has_work

    @property
    def kv_usage(self) -> float:
        """Share of pages that sequences hold, 0 to 1."""
        return 1 - self.pages.num_free / self.pages.num_pages

    @property
    def computes_at_launch(self) -> bool:
        """Whether a step is done when its launch returns: nothing runs beside this thread."""
        return self._pipeline.runner is None or self._pipeline.runner.computes_at_launch

    @property
    def num_graphs(self) -> int:
        """Captured by now."""
        return self._pipeline.runner.num_graphs if self._pipeline.runner else 0

    def describe(self) -> dict[str, str]:
        """Operation -> implementation executed, read back; empty without a model."""
        return self._pipeline.runner.describe() if self._pipeline.runner else {}

    def step(self, on_launch: Callable[[], None] = lambda: None) -> bool:
        """Launches a step, calls `on_launch`, reads an earlier step (`pipeline.py`). Returns whether there was anything to do."""
        has_computed = self._pipeline.step(on_launch)
        if self.recompute.is_going_on:
            self.recompute.look(self.scheduler)
        return has_computed

    def drain(self) -> None:
        """Reads what is in flight without launching more."""
        self._pipeline.drain()

    def take_outputs(self, least_chunks: int | None = None) -> Outputs:
        """What left the engine since, in order; with `least_chunks` of many chunks so many or a quarter, whichever is more."""
        outputs = self._pipeline.outputs
        if least_chunks is not None and len(outputs.chunks) > least_chunks:
            num_chunks = max(least_chunks, len(outputs.chunks) // 4)
            taken, outputs.chunks = outputs.chunks[:num_chunks], outputs.chunks[num_chunks:]
            # A failure comes behind everything that was sampled.
            return Outputs(taken)
        self._pipeline.outputs = Outputs()
        return outputs

    def submit(self, samples: list[Sample], model: ServedModel) -> None:
        """Puts a group in line. Raises Refused, and then nothing of it is in line.

        Args:
            model: the one that the request was checked against; it may have been replaced since.
        """
        self._require_room(len(samples), model)
        for sample in samples:
            self._enqueue(sample)
            # A continuation may be at its end already.
            reason = sample.stop_rule.check(sample.token_ids, sample.num_prompt_tokens)
            if reason is not None:
                self._pipeline.end(sample, reason)

    def submit_scoring(self, scorings: list[Scoring], model: ServedModel) -> None:
        """Puts sequences in line whose logprobs are wanted, through the same steps as everything else. Raises Refused."""
        self._require_room(len(scorings), model)
        for scoring in scorings:
            self._enqueue(scoring)

    def abort(self, seqs: Iterable[Sample | Scoring]) -> int:
        """Ends what is open; samples stream what they have. Returns how many."""
        open_seqs = [s for s in seqs if s.state.is_open]
        for seq in open_seqs:
            if isinstance(seq, Sample):
                self._pipeline.end(seq, FinishReason.ABORTED)
            else:
                self.scheduler.finish(seq)
        return len(open_seqs)

    def abort_ids(self, trajectory_ids: set[str]) -> int:
        """`abort` by trajectory id."""
        return self.abort([s for s in self._open_samples() if s.trajectory_id in trajectory_ids])

    def swap(self, model: ServedModel, *, keeps_kv: bool = False) -> CommitResult:
        """Between two steps: serve another version, compute running sequences again under it, prove it by the probe.

        Idempotent on the digest; then only the proof is repeated.

        Args:
            keeps_kv: let running sequences go on behind keys and values of the old version; what they sample from now on comes
                from no version that exists, and is stamped so.
        """
        lap = Laps()
        self._pipeline.drain()
        lap("drain")
        for sample in self._open_samples():
            self._pipeline.flush(sample, None)
        current = self.model
        if current is not None and current.run != model.run:
            self.fail_all(f"the replica went over from run {current.run.config.run} to {model.run.config.run}")
        if current is None or current.run != model.run or current.version.digest != model.version.digest:
            # A score has one version; samples have spans.
            self._fail([s for s in self._open() if isinstance(s, Scoring)], f"the replica took {model.version}")
            (self.scheduler.keep if keeps_kv else self.scheduler.restart)(model.version.digest)
        lap("requeue")
        if current is None or current.run != model.run:
            self._pipeline.build(model)
        assert self._pipeline.runner is not None
        held = self._pipeline.runner.adopt(model)
        lap("copy")
        digest = held_digest(held)
        lap("digest")
        num_tokens, num_differing = self._prove(held, digest)
        lap("probe")
        self.recompute.begin(self.scheduler, self._num_arrivals)
        return CommitResult(digest, num_tokens, num_differing, sum(lap.seconds.values()), lap.seconds)

    def fail_all(self, reason: str) -> None:
        """Ends everything that is open; samples can be continued elsewhere from what was streamed."""
        self._pipeline.drain()
        self._fail(self._open(), reason)

    def _fail(self, seqs: list[Sequence], reason: str) -> None:
        for seq in seqs:
            self.scheduler.finish(seq)
            if isinstance(seq, Sample):
                self._pipeline.flush(seq, None)
                failed = SampleFailed(sample=seq, reason=reason, is_in_doubt=bool(self.doubt))
                self._pipeline.outputs.failures.append(failed)
            elif isinstance(seq, Scoring):
                seq.done.set_exception(OtherVersion(reason))

    def _require_room(self, num_sequences: int, model: ServedModel) -> None:
        held = self.model
        if held is None or (held.run, held.version.digest) != (model.run, model.version.digest):
            raise OtherVersion(f"the replica holds {held and held.version}, asked for {model.version}")
        if self.doubt or self.is_leaving:
            raise OtherVersion(self.doubt or "the replica is about to take another version")
        num_open, limit = len(self.scheduler.running) + len(self.scheduler.waiting), self.config.max_open_samples
        if num_sequences > limit:
            raise InvalidRequest(f"{num_sequences} sequences in one call, at most {limit} may be open; send fewer")
        if num_open + num_sequences > limit:
            raise Full(f"{num_open} of {limit} sequences are open, no room for {num_sequences}; try another replica")

    def _enqueue(self, seq: Sample | Scoring) -> None:
        if isinstance(seq, Sample):
            seq.limit = seq.num_prompt_tokens + seq.request.sampling.max_tokens
        seq.arrival = self._num_arrivals
        self._num_arrivals += 1
        self.scheduler.add(seq)

    def _open(self) -> list[Sequence]:
        return [*self.scheduler.running, *self.scheduler.waiting]

    def _open_samples(self) -> list[Sample]:
        return [s for s in self._open() if isinstance(s, Sample)]

    def _prove(self, model: ServedModel, digest: str) -> tuple[int, int]:
        """Scores the probe through ordinary steps, ahead of everything in line; leaves in `doubt` what speaks against the model.

        Args:
            digest: of what is held, read back.

        Returns:
            The number of probe logprobs, and how many of them differ.
        """
        probes = [
            Scoring.of(int32_array(ids).tolist(), PROBE_TEMPERATURE)
            for ids in model.manifest.probe_token_ids
            if len(ids) > 4
        ]
        self.scheduler.make_room(max((p.num_tokens for p in probes), default=0))
        with self.scheduler.apart():
            for arrival, probe in enumerate(probes, -len(probes)):
                probe.arrival = arrival
                self.scheduler.add(probe)
            while not all(p.done.done() for p in probes):
                self._pipeline.step()
        expected = b"".join(model.manifest.probe_logprobs)
        got = b"".join(float32_bytes(p.logprobs) for p in probes)
        num_differing = int((np.frombuffer(got, "<u4") != np.frombuffer(expected, "<u4")).sum())
        self.doubt = ""
        if digest != model.version.digest:
            self.doubt = f"the weights in memory have digest {digest}, the manifest says {model.version.digest}"
        elif num_differing and model.run.config.numerics == "exact":
            self.doubt = f"{num_differing} of {len(got) // 4} probe logprobs differ from the trainer's"
        if self.doubt:
            self.fail_all(self.doubt)
        return len(got) // 4, num_differing
