"""What a layer keeps for its backward is what docs/scaling.md says, to the byte."""

import runpy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.models import Decoder, Recompute, packed_layout
from tests.kernels.cuda_testing import interpreted_ops
from tests.kernels.kernel_testing import tiny_config

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 8


def kept(num_layers: int, recompute: Recompute, directory: Path) -> int:
    """Bytes of distinct storages that the layers keep for the backward, parameters aside."""
    config = tiny_config("qwen3", num_layers=num_layers, num_heads=4, num_kv_heads=2)
    decoder = Decoder(config, interpreted_ops(directory), activation_checkpointing=recompute)
    decoder.init_weights()
    storages: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # Held, so that no other takes its address.
        storages[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    layout = packed_layout([TOKENS])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = decoder(torch.arange(TOKENS), layout.positions, layout)
    for parameter in decoder.parameters():
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    assert hidden.requires_grad
    return sum(size for size, _ in storages.values())


@pytest.mark.parametrize("recompute", ["none", "elementwise", "mlp"])
def test_a_layer_keeps_what_the_page_on_scaling_says(recompute: Recompute, tmp_path: Path) -> None:
    model = runpy.run_path(str(ROOT / "docs/generate_scaling.py"))["Model"](
        "tiny", layers=1, hidden=48, inner=80, heads=4, kv_heads=2, head_dim=16, vocab=131
    )
    of_a_layer = kept(2, recompute, tmp_path) - kept(1, recompute, tmp_path)
    assert of_a_layer == TOKENS * model.kept(recompute, size=4)
