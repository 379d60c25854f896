"""What a file for `timzero train` holds: a run, an environment, an evaluation, and how to start services here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from shared.config import load, strict
from shared.wire.run import RunConfig


@strict
@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingTable:
    """Of every rollout and evaluation; the temperature is the run's."""

    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"sampling.max_tokens must be >= 1, got {self.max_tokens}")


@strict
@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationTable:
    """Greedy answers to a fixed set of tasks, before the first step and after the last one."""

    num_tasks: int = 64
    """0: no evaluation."""
    seed: int = 1_000_003
    """Of the tasks; the training tasks use the run's."""
    environment: dict[str, Any] = field(default_factory=dict)
    """Overrides of the `[environment]` table, for example another `path`."""

    def __post_init__(self) -> None:
        if not 0 <= self.num_tasks <= 1024:
            raise ValueError(f"evaluation.num_tasks must be in [0, 1024], got {self.num_tasks}")


@strict
@dataclass(frozen=True, kw_only=True, slots=True)
class LocalTable:
    """What `timzero up` and `timzero train --local` start. The other tables are keys of that service's configuration."""

    replicas: int = 1
    trainer_world_size: int = 1
    threads: int = 1
    """OMP_NUM_THREADS of every process; two processes with two threads each on two cores lose half to contention."""
    gateway: dict[str, Any] = field(default_factory=dict)
    rollout: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    weight_sync: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("replicas", "trainer_world_size", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"local.{name} must be >= 1, got {getattr(self, name)}")


@strict
@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    run: RunConfig
    environment: dict[str, Any]
    """`type` and that environment's keys; see docs/environments.md."""
    sampling: SamplingTable = field(default_factory=SamplingTable)
    evaluation: EvaluationTable = field(default_factory=EvaluationTable)
    local: LocalTable = field(default_factory=LocalTable)

    def with_run(self, **changes: Any) -> Job:
        return replace(self, run=replace(self.run, **changes))


def load_job(path: Path, overrides: Sequence[str] = ()) -> Job:
    """Args:
        path: TOML file.
        overrides: `key=value`; a key of the run may leave `run.` out, and one of a service `local.`:
            `num_steps=8`, `optimizer.lr=1e-5`, `rollout.max_chunk_tokens=16`, `environment.dataset=gcd`.

    Raises: ConfigError.
    """
    return load(Job, service="train", path=path, overrides=[_qualified(o) for o in overrides])


def _qualified(override: str) -> str:
    first = override.partition("=")[0].split(".")[0]
    if first != "run" and first in {f.name for f in fields(RunConfig)}:
        return f"run.{override}"
    if first in ("gateway", "rollout", "trainer", "weight_sync", "replicas", "trainer_world_size"):
        return f"local.{override}"
    return override
