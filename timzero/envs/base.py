"""What every environment is: tasks by number, and a grade for each answer.

A task is a function of (environment settings, seed, number) and of nothing else. That is what lets a driver be killed and
started again: it posts the same prompts under the same numbers and grades what it finds, without a file of its own.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = dict[str, str]
Prompt = str | tuple[Message, ...] | tuple[int, ...]


class EnvironmentFault(ValueError):
    """An environment that cannot be built, or a task or grade that it cannot give: what, the value got, what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One prompt and what is needed to grade its answers."""

    number: int
    prompt: Prompt
    """Text, chat messages (a last one from the assistant is continued, not closed), or token ids."""
    answer: Any
    """What `grade` compares with; stays with the driver."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """JSON; travels with the prompt and comes back with its trajectories."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What was sampled behind the prompt."""

    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: str = "stop"


class Environment(Protocol):
    def task(self, number: int, *, seed: int) -> Task:
        """The task of this number, equal at every call. Raises EnvironmentFault."""

    def grade(self, task: Task, completion: Completion) -> float:
        """A finite reward; 1.0 and above counts as solved in an evaluation. Raises what the grader raises: a fault of the
        grader is never a reward of 0."""


def chat(question: str, *, prefill: str = "", system: str = "") -> tuple[Message, ...]:
    """Chat messages of one question; `prefill` begins the assistant's answer."""
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": question})
    if prefill:
        messages.append({"role": "assistant", "content": prefill})
    return tuple(messages)


def stable_hash(*parts: int | str) -> int:
    """48 bits that depend on the parts alone: equal on every machine, process and Python version."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "little")
