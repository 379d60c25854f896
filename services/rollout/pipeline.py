"""Steps in flight: the next ones are scheduled and launched while the last one runs, then the oldest one's results are read.

    schedule n + 1 ─ launch n + 1 ─ read n ─ schedule n + 2 ─ ...        the host
            [ step n ............ ][ step n + 1 ............ ]           the device

So the device never waits for the host to hand on what it sampled. What the host does not know yet, the device does: a step
takes the tokens of the last one where it left them. A sequence that turns out to have ended at n has a row in each step launched
since, which is dropped. The runner says how many steps are in flight at most: two as above, or three, so that a host that is held
up for as long as a step takes still comes in time. Where many samples end with a step, others are launched while it is read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from services.rollout.config import RolloutConfig
from services.rollout.inputs import Batch
from services.rollout.kv_cache import PagePool
from services.rollout.runner import Flight, ModelRunner
from services.rollout.samples import Sample, SampleChunk, SampleFailed, Scoring, UnservableRun
from services.rollout.scheduler import Scheduler
from services.rollout.sequence import SequenceState
from services.rollout.slots import Step
from services.rollout.times import StepTimes
from services.rollout.weights import ServedModel
from shared.kernels import InexactKernelError
from shared.wire.types import FinishReason, Kv


class EngineFault(RuntimeError):
    """The engine computed something that cannot be right; the process must not go on."""


@dataclass(slots=True)
class Counters:
    """Since the start of the process."""

    sampled_tokens: int = 0
    continued_tokens: int = 0
    prefill_tokens: int = 0
    """Computed without sampling behind them: prompts, and what preemption made us compute again."""
    dropped_rows: int = 0
    """Sampled behind the end of a sequence, which was not known yet when the step was launched."""


@dataclass(slots=True)
class Outputs:
    """What left the engine since it was last asked."""

    chunks: list[SampleChunk] = field(default_factory=list)
    failures: list[SampleFailed] = field(default_factory=list)


class Pipeline:
    """Scheduler, page pool and model runner together, and the steps between them."""

    def __init__(self, config: RolloutConfig) -> None:
        self._given = self.config = config = replace(config, device=device_of(config.device))
        # A measured cache gets its pages with its model.
        num_pages = 1 if config.is_measured else config.num_pages
        self.pages = PagePool(
            num_pages=num_pages, page_size=config.tokens_per_page, shares_prefixes=config.shares_prefixes
        )
        self.scheduler = Scheduler(
            self.pages,
            max_running=config.max_running,
            max_step_tokens=config.max_step_tokens,
            max_chunk_tokens=config.max_chunk_tokens,
            tokens_per_chunk=config.tokens_per_chunk,
        )
        self.counters, self.times, self.outputs = Counters(), StepTimes(), Outputs()
        self.runner: ModelRunner | None = None
        self._in_flight: deque[Flight] = deque()
        """Launched steps whose results are not read, in the order of their launch."""

    @property
    def has_work(self) -> bool:
        """Whether anything is open or in flight."""
        return self.scheduler.has_work or bool(self._in_flight)

    def build(self, model: ServedModel) -> None:
        """A runner for another run's model; nothing is open. Raises UnservableRun."""
        # Free the old cache first: both at once may not fit.
        self.runner = None
        try:
            self.runner = build_runner(self._given, model)
        except InexactKernelError as error:
            raise UnservableRun(str(error)) from error
        self.runner.times = self.times
        self.config = config = self.runner.config
        if self._given.is_measured:
            self.pages = self.scheduler.pages = PagePool(
                num_pages=config.num_pages, page_size=config.tokens_per_page, shares_prefixes=config.shares_prefixes
            )
            self.pages.reset(model.version.digest)

    def step(self, on_launch: Callable[[], None] = lambda: None) -> bool:
        """Launches the next step, one chunk of every sequence that has a place, and then reads what the oldest in flight sampled,
        unless the runner takes another step before.

        Args:
            on_launch: called between the two.

        Returns:
            Whether there was anything to compute or to read.
        """
        has_launched = self._fill_up()
        on_launch()
        if not self._in_flight:
            assert not self.scheduler.has_work, "work but no step: a sequence exceeds the cache"
            return False
        if not (has_launched and self._takes_more):
            self._read(self._in_flight.popleft(), meanwhile=self._fill_up)
        return True

    def drain(self) -> None:
        """Reads what is in flight without launching more."""
        while self._in_flight:
            self._read(self._in_flight.popleft())

    def end(self, sample: Sample, reason: FinishReason) -> None:
        self.scheduler.finish(sample)
        self.flush(sample, reason)

    def flush(self, sample: Sample, reason: FinishReason | None) -> None:
        """Hands over the tokens sampled since the last chunk, stamped with the version held: flush before a swap."""
        self.scheduler.slots.settle(sample)
        if sample.logprobs or reason is not None:
            self._send(sample, reason)
        if sample.slot >= 0:
            self.scheduler.slots.watch(sample)

    @property
    def _takes_more(self) -> bool:
        return self.runner is None or len(self._in_flight) < self.runner.most_in_flight

    def _fill_up(self) -> bool:
        """Launches the next step if there is one and the runner takes it. Returns whether it did."""
        coming = self._launch() if self._takes_more else None
        if coming is not None:
            self._in_flight.append(coming)
        return coming is not None

    def _launch(self) -> Flight | None:
        begin = time.monotonic()
        step = self.scheduler.schedule()
        if not len(step):
            return None
        assert self.runner is not None
        self.times.schedule_s += time.monotonic() - begin
        flight = self.runner.launch(step)
        self.scheduler.slots.pending[flight.batch.slots_R] += 1
        self.scheduler.complete(step)
        if flight.scored is not None:
            for seq, _, _, is_last in step:
                if is_last and isinstance(seq, Scoring):
                    self.scheduler.finish(seq)
        self.counters.prefill_tokens += flight.num_tokens - len(flight.batch.samples)
        return flight

    def _read(self, flight: Flight, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Hands on what a step computed; what was sampled behind the end of a sequence is dropped.

        Args:
            meanwhile: may launch; called after every `Scheduler.most_at_once` samples that were looked at.
        """
        assert self.runner is not None
        self.runner.wait(flight)
        begin = time.monotonic()

        def apart() -> None:
            nonlocal begin
            started = time.monotonic()
            meanwhile()
            begin += time.monotonic() - started

        if flight.scored is not None:
            _fill_scorings(flight.batch.step, flight.scored.numpy())
        num_rows = len(flight.batch.samples)
        if num_rows:
            drawn_3R = flight.drawn.numpy()[:, :num_rows]
            self._require_finite(flight.batch.samples, drawn_3R[1].view(np.float32))
            self._extend(flight.batch, drawn_3R, meanwhile=apart)
        self.times.read_s += time.monotonic() - begin

    def _extend(self, batch: Batch, drawn_3R: np.ndarray, *, meanwhile: Callable[[], object]) -> None:
        """One token more for each sample that is still open; those where something is due are looked at."""
        slots, slots_R, c = self.scheduler.slots, batch.slots_R, self.counters
        is_there_R = slots.stints[slots_R] == batch.stints_R
        if not is_there_R.all():
            for i in np.flatnonzero(~is_there_R).tolist():
                self._extend_gone(batch.samples[i], *drawn_3R[:, i])
            slots_R, drawn_3R = slots_R[is_there_R], drawn_3R[:, is_there_R]
        c.sampled_tokens += len(slots_R)
        c.continued_tokens += int(np.count_nonzero(slots.is_continued[slots_R]))
        for i, sample in enumerate(slots.seqs[slots.extend(slots_R, drawn_3R)].tolist(), 1):
            slots.settle(sample)
            self._look(sample)
            if i % self.scheduler.most_at_once == 0:
                # To a step launched here it is as if those not looked at yet were still to be read. It may overwrite what
                # `drawn_3R` is a view of.
                meanwhile()

    def _extend_gone(self, sample: Sample, token: np.int32, logprob_bits: np.int32, top1: np.int32) -> None:
        """A token of one that lost its place after the launch: it was preempted, or is over."""
        sample.num_pending -= 1
        if sample.state is SequenceState.FINISHED:
            self.counters.dropped_rows += 1
            return
        sample.token_ids.append(int(token))
        sample.logprobs.append(float(logprob_bits.view(np.float32)))
        sample.top1.append(int(top1))
        self.counters.sampled_tokens += 1
        self.counters.continued_tokens += sample.num_continued_tokens > 0
        self._look(sample)

    def _look(self, sample: Sample) -> None:
        """Ends a settled sample that is at its end, sends a chunk that is due."""
        reason = sample.stop_rule.check(sample.token_ids, sample.num_prompt_tokens)
        if reason is not None:
            self.end(sample, reason)
            return
        if self.scheduler.slots.room(sample) == 0:
            self._send(sample, None)
        if sample.slot >= 0:
            self.scheduler.slots.watch(sample)

    def _send(self, sample: Sample, reason: FinishReason | None) -> None:
        assert self.runner is not None
        num_tokens = len(sample.logprobs)
        self.outputs.chunks.append(
            SampleChunk(
                sample=sample,
                start=sample.num_sampled_tokens - num_tokens,
                token_ids=sample.token_ids[len(sample.token_ids) - num_tokens :],
                logprobs=sample.logprobs,
                top1=sample.top1,
                version=self.runner.model.version,
                kv=Kv.MIXED if sample.is_mixed else Kv.FRESH,
                finish_reason=reason,
            )
        )
        sample.begin_chunk()

    def _require_finite(self, samples: np.ndarray, logprobs: np.ndarray) -> None:
        # A row behind the end of its sequence continues a sequence like any other: it is finite too.
        is_finite = np.isfinite(logprobs)
        if not is_finite.all():
            bad = [samples[i].trajectory_id for i in np.flatnonzero(~is_finite).tolist()]
            raise EngineFault(
                f"a logprob that is not finite in {len(bad)} of {len(samples)} samples ({', '.join(bad[:4])}) under "
                f"{self.runner and self.runner.model.version}; look at the trainer's last step"
            )


def build_runner(config: RolloutConfig, model: ServedModel) -> ModelRunner:
    """The runner for the device that the model's operations are of. Raises UnservableRun, InexactKernelError."""
    if not model.numerics.ops.has_paged_kernels:
        return ModelRunner(config, model)
    # Its kernels need triton.
    from services.rollout.paged import PagedRunner

    return PagedRunner(config, model)


def _fill_scorings(step: Step, logprobs: np.ndarray) -> None:
    begin = 0
    for seq, start, end, is_last in step:
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
