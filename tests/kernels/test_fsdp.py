"""FSDP2 with bfloat16 compute over float32 masters gives the engine's bits."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shared.kernels import build_ops
from shared.models import Decoder, completion_rows, prefix_shared_layout
from shared.models.config import FAMILIES
from tests.kernels.kernel_testing import same_bits, tiny_config


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_sharded_masters_give_the_bits_of_their_cast(family: str, tied: bool) -> None:
    config, ops = tiny_config(family, tie_word_embeddings=tied), build_ops("exact")
    trainer, engine = Decoder(config, ops, activation_checkpointing="layer"), Decoder(config, ops)
    trainer.init_weights(seed=3, std=0.3)
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)) * 0.01
    engine.load_state_dict(trainer.state_dict())
    engine.to(torch.bfloat16)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in trainer.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(trainer, mp_policy=policy)

    lens = ([20, 3], [[4, 7], [5]])
    layout = prefix_shared_layout(*lens)
    ids = torch.arange(layout.num_queries) * 7 % config.vocab_size
    rows = completion_rows(*lens)
    # 0.7 is not a bfloat16: were it cast on the way in, the bits would show it.
    score = (ids, layout.positions, layout, rows, rows % config.vocab_size, torch.full((len(rows),), 0.7))
    ours = trainer.score(*score)
    assert layout._plans, "the layers planned on copies of the layout"
    theirs = engine.score(*score)
    assert all(same_bits(a.detach(), b.detach()) for a, b in zip(ours, theirs, strict=True))
    ours.logprob.sum().backward()
    theirs.logprob.sum().backward()
    for (name, a), (_, b) in zip(trainer.named_parameters(), engine.named_parameters(), strict=True):
        assert a.grad.dtype == torch.float32, name
        torch.testing.assert_close(a.grad.full_tensor(), b.grad.float(), rtol=1e-2, atol=1e-2)
