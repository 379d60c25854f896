"""Bits, data and batches for the kernel tests."""

import torch
from torch import Tensor

from shared.kernels import AttentionLayout
from shared.models import ModelConfig, Rope

DTYPES = [torch.float32, torch.bfloat16]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality of raw bits: tells -0 from 0 and finds equal NaNs equal."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))


def wide(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Random numbers whose exponents vary, so that another order of additions shows."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-6, 3, shape, generator=generator).float()
    return (torch.randn(shape, generator=generator) * torch.exp2(exponents)).to(dtype)


def ranges_layout(ranges: list[tuple[int, int]], rows: Tensor) -> AttentionLayout:
    """Query ranges [begin, end) of one sequence whose positions lie in the given store rows."""
    return AttentionLayout(
        q_lens=torch.tensor([end - begin for begin, end in ranges]),
        context_lens=torch.tensor([end for _, end in ranges]),
        kv_rows=rows.expand(len(ranges), -1),
    )


def tiny_config(family: str = "llama", **changes: object) -> ModelConfig:
    """A model that runs in a millisecond, with the family's peculiarities."""
    fields: dict = {
        "family": family,
        "vocab_size": 131,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rope": Rope(head_dim=16),
        "qkv_bias": family == "qwen2",
        "qk_norm": family == "qwen3",
        "eos_token_ids": (2,),
    }
    if family == "mistral":
        fields.update(sliding_window=37, sliding_layers=(0, 1))
    fields.update(changes)
    if "head_dim" in changes and "rope" not in changes:
        fields["rope"] = Rope(head_dim=fields["head_dim"])
    return ModelConfig(**fields)
