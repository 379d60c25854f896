"""From a run's configuration to a session that can go on with it: model, checkpoint, reference, versions in place."""

from __future__ import annotations

from pathlib import Path

import structlog
import torch

from services.trainer import checkpoint, report
from services.trainer.config import TrainerConfig
from services.trainer.distributed import World
from services.trainer.learner import Learner
from services.trainer.link import Link, Refused
from services.trainer.policy import Placement, load_policy
from services.trainer.server import StatusBoard
from services.trainer.session import Session
from shared.kernels import InexactKernelError, Ops, build_ops, default_dtype, fingerprint, self_check
from shared.models import Decoder, load_config, resolve_model
from shared.wire.run import RunConfig

log = structlog.get_logger()


class UnusableModel(ValueError):
    """The run names a model that can't be loaded; no trainer could run it."""


def open_session(config: RunConfig, service: TrainerConfig, link: Link, board: StatusBoard, world: World) -> Session:
    """Load the model or the newest checkpoint, take the run over, and publish what the fleet needs to go on.

    Raises:
        UnusableModel: the run should fail.
        Refused: this process can't serve the run.
    """
    directory = (Path(service.run_dir) / config.run).absolute()
    if world.is_leader:
        directory.mkdir(parents=True, exist_ok=True)
    world.barrier()
    board.set(run=config.run, phase="loading", world_size=world.size)
    learner, numerics = _build_learner(config, service, world)
    newest = checkpoint.latest(directory / "checkpoints")
    try:
        step = checkpoint.load(newest, learner).step if newest else 0
    except checkpoint.CheckpointError as error:
        raise Refused(str(error)) from error
    if newest is None:
        learner.copies.take(0, lineage=0)
    link.take_over(config.run, next_step=step)
    kernels = learner.decoder.ops.describe()
    board.set(kernels=kernels, fingerprint=numerics, epoch=link.epoch, checkpoint_step=step, step=step)
    report.export_kernels(kernels, numerics)
    session = Session(config, learner, link, board, directory, numerics, step, service)
    session.publish_lost(at_start=True)
    log.info("run loaded", run=config.run, step=step, resumed=newest is not None, fingerprint=numerics)
    return session


def _build_learner(config: RunConfig, service: TrainerConfig, world: World) -> tuple[Learner, str]:
    """A learner with the run's initial weights, and the numerics fingerprint."""
    ops = build_ops(config.numerics, world.device)
    try:
        model_directory = resolve_model(config.model)
        model_config = load_config(model_directory)
    except (ValueError, KeyError, OSError) as error:
        raise UnusableModel(f"{config.model}: {error}") from error
    if config.dtype == "auto":
        dtype = torch.bfloat16 if world.device.type == "cuda" else default_dtype()
    else:
        dtype = getattr(torch, config.dtype)
    try:
        self_check(
            ops,
            dtype,
            linear_shapes=model_config.linear_shapes,
            heads=model_config.heads,
            sliding_window=model_config.window_in_use,
        )
    except InexactKernelError as error:
        raise Refused(str(error)) from error
    try:
        decoder = load_policy(
            model_directory,
            ops,
            dtype,
            world,
            activation_checkpointing=config.activation_checkpointing,
            placement=Placement(service.reshard_after_forward, service.offload),
        )
    except (ValueError, OSError) as error:
        raise UnusableModel(f"{config.model}: {error}") from error
    directory = None if service.directory is None else Path(service.directory)
    try:
        reference = _load_reference(config, ops, dtype, world)
        learner = Learner(
            decoder, config, dtype, world, behind=service.older_versions, directory=directory, reference=reference
        )
    except (ValueError, KeyError, OSError) as error:
        raise UnusableModel(f"{config.algorithm.kl_reference}: {error}") from error
    return learner, fingerprint(ops, dtype)


def _load_reference(config: RunConfig, ops: Ops, dtype: torch.dtype, world: World) -> Decoder | None:
    """What a KL penalty compares with, if it is not the run's own model; let go once the learner has its weights."""
    if config.algorithm.kl_reference is None:
        return None
    directory = resolve_model(config.algorithm.kl_reference)
    return load_policy(directory, ops, dtype, world, activation_checkpointing="none", placement=Placement(offload=True))
