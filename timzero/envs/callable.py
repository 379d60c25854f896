"""Tasks and grades from any Python functions, named `module:function`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.config import strict
from timzero.envs.base import Completion, EnvironmentFault, Prompt, Task, chat


@strict
@dataclass(frozen=True, kw_only=True, slots=True)
class CallableConfig:
    task: str
    """`module:function`, called as `function(number, seed)`; returns a mapping with `prompt` (text, messages or token ids) and
    whatever the grader needs. It must return equal values for equal arguments."""
    grade: str
    """`module:function`, called as `function(task, completion)` with that mapping and a `Completion`; returns a number."""
    prefill: str = ""
    """Where `prompt` is text: sent as a chat question with this beginning of the answer. Empty: sent as plain text."""


class CallableEnvironment:
    def __init__(self, config: CallableConfig) -> None:
        """Raises EnvironmentFault when a function can't be imported."""
        self.config = config
        self._task = load_function(config.task)
        self._grade = load_function(config.grade)

    def task(self, number: int, *, seed: int) -> Task:
        values = self._task(number, seed)
        if not isinstance(values, dict) or "prompt" not in values:
            raise EnvironmentFault(
                f"{self.config.task}({number}, {seed}) must return a dict with 'prompt', got {values!r}"
            )
        prompt = as_prompt(values["prompt"], where=f"{self.config.task}({number}, {seed})")
        if isinstance(prompt, str) and self.config.prefill:
            prompt = chat(prompt, prefill=self.config.prefill)
        return Task(number=number, prompt=prompt, answer=values)

    def grade(self, task: Task, completion: Completion) -> float:
        return float(self._grade(task.answer, completion))


def as_prompt(value: Any, *, where: str) -> Prompt:
    """Text, messages or token ids as a `Prompt`. Raises EnvironmentFault that begins with `where`."""
    if isinstance(value, str) and value:
        return value
    if isinstance(value, (list, tuple)) and value:
        if all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in value):
            return tuple(value)
        if all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
        ):
            return tuple({"role": m["role"], "content": m["content"]} for m in value)
    raise EnvironmentFault(
        f"{where}: 'prompt' must be text, a list of messages with role and content, or a list of token ids, got {value!r}"
    )


def load_function(name: str) -> Callable[..., Any]:
    """Imports `module:function`, with the working directory importable. Raises EnvironmentFault."""
    module_name, sign, attribute = name.partition(":")
    if not sign or not module_name or not attribute:
        raise EnvironmentFault(f"expected module:function, got {name!r}")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise EnvironmentFault(f"cannot load {name!r} (looked from {Path.cwd()} as well): {error}") from error
    if not callable(function):
        raise EnvironmentFault(f"{name!r} is a {type(function).__name__}, not a function")
    return function
