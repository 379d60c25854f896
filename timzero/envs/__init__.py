"""Environments and reward functions. `make` builds one from the `[environment]` table of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.config import ConfigError, structure
from timzero.envs.base import Completion, Environment, EnvironmentFault, Task
from timzero.envs.callable import CallableConfig, CallableEnvironment
from timzero.envs.jsonl import Jsonl, JsonlConfig
from timzero.envs.reasoning_gym import ReasoningGym, ReasoningGymConfig
from timzero.envs.sort_digits import SortDigits, SortDigitsConfig

__all__ = ["Completion", "Environment", "EnvironmentFault", "Task", "make"]

KINDS: dict[str, tuple[type[Any], type[Any]]] = {
    "reasoning_gym": (ReasoningGymConfig, ReasoningGym),
    "jsonl": (JsonlConfig, Jsonl),
    "callable": (CallableConfig, CallableEnvironment),
    "sort_digits": (SortDigitsConfig, SortDigits),
}


def make(table: Mapping[str, Any]) -> Environment:
    """Builds the environment that `type` names from the table's other keys.

    >>> make({"type": "sort_digits"}).task(0, seed=1).prompt
    'sort 5 9 ='

    Raises: ConfigError for a bad table, EnvironmentFault for one that can't be built.
    """
    values = dict(table)
    kind = values.pop("type", None)
    if kind not in KINDS:
        raise ConfigError(f"environment.type must be one of {', '.join(KINDS)}, got {kind!r}")
    config_class, environment_class = KINDS[kind]
    try:
        config = structure(config_class, values)
    except ConfigError as error:
        raise ConfigError(f"environment ({kind}): {error}") from error
    environment: Environment = environment_class(config)
    return environment
