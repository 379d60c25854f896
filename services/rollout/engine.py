"""What one step does, and what a swap of weights does between two: scheduler, page pool and model runner together.

Every method is called from one thread, the loop's (`loop.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from services.rollout.config import RolloutConfig
from services.rollout.kv_cache import PagePool
from services.rollout.runner import Flight, ModelRunner
from services.rollout.samples import Full, InvalidRequest, OtherVersion, Sample, SampleChunk, SampleFailed, Scoring
from services.rollout.scheduler import Chunk, Scheduler
from services.rollout.sequence import Sequence
from services.rollout.weights import ServedModel, held_digest
from shared.wire.types import FinishReason, float32_bytes, int32_array

PROBE_TEMPERATURE = 1.0
"""Of the probe's logprobs, on the trainer's side as on this one."""


class EngineFault(RuntimeError):
    """The engine computed something that cannot be right; the process must not go on."""


@dataclass(slots=True)
class Counters:
    """Since the start of the process."""

    sampled_tokens: int = 0
    continued_tokens: int = 0
    prefill_tokens: int = 0
    """Computed without sampling behind them: prompts, and what preemption made us compute again."""


@dataclass(frozen=True, slots=True)
class CommitResult:
    digest: str
    """Of the weights in memory, read back."""
    probe_tokens: int
    probe_differing: int
    pause_s: float
    """Time that sampling stood still."""


@dataclass(slots=True)
class Outputs:
    """What left the engine since it was last asked."""

    chunks: list[SampleChunk] = field(default_factory=list)
    failures: list[SampleFailed] = field(default_factory=list)


class Engine:
    """Continuous batching over one model."""

    def __init__(self, config: RolloutConfig) -> None:
        config = replace(config, device=device_of(config.device))
        self.config = config
        # A measured cache gets its pages with its model.
        num_pages = 1 if config.is_measured else config.num_pages
        self.pages = PagePool(num_pages=num_pages, page_size=config.page_size, shares_prefixes=config.shares_prefixes)
        self.scheduler = Scheduler(
            self.pages,
            max_running=config.max_running,
            max_step_tokens=config.max_step_tokens,
            max_chunk_tokens=config.max_chunk_tokens,
        )
        self.counters = Counters()
        self.doubt = ""
        """Why the weights held may not be sampled from; empty when they may."""
        self.is_leaving = False
        """Whether a commit waits; until it is done nothing new may enter under the old version."""
        self._runner: ModelRunner | None = None
        self._in_flight: Flight | None = None
        """The step that was launched last, while its results are not read."""
        self._num_arrivals = 0
        self._outputs = Outputs()

    @property
    def model(self) -> ServedModel | None:
        return self._runner.model if self._runner else None

    @property
    def has_work(self) -> bool:
        """Whether anything is open or in flight."""
        return self.scheduler.has_work or self._in_flight is not None

    @property
    def kv_usage(self) -> float:
        """Share of pages that sequences hold, 0 to 1."""
        return 1 - self.pages.num_free / self.pages.num_pages

    def take_outputs(self) -> Outputs:
        outputs, self._outputs = self._outputs, Outputs()
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
                self._end(sample, reason)

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
                self._end(seq, FinishReason.ABORTED)
            else:
                self.scheduler.finish(seq)
        return len(open_seqs)

    def abort_ids(self, trajectory_ids: set[str]) -> int:
        """`abort` by trajectory id."""
        return self.abort([s for s in self._open_samples() if s.trajectory_id in trajectory_ids])

    def step(self) -> bool:
        """Launches the next step, one chunk of every sequence that has a place, and then reads what the one before it sampled.

        Returns:
            Whether there was anything to compute or to read.
        """
        coming, landing = self._launch(), self._in_flight
        self._in_flight = coming
        if landing is not None:
            self._read(landing)
        return coming is not None or landing is not None

    def drain(self) -> None:
        """Reads what is in flight without launching more."""
        landing, self._in_flight = self._in_flight, None
        if landing is not None:
            self._read(landing)

    def swap(self, model: ServedModel) -> CommitResult:
        """Between two steps: serve another version, compute running sequences again under it, prove it by the probe.

        Idempotent on the digest; then only the proof is repeated.
        """
        begin = time.monotonic()
        self.drain()
        for sample in self._open_samples():
            self._flush(sample, None)
        current = self.model
        if current is not None and current.run != model.run:
            self.fail_all(f"the replica went over from run {current.run.config.run} to {model.run.config.run}")
        if current is None or current.run != model.run or current.version.digest != model.version.digest:
            # A score has one version; samples have spans.
            self._fail([s for s in self._open() if isinstance(s, Scoring)], f"the replica took {model.version}")
            self.scheduler.restart(model.version.digest)
        if self._runner is None or current is None or current.run != model.run:
            self._build(model)
        assert self._runner is not None
        digest, num_tokens, num_differing = self._prove(self._runner.adopt(model))
        return CommitResult(digest, num_tokens, num_differing, time.monotonic() - begin)

    def _build(self, model: ServedModel) -> None:
        # Free the old cache first: both at once may not fit.
        self._runner = None
        self._runner = ModelRunner(self.config, model)

    def fail_all(self, reason: str) -> None:
        """Ends everything that is open; samples can be continued elsewhere from what was streamed."""
        self.drain()
        self._fail(self._open(), reason)

    def _fail(self, seqs: list[Sequence], reason: str) -> None:
        for seq in seqs:
            self.scheduler.finish(seq)
            if isinstance(seq, Sample):
                self._flush(seq, None)
                self._outputs.failures.append(SampleFailed(sample=seq, reason=reason))
            elif isinstance(seq, Scoring):
                seq.done.set_exception(OtherVersion(reason))

    def _require_room(self, num_sequences: int, model: ServedModel) -> None:
        held = self.model
        if held is None or (held.run, held.version.digest) != (model.run, model.version.digest):
            raise OtherVersion(f"the replica holds {held and held.version}, asked for {model.version}")
        if self.doubt or self.is_leaving:
            raise OtherVersion(self.doubt or "the replica is about to take another version")
        num_open, limit = len(self._open()), self.config.max_open_samples
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

    def _launch(self) -> Flight | None:
        begin = time.monotonic()
        chunks = self.scheduler.schedule()
        if not chunks:
            return None
        assert self._runner is not None
        self._runner.times.schedule_s += time.monotonic() - begin
        flight = self._runner.launch(chunks)
        for sample in flight.batch.samples:
            sample.num_pending += 1
        for chunk in chunks:
            self.scheduler.complete(chunk)
            if chunk.is_last and isinstance(chunk.seq, Scoring):
                self.scheduler.finish(chunk.seq)
        self.counters.prefill_tokens += flight.num_tokens - len(flight.batch.samples)
        return flight

    def _read(self, flight: Flight) -> None:
        """Hands on what a step computed; what was sampled behind the end of a sequence is dropped."""
        assert self._runner is not None
        self._runner.wait(flight)
        begin = time.monotonic()
        samples = flight.batch.samples
        if flight.scored is not None:
            _fill_scorings(flight.batch.chunks, flight.scored.numpy())
        if samples:
            drawn = flight.drawn.numpy()[:, : len(samples)]
            logprobs = drawn[1].view(np.float32)
            self._require_finite(samples, logprobs)
            for sample, token, logprob, top1 in zip(
                samples, drawn[0].tolist(), logprobs.tolist(), drawn[2].tolist(), strict=True
            ):
                sample.num_pending -= 1
                if sample.state.is_open:
                    self._extend(sample, token, logprob, top1)
        self._runner.times.read_s += time.monotonic() - begin

    def _extend(self, sample: Sample, token: int, logprob: float, top1: int) -> None:
        sample.token_ids.append(token)
        sample.logprobs.append(logprob)
        sample.top1.append(top1)
        self.counters.sampled_tokens += 1
        self.counters.continued_tokens += sample.num_continued_tokens > 0
        reason = sample.stop_rule.check(sample.token_ids, sample.num_prompt_tokens)
        if reason is not None:
            self._end(sample, reason)
        elif len(sample.logprobs) >= self.config.tokens_per_chunk:
            self._flush(sample, None)

    def _require_finite(self, samples: list[Sample], logprobs: np.ndarray) -> None:
        # A row behind the end of its sequence continues a sequence like any other: it is finite too.
        is_finite = np.isfinite(logprobs)
        if not is_finite.all():
            bad = [samples[i].trajectory_id for i in np.flatnonzero(~is_finite).tolist()]
            raise EngineFault(
                f"a logprob that is not finite in {len(bad)} of {len(samples)} samples ({', '.join(bad[:4])}) under "
                f"{self.model and self.model.version}; look at the trainer's last step"
            )

    def _end(self, sample: Sample, reason: FinishReason) -> None:
        self.scheduler.finish(sample)
        self._flush(sample, reason)

    def _flush(self, sample: Sample, reason: FinishReason | None) -> None:
        """Hands over the tokens sampled since the last chunk, stamped with the version held: flush before a swap."""
        num_tokens = len(sample.logprobs)
        if not num_tokens and reason is None:
            return
        assert self.model is not None
        self._outputs.chunks.append(
            SampleChunk(
                sample=sample,
                start=sample.num_sampled_tokens - num_tokens,
                token_ids=sample.token_ids[len(sample.token_ids) - num_tokens :],
                logprobs=sample.logprobs,
                top1=sample.top1,
                version=self.model.version,
                finish_reason=reason,
            )
        )
        sample.logprobs, sample.top1 = [], []

    def _prove(self, model: ServedModel) -> tuple[str, int, int]:
        """Reads the digest of what is held and scores the probe through ordinary steps, ahead of everything in line.

        Returns:
            The digest, the number of probe logprobs, and how many of them differ.
        """
        digest = held_digest(model)
        probes = [
            Scoring.of(int32_array(ids).tolist(), PROBE_TEMPERATURE)
            for ids in model.manifest.probe_token_ids
            if len(ids) > 4
        ]
        held, self.scheduler.waiting = self.scheduler.waiting, []
        for probe in probes:
            probe.arrival = -1
            self.scheduler.add(probe)
        while not all(p.done.done() for p in probes):
            self.step()
        for seq in held:
            self.scheduler.add(seq)
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
        return digest, len(got) // 4, num_differing


def _fill_scorings(chunks: list[Chunk], logprobs: np.ndarray) -> None:
    begin = 0
    for seq, start, end, is_last in chunks:
        if isinstance(seq, Scoring):
            seq.logprobs[start:end] = logprobs[begin : begin + end - start]
            begin += end - start
            if is_last:
                seq.done.set_result(seq.logprobs)


def device_of(name: str) -> str:
    """What `auto` means on this machine; any other name as it is."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"
