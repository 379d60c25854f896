"""Any dataset of reasoning-gym: endless tasks that a program makes and a program grades."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from shared.config import strict
from timzero.envs.base import Completion, EnvironmentFault, Task, chat, stable_hash
from timzero.envs.extract import Extract, extract, is_same


@strict
@dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningGymConfig:
    dataset: str
    """Name in reasoning-gym, for example `products`, `gcd`, `chain_sum`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the dataset."""
    size: int = 1_000_000
    """Number of tasks per seed; numbers beyond it begin again."""
    system: str = ""
    """System message. Empty: what the chat template says without one."""
    prefill: str = ""
    """Beginning of the assistant's answer."""
    extract: Extract = "text"
    """Which part of the completion is the answer."""
    score: Literal["score_answer", "equal"] = "score_answer"
    """`score_answer` is the dataset's own grade, which may give part of a reward; `equal` is 1 or 0."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"environment.size must be >= 1, got {self.size}")
        reserved = {"seed", "size"} & set(self.options)
        if reserved:
            raise ValueError(
                f"environment.options must not name {sorted(reserved)}: numbers and seeds are the driver's"
            )


class ReasoningGym:
    """Tasks `seed + number` of one dataset, with the seed hashed so that neighbouring seeds share no task by position."""

    def __init__(self, config: ReasoningGymConfig) -> None:
        """Raises EnvironmentFault when the dataset or its options don't exist."""
        self.config = config
        self._dataset = cache(self._create)
        self._dataset(0)

    def task(self, number: int, *, seed: int) -> Task:
        entry = self._dataset(seed)[number % self.config.size]
        return Task(
            number=number,
            prompt=chat(entry["question"], prefill=self.config.prefill, system=self.config.system),
            answer=(seed, entry),
            metadata={"dataset": self.config.dataset, "answer": str(entry["answer"])},
        )

    def grade(self, task: Task, completion: Completion) -> float:
        seed, entry = task.answer
        answer = extract(completion.text, self.config.extract)
        if self.config.score == "equal":
            return float(answer is not None and is_same(answer, str(entry["answer"])))
        return float(self._dataset(seed).score_answer(answer, entry))

    def _create(self, seed: int) -> Any:
        from reasoning_gym import create_dataset
        from reasoning_gym.factory import DATASETS

        c = self.config
        if c.dataset not in DATASETS:
            near = difflib.get_close_matches(c.dataset, DATASETS, n=3, cutoff=0.4)
            raise EnvironmentFault(
                f"reasoning-gym has no dataset {c.dataset!r}; near names: {', '.join(near) or 'none'}"
            )
        try:
            return create_dataset(c.dataset, seed=stable_hash("reasoning_gym", seed), size=c.size, **c.options)
        except (TypeError, ValueError, AssertionError) as error:
            raise EnvironmentFault(f"reasoning-gym {c.dataset} refuses options {c.options}: {error}") from error
