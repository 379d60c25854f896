"""The whole decoder: one function, whichever way it is cut; the function of transformers; saved and loaded."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from shared.kernels import SamplingParams, build_ops
from shared.models import (
    Decoder,
    KVCache,
    ModelConfig,
    completion_rows,
    load_model,
    named_weights,
    packed_layout,
    paged_layout,
    prefix_shared_layout,
    save_model,
)
from shared.models.config import FAMILIES
from tests.kernels.kernel_testing import DTYPES, same_bits, tiny_config

OPS = build_ops("exact")
PAGE_SIZE = 8
HF = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def build(config: ModelConfig, dtype: torch.dtype, **options: Any) -> Decoder:
    decoder = Decoder(config, OPS, **options)
    decoder.init_weights(std=0.3)
    for name, parameter in decoder.named_parameters():
        if name.endswith((".bias", "norm.weight")):
            parameter.data.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)) * 0.2)
    return decoder.to(dtype)


def run_steps(
    decoder: Decoder, sequences: list[Tensor], steps: list[dict[int, int]], dtype: torch.dtype
) -> list[Tensor]:
    """Hidden states of sequences fed through a shuffled paged cache; a step gives each sequence's number of tokens."""
    pages_each = -(-max(len(s) for s in sequences) // PAGE_SIZE)
    order = torch.randperm(len(sequences) * pages_each, generator=torch.Generator().manual_seed(4))
    tables = order.view(len(sequences), pages_each).tolist()
    cache = KVCache(decoder.config, order.numel() * PAGE_SIZE, dtype)
    done = [0] * len(sequences)
    outputs: list[list[Tensor]] = [[] for _ in sequences]
    for step in steps:
        members, counts = list(step), list(step.values())
        contexts = [done[s] + n for s, n in step.items()]
        layout = paged_layout([tables[s] for s in members], PAGE_SIZE, counts, contexts)
        ids = torch.cat([sequences[s][done[s] : done[s] + n] for s, n in step.items()])
        with torch.no_grad():
            hidden = decoder(ids, layout.positions, layout, cache)
        for s, part in zip(members, hidden.split(counts), strict=True):
            outputs[s].append(part)
            done[s] += len(part)
    return [torch.cat(parts) for parts in outputs]


def random_steps(lengths: list[int], largest: int, generator: torch.Generator) -> Iterator[dict[int, int]]:
    """Random members and chunk sizes until every sequence is through."""
    left = dict(enumerate(lengths))
    while left:
        members = [s for s in left if torch.rand((), generator=generator) < 0.7] or list(left)[:1]
        step = {s: min(left[s], int(torch.randint(1, largest + 1, (), generator=generator))) for s in members}
        yield step
        left = {s: n - step.get(s, 0) for s, n in left.items() if n > step.get(s, 0)}


@settings(max_examples=20)
@given(
    family=st.sampled_from(list(FAMILIES)),
    dtype=st.sampled_from(DTYPES),
    heads=st.sampled_from([(6, 2, 16), (4, 4, 10), (3, 1, 24)]),
    hidden_size=st.sampled_from([48, 35]),
    tied=st.booleans(),
    largest=st.sampled_from([1, 9, 80]),
    seed=st.integers(0, 99),
)
def test_every_path_gives_the_same_bits(
    family: str, dtype: torch.dtype, heads: tuple[int, int, int], hidden_size: int, tied: bool, largest: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    h, kv, d = heads
    config = tiny_config(
        family, num_heads=h, num_kv_heads=kv, head_dim=d, hidden_size=hidden_size, tie_word_embeddings=tied
    )
    decoder = build(config, dtype)
    prompt_len = int(torch.randint(1, 70, (), generator=generator))
    completion_lens = torch.randint(1, 12, (3,), generator=generator).tolist()
    prompt = torch.randint(0, config.vocab_size, (prompt_len,), generator=generator)
    completions = [torch.randint(0, config.vocab_size, (n,), generator=generator) for n in completion_lens]
    sequences = [torch.cat((prompt, c)) for c in completions]
    lengths = [len(s) for s in sequences]

    layout = packed_layout(lengths)
    packed = decoder(torch.cat(sequences), layout.positions, layout).detach()
    expected = list(packed.split(lengths))
    alone = packed_layout(lengths[:1])
    with torch.no_grad():
        assert same_bits(decoder(sequences[0], alone.positions, alone), expected[0])
    chunked = run_steps(decoder, sequences, list(random_steps(lengths, largest, generator)), dtype)
    assert all(same_bits(a, b) for a, b in zip(chunked, expected, strict=True))

    shared = prefix_shared_layout([prompt_len], [completion_lens])
    ids = torch.cat((prompt, *completions))
    rows = completion_rows([prompt_len], [completion_lens])
    targets, temperature = torch.cat(completions), torch.full((len(rows),), 0.9)
    score = decoder.score(ids, shared.positions, shared, rows, targets, temperature)
    predicting = torch.cat([e[prompt_len - 1 : -1] for e in expected])
    engine = decoder.logprobs(predicting, targets, temperature, weight32_VD=decoder.head_weight.detach().float())
    assert same_bits(score.logprob.detach(), engine.logprob.detach())

    recomputing = build(config, dtype, activation_checkpointing="layer")
    again = recomputing.score(ids, shared.positions, shared, rows, targets, temperature)
    assert same_bits(score.logprob.detach(), again.logprob.detach())
    score.logprob.sum().backward()
    again.logprob.sum().backward()
    for (name, a), (_, b) in zip(named_weights(decoder), named_weights(recomputing), strict=True):
        assert same_bits(a.grad, b.grad), name


def test_fast_mode_shows_the_path() -> None:
    """Negative control: with the library's kernels decode and packed forward differ."""
    decoder = build(tiny_config(hidden_size=64), torch.float32)
    for module in decoder.modules():
        if hasattr(module, "ops"):
            module.ops = build_ops("fast")
    ids = torch.arange(40)
    layout = packed_layout([40])
    with torch.no_grad():
        full = decoder(ids, layout.positions, layout)
    decode = run_steps(decoder, [ids], [{0: 1}] * 40, torch.float32)[0]
    assert not same_bits(full, decode)
    torch.testing.assert_close(full, decode, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_generated_tokens_score_to_the_same_bits(dtype: torch.dtype) -> None:
    """A rollout step by step, then the trainer's forward over what it wrote."""
    decoder = build(tiny_config(), dtype)
    prompt, num_new, batch = torch.arange(5), 12, 4
    cache = KVCache(decoder.config, batch * 32, dtype)
    tokens, logprobs = [prompt.tolist() for _ in range(batch)], []
    for step in range(num_new):
        new = 5 if step == 0 else 1
        layout = paged_layout([[s] for s in range(batch)], 32, [new] * batch, [5 + step] * batch)
        ids = torch.tensor([t for sequence in tokens for t in sequence[-new:]])
        params = SamplingParams.of(
            seed=[3] * batch,
            prompt=[0] * batch,
            sample=range(batch),
            position=[5 + step] * batch,
            temperature=[0.8] * batch,
        )
        with torch.no_grad():
            hidden = decoder(ids, layout.positions, layout, cache)[new - 1 :: new]
            drawn = OPS.sample(hidden, decoder.head_weight, params)
        logprobs.append(drawn.logprob)
        for sequence, token in zip(tokens, drawn.token.tolist(), strict=True):
            sequence.append(token)
    lens = [[num_new] * batch]
    shared = prefix_shared_layout([5], lens)
    completions = torch.tensor([t[5:] for t in tokens]).flatten()
    score = decoder.score(
        torch.cat((prompt, completions)),
        shared.positions,
        shared,
        completion_rows([5], lens),
        completions,
        torch.full((batch * num_new,), 0.8),
    )
    assert same_bits(score.logprob.detach(), torch.stack(logprobs, 1).flatten())
    assert len({tuple(t) for t in tokens}) == batch


def hf_config(family: str, tied: bool) -> PreTrainedConfig:
    extra: dict = {
        "llama": {"attention_bias": True, "mlp_bias": True, "head_dim": 16},
        "mistral": {"sliding_window": 20},
    }.get(family, {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1})
    return HF[family](
        vocab_size=97,
        hidden_size=64,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        **{"head_dim": 16, **extra} if family != "qwen2" else extra,
    )


def hf_logits(model: torch.nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids[None]).logits[0]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_agrees_with_transformers_and_survives_a_round_trip(family: str, tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hf_config(family, tied)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".bias", "norm.weight")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="60KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    decoder = load_model(tmp_path / "theirs", OPS, torch.float32)
    ids = torch.randint(0, 97, (60,), generator=torch.Generator().manual_seed(1))
    layout = packed_layout([60])
    with torch.no_grad():
        logits = decoder(ids, layout.positions, layout) @ decoder.head_weight.t()
    torch.testing.assert_close(logits, hf_logits(model, ids), rtol=1e-3, atol=2e-3)

    save_model(dict(named_weights(decoder)), decoder.config, tmp_path / "ours")
    again = load_model(tmp_path / "ours", OPS, torch.float32)
    assert again.config == dataclasses.replace(decoder.config)
    assert all(same_bits(a, b) for (_, a), (_, b) in zip(named_weights(decoder), named_weights(again), strict=True))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert same_bits(hf_logits(theirs, ids), hf_logits(model, ids))
