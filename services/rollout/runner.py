"""One model and the KV cache it writes: a step's chunks in, tokens and logprobs out.

`launch` hands a step to the device, `wait` waits for what came of it; in between the next steps may be launched. Sampled ids
stay on the device, by slot, where the next step finds them. Everything launched runs in the order of the launches, so a
launched step counts as done for whatever is launched behind it. On a CPU a launch computes before it returns.

Legend: S chunks, T tokens of the step, D hidden size, R rows for the head.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.rollout.config import RolloutConfig
from services.rollout.inputs import Batch, SlotTables
from services.rollout.samples import Scoring
from services.rollout.slots import Step
from services.rollout.times import Clock, StepTimes
from services.rollout.weights import ServedModel
from shared.kernels import AttentionLayout, SampleOutput, SamplingParams, to_device
from shared.models import KVCache


@dataclass(slots=True)
class Flight:
    """A step between its launch and the reading of its results."""

    batch: Batch
    drawn: Tensor
    """[3, >= R] int32 on the host, complete at `end`: tokens, bits of their logprobs, top-1 ids."""
    scored: Tensor | None
    """[rows of all scorings] float32 on the host, complete at `end`."""
    begin: Any
    forwarded: Any
    end: Any
    """Marks of the runner's clock: before the forward, behind it, behind the copies to the host."""
    previous_end: Any | None
    """`end` of the step that was in flight, if the device had come to it when this one was launched."""
    num_tokens: int
    is_graph: bool = False


class ModelRunner:
    """Allocates the cache and the input tables for the run's shape; versions of the run follow one another in it."""

    most_in_flight = 2
    """Steps that are launched before the oldest one's results are read. Each may leave a row behind the end of a sequence."""

    def __init__(self, config: RolloutConfig, model: ServedModel) -> None:
        self.config, self.model = config, model
        self.device = model.numerics.ops.device
        self.clock, self.times = Clock(self.device), StepTimes()
        max_pages = -(-model.run.config.max_model_len // config.tokens_per_page)
        self.tables = SlotTables(num_slots=config.max_running, max_pages=max_pages)
        # One more than slots: what padding leaves goes to the last.
        self.last_token = torch.zeros(config.max_running + 1, dtype=torch.int64, device=self.device)
        """[N + 1]: the token sampled last in each slot."""
        self._last_end: Any | None = None
        self.cache = self._allocate()

    @property
    def num_graphs(self) -> int:
        """Captured by now; steps of a CPU are not."""
        return 0

    @property
    def computes_at_launch(self) -> bool:
        """Whether a step is done when its launch returns."""
        return self.device.type != "cuda"

    def adopt(self, model: ServedModel) -> ServedModel:
        """Serves another version of the run from now on; no step is in flight. Returns the model as it is held."""
        self.model = model
        return model

    def launch(self, step: Step) -> Flight:
        """Computes the step's tokens into the cache and draws the next token of each sample that is computed to its end."""
        started = time.monotonic()
        batch = self.tables.batch(step)
        flight = self._run(batch, self._last_end)
        self._last_end = flight.end
        # What the launch itself computes is no preparation.
        computed_s = self.clock.seconds(flight.begin, flight.end) if self.computes_at_launch else 0.0
        self.times.prepare_s += time.monotonic() - started - computed_s
        return flight

    def wait(self, flight: Flight) -> None:
        """Until the flight's results are on the host; counts its times."""
        started, t = time.monotonic(), self.times
        self.clock.wait(flight.end)
        t.wait_s += time.monotonic() - started
        t.num_steps += 1
        t.num_graph_steps += flight.is_graph
        t.num_tokens += flight.num_tokens
        t.num_sampled += len(flight.batch.samples)
        device_s = self.clock.seconds(flight.begin, flight.forwarded)
        sample_s = self.clock.seconds(flight.forwarded, flight.end)
        idle_s = 0.0 if flight.previous_end is None else self.clock.seconds(flight.previous_end, flight.begin)
        t.device_s += device_s
        t.sample_s += sample_s
        t.idle_s += idle_s
        if len(flight.batch.samples) == self.config.max_running:
            t.full_s += device_s + sample_s
            t.full_idle_s += idle_s
        if self._last_end is flight.end:
            # Nothing was launched behind it: whatever comes later did not keep the device waiting.
            self._last_end = None

    def _allocate(self) -> KVCache:
        return KVCache(self.model.run.model, self.config.kv_capacity_tokens, self.model.run.dtype, self.device)

    def _run(self, batch: Batch, previous_end: Any | None) -> Flight:
        ids_T = np.empty(batch.num_tokens, np.int64)
        batch.write_ids(ids_T)
        layout = self._layout(batch)
        begin, previous_end = self.clock.mark(), self.clock.passed(previous_end)
        hidden_TD = self.model.decoder(
            self.known(self.to_device(ids_T)), layout.positions.to(self.device), layout, self.cache
        )
        forwarded = self.clock.mark()
        drawn = torch.empty((3, 0), dtype=torch.int32)
        if len(batch.samples):
            hidden_RD = hidden_TD[self.to_device(batch.rows_R)]
            keys = {name: self.to_device(v) for name, v in self.tables.sampling(batch).items()}
            out = self.sample(hidden_RD, SamplingParams(**keys, **self.filters(batch)))
            self.last_token[self.to_device(batch.slots_R)] = out.token.long()
            drawn = torch.stack((out.token, out.logprob.view(torch.int32), out.top1)).cpu()
        scored = self.score(hidden_TD, batch)
        scored = scored.cpu() if scored is not None else None
        return Flight(batch, drawn, scored, begin, forwarded, self.clock.mark(), previous_end, batch.num_tokens)

    def known(self, ids_T: Tensor) -> Tensor:
        """[T] token ids, pending ones (-1 - slot) looked up."""
        return torch.where(ids_T < 0, self.last_token[(-1 - ids_T).clamp_min(0)], ids_T)

    def sample(self, hidden_RD: Tensor, params: SamplingParams) -> SampleOutput:
        """The next token of each row."""
        ops, decoder = self.model.numerics.ops, self.model.decoder
        return ops.sample(hidden_RD, decoder.head_weight, params, weight32_VD=self.model.head32)

    def filters(self, batch: Batch) -> dict[str, Tensor]:
        """Those fields of SamplingParams that cut a row's distribution, as far as a row uses them."""
        return {name: self.to_device(values) for name, values in self.tables.filters(batch).items()}

    def score(self, hidden_TD: Tensor, batch: Batch) -> Tensor | None:
        """Logprobs of the given next tokens, of all scorings one after another; None without any."""
        if self.tables.is_sample[batch.slots_S].all():
            return None
        targets: list[int] = []
        rows, temperatures = [], []
        begin = 0
        for seq, start, end, _ in batch.step:
            if isinstance(seq, Scoring):
                targets += seq.targets[start:end]
                rows.append(np.arange(begin, begin + end - start))
                temperatures.append(np.full(end - start, seq.temperature, np.float32))
            begin += end - start
        hidden_RD = hidden_TD[self.to_device(np.concatenate(rows))]
        to = self.to_device
        return self.model.decoder.logprobs(
            hidden_RD, to(np.array(targets)), to(np.concatenate(temperatures)), weight32_VD=self.model.head32
        ).logprob

    def _layout(self, batch: Batch) -> AttentionLayout:
        num_pages = -(-int(batch.ends_S.max()) // self.config.tokens_per_page)
        return AttentionLayout(
            q_lens=torch.from_numpy(batch.q_lens_S),
            context_lens=torch.from_numpy(batch.ends_S.copy()),
            pages=torch.from_numpy(self.tables.pages[batch.slots_S, :num_pages].astype(np.int64)),
            page_size=self.config.tokens_per_page,
        )

    def to_device(self, values: np.ndarray) -> Tensor:
        return to_device(torch.from_numpy(np.ascontiguousarray(values)), self.device)

    def describe(self) -> dict[str, str]:
        """Operation -> implementation executed, read back."""
        return self.model.numerics.ops.describe()
