"""One model and the KV cache it writes: a step's chunks in, hidden states, tokens and logprobs out.

Legend: S chunks, T tokens of the step, D hidden size, R rows for the head.
"""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch
from torch import Tensor

from services.rollout.config import RolloutConfig
from services.rollout.samples import Sample
from services.rollout.scheduler import Chunk
from services.rollout.weights import ServedModel
from shared.kernels import AttentionLayout, SampleOutput, SamplingParams
from shared.models import KVCache


class ModelRunner:
    """Allocates the cache and the input tables for the run's shape; versions of the run follow one another in it."""

    def __init__(self, config: RolloutConfig, model: ServedModel) -> None:
        self.model = model
        """Replace it between two steps, by a version of the same run."""
        self._page_size = config.page_size
        self._cache = KVCache(model.run.model, config.kv_capacity_tokens, model.run.dtype)
        max_pages = -(-model.run.config.max_model_len // config.page_size)
        self._page_tables = np.zeros((config.max_running, max_pages), np.int64)
        """A row per slot of a running sequence, so that a layout is array arithmetic over all chunks."""

    def forward(self, chunks: list[Chunk]) -> Tensor:
        """[T, D]: computes the chunks' tokens into the cache, packed in the order of the chunks."""
        num_tokens = sum(c.end - c.start for c in chunks)
        parts = (c.seq.token_ids[c.start : c.end] for c in chunks)
        token_ids = torch.from_numpy(np.fromiter(chain.from_iterable(parts), np.int64, num_tokens))
        layout = self._layout(chunks)
        return self.model.decoder(token_ids, layout.positions, layout, self._cache)

    def sample(self, hidden_RD: Tensor, samples: list[Sample]) -> SampleOutput:
        """The next token of each sample. Its index counts sampled tokens: the prompt number stands for the prompt."""
        requests = [s.request for s in samples]
        params = SamplingParams.of(
            seed=[r.seed for r in requests],
            prompt=[r.prompt_number for r in requests],
            sample=[s.sample_index for s in samples],
            position=[s.num_sampled_tokens for s in samples],
            temperature=[r.sampling.temperature for r in requests],
            top_k=[r.sampling.top_k for r in requests],
            top_p=[r.sampling.top_p or 1.0 for r in requests],
            min_p=[r.sampling.min_p for r in requests],
        )
        ops, head_weight = self.model.numerics.ops, self.model.decoder.head_weight
        return ops.sample(hidden_RD, head_weight, params, weight32_VD=self.model.head32)

    def score(self, hidden_RD: Tensor, targets: list[int], temperature: float) -> np.ndarray:
        """[R] float32 logprobs of given next tokens."""
        output = self.model.decoder.logprobs(
            hidden_RD,
            torch.tensor(targets),
            torch.full((len(targets),), temperature),
            weight32_VD=self.model.head32,
        )
        return output.logprob.numpy()

    def _layout(self, chunks: list[Chunk]) -> AttentionLayout:
        for chunk in chunks:
            seq = chunk.seq
            num_tabled, num_pages = seq.num_tabled_pages, len(seq.pages)
            if num_tabled < num_pages:
                self._page_tables[seq.slot, num_tabled:num_pages] = seq.pages[num_tabled:]
                seq.num_tabled_pages = num_pages
        starts_S, ends_S, slots_S = np.array([(c.start, c.end, c.seq.slot) for c in chunks], np.int64).T
        num_pages = -(-int(ends_S.max()) // self._page_size)
        return AttentionLayout(
            q_lens=torch.from_numpy(ends_S - starts_S),
            context_lens=torch.from_numpy(ends_S.copy()),
            pages=torch.from_numpy(self._page_tables[slots_S, :num_pages]),
            page_size=self._page_size,
        )
