"""Groups that the client posts for another engine: arrays keep their bits, large posts are cut, and what came of them is said."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timzero import sampled
from timzero.display import ingested_line
from timzero.steps import StepSummary


def group(num_tokens: int, num_samples: int = 1) -> dict[str, Any]:
    return {"samples": [{"token_ids": [1] * num_tokens}] * num_samples}


def test_arrays_become_plain_and_float32_keeps_its_bits() -> None:
    logprobs = np.array([-0.1, -np.float32(1e-40), -0.0], np.float32)
    packed = sampled.packed(
        {"prompt_token_ids": np.array([1, 2]), "samples": [{"token_ids": np.array([3, 4, 5]), "logprobs": logprobs}]}
    )
    assert packed["prompt_token_ids"] == [1, 2]
    assert packed["samples"] == [{"token_ids": [3, 4, 5], "logprobs_f32": logprobs.tobytes()}]


@pytest.mark.parametrize("logprobs", [[-0.1], np.array([-0.1])])
def test_logprobs_of_another_kind_stay_numbers(logprobs: Any) -> None:
    (sample,) = sampled.packed({"samples": [{"token_ids": [1], "logprobs": logprobs}]})["samples"]
    assert sample["logprobs"] == [-0.1]


def test_what_is_no_group_is_left_for_the_gateway_to_refuse() -> None:
    for wrong in ({}, {"samples": 3}, {"samples": ["text"]}):
        assert sampled.packed(wrong) == wrong
        assert list(sampled.parts([sampled.packed(wrong)])) == [[wrong]]


@given(st.lists(st.integers(0, 2 * sampled.MAX_TOKENS // 3), max_size=8))
def test_posts_are_cut_in_order_and_stay_below_the_limit(sizes: list[int]) -> None:
    groups = [{"samples": [{"token_ids": range(size)}]} for size in sizes]
    parts = list(sampled.parts(groups))
    assert [g for part in parts for g in part] == groups
    for part in parts:
        assert len(part) == 1 or sum(len(g["samples"][0]["token_ids"]) for g in part) <= sampled.MAX_TOKENS


def test_small_groups_are_cut_by_number() -> None:
    groups = [group(1)] * (sampled.MAX_GROUPS + 1)
    assert [len(part) for part in sampled.parts(groups)] == [sampled.MAX_GROUPS, 1]


def test_summary_names_what_was_sampled_elsewhere() -> None:
    def step(tokens: int, mean: float, largest: float) -> StepSummary:
        tim = {"compared_tokens": tokens, "abs_mean": mean, "abs_max": largest}
        return StepSummary(step=0, epoch=1, metrics={"ingested_tokens": tokens, "ingested_tim": tim})

    line = ingested_line((step(100, 0.02, 0.5), step(0, 0.0, 0.0), step(300, 0.04, 0.25)))
    assert line == "tokens sampled elsewhere: 400, |delta logprob|: mean 0.035, max 0.5"
