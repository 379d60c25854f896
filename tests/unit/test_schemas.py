"""What bodies are refused before a run is looked at."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from services.gateway.schemas import EvalBody, PromptBatch, PromptItem, Refused, RewardBatch, RewardBody, Sampling

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.lists(json_values, min_size=1, max_size=5))
def test_any_item_is_a_prompt_or_a_refusal_that_says_why(items: list[Any]) -> None:
    """One bad item, whatever it is, never refuses the batch."""
    batch = PromptBatch.model_validate({"items": [*items, {"prompt": "1", "number": 0}]})
    for item in batch.items[:-1]:
        assert isinstance(item, PromptItem) or (isinstance(item, Refused) and item.errors)
    assert isinstance(batch.items[-1], PromptItem)


@given(st.lists(json_values, min_size=1, max_size=5))
def test_any_reward_item_is_a_finite_reward_or_a_refusal(items: list[Any]) -> None:
    for item in RewardBatch.model_validate({"items": items}).items:
        assert isinstance(item, Refused) or math.isfinite(item.value)


@given(st.sampled_from([math.nan, math.inf, -math.inf]))
def test_reward_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(ValidationError):
        RewardBody(value=value)


@pytest.mark.parametrize(
    "given_forms",
    [(), ("prompt", "messages"), ("prompt", "prompt_token_ids"), ("prompt", "messages", "prompt_token_ids")],
)
def test_a_prompt_has_exactly_one_form(given_forms: tuple[str, ...]) -> None:
    forms = {"prompt": "1", "messages": [{"role": "user", "content": "1"}], "prompt_token_ids": [1]}
    with pytest.raises(ValidationError, match="exactly one"):
        PromptItem.model_validate({name: forms[name] for name in given_forms})


def test_empty_text_is_a_form_and_left_to_the_tokenizer() -> None:
    assert PromptItem(prompt="").prompt == ""


@given(st.integers(min_value=2**63) | st.integers(max_value=-(2**63) - 1))
def test_integer_that_msgpack_cannot_hold_is_refused_anywhere_in_metadata(number: int) -> None:
    for metadata in ({"x": number}, {"x": [{"y": number}]}):
        with pytest.raises(ValidationError, match="64 bits"):
            PromptItem(prompt="1", metadata=metadata)


@pytest.mark.parametrize("value", [math.nan, math.inf, "\ud800", object(), b"x"])
def test_metadata_that_json_cannot_hold_is_refused(value: Any) -> None:
    with pytest.raises(ValidationError):
        PromptItem(prompt="1", metadata={"x": value})


def test_metadata_is_bounded_in_bytes_not_characters() -> None:
    PromptItem(prompt="1", metadata={"x": "a" * 16_000})
    with pytest.raises(ValidationError, match="bytes"):
        PromptItem(prompt="1", metadata={"x": "é" * 16_000})


@pytest.mark.parametrize(
    "fields",
    [{"temperature": -1}, {"temperature": math.nan}, {"max_tokens": 0}, {"max_tokens": 1.5}, {"top_p": 1.1}, {"top_k": -1},
     {"stop": [""]}, {"stop_token_ids": [-1]}, {"seed": 1}, {"stop": "x"}],
)  # fmt: skip
def test_sampling_out_of_range_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Sampling.model_validate(fields)


def test_temperature_defaults_to_what_the_lane_says() -> None:
    assert Sampling().params(0.7).temperature == 0.7
    assert Sampling(temperature=0).params(0.7).temperature == 0.0
    params = Sampling(stop=["a"], stop_token_ids=[3], top_k=2, max_tokens=9).params(1.0)
    assert (params.stop, params.stop_token_ids, params.top_k, params.max_tokens, params.is_truncated) == (
        ("a",),
        (3,),
        2,
        9,
        True,
    )


def test_evaluation_items_have_no_number() -> None:
    with pytest.raises(ValidationError):
        EvalBody.model_validate({"items": [{"prompt": "1", "number": 0}]})
