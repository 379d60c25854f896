"""One definition of each architecture, used by the rollout engine and the trainer."""

from shared.models.config import ModelConfig
from shared.models.decoder import Decoder, Score
from shared.models.kv_cache import KVCache
from shared.models.layout import completion_rows, packed_layout, paged_layout, prefix_shared_layout
from shared.models.loader import (
    load_config,
    load_model,
    named_weights,
    read_tensors,
    resolve_model,
    save_model,
    save_sharded,
    weight_files,
)
from shared.models.recompute import Recompute
from shared.models.rope import Rope

__all__ = [
    "Decoder",
    "KVCache",
    "ModelConfig",
    "Recompute",
    "Rope",
    "Score",
    "completion_rows",
    "load_config",
    "load_model",
    "named_weights",
    "packed_layout",
    "paged_layout",
    "prefix_shared_layout",
    "read_tensors",
    "resolve_model",
    "save_model",
    "save_sharded",
    "weight_files",
]
