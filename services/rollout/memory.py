"""How large a KV cache fits on a GPU, from what is free once the weights are there."""

from __future__ import annotations

from dataclasses import replace

import torch

from services.rollout.config import MOST_TOKENS, RolloutConfig
from services.rollout.samples import UnservableRun
from services.rollout.weights import ServedModel
from shared.models import KVCache

GRAPH_SHARE = 0.5
"""Memory kept for graphs, as a share of what the largest eager step takes."""


def measured(config: RolloutConfig, model: ServedModel, step_bytes: int) -> RolloutConfig:
    """The config with the cache that fits beside the weights, a version on its way in, a step and its graphs.

    Raises UnservableRun when that is less than one sequence.
    """
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info(model.numerics.ops.device)
    weight_bytes = sum(w.nbytes for w in model.decoder.parameters())
    budget = int(free_bytes * config.kv_memory_share - step_bytes * (1 + GRAPH_SHARE)) - weight_bytes
    per_token = KVCache.bytes_per_slot(model.run.model, model.run.dtype)
    return sized(config, budget // per_token, model.run.config.max_model_len)


def sized(config: RolloutConfig, num_tokens: int, max_model_len: int) -> RolloutConfig:
    """The config with a cache of whole pages, at most what the kernels can number. Raises UnservableRun."""
    num_tokens = min(num_tokens, MOST_TOKENS) // config.tokens_per_page * config.tokens_per_page
    if num_tokens < max_model_len:
        raise UnservableRun(
            f"the GPU has room for a KV cache of {max(num_tokens, 0)} tokens, one sequence of the run may have {max_model_len}; "
            "lower max_step_tokens or max_running, or raise kv_memory_share"
        )
    return replace(config, kv_cache_tokens=num_tokens)
