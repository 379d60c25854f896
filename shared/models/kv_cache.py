"""Keys and values of every layer by slot; pages are runs of slots and belong to whoever hands them out."""

import torch

from shared.models.config import ModelConfig


class KVCache:
    """One key store and one value store per layer, each [num_slots, Hkv, D].

    Zeroed on allocation: attention multiplies what it does not see by zero, and zero times a stale NaN is NaN.
    """

    def __init__(
        self, config: ModelConfig, num_slots: int, dtype: torch.dtype, device: str | torch.device = "cpu"
    ) -> None:
        """Allocate.

        Args:
            config: of the model.
            num_slots: tokens that fit, pages times page size.
            dtype: of the model's activations.
            device: of the stores.
        """
        self.num_slots = num_slots
        shape = (config.num_layers, 2, num_slots, config.num_kv_heads, config.head_dim)
        stores = torch.zeros(shape, dtype=dtype, device=device)
        self.layers = [(stores[i, 0], stores[i, 1]) for i in range(config.num_layers)]
        """(keys, values) per layer."""

    @staticmethod
    def bytes_per_slot(config: ModelConfig, dtype: torch.dtype) -> int:
        """Memory of one token."""
        return config.num_layers * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize
