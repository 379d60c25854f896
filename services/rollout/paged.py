"""The runner of a GPU: inputs in one block and one copy, tables of pages that stay on the device, steps replayed from graphs.

A sequence is known to the attention kernels by its slot, so chunks are packed in the order of their slots and nothing about a
context is sent but the pages that are new. The same code runs on CPU tensors under Triton's interpreter, uncaptured.

Legend: T tokens (padded), R sampled rows (padded), N slots; slot N belongs to nobody, and padding points there.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.rollout.blocks import Block, Fields, Views, clear
from services.rollout.config import RolloutConfig
from services.rollout.graphs import (
    LONG_PARTS,
    PROMPT_PARTS,
    SCRATCH_BYTES,
    Graphs,
    Shape,
    capturable,
    most_tiles,
    most_tokens,
    padded,
    padded_sizes,
)
from services.rollout.inputs import Batch
from services.rollout.memory import measured
from services.rollout.runner import Flight, ModelRunner
from services.rollout.weights import ServedModel, adopt
from shared.kernels import SamplingParams
from shared.kernels.cuda.attention import DECODE_ROWS, PREFILL_ROWS, CachedPlan, Launch
from shared.kernels.cuda.attention_cached import CachedRows, allocate_partials
from shared.kernels.cuda.attention_math import Tiles
from shared.kernels.cuda.ops import CudaOps
from shared.models import KVCache
from shared.models.merged import MergedDecoder
from shared.transfer import digests


class PagedRunner(ModelRunner):
    """Holds one decoder with merged weights for the life of the run; other versions are copied into it."""

    most_in_flight = 3
    """The thread that launches is held up by those that take calls and send tokens: the device has two steps to do meanwhile."""

    def __init__(self, config: RolloutConfig, model: ServedModel) -> None:
        assert isinstance(model.numerics.ops, CudaOps)
        self.ops = model.numerics.ops
        self.ops.activate()
        # Another thread staged it, in another stream, which must not have its memory back before this one has merged the weights.
        _synchronize(self.ops.device)
        for weight in model.decoder.parameters():
            if weight.is_cuda:
                weight.record_stream(torch.cuda.current_stream(weight.device))
        run = model.run
        self._merged = MergedDecoder(model.decoder, self.ops, num_positions=run.config.max_model_len)
        heads, kv_heads, _ = run.model.heads
        self._group = heads // kv_heads
        self._few_rows = max(DECODE_ROWS, 1 << (self._group - 1).bit_length())
        self._many_rows = max(PREFILL_ROWS, self._few_rows)
        self._tile_queries = self._many_rows // self._group
        self._most_captured = most_tokens(sum(p.numel() for p in model.decoder.model.layers[0].parameters()))
        self._graphs = Graphs(model.numerics.ops.device, is_enabled=config.cuda_graphs)
        super().__init__(config, model)
        self._warm_up()

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def adopt(self, model: ServedModel) -> ServedModel:
        """Copies another version into the memory that graphs were captured with."""
        self.ops.activate()
        if model.decoder is self.model.decoder:
            self.model = model
            return model
        # Another thread staged it in another stream, and will have the memory back.
        _synchronize(self.device)
        self.model = adopt(self.model, model)
        _synchronize(self.device)
        return self.model

    def describe(self) -> dict[str, str]:
        # A tensor's device has its number, by which the staging thread has found out.
        others = {"graphs": self._graphs.describe(), "digests": digests.describe(self._zeros.device)}
        return self.ops.describe() | self._merged.rows.describe() | others

    def _allocate(self) -> KVCache:
        n, run = self.config.max_running, self.model.run
        self._most_rows = padded(n)
        num_tokens = max(padded(self.config.max_step_tokens, parts=parts) for parts in (LONG_PARTS, PROMPT_PARTS, 8))
        fields = Fields(num_slots=n, num_rows=self._most_rows, num_tiles=self._most_tiles(num_tokens))
        self._block = Block(fields, num_tokens=num_tokens, device=self.device, num_hosts=self.most_in_flight)
        self._pages = torch.zeros(n + 1, self.tables.max_pages, dtype=torch.int32, device=self.device)
        self._hidden_RD = torch.zeros(self._most_rows, run.model.hidden_size, dtype=run.dtype, device=self.device)
        drawn_3R = partial(torch.zeros, (3, self._most_rows), dtype=torch.int32, pin_memory=self.device.type == "cuda")
        self._drawn = cycle([drawn_3R() for _ in range(self.most_in_flight)])
        self._zeros = torch.zeros(self._most_rows, dtype=torch.int32, device=self.device)
        if self.config.is_measured:
            self.config = measured(self.config, self.model, self._measure_step())
        return KVCache(run.model, self.config.kv_capacity_tokens, run.dtype, self.device)

    def _run(self, batch: Batch, previous_end: Any | None) -> Flight:
        shape = self._shape(batch.q_lens_S, batch.ends_S)
        has_scorings = not batch.is_decode and not self.tables.is_sample[batch.slots_S].all()
        fitting = self._captured(shape) if self.config.cuda_graphs else None
        # Scorings have any shape, and are few: they are not worth a capture, but the probe's is there. Where rows are drawn as
        # well, that replay would overwrite the hidden states.
        if has_scorings and (len(batch.samples) or fitting not in self._graphs):
            fitting = None
        self._block.fill(batch, self.tables, fitting or shape, self.config.tokens_per_page, self._tile_queries)
        begin, previous_end = self.clock.mark(), self.clock.passed(previous_end)
        self._block.send()
        self._table_pages(batch)
        if fitting is not None:
            hidden_TD = self._graphs.run(fitting, partial(self._forward, fitting))
        else:
            hidden_TD = self._forward(shape)
        forwarded = self.clock.mark()
        drawn, scored = torch.empty((3, 0), dtype=torch.int32), None
        if len(batch.samples):
            drawn = self._hand_over(self._draw(batch))
        if has_scorings:
            logprobs = self.score(hidden_TD, batch)
            assert logprobs is not None
            scored = self._to_host(logprobs)
        end = self.clock.mark()
        is_graph = fitting is not None
        return Flight(batch, drawn, scored, begin, forwarded, end, previous_end, batch.num_tokens, is_graph)

    def _shape(self, q_lens_S: np.ndarray, ends_S: np.ndarray) -> Shape:
        is_one = q_lens_S == 1
        ends = ends_S[is_one]
        num_ones, longest = len(ends), int(ends.max(initial=1))
        chunk = self.ops.choose_chunk(max(num_ones, 1) * self.model.run.model.num_kv_heads, longest)
        num_longs = int((ends > chunk).sum())
        return Shape(
            tokens=int(q_lens_S.sum()),
            ones=num_ones - num_longs,
            longs=num_longs,
            chunks=-(-longest // chunk),
            chunk=chunk,
            tiles=int((-(-q_lens_S[~is_one] // self._tile_queries)).sum()),
        )

    def _most_tiles(self, tokens: int) -> int:
        return most_tiles(tokens, tile_queries=self._tile_queries, max_running=self.config.max_running)

    def _captured(self, shape: Shape) -> Shape | None:
        """The captured shape that holds an exact one, or None: it runs eagerly."""
        found = capturable(
            shape,
            tile_queries=self._tile_queries,
            max_running=self.config.max_running,
            most_tokens=self._most_captured,
        )
        if found is None:
            return None
        heads, _, dim = self.model.run.model.heads
        scratch_bytes = 4 * found.longs * found.chunks * heads * (2 + 2 * dim)
        return found if scratch_bytes <= SCRATCH_BYTES else None

    def _forward(self, shape: Shape) -> Tensor:
        """[T, D]: the layers on what the block holds; the rows to be sampled are copied to `_hidden_RD`."""
        block = self._block.device(shape.tokens)
        self._pages.view(-1).index_copy_(0, block["page_at"], block["page_ids"])
        hidden_TD = self._merged.forward(
            self.known(block["ids"]), block["positions"], block["kv_slots"], self._plan(shape, block), self.cache
        )
        num_rows = min(self._most_rows, shape.tokens)
        torch.index_select(hidden_TD, 0, block["rows"][:num_rows], out=self._hidden_RD[:num_rows])
        return hidden_TD

    def _plan(self, shape: Shape, block: Views) -> CachedPlan:
        heads, kv_heads, dim = self.model.run.model.heads
        launches = []
        if shape.ones:
            tiles = Tiles(block["ones"][: shape.ones], self._zeros[: shape.ones], 1, self._few_rows)
            launches.append(Launch(tiles, None, shape.chunk))
        if shape.longs:
            tiles = Tiles(block["longs"][: shape.longs], self._zeros[: shape.longs], 1, self._few_rows)
            longest = shape.chunks * shape.chunk
            scratch = allocate_partials(tiles, heads, kv_heads, dim, longest, chunk=shape.chunk)
            launches.append(Launch(tiles, scratch, shape.chunk))
        if shape.tiles:
            seq, first = block["tile_seqs"][: shape.tiles], block["tile_firsts"][: shape.tiles]
            tiles = Tiles(seq, first, self._tile_queries, self._many_rows)
            launches.append(Launch(tiles, None, self.ops.serial_chunk, walks=True))
        where = CachedRows(block["contexts"], block["q_starts"], self._pages, self.config.tokens_per_page)
        return CachedPlan(where, tuple(launches))

    def _draw(self, batch: Batch) -> Tensor:
        """[3, R] int32: tokens, bits of logprobs and top-1 ids of the rows in `_hidden_RD`."""
        num_rows, filters = len(batch.samples), self.filters(batch)
        if filters:
            return self._draw_rows(num_rows, filters)
        size = padded(num_rows)
        return self._graphs.run(("draw", size), partial(self._draw_rows, size, {}))

    def _draw_rows(self, num_rows: int, filters: dict[str, Tensor]) -> Tensor:
        block = self._block.device(1)
        keys = {name: block[name][:num_rows] for name in ("seed", "prompt", "sample", "position", "temperature")}
        out = self.sample(self._hidden_RD[:num_rows], SamplingParams(**keys, **filters))
        self.last_token.index_copy_(0, block["slots"][:num_rows], out.token.long())
        return torch.stack((out.token, out.logprob.view(torch.int32), out.top1))

    def _table_pages(self, batch: Batch) -> None:
        at, pages = batch.new_pages
        if len(at) > self._most_rows:
            # More than the block has room for.
            packed = self.to_device(np.stack((at, pages.astype(np.int64))))
            self._pages.view(-1).index_copy_(0, packed[0], packed[1].int())

    def _hand_over(self, drawn_3R: Tensor) -> Tensor:
        """On the host, in places used in turn, as many as steps are in flight: what was drawn to one has been read by then."""
        host = next(self._drawn).view(-1)[: drawn_3R.numel()].view(drawn_3R.shape)
        return host.copy_(drawn_3R, non_blocking=True)

    def _to_host(self, values: Tensor) -> Tensor:
        if self.device.type != "cuda":
            return values
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return host.copy_(values, non_blocking=True)

    def _warm_up(self) -> None:
        """Captures draws, decode steps and steps with prompts of every size, and whatever they compile and certify; what runs
        eagerly just runs."""
        if not self.config.cuda_graphs or self.device.type != "cuda":
            return
        for exact, captured in self._decode_steps():
            self._send_nothing(exact.tokens)
            if captured is not None:
                self._graphs.run(captured, partial(self._forward, captured))
            else:
                self._forward(exact)
            self._graphs.run(("draw", exact.tokens), partial(self._draw_rows, exact.tokens, {}))
        probe = self._probe_step()
        for captured in (*self._prompt_steps(), *([] if probe is None else [probe])):
            self._send_nothing(captured.tokens)
            self._graphs.run(captured, partial(self._forward, captured))

    def _probe_step(self) -> Shape | None:
        """Of the run's probe, as it is captured: every version is proved by it while sampling stands still."""
        lengths = [len(ids) // 4 - 1 for ids in self.model.manifest.probe_token_ids if len(ids) > 4]
        # one that takes several steps is scored eagerly: no step, and no block of inputs, is as large as the whole
        if not lengths or sum(lengths) > self.config.max_step_tokens:
            return None
        q_lens_S = np.array(lengths, np.int64)
        return self._captured(self._shape(q_lens_S, q_lens_S))

    def _decode_steps(self) -> Iterator[tuple[Shape, Shape | None]]:
        """Decode steps of every padded number of sequences, descending, each with the shape it is captured in; None: eager."""
        kv_heads = self.model.run.model.num_kv_heads
        for size in padded_sizes(min(self.config.max_running, self.config.max_step_tokens)):
            chunk = self.ops.choose_chunk(size * kv_heads, 1)
            exact = Shape(tokens=size, ones=size, longs=0, chunks=1, chunk=chunk, tiles=0)
            yield exact, self._captured(exact)

    def _prompt_steps(self) -> Iterator[Shape]:
        """The captured shapes of steps with prompts and without long contexts, descending."""
        chunk = self.ops.choose_chunk(self.model.run.model.num_kv_heads, 1)
        for size in padded_sizes(min(self.config.max_step_tokens, self._most_captured), parts=PROMPT_PARTS):
            captured = self._captured(Shape(tokens=size, ones=0, longs=0, chunks=1, chunk=chunk, tiles=1))
            if captured is not None:
                yield captured

    def _send_nothing(self, num_tokens: int) -> None:
        host = self._block.next_host(num_tokens)
        clear(host, self.tables)
        self._block.send()
        self.clock.wait(self.clock.mark())

    def _measure_step(self) -> int:
        """Bytes that the largest step takes besides weights and cache."""
        run = self.model.run
        tokens = self.config.max_step_tokens
        self.cache = KVCache(run.model, self.config.tokens_per_page, run.dtype, self.device)
        chunk = self.ops.choose_chunk(run.model.num_kv_heads, 1)
        shape = Shape(tokens=tokens, ones=0, longs=0, chunks=1, chunk=chunk, tiles=self._most_tiles(tokens))
        self._send_nothing(tokens)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self._forward(shape)
        self._draw_rows(self._most_rows, {})
        self.clock.wait(self.clock.mark())
        return torch.cuda.max_memory_allocated(self.device) - before


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
