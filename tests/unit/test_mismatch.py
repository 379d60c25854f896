"""TIM metrics: worked examples, and that one bit shows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from services.trainer.mismatch import Divergence, Mismatch, divergence, measure, ulp_distance
from services.trainer.mismatch_metrics import effective_sample_size

EXAMPLES = json.loads((Path(__file__).parents[1] / "data" / "algorithms_examples.json").read_text())
MASK = torch.tensor(EXAMPLES["B0"]["mask"]).bool()


def flat(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows)[MASK]


def compare(train: Tensor, rollout: Tensor, comparable: Tensor | None = None) -> Mismatch:
    top1 = torch.zeros(len(train), dtype=torch.int32)
    everything = torch.ones(len(train), dtype=torch.bool)
    return measure(train, rollout, top1, top1, everything if comparable is None else comparable)


def test_divergence_of_the_reference_batch() -> None:
    got = divergence(flat(EXAMPLES["B0"]["train_old"]), flat(EXAMPLES["B0"]["rollout"]))
    example = EXAMPLES["X3_metrics"]
    p50, p95, p99, largest = example["absdelta_p50_p95_p99_max"]
    assert (got.k1, got.k3) == pytest.approx((example["kl_k1"], example["k3_kl"]), rel=1e-5)
    assert (got.abs_p50, got.abs_p95, got.abs_p99, got.abs_max) == pytest.approx((p50, p95, p99, largest), rel=1e-5)
    assert got.abs_mean == pytest.approx(2.5 / 7, rel=1e-5)


def test_effective_sample_size_of_raw_and_truncated_weights() -> None:
    ratio = flat(EXAMPLES["B0"]["r_corr"])
    example = EXAMPLES["X3_metrics"]
    assert effective_sample_size(ratio) == pytest.approx(example["ess_raw"], rel=1e-6)
    assert effective_sample_size(ratio.clamp(max=2.0)) == pytest.approx(example["ess_tis"], rel=1e-6)
    assert effective_sample_size(torch.ones(5)) == 1
    assert effective_sample_size(torch.zeros(5)) == 0


def test_equal_bits_are_exact_and_every_number_is_zero() -> None:
    values = flat(EXAMPLES["B0"]["rollout"])
    got = compare(values, values.clone())
    assert got.is_exact
    assert got.compared_tokens == 7
    assert got.delta == Divergence()
    assert (got.differing_tokens, got.differing_bits, got.ulp_max) == (0, 0, 0)


@given(st.lists(st.floats(-30, -0.0009765625, width=32), min_size=1, max_size=20), st.data())
def test_one_flipped_bit_anywhere_shows(values: list[float], data: st.DataObject) -> None:
    rollout = torch.tensor(values)
    train = rollout.clone()
    place, bit = data.draw(st.integers(0, len(values) - 1)), data.draw(st.integers(0, 22))
    train.view(torch.int32)[place] ^= 1 << bit
    got = compare(train, rollout)
    assert not got.is_exact
    assert (got.differing_tokens, got.differing_bits) == (1, 1)
    assert got.ulp_max == 1 << bit
    assert got.delta.abs_max > 0


def test_the_sign_of_zero_is_a_bit_too() -> None:
    assert compare(torch.tensor([-0.0]), torch.tensor([0.0])).differing_bits == 1


def test_ulp_distance_counts_across_zero() -> None:
    tiny = float(np.nextafter(np.float32(0), np.float32(1)))
    assert ulp_distance(torch.tensor([tiny]), torch.tensor([-tiny])) == 2
    assert ulp_distance(torch.zeros(0), torch.zeros(0)) == 0


def test_tokens_of_an_unknown_version_are_not_compared_but_break_exactness() -> None:
    values = flat(EXAMPLES["B0"]["rollout"])
    known = torch.tensor([True] * 6 + [False])
    got = compare(values, values, known)
    assert (got.compared_tokens, got.uncompared_tokens) == (6, 1)
    assert not got.is_exact


def test_nonfinite_tokens_are_counted_and_leave_the_statistics() -> None:
    rollout = torch.tensor([-1.0, -2.0])
    got = compare(torch.tensor([torch.nan, -2.5]), rollout)
    assert (got.nonfinite, got.differing_tokens) == (1, 2)
    assert got.delta.abs_max == 0.5


def test_top1_flips() -> None:
    logprob = torch.tensor([-1.0, -2.0, -3.0])
    got = measure(
        logprob,
        logprob,
        torch.tensor([1, 2, 3], dtype=torch.int32),
        torch.tensor([1, 9, 3], dtype=torch.int32),
        torch.ones(3, dtype=torch.bool),
    )
    assert got.top1_flips == 1
    assert got.is_exact, "the argmax is reported, the logprob decides"


def test_no_tokens_no_numbers() -> None:
    assert compare(torch.zeros(0), torch.zeros(0)).as_dict()["compared_tokens"] == 0


def test_the_block_is_flat_and_json_ready() -> None:
    block = compare(flat(EXAMPLES["B0"]["train_old"]), flat(EXAMPLES["B0"]["rollout"])).as_dict()
    assert json.loads(json.dumps(block)) == block
    assert block["differing_tokens"] == 6
    assert block["abs_max"] == pytest.approx(1.0)
