"""What the backward computes again changes no bit of the forward and no gradient beyond rounding, and is kept no longer."""

from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from shared.kernels import Ops, build_ops
from shared.models import Decoder, ModelConfig, Recompute, completion_rows, prefix_shared_layout
from tests.kernels.kernel_testing import same_bits, tiny_config

LENS = ([20, 3], [[4, 7], [5]])


def trained(config: ModelConfig, ops: Ops, recompute: Recompute) -> tuple[Tensor, dict[str, Tensor], int]:
    """Logprobs, gradients, and the bytes of distinct tensors that the forward keeps beside the parameters."""
    decoder = Decoder(config, ops, activation_checkpointing=recompute)
    decoder.init_weights(seed=3, std=0.3)
    layout, rows = prefix_shared_layout(*LENS), completion_rows(*LENS)
    ids = torch.arange(layout.num_queries) * 7 % config.vocab_size
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        temperature = torch.full((len(rows),), 0.7)
        output = decoder.score(ids, layout.positions, layout, rows, rows % config.vocab_size, temperature)
        (output.logprob.sum() + output.entropy.mean()).backward()
    for parameter in decoder.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    return (
        output.logprob.detach(),
        {n: p.grad for n, p in decoder.named_parameters() if p.grad is not None},
        sum(kept.values()),
    )


@pytest.mark.parametrize(
    "config",
    [
        tiny_config("llama", mlp_bias=True, qkv_bias=True, output_bias=True),
        tiny_config("mistral"),
        tiny_config("qwen2"),
        tiny_config("qwen3", tie_word_embeddings=True),
    ],
    ids=lambda c: c.family,
)
def test_recomputing_changes_no_logprob_and_hardly_a_gradient(config: ModelConfig) -> None:
    ops = build_ops("exact")
    logprob, gradients, _ = trained(config, ops, "none")
    for recompute in ("elementwise", "mlp", "layer"):
        again, theirs, _ = trained(config, ops, recompute)
        assert same_bits(again, logprob), recompute
        assert theirs.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(theirs[name], gradient, rtol=1e-4, atol=1e-5)


def test_each_step_of_recomputing_keeps_less() -> None:
    config = tiny_config("qwen3", num_layers=8)
    kept = [trained(config, build_ops("exact"), recompute)[2] for recompute in get_args(Recompute)[:3]]
    assert kept[0] > kept[1] > kept[2]


def test_recomputing_twice_gives_the_same_bits() -> None:
    config = tiny_config("qwen3")
    first, second = (trained(config, build_ops("exact"), "mlp")[1] for _ in range(2))
    assert all(same_bits(first[name], second[name]) for name in first)


def test_the_devices_operations_recompute_alike(tmp_path: Path) -> None:
    from tests.kernels.cuda_testing import interpreted_ops, relative_error

    config = tiny_config("qwen3", num_layers=1, num_heads=4, num_kv_heads=2, vocab_size=67)
    ops = interpreted_ops(tmp_path)
    logprob, gradients, _ = trained(config, ops, "none")
    for recompute in ("elementwise", "mlp"):
        again, theirs, _ = trained(config, ops, recompute)
        assert same_bits(again, logprob)
        assert all(relative_error(theirs[name], gradient) < 1e-4 for name, gradient in gradients.items()), recompute
