"""The environment of `benchmarks.loop`: prompts and rewards that cost nothing, so that what is timed is the loop."""

from __future__ import annotations

import random
from typing import Any

from timzero.envs import Completion

PROMPT_TOKENS = 64
NUM_IDS = 32
"""Ids of the prompts lie below; every vocabulary has as many."""


def task(number: int, seed: int) -> dict[str, Any]:
    """A prompt of random ids."""
    draw = random.Random(f"{seed}.{number}")
    return {"prompt": [draw.randrange(NUM_IDS) for _ in range(PROMPT_TOKENS)]}


def grade(task: dict[str, Any], completion: Completion) -> float:
    """The share of even ids: it differs between samples, so that every group has a gradient."""
    return sum(i % 2 == 0 for i in completion.token_ids) / len(completion.token_ids)
