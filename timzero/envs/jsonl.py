"""A file of prompts with answers, one JSON object a line: `{"prompt": ..., "answer": ..., ...}`."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from shared.config import strict
from timzero.envs.base import Completion, EnvironmentFault, Prompt, Task, chat, stable_hash
from timzero.envs.callable import as_prompt, load_function
from timzero.envs.extract import Extract, extract, is_same


@strict
@dataclass(frozen=True, kw_only=True, slots=True)
class JsonlConfig:
    path: str
    """File of JSON lines. `prompt` is text, messages or token ids; `answer` is text or a number; other keys are metadata."""
    grade: str = "exact"
    """`exact`, `math_verify`, or `module:function`, called as `function(row, completion)`."""
    extract: Extract = "text"
    """Which part of the completion `exact` compares."""
    chat: bool = True
    """Send a text prompt as a chat question. False: as plain text."""
    system: str = ""
    prefill: str = ""
    """Beginning of the assistant's answer, where the prompt is text."""
    shuffle: bool = True
    """Another order in every epoch, a function of the seed alone. False: the order of the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    prompt: Prompt
    values: dict[str, Any]


class Jsonl:
    """Task `number` is line `number % N` of the order of epoch `number // N`."""

    def __init__(self, config: JsonlConfig) -> None:
        """Raises EnvironmentFault naming the file and line of whatever can't be used."""
        self.config = config
        self.rows = read_rows(config.path, needs_answer=":" not in config.grade)
        self._order = cache(self._epoch_order)
        self._grade = _grader(config)

    def task(self, number: int, *, seed: int) -> Task:
        epoch, position = divmod(number, len(self.rows))
        line = self._order(seed, epoch)[position]
        row, c = self.rows[line], self.config
        prompt = row.prompt
        if isinstance(prompt, str):
            prompt = chat(prompt, prefill=c.prefill, system=c.system) if c.chat else prompt + c.prefill
        return Task(number=number, prompt=prompt, answer=row.values, metadata={"line": line + 1})

    def grade(self, task: Task, completion: Completion) -> float:
        return float(self._grade(task.answer, completion))

    def _epoch_order(self, seed: int, epoch: int) -> list[int]:
        order = list(range(len(self.rows)))
        if self.config.shuffle:
            random.Random(stable_hash("jsonl", seed, epoch)).shuffle(order)
        return order


def read_rows(path: str | Path, *, needs_answer: bool = True) -> list[Row]:
    """Reads and checks every line. Raises EnvironmentFault with path, line number and what to do."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise EnvironmentFault(f"cannot read {path}: {error}") from error
    rows = [_row(line, f"{path}:{i}", needs_answer) for i, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise EnvironmentFault(f"{path} holds no line; each must be a JSON object with 'prompt' and 'answer'")
    return rows


def _row(line: str, where: str, needs_answer: bool) -> Row:
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise EnvironmentFault(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(values, dict) or "prompt" not in values:
        raise EnvironmentFault(f"{where}: expected a JSON object with 'prompt', got {line[:80]!r}")
    answer = values.get("answer")
    if needs_answer and (isinstance(answer, bool) or not isinstance(answer, (str, int, float))):
        raise EnvironmentFault(f"{where}: 'answer' must be text or a number, got {answer!r}")
    return Row(prompt=as_prompt(values["prompt"], where=where), values=values)


def _grader(config: JsonlConfig) -> Callable[[dict[str, Any], Completion], float]:
    if config.grade == "exact":

        def exact(row: dict[str, Any], completion: Completion) -> float:
            answer = extract(completion.text, config.extract)
            return float(answer is not None and is_same(answer, str(row["answer"])))

        return exact
    if config.grade == "math_verify":
        return math_verify_grade
    if ":" not in config.grade:
        raise EnvironmentFault(
            f"environment.grade must be 'exact', 'math_verify' or 'module:function', got {config.grade!r}"
        )
    return load_function(config.grade)


def math_verify_grade(row: dict[str, Any], completion: Completion) -> float:
    """1 where math-verify finds the completion's last answer equal to the row's, else 0.

    An answer without mark-up is read as mathematics, so `1/2` and `\\frac{1}{2}` are the same.
    """
    from math_verify import parse, verify

    expected = str(row["answer"])
    gold = parse(expected if "$" in expected or "\\boxed" in expected else f"${expected}$")
    if not gold:
        raise EnvironmentFault(f"math-verify cannot read the answer {expected!r}")
    return float(verify(gold, parse(completion.text)))
