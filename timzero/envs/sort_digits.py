"""Sort a few digits: small enough for a model of 76k parameters, with a reward for every digit in its place."""

from __future__ import annotations

import random
from dataclasses import dataclass

from shared.config import strict
from timzero.envs.base import Completion, Task, stable_hash


@strict
@dataclass(frozen=True, kw_only=True, slots=True)
class SortDigitsConfig:
    num_digits: int = 2

    def __post_init__(self) -> None:
        if not 2 <= self.num_digits <= 9:
            raise ValueError(f"environment.num_digits must be in [2, 9], got {self.num_digits}")


class SortDigits:
    """`sort 7 3 =` wants `3 7`. The reward is the share of places that hold the right digit."""

    def __init__(self, config: SortDigitsConfig) -> None:
        self.config = config

    def task(self, number: int, *, seed: int) -> Task:
        rng = random.Random(stable_hash("sort_digits", seed, number))
        digits = [str(rng.randrange(10)) for _ in range(self.config.num_digits)]
        return Task(number=number, prompt=f"sort {' '.join(digits)} =", answer=sorted(digits))

    def grade(self, task: Task, completion: Completion) -> float:
        words = completion.text.split()
        right = sum(a == b for a, b in zip(words, task.answer, strict=False))
        return right / len(task.answer)
