"""Environments give the same task for the same number in every process, and grade what they ought to."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.config import ConfigError
from timzero.envs import Completion, EnvironmentFault, make
from timzero.envs.base import chat, stable_hash
from timzero.envs.extract import extract, is_same

PRODUCTS = {
    "type": "reasoning_gym",
    "dataset": "products",
    "options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "prefill": "The answer is",
    "extract": "first_number",
    "score": "equal",
}
SORT = {"type": "sort_digits", "num_digits": 3}
ENVIRONMENTS = {"products": make(PRODUCTS), "sort": make(SORT)}

seeds = st.integers(0, 2**63 - 1)
numbers = st.integers(0, 10_000_000)


@given(name=st.sampled_from(sorted(ENVIRONMENTS)), seed=seeds, number=numbers)
@settings(deadline=None, max_examples=60)
def test_a_task_is_a_function_of_settings_seed_and_number(name, seed, number):
    first = ENVIRONMENTS[name].task(number, seed=seed)
    again = make(PRODUCTS if name == "products" else SORT).task(number, seed=seed)
    assert first == again
    assert json.loads(json.dumps(first.metadata)) == first.metadata


def test_another_process_makes_the_same_tasks():
    code = (
        "from timzero.envs import make\n"
        f"for t in ({PRODUCTS!r}, {SORT!r}):\n"
        "    print([make(t).task(n, seed=7).prompt for n in (0, 5, 99)])"
    )
    lines = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": hash_seed}
        ).stdout
        for hash_seed in ("1", "2")
    ]
    here = "".join(f"{[make(t).task(n, seed=7).prompt for n in (0, 5, 99)]}\n" for t in (PRODUCTS, SORT))
    assert lines == [here, here]


def test_neighbouring_seeds_do_not_share_tasks_by_position():
    env = make(PRODUCTS | {"options": {"min_terms": 3, "max_terms": 3, "min_digits": 4, "max_digits": 4}})
    train = {str(env.task(n, seed=0).prompt) for n in range(200)}
    held_out = {str(env.task(n, seed=1).prompt) for n in range(200)}
    assert not train & held_out


@given(seed=seeds, number=numbers)
@settings(deadline=None, max_examples=40)
def test_products_reward_exactly_the_right_first_number(seed, number):
    task = ENVIRONMENTS["products"].task(number, seed=seed)
    _, entry = task.answer
    right = int(entry["answer"])
    grade = ENVIRONMENTS["products"].grade

    assert task.prompt[-1] == {"role": "assistant", "content": "The answer is"}
    assert grade(task, Completion(text=f" {right}.")) == 1.0
    assert grade(task, Completion(text=f": {right}, not {right + 1}")) == 1.0
    assert grade(task, Completion(text=f" {right + 1}. Or {right}?")) == 0.0
    # "4" must not be found inside "24"
    assert grade(task, Completion(text=f" 9{right}")) == 0.0
    assert grade(task, Completion(text=" the")) == 0.0
    assert grade(task, Completion(text="")) == 0.0


def test_score_answer_is_the_datasets_own_grade():
    env = make(PRODUCTS | {"extract": "text", "score": "score_answer"})
    task = env.task(0, seed=0)
    answer = task.answer[1]["answer"]
    assert env.grade(task, Completion(text=answer)) == 1.0
    assert 0.0 < env.grade(task, Completion(text=f"it is {answer}")) < 1.0


@given(seed=seeds, number=numbers)
@settings(deadline=None)
def test_sort_digits_rewards_each_place(seed, number):
    env = ENVIRONMENTS["sort"]
    task = env.task(number, seed=seed)
    digits = task.prompt.removeprefix("sort ").removesuffix(" =").split()
    right = sorted(digits)
    assert env.grade(task, Completion(text=" ".join(right))) == 1.0
    assert env.grade(task, Completion(text=" ".join(right) + " 0")) == 1.0
    assert env.grade(task, Completion(text=right[0])) == pytest.approx(1 / 3)
    assert env.grade(task, Completion(text=f"x {right[1]} x")) == pytest.approx(1 / 3)
    assert env.grade(task, Completion(text="")) == 0.0


@pytest.mark.parametrize(
    ("text", "how", "expected"),
    [
        (" 45. Because", "first_number", "45"),
        ("-3 or 4", "first_number", "-3"),
        ("1,234.50 dollars", "first_number", "1234.50"),
        ("10, 20", "last_number", "20"),
        ("none", "first_number", None),
        (" Yes, it is", "first_word", "Yes"),
        ("...", "first_word", None),
        ("  all of it ", "text", "all of it"),
        ("  ", "text", None),
    ],
)
def test_extract_finds_the_answer(text, how, expected):
    assert extract(text, how) == expected


@given(st.text())
def test_extract_never_raises(text):
    for how in ("first_number", "last_number", "first_word", "text"):
        found = extract(text, how)
        assert found is None or found


@given(st.integers(-(10**9), 10**9))
def test_numbers_are_the_same_however_they_are_written(number):
    assert is_same(f"{number:,}", str(number))
    assert is_same(f" {number}.0 ", str(number))
    assert not is_same(str(number + 1), str(number))


def test_chat_puts_the_prefill_last():
    assert chat("q", prefill="A:", system="s") == (
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "A:"},
    )


@given(st.lists(st.integers(), max_size=4), st.lists(st.integers(), max_size=4))
def test_stable_hash_separates_its_parts(a, b):
    assert (stable_hash(*a) == stable_hash(*b)) == (a == b)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "type must be one of"),
        ({"type": "gym"}, "type must be one of"),
        ({"type": "sort_digits", "num_digit": 3}, "nearest key is num_digits"),
        ({"type": "sort_digits", "num_digits": 1}, r"\[2, 9\]"),
        (PRODUCTS | {"extract": "second_number"}, "extract"),
        (PRODUCTS | {"options": {"seed": 3}}, "must not name"),
        (PRODUCTS | {"size": 0}, "size must be >= 1"),
    ],
)
def test_a_bad_table_is_refused_with_what_to_do(table, message):
    with pytest.raises(ConfigError, match=message):
        make(table)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (PRODUCTS | {"dataset": "product"}, "near names: products"),
        (PRODUCTS | {"options": {"min_term": 2}}, "min_term"),
        (PRODUCTS | {"options": {"min_terms": 5, "max_terms": 2}}, "refuses options"),
    ],
)
def test_a_dataset_that_cannot_be_built_is_refused(table, message):
    with pytest.raises(EnvironmentFault, match=message):
        make(table)


def test_numbers_beyond_the_size_begin_again():
    env = make(PRODUCTS | {"size": 5})
    assert env.task(7, seed=1).prompt == env.task(2, seed=1).prompt
    assert env.task(7, seed=1).number == 7
