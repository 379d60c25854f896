"""The same model in transformers with SDPA and torch's fused AdamW, all in bfloat16: eager, and compiled by torch.compile."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.trainer_cases.shapes import Case
from shared.models import ModelConfig


class Peer:
    """A causal language model on random weights; no fp32 masters, which is less work than ours does."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype, *, is_compiled: bool) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        hf = config.to_hf()
        self._device, self._vocab = device, config.vocab_size
        described = AutoConfig.for_model(hf.pop("model_type"), **hf)
        with torch.device(device):
            self._model = AutoModelForCausalLM.from_config(described, dtype=dtype, attn_implementation="sdpa")
        self._model.config.use_cache = False
        self._model.train()
        parameters = list(self._model.parameters())
        self.num_parameters = sum(p.numel() for p in parameters)
        self._optimizer = torch.optim.AdamW(parameters, lr=1e-6, betas=(0.9, 0.95), fused=True)
        self._run: Callable[..., object] = torch.compile(self._model) if is_compiled else self._model

    def batch(self, case: Case) -> Tensor:
        """[sequences, length] random token ids on the device."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self._vocab, (case.sequences, case.length), generator=generator)
        return ids.to(self._device)

    @torch.no_grad()
    def forward(self, ids: Tensor) -> None:
        """Its own loss over every token."""
        self._run(input_ids=ids, labels=ids)

    def step(self, ids: Tensor) -> None:
        """Forward, backward, clipping, AdamW."""
        self._run(input_ids=ids, labels=ids).loss.backward()  # type: ignore[attr-defined]
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
