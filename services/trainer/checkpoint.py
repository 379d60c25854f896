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
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor
from torch.utils import serialization

from services.trainer.batch import PolicyVersion
from services.trainer.copies import ForwardCopy
from services.trainer.distributed import World
from services.trainer.learner import Learner
from services.trainer.policy import as_global, local_shards
from shared.config import ConfigError, structure, unstructure
from shared.wire.run import RunConfig
from shared.wire.tensor_file import move_into_place

log = structlog.get_logger()

LEDGER = "ledger.json"
CLOSE_S = 60.0
"""How long a trainer that stops waits for a checkpoint that is being written."""


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
    dtype: str | None = None
    """Of the published weights, which the run may leave to the machine; None in checkpoints from before it was recorded."""


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
    world = learner.world
    draft = _draft(directory, learner)
    _write(_whole_state(learner), draft.temporary, None)
    if world.is_leader:
        _finish(draft, keep)
    world.barrier()
    return draft.final


class Saver:
    """Saves a run's checkpoints, in the background if asked to: then training goes on while a copy on the host is written.

    At most one is on its way. All ranks make the same calls.

    >>> saver.begin(learner)  # its current version is named
    >>> while saver.settle(wait=False) is None: train()  # the step of the checkpoint, once it is durable
    """

    def __init__(self, directory: Path, world: World, *, keep: int, in_background: bool) -> None:
        """Args: as for `save`."""
        self._directory, self._world, self._keep = directory, world, keep
        self._draft: Draft | None = None
        self._written: Future[None] = Future()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if in_background else None
        # The thread's collectives must not meet those of the training steps.
        self._group = dist.new_group(backend="gloo") if in_background and world.size > 1 else None
        is_pinned = world.device.type == "cuda"
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=is_pinned,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=is_pinned,
            )
        )

    def begin(self, learner: Learner) -> None:
        """Starts a checkpoint of the state as it is now; returns once that may change."""
        assert self._draft is None, "settle the one before first"
        self._draft = _draft(self._directory, learner)
        state = _whole_state(learner)
        if self._executor is None:
            _write(state, self._draft.temporary, None)
            self._written = Future()
            self._written.set_result(None)
        else:
            staged = self._stager.stage(state)
            assert isinstance(staged, dict), "the copy is made at once"
            if self._world.device.type == "cuda":
                # Not every torch waits here for copies that it did not send to a stream of its own.
                torch.cuda.current_stream().synchronize()
            self._written = self._executor.submit(_write, staged, self._draft.temporary, self._group)

    def settle(self, *, wait: bool) -> int | None:
        """The step of a checkpoint that has become durable since the last call; None if none has.

        Args:
            wait: for the one that is on its way, as long as its writing takes.

        Raises:
            CheckpointError: some rank could not write; what it met is in its log.
        """
        draft = self._draft
        if draft is None:
            return None
        if wait:
            wait_for([self._written])
        is_done = self._written.done()
        error = self._written.exception() if is_done else None
        if error is not None:
            log.error("checkpoint failed", step=draft.ledger.step, error=repr(error))
        done, failed = self._world.count(is_done), self._world.count(error is not None)
        if failed:
            raise CheckpointError(f"{failed} of {self._world.size} ranks could not write {draft.final}") from error
        if done < self._world.size:
            return None
        if self._world.is_leader:
            _finish(draft, self._keep)
        self._world.barrier()
        self._draft = None
        return draft.ledger.step

    def close(self) -> None:
        """Waits a while for what is being written; it stays without a name, and the next checkpoint removes it."""
        if self._executor is not None:
            wait_for([self._written] if self._draft else [], timeout=CLOSE_S)
            self._executor.shutdown(wait=False, cancel_futures=True)
        self._stager.close()


@dataclass(frozen=True)
class Draft:
    """A checkpoint on its way."""

    temporary: Path
    final: Path
    ledger: Ledger


def _draft(directory: Path, learner: Learner) -> Draft:
    """A directory to write into, which no other trainer has."""
    world, current = learner.world, learner.copies.current.version
    final = directory / f"step-{current.step:08d}"
    # A name of its own: a trainer that was taken over may still be writing the same step.
    temporary = directory / f".{final.name}.{world.from_leader(lambda: uuid.uuid4().hex)}.tmp"
    if world.is_leader:
        for left_over in directory.glob(".step-*.tmp"):
            shutil.rmtree(left_over, ignore_errors=True)
        temporary.mkdir(parents=True)
    world.barrier()
    ledger = Ledger(
        step=current.step,
        lineage=current.lineage,
        optimizer_steps=_optimizer_steps(learner),
        versions=tuple(c.version for c in learner.copies.held),
        run_config=unstructure(learner.config),
        kl_coef=learner.kl_coef,
        dtype=str(learner.dtype).removeprefix("torch."),
    )
    return Draft(temporary, final, ledger)


def _whole_state(learner: Learner) -> dict[str, Tensor]:
    return {**_state(learner), **_copies(learner, learner.copies.held[:-1])}


def _write(state: dict[str, Any], directory: Path, group: dist.ProcessGroup | None) -> None:
    # torch computes checksums that it never reads; the digest of the republished weights is what proves a checkpoint.
    with serialization.config.patch({"save.compute_crc32": False}):  # type: ignore[attr-defined]
        dcp.save(state, storage_writer=dcp.FileSystemWriter(directory, sync_files=True), process_group=group)


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
    # Where a distributed tensor over them shares their memory; an offloaded model's own shards lie elsewhere.
    device = learner.world.device
    older = [
        ForwardCopy(
            version,
            {name: torch.empty_like(local, dtype=learner.dtype, device=device) for name, local in shards.items()},
        )
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
            # Beside the moments, which an offloaded model keeps on the host.
            moments["step"] = torch.zeros((), dtype=torch.float32, device=parameter.to_local().device)  # type: ignore[attr-defined]
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
    return int(next(iter(learner.optimizer.state.values()), {"step": 0})["step"])


def _finish(draft: Draft, keep: int) -> None:
    """Ledger, syncs, the rename that makes the checkpoint exist, and the end of older ones."""
    temporary, final = draft.temporary, draft.final
    with (temporary / LEDGER).open("w") as file:
        json.dump(asdict(draft.ledger), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    # Only someone who went back to an older checkpoint by hand finds the name taken.
    move_into_place(temporary, final)
    for old in sorted(final.parent.glob("step-*"))[:-keep]:
        shutil.rmtree(old)
