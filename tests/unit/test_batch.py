"""Batches: order, cuts and packing, and that packing changes no bit."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.advantage import ADVANTAGES, advantages
from services.trainer.batch import BatchError, MicroBatch, PolicyVersion, build_batch, empty_micro_batch
from services.trainer.packing import even_runs
from shared.kernels import build_ops
from shared.models import Decoder, load_model, packed_layout
from shared.wire.run import AlgorithmConfig, RunConfig
from shared.wire.types import Group, Kv, SamplingParams, Span
from tests.integration.trainer_testing import VOCAB, Engine, run_config, tiny_model
from tests.kernels.kernel_testing import same_bits

VERSION = PolicyVersion(0, 0, "aa")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return Engine(load_model(model, build_ops("exact"), torch.bfloat16).requires_grad_(False), VERSION)


@pytest.fixture
def config(model: Path) -> RunConfig:
    return run_config(model)


@pytest.fixture(scope="module")
def seven_groups(engine: Engine, model: Path) -> list[Group]:
    return groups_of(engine, run_config(model), 7)


def groups_of(engine: Engine, config: RunConfig, count: int, **kwargs: Any) -> list[Group]:
    return [engine.group(config, n, **kwargs) for n in range(count)]


def score(decoder: Decoder, micro: MicroBatch) -> torch.Tensor:
    return decoder.score(
        micro.token_ids, micro.layout.positions, micro.layout, micro.rows, micro.targets, micro.temperature
    ).logprob


def test_everything_keeps_prompt_order_whatever_order_arrives(engine: Engine, config: RunConfig) -> None:
    groups = groups_of(engine, config, 3)
    shuffled = [replace(g, trajectories=g.trajectories[::-1]) for g in reversed(groups)]
    a = build_batch(groups, config, step=0, vocab_size=VOCAB)
    b = build_batch(shuffled, config, step=0, vocab_size=VOCAB)
    assert [g.prompt_number for g in b.groups] == [0, 1, 2]
    for name in ("reward_N", "group_N", "num_tokens_N", "sequence_T", "rollout_T", "top1_T", "version_T"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert a.num_sequences == 12
    assert a.rollout_T.tolist() == [x for g in groups for t in g.trajectories for x in t.logprobs.tolist()]


@given(
    lost=st.lists(st.sets(st.integers(0, 3), max_size=2), min_size=3, max_size=3),
    name=st.sampled_from(sorted(ADVANTAGES)),
)
@settings(max_examples=30)
def test_a_group_is_trained_with_its_survivors_as_if_the_others_had_never_been(
    seven_groups: list[Group], model: Path, lost: list[set[int]], name: str
) -> None:
    config = run_config(model, lag=1, max_lag=1)
    groups = seven_groups[:3]
    left = [
        replace(g, trajectories=tuple(t for t in g.trajectories if t.sample_index not in out))
        for g, out in zip(groups, lost, strict=True)
    ]
    whole, batch = (build_batch(g, config, step=0, vocab_size=VOCAB) for g in (groups, left))
    kept_N = torch.tensor(
        [t.sample_index not in out for g, out in zip(groups, lost, strict=True) for t in g.trajectories]
    )
    assert (batch.num_missing, whole.num_missing) == (int((~kept_N).sum()), 0)
    assert batch.num_sequences == int(kept_N.sum())
    for field in ("reward_N", "group_N", "num_tokens_N"):
        assert torch.equal(getattr(batch, field), getattr(whole, field)[kept_N]), field
    assert torch.equal(batch.rollout_T, whole.rollout_T[kept_N[whole.sequence_T]])
    # Nor do the lost ones, whatever their rewards would have been, enter a mean or a deviation.
    rewards_N = torch.where(kept_N, whole.reward_N, 1e6)
    alone_N = advantages(
        name, reward_N=batch.reward_N, group_N=batch.group_N, num_tokens_N=batch.num_tokens_N,
        accepted_N=torch.ones(batch.num_sequences, dtype=torch.bool),
    )  # fmt: skip
    among_N = advantages(
        name, reward_N=rewards_N, group_N=whole.group_N, num_tokens_N=whole.num_tokens_N, accepted_N=kept_N
    )
    torch.testing.assert_close(alone_N, among_N[kept_N], rtol=1e-12, atol=1e-12)
    if not name.startswith("reinforce"):
        # A sum over the whole batch may be taken in another order; one over siblings is not.
        assert torch.equal(alone_N, among_N[kept_N])


@given(tokens=st.integers(1, 200), mini_steps=st.integers(1, 7), world_size=st.integers(1, 4))
@settings(max_examples=30)
def test_cuts_cover_every_token_once_and_deal_every_rank_the_same_number(
    seven_groups: list[Group], model: Path, tokens: int, mini_steps: int, world_size: int
) -> None:
    config = run_config(
        model, prompts_per_step=7, micro_batch_tokens=tokens, algorithm=AlgorithmConfig(mini_steps=mini_steps)
    )
    batch = build_batch(seven_groups, config, step=0, vocab_size=VOCAB)
    assert len(batch.mini_steps) == mini_steps
    end = 0
    for mini_step in batch.mini_steps:
        assert mini_step.tokens.start == end
        for micro in mini_step.micro_batches:
            assert micro.tokens.start == end
            end = micro.tokens.stop
            num_sequences = len(batch.sequence_T[micro.tokens].unique())
            assert num_sequences == 1 or micro.num_rows <= tokens
        assert mini_step.tokens.stop == end
        dealt = [list(mini_step.of_rank(rank, world_size)) for rank in range(world_size)]
        assert len({len(d) for d in dealt}) == 1
        rounds = [micro for deal in zip(*dealt, strict=True) for micro in deal]
        assert rounds[: len(mini_step.micro_batches)] == list(mini_step.micro_batches)
        assert all(len(m.rows) == 0 for m in rounds[len(mini_step.micro_batches) :])
    assert end == batch.num_tokens


def test_a_group_larger_than_the_limit_is_cut_between_trajectories_each_part_with_the_prompt(
    engine: Engine, model: Path
) -> None:
    config = run_config(model, micro_batch_tokens=1)
    batch = build_batch(groups_of(engine, config, 3), config, step=0, vocab_size=VOCAB)
    micros = batch.mini_steps[0].micro_batches
    trajectories = [t for g in batch.groups for t in g.trajectories]
    assert len(micros) == len(trajectories) == 12
    for micro, t in zip(micros, trajectories, strict=True):
        assert micro.token_ids.tolist() == t.token_ids[: micro.num_rows].tolist()
        assert micro.num_rows == len(t.token_ids) - 1


@given(sizes=st.lists(st.integers(1, 40), max_size=12), bound=st.integers(1, 80), each=st.integers(0, 30))
def test_runs_are_as_few_and_as_even_as_their_order_allows(sizes: list[int], bound: int, each: int) -> None:
    runs = even_runs(sizes, bound, each=each)
    assert [i for run in runs for i in range(len(sizes))[run]] == list(range(len(sizes)))
    largest = max((each + sum(sizes[run]) for run in runs), default=0)
    assert all(len(sizes[run]) == 1 or each + sum(sizes[run]) <= bound for run in runs)
    # The best of every way to cut the list into runs.
    ways = [
        [0, *cuts, len(sizes)]
        for count in range(len(runs))
        for cuts in itertools.combinations(range(1, len(sizes)), count)
    ]
    best = min(
        (
            (len(way) - 1, max(each + sum(sizes[a:b]) for a, b in itertools.pairwise(way)))
            for way in ways
            if all(b - a == 1 or each + sum(sizes[a:b]) <= bound for a, b in itertools.pairwise(way))
        ),
        default=(0, 0),
    )
    assert best == (len(runs), largest)


@given(
    shape=st.lists(
        st.tuples(st.integers(1, 80), st.lists(st.integers(1, 12), min_size=1, max_size=4)), min_size=1, max_size=3
    ),
    tool_tokens=st.integers(0, 3),
    limit=st.sampled_from([1, 64, 4096]),
)
@settings(max_examples=25)
def test_packed_and_prefix_shared_rows_have_the_bits_of_the_sequence_alone(
    engine: Engine, model: Path, shape: list[tuple[int, list[int]]], tool_tokens: int, limit: int
) -> None:
    config = run_config(model, prompts_per_step=len(shape), micro_batch_tokens=limit, max_model_len=128)
    rng = np.random.default_rng(0)
    groups = [
        engine.group(config, n, prompt=rng.integers(0, VOCAB, size).tolist(), lengths=lengths, tool_tokens=tool_tokens)
        for n, (size, lengths) in enumerate(shape)
    ]
    batch = build_batch(groups, config, step=0, vocab_size=VOCAB)
    got = torch.cat([score(engine.decoder, m) for m in batch.mini_steps[0].micro_batches])
    # The engine recorded each token at the end of its own growing sequence.
    assert same_bits(got, batch.rollout_T)


def test_packed_rows_have_the_bits_of_a_padded_batch(engine: Engine, config: RunConfig) -> None:
    batch = build_batch(groups_of(engine, config, 3), config, step=0, vocab_size=VOCAB)
    got = torch.cat([score(engine.decoder, m) for m in batch.mini_steps[0].micro_batches])
    sequences = [t for g in batch.groups for t in g.trajectories]
    width = max(len(t.token_ids) for t in sequences)
    padded = torch.zeros((len(sequences), width), dtype=torch.int64)
    for row, t in zip(padded, sequences, strict=True):
        row[: len(t.token_ids)] = torch.from_numpy(t.token_ids.astype(np.int64))
    layout = packed_layout([width] * len(sequences))
    rows = torch.cat(
        [torch.arange(t.num_prompt_tokens - 1, len(t.token_ids) - 1) + i * width for i, t in enumerate(sequences)]
    )
    flat = padded.flatten()
    alone = engine.decoder.score(
        flat, layout.positions, layout, rows, flat[rows + 1], torch.full((len(rows),), config.temperature)
    )
    assert same_bits(got, alone.logprob)


def test_what_stands_at_masked_positions_does_not_matter(engine: Engine, config: RunConfig) -> None:
    groups = groups_of(engine, config, 3, lengths=[6, 6, 6, 6], tool_tokens=2)
    poisoned = []
    for group in groups:
        trajectories = []
        for t in group.trajectories:
            logprobs, top1 = t.logprobs.copy(), t.top1.copy()
            masked = t.loss_mask[t.num_prompt_tokens :] == 0
            assert masked.sum() == 2
            logprobs[masked], top1[masked] = np.nan, -7
            trajectories.append(replace(t, logprobs=logprobs, top1=top1))
        poisoned.append(replace(group, trajectories=tuple(trajectories)))
    a = build_batch(groups, config, step=0, vocab_size=VOCAB)
    b = build_batch(poisoned, config, step=0, vocab_size=VOCAB)
    assert torch.equal(a.rollout_T, b.rollout_T)
    assert torch.equal(a.top1_T, b.top1_T)
    assert a.num_tokens == 3 * 4 * 4


def test_only_rows_of_trainable_tokens_reach_the_head(engine: Engine, config: RunConfig) -> None:
    batch = build_batch(groups_of(engine, config, 3, lengths=[5, 1, 1, 3]), config, step=0, vocab_size=VOCAB)
    (micro,) = batch.mini_steps[0].micro_batches
    assert len(micro.rows) == batch.num_tokens == 3 * 10
    # The last token of a completion is predicted by the row before it and needs none of its own.
    assert micro.num_rows == sum(g.trajectories[0].num_prompt_tokens for g in batch.groups) + 3 * (4 + 0 + 0 + 2)


def test_an_empty_micro_batch_is_a_connected_zero(model: Path) -> None:
    decoder = load_model(model, build_ops("exact"), torch.bfloat16)
    score(decoder, empty_micro_batch()).sum().backward()
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_tokens_with_mixed_kv_belong_to_no_version(engine: Engine, config: RunConfig) -> None:
    group = groups_of(engine, config, 1)[0]

    def mixed(span: Span) -> Span:
        return replace(span, kv=Kv.MIXED) if span.manifest_digest else span

    group = replace(
        group,
        trajectories=tuple(replace(t, spans=tuple(mixed(s) for s in t.spans)) for t in group.trajectories),
    )
    batch = build_batch([group], config, step=0, vocab_size=VOCAB)
    assert batch.versions == ()
    assert set(batch.version_T.tolist()) == {-1}


def test_tokens_between_two_tool_answers_are_one_segment(engine: Engine, config: RunConfig) -> None:
    groups = groups_of(engine, config, 1, lengths=[6, 1, 1, 6], tool_tokens=2)
    batch = build_batch(groups, config, step=0, vocab_size=VOCAB)
    assert batch.segment_T.tolist() == [0, 1, 1, 1, 2, 3, 4, 5, 5, 5]
    assert batch.sequence_T.tolist() == [0, 0, 0, 0, 1, 2, 3, 3, 3, 3]


def test_a_batch_of_dropped_groups_has_nothing_to_run(config: RunConfig) -> None:
    batch = build_batch([], config, step=0, vocab_size=VOCAB)
    assert (batch.num_tokens, batch.num_sequences, batch.mini_steps) == (0, 0, ())


def broken(group: Group, **changes: Any) -> Group:
    first, *rest = group.trajectories
    return replace(group, trajectories=(replace(first, **changes), *rest))


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        (lambda g: replace(g, run="other"), "belongs to run 'other'"),
        (lambda g: replace(g, prompt_number=3), "belongs to batch 1"),
        (lambda g: replace(g, trajectories=()), "has no trajectories"),
        (lambda g: broken(g, reward=None), "reward None"),
        (lambda g: broken(g, reward=float("nan")), "reward nan"),
        (lambda g: broken(g, token_ids=g.trajectories[0].token_ids + 1), "another prompt than its siblings"),
        (lambda g: broken(g, loss_mask=np.ones_like(g.trajectories[0].loss_mask)), "prompt tokens as trainable"),
        (lambda g: broken(g, sampling=SamplingParams(temperature=1.0)), "trains at temperature 0.7"),
        (lambda g: broken(g, sampling=SamplingParams(temperature=0.7, top_p=0.9)), "trains at temperature 0.7"),
    ],
)
def test_a_group_that_contradicts_the_run_is_refused(
    engine: Engine, config: RunConfig, breakage: Any, message: str
) -> None:
    with pytest.raises(BatchError, match=message):
        build_batch([breakage(groups_of(engine, config, 1)[0])], config, step=0, vocab_size=VOCAB)


def test_token_ids_beyond_the_vocabulary_are_refused(engine: Engine, config: RunConfig) -> None:
    with pytest.raises(BatchError, match=r"outside \[0, 3\)"):
        build_batch(groups_of(engine, config, 1), config, step=0, vocab_size=3)
