"""`pytest -m gpu` on a CUDA machine: engine and trainer are one function on the device, down to every sampled token."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shared.kernels import SamplingParams
from shared.kernels.cuda.ops import CudaOps
from shared.models import (
    Decoder,
    KVCache,
    ModelConfig,
    completion_rows,
    packed_layout,
    paged_layout,
    prefix_shared_layout,
)
from shared.models.config import FAMILIES
from tests.kernels.cuda_testing import DEVICE, HALF, device_ops, replayed
from tests.kernels.kernel_testing import same_bits, tiny_config

pytestmark = pytest.mark.gpu
PAGE = 16


@pytest.fixture(scope="module")
def ops(tmp_path_factory: pytest.TempPathFactory) -> CudaOps:
    return device_ops(tmp_path_factory.mktemp("table"))


def config_of(family: str, head_dim: int, **changes: object) -> ModelConfig:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 1003}
    config = tiny_config(family, **{**sizes, "head_dim": head_dim, **changes})
    return dataclasses.replace(config, sliding_window=100) if config.sliding_window else config


def build(config: ModelConfig, ops: CudaOps) -> Decoder:
    decoder = Decoder(config, ops)
    decoder.init_weights(std=0.1)
    return decoder.to(DEVICE, HALF)


def engine(decoder: Decoder, sequences: list[Tensor], largest: int, seed: int) -> list[Tensor]:
    """Hidden states of sequences fed in random chunks through random pages, with whoever else is in the step."""
    generator = torch.Generator().manual_seed(seed)
    pages_each = -(-max(map(len, sequences)) // PAGE)
    tables = torch.randperm(len(sequences) * pages_each, generator=generator).view(len(sequences), -1).tolist()
    cache = KVCache(decoder.config, len(sequences) * pages_each * PAGE, HALF, DEVICE)
    parts: list[list[Tensor]] = [[] for _ in sequences]
    done = [0] * len(sequences)
    while any(d < len(s) for d, s in zip(done, sequences, strict=True)):
        left = [i for i, s in enumerate(sequences) if done[i] < len(s)]
        members = [i for i in left if torch.rand((), generator=generator) < 0.7] or left[:1]
        sizes = torch.randint(1, largest + 1, (len(members),), generator=generator).tolist()
        counts = [min(n, len(sequences[i]) - done[i]) for i, n in zip(members, sizes, strict=True)]
        contexts = [done[i] + n for i, n in zip(members, counts, strict=True)]
        layout = paged_layout([tables[i] for i in members], PAGE, counts, contexts)
        ids = torch.cat([sequences[i][done[i] : c] for i, c in zip(members, contexts, strict=True)])
        with torch.no_grad():
            hidden = decoder(ids, layout.positions.to(DEVICE), layout, cache)
        for i, part in zip(members, hidden.split(counts), strict=True):
            parts[i].append(part)
            done[i] += len(part)
    return [torch.cat(p) for p in parts]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_path_gives_the_same_bits(ops: CudaOps, family: str, head_dim: int) -> None:
    decoder = build(config_of(family, head_dim, tie_word_embeddings=head_dim == 64), ops)
    generator = torch.Generator().manual_seed(head_dim)
    prompt = torch.randint(0, 1003, (1040,), generator=generator).to(DEVICE)
    completions = [torch.randint(0, 1003, (n,), generator=generator).to(DEVICE) for n in (1, 90, 30)]
    sequences = [torch.cat((prompt, c)) for c in completions]
    layout = packed_layout([len(s) for s in sequences])
    packed = decoder(torch.cat(sequences), layout.positions.to(DEVICE), layout).detach()
    expected = packed.split([len(s) for s in sequences])
    for largest, seed in ((700, 0), (64, 1)):
        got = engine(decoder, sequences, largest, seed)
        assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True)), largest
    got = engine(decoder, [s[:70] for s in sequences], 1, 2)
    assert all(same_bits(a, b[:70]) for a, b in zip(got, expected, strict=True)), "one token at a time"

    lens = ([len(prompt)], [[len(c) for c in completions]])
    shared, rows = prefix_shared_layout(*lens), completion_rows(*lens).to(DEVICE)
    targets, temperature = torch.cat(completions), torch.full((len(rows),), 0.9, device=DEVICE)
    ids = torch.cat((prompt, *completions))
    score = decoder.score(ids, shared.positions.to(DEVICE), shared, rows, targets, temperature)
    predicting = torch.cat([e[len(prompt) - 1 : -1] for e in expected])
    engine_side = decoder.logprobs(predicting, targets, temperature)
    assert all(same_bits(a.detach(), b.detach()) for a, b in zip(score, engine_side, strict=True))


def test_every_sampled_token_scores_to_its_own_bits(ops: CudaOps) -> None:
    decoder = build(config_of("qwen3", 128), ops)
    batch, num_new, prompt = 32, 40, list(range(5, 25))
    tokens, logprobs = [list(prompt) for _ in range(batch)], []
    cache = KVCache(decoder.config, batch * 64, HALF, DEVICE)
    tables = torch.randperm(batch * 4, generator=torch.Generator().manual_seed(0)).view(batch, 4).tolist()
    for i in range(num_new):
        fresh = [t if i == 0 else t[-1:] for t in tokens]
        layout = paged_layout(tables, PAGE, [len(f) for f in fresh], [len(t) for t in tokens])
        ids = torch.tensor([token for f in fresh for token in f], device=DEVICE)
        params = SamplingParams.of(
            seed=[9] * batch, prompt=[1] * batch, sample=range(batch), position=[i] * batch, temperature=[0.8] * batch
        )
        with torch.no_grad():
            hidden = decoder(ids, layout.positions.to(DEVICE), layout, cache)[len(fresh[0]) - 1 :: len(fresh[0])]
            drawn = ops.sample(hidden, decoder.head_weight, params)
        logprobs.append(drawn.logprob)
        for sequence, token in zip(tokens, drawn.token.tolist(), strict=True):
            sequence.append(token)
    lens = ([len(prompt)], [[num_new] * batch])
    shared, rows = prefix_shared_layout(*lens), completion_rows(*lens).to(DEVICE)
    completions = torch.tensor([t[len(prompt) :] for t in tokens], device=DEVICE).flatten()
    score = decoder.score(
        torch.cat((torch.tensor(prompt, device=DEVICE), completions)),
        shared.positions.to(DEVICE),
        shared,
        rows,
        completions,
        torch.full((batch * num_new,), 0.8, device=DEVICE),
    )
    assert same_bits(score.logprob.detach(), torch.stack(logprobs, 1).flatten())
    assert len({tuple(t) for t in tokens}) == batch


def test_a_graph_of_a_whole_step_replays_its_bits(ops: CudaOps) -> None:
    """A layout's plans are made by the first call; later ones allocate and copy nothing from the host."""
    decoder = build(config_of("llama", 64), ops)
    lens = [1500, 33, 700, 1100]
    cache = KVCache(decoder.config, 4 * 1600, HALF, DEVICE)
    tables = torch.arange(400).view(4, 100).tolist()
    layout = paged_layout(tables, PAGE, lens, lens)
    ids = torch.arange(sum(lens), device=DEVICE) % 1003
    step = paged_layout(tables, PAGE, [1, 1, 1, 1], [n + 1 for n in lens])
    positions, next_ids = step.positions.to(DEVICE), torch.arange(4, device=DEVICE)
    with torch.no_grad():
        decoder(ids, layout.positions.to(DEVICE), layout, cache)
        expected = decoder(next_ids, positions, step, cache).clone()
        assert same_bits(replayed(lambda: decoder(next_ids, positions, step, cache)), expected)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("family", list(FAMILIES))
def test_sharded_masters_give_the_bits_of_their_cast(ops: CudaOps, family: str) -> None:
    """FSDP2 with bfloat16 compute over float32 masters, activations checkpointed; gradients twice the same."""
    config = config_of(family, 64)
    trainer = Decoder(config, ops, activation_checkpointing="layer")
    trainer.init_weights(std=0.1)
    trainer.to(DEVICE)
    twin = Decoder(config, ops)
    twin.load_state_dict(trainer.state_dict())
    twin.to(DEVICE, HALF)
    policy = MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in trainer.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(trainer, mp_policy=policy)
    lens = ([200, 3], [[40, 7], [50]])
    layout, rows = prefix_shared_layout(*lens), completion_rows(*lens).to(DEVICE)
    ids = torch.arange(layout.num_queries, device=DEVICE) * 7 % 1003
    score = (ids, layout.positions.to(DEVICE), layout, rows, rows % 1003, torch.full((len(rows),), 0.7, device=DEVICE))
    theirs = twin.score(*score)
    gradients = []
    for _ in range(2):
        trainer.zero_grad()
        ours = trainer.score(*score)
        assert all(same_bits(a.detach(), b.detach()) for a, b in zip(ours, theirs, strict=True))
        (ours.logprob.sum() + ours.entropy.sum()).backward()
        gradients.append([p.grad.to_local().clone() for p in trainer.parameters()])
    assert all(same_bits(a, b) for a, b in zip(*gradients, strict=True))
    assert all(g.isfinite().all() for g in gradients[0])
