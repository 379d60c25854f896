"""Durable checkpoints: masters, moments, kept forward copies and generator state as tensors, the ledger as JSON beside them.

    {directory}/step-00000007/          complete: it was renamed after everything in it was synced
        *.distcp, .metadata             torch.distributed.checkpoint; loads on any number of ranks
        ledger.json
Batches below the ledger's step are trained; nothing else needs to be known about them.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import serialization

from services.trainer.batch import PolicyVersion
from services.trainer.copies import ForwardCopy
from services.trainer.learner import Learner
from services.trainer.policy import as_global, local_shards
from shared.config import ConfigError, structure, unstructure
from shared.wire.run import RunConfig
from shared.wire.tensor_file import fsync_directory

LEDGER = "ledger.json"


class CheckpointError(ValueError):
    """The checkpoint is of another run, or can't be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What a checkpoint says besides tensors."""

    step: int
    """Next step to train: batches below it are in these weights."""
    lineage: int
    optimizer_steps: int
    """Taken so far; the moments' bias correction counts them."""
    versions: tuple[PolicyVersion, ...]
    """Of the forward copies, ascending by step; the last one is the masters' own, which needs no copy."""
    run_config: dict[str, Any]
    kl_coef: float | None = None
    """Of the penalty towards the reference, as adapted so far; None in checkpoints from before it moved."""


def latest(directory: Path) -> Path | None:
    """The newest complete checkpoint."""
    return max(directory.glob("step-*"), default=None)


def read_ledger(path: Path) -> Ledger:
    """Raises CheckpointError."""
    try:
        values = json.loads((path / LEDGER).read_text())
        values["versions"] = tuple(PolicyVersion(**v) for v in values["versions"])
        return Ledger(**values)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{path} is no checkpoint of this build: {error}. Move it away to start from an older one"
        ) from error


def save(directory: Path, learner: Learner, *, keep: int) -> Path:
    """Write the state between two steps; durable when it returns. All ranks must call it.

    Args:
        directory: of the run's checkpoints, shared by all ranks.
        learner: its current version must be named (published).
        keep: newest checkpoints to keep.
    """
    world, current = learner.world, learner.copies.current.version
    final = directory / f"step-{current.step:08d}"
    # A name of its own: a trainer that was taken over may still be writing the same step.
    temporary = directory / f".{final.name}.{world.from_leader(lambda: uuid.uuid4().hex)}.tmp"
    if world.is_leader:
        for left_over in directory.glob(".step-*.tmp"):
            shutil.rmtree(left_over, ignore_errors=True)
        temporary.mkdir(parents=True)
    world.barrier()
    state = {**_state(learner), **_copies(learner, learner.copies.held[:-1])}
    # torch computes checksums that it never reads; the digest of the republished weights is what proves a checkpoint.
    with serialization.config.patch({"save.compute_crc32": False}):  # type: ignore[attr-defined]
        dcp.save(state, storage_writer=dcp.FileSystemWriter(temporary, sync_files=True))
    if world.is_leader:
        ledger = Ledger(
            step=current.step,
            lineage=current.lineage,
            optimizer_steps=_optimizer_steps(learner),
            versions=tuple(c.version for c in learner.copies.held),
            run_config=unstructure(learner.config),
            kl_coef=learner.kl_coef,
        )
        _finish(temporary, final, ledger)
        for old in sorted(directory.glob("step-*"))[:-keep]:
            shutil.rmtree(old)
    world.barrier()
    return final


def _is_of(ledger: Ledger, config: RunConfig) -> bool:
    """A key that came into being behind the checkpoint has its default there."""
    try:
        return structure(RunConfig, ledger.run_config) == config
    except ConfigError:
        return False


def load(path: Path, learner: Learner) -> Ledger:
    """Put a checkpoint into a freshly built learner. All ranks must call it.

    Raises:
        CheckpointError: of another run or configuration, or unreadable.
    """
    ledger = read_ledger(path)
    if not _is_of(ledger, learner.config):
        raise CheckpointError(
            f"{path} belongs to a run of the same name with another configuration; give this run another name or another run_dir"
        )
    shards = local_shards(learner.decoder)
    older = [
        ForwardCopy(version, {name: torch.empty_like(local, dtype=learner.dtype) for name, local in shards.items()})
        for version in ledger.versions[:-1]
    ]
    state = {**_state(learner), **_copies(learner, older)}
    dcp.load(state, storage_reader=dcp.FileSystemReader(path))
    torch.set_rng_state(state["rng"])
    for parameter in _parameters(learner).values():
        learner.optimizer.state[parameter]["step"].fill_(ledger.optimizer_steps)
    for copy in older:
        learner.copies.put(copy)
    learner.copies.take(ledger.step, lineage=ledger.lineage)
    learner.copies.name(ledger.versions[-1])
    if ledger.kl_coef is not None:
        learner.kl_coef = ledger.kl_coef
    return ledger


def _parameters(learner: Learner) -> dict[str, Tensor]:
    return dict(learner.decoder.named_parameters())


def _state(learner: Learner) -> dict[str, Tensor]:
    """Masters and moments by name, sharing their memory; moments that do not exist yet are zeros."""
    state: dict[str, Tensor] = {"rng": torch.get_rng_state()}
    for name, parameter in _parameters(learner).items():
        moments = learner.optimizer.state[parameter]
        if not moments:
            moments["step"] = torch.zeros((), dtype=torch.float32, device=learner.world.device)
            moments["exp_avg"] = torch.zeros_like(parameter)
            moments["exp_avg_sq"] = torch.zeros_like(parameter)
        state[f"master.{name}"] = parameter.detach()
        state[f"exp_avg.{name}"] = moments["exp_avg"]
        state[f"exp_avg_sq.{name}"] = moments["exp_avg_sq"]
    return state


def _copies(learner: Learner, copies: list[ForwardCopy] | tuple[ForwardCopy, ...]) -> dict[str, DTensor]:
    return {
        f"copy.{copy.version.step}.{name}": tensor
        for copy in copies
        for name, tensor in as_global(learner.decoder, copy.shards).items()
    }


def _optimizer_steps(learner: Learner) -> int:
    return int(next(iter(learner.optimizer.state.values()))["step"])


def _finish(temporary: Path, final: Path, ledger: Ledger) -> None:
    """Ledger, syncs, and the rename that makes the checkpoint exist."""
    with (temporary / LEDGER).open("w") as file:
        json.dump(asdict(ledger), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    fsync_directory(temporary)
    # Only someone who went back to an older checkpoint by hand finds the name taken; at no moment is there none.
    replaced = final.with_name(f".{final.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)
    temporary.rename(final)
    fsync_directory(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
