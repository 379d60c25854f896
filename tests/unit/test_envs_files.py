"""JSONL files and Python functions as environments: grades, order, and errors that name the line."""

import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from timzero.envs import Completion, EnvironmentFault, make
from timzero.envs.jsonl import read_rows


def write(path, *rows):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return str(path)


def test_exact_match_compares_numbers_and_text(tmp_path):
    path = write(tmp_path / "a.jsonl", {"prompt": "2 + 2?", "answer": 4}, {"prompt": "Capital?", "answer": "Paris"})
    env = make({"type": "jsonl", "path": path, "shuffle": False})
    number, word = env.task(0, seed=0), env.task(1, seed=0)
    assert number.prompt == ({"role": "user", "content": "2 + 2?"},)
    assert env.grade(number, Completion(text=" 4.0 ")) == 1.0
    assert env.grade(number, Completion(text="5")) == 0.0
    assert env.grade(word, Completion(text="Paris\n")) == 1.0
    assert env.grade(word, Completion(text="paris")) == 0.0
    assert env.grade(word, Completion(text="")) == 0.0


@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [
        ("1/2", "so it is $\\frac{1}{2}$", 1.0),
        ("$x^2 + 1$", "\\boxed{1 + x^2}", 1.0),
        ("12", "The answer is 12.", 1.0),
        ("12", "The answer is 13.", 0.0),
        ("12", "", 0.0),
    ],
)
def test_math_verify_compares_mathematics(tmp_path, answer, text, reward):
    env = make(
        {
            "type": "jsonl",
            "path": write(tmp_path / "m.jsonl", {"prompt": "?", "answer": answer}),
            "grade": "math_verify",
        }
    )
    assert env.grade(env.task(0, seed=0), Completion(text=text)) == reward


def test_prompts_may_be_text_messages_or_token_ids(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    rows = [{"prompt": p, "answer": "x"} for p in ("plain", messages, [1, 2, 3])]
    env = make({"type": "jsonl", "path": write(tmp_path / "p.jsonl", *rows), "shuffle": False, "chat": False})
    assert [env.task(n, seed=0).prompt for n in range(3)] == ["plain", tuple(messages), (1, 2, 3)]


def test_prefill_begins_the_answer(tmp_path):
    path = write(tmp_path / "p.jsonl", {"prompt": "q", "answer": "x"})
    env = make({"type": "jsonl", "path": path, "prefill": "A:", "system": "s"})
    assert [m["role"] for m in env.task(0, seed=0).prompt] == ["system", "user", "assistant"]


@given(num_rows=st.integers(1, 40), seed=st.integers(0, 2**40), epoch=st.integers(0, 5))
@settings(deadline=None, max_examples=30)
def test_every_epoch_holds_every_row_once(tmp_path_factory, num_rows, seed, epoch):
    path = write(tmp_path_factory.mktemp("e") / "r.jsonl", *({"prompt": f"p{i}", "answer": i} for i in range(num_rows)))
    env = make({"type": "jsonl", "path": path})
    seen = [env.task(epoch * num_rows + i, seed=seed).metadata["line"] for i in range(num_rows)]
    assert sorted(seen) == list(range(1, num_rows + 1))
    again = make({"type": "jsonl", "path": path})
    assert seen == [again.task(epoch * num_rows + i, seed=seed).metadata["line"] for i in range(num_rows)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", ":2: not JSON"),
        ("[1, 2]", ":2: expected a JSON object"),
        ('{"answer": 1}', ":2: expected a JSON object with 'prompt'"),
        ('{"prompt": "q"}', ":2: 'answer' must be text or a number, got None"),
        ('{"prompt": "q", "answer": true}', ":2: 'answer' must be"),
        ('{"prompt": "", "answer": 1}', ":2: 'prompt' must be"),
        ('{"prompt": [{"role": "user"}], "answer": 1}', ":2: 'prompt' must be"),
        ('{"prompt": [1, -2], "answer": 1}', ":2: 'prompt' must be"),
        ('{"prompt": 7, "answer": 1}', ":2: 'prompt' must be"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = write(tmp_path / "bad.jsonl", {"prompt": "q", "answer": 1}, line)
    with pytest.raises(EnvironmentFault, match=message):
        read_rows(path)


def test_a_file_that_is_empty_missing_or_binary_is_refused(tmp_path):
    (tmp_path / "empty").write_text("\n \n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, message in (("empty", "holds no line"), ("missing", "cannot read"), ("binary", "cannot read")):
        with pytest.raises(EnvironmentFault, match=message):
            make({"type": "jsonl", "path": str(tmp_path / name)})


MODULE = """
def task(number, seed):
    return {"prompt": f"say {number + seed}", "wanted": str(number + seed)}

def grade(task, completion):
    if completion.text == "crash":
        raise RuntimeError("grader broke")
    return 0.25 if completion.text == task["wanted"] else 0

def bad_task(number, seed):
    return {"question": "?"}

NOT_A_FUNCTION = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "user_env.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.delitem(sys.modules, "user_env", raising=False)
    return "user_env"


def test_any_python_function_makes_and_grades_tasks(module):
    env = make({"type": "callable", "task": f"{module}:task", "grade": f"{module}:grade"})
    task = env.task(3, seed=4)
    assert task.prompt == "say 7"
    assert env.grade(task, Completion(text="7")) == 0.25
    assert env.grade(task, Completion(text="8")) == 0.0


def test_a_fault_of_the_grader_is_no_reward(module):
    env = make({"type": "callable", "task": f"{module}:task", "grade": f"{module}:grade"})
    with pytest.raises(RuntimeError, match="grader broke"):
        env.grade(env.task(0, seed=0), Completion(text="crash"))


def test_a_jsonl_file_may_be_graded_by_a_function(module, tmp_path):
    path = write(tmp_path / "f.jsonl", {"prompt": "q", "wanted": "yes"})
    env = make({"type": "jsonl", "path": path, "grade": f"{module}:grade"})
    assert env.grade(env.task(0, seed=0), Completion(text="yes")) == 0.25


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("user_env", "expected module:function"),
        ("user_env:missing", "cannot load"),
        ("no_such_module:f", "cannot load"),
        ("user_env:NOT_A_FUNCTION", "is a int, not a function"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_named(module, name, message):
    with pytest.raises(EnvironmentFault, match=message):
        make({"type": "callable", "task": name, "grade": "user_env:grade"})


def test_a_task_without_a_prompt_is_refused(module):
    env = make({"type": "callable", "task": f"{module}:bad_task", "grade": f"{module}:grade"})
    with pytest.raises(EnvironmentFault, match="must return a dict with 'prompt'"):
        env.task(0, seed=0)
