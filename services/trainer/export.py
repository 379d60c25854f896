"""Versions as Hugging Face directories: from the shards of a running trainer, or from a checkpoint.

`python -m services.trainer.export CHECKPOINT DIRECTORY` turns {run_dir}/{run}/checkpoints/step-XXXXXXXX into a model directory.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from services.trainer.checkpoint import CheckpointError, read_ledger
from services.trainer.copies import ForwardCopy
from services.trainer.distributed import World
from services.trainer.policy import as_global
from shared.config import structure
from shared.kernels import build_ops, default_dtype
from shared.models import Decoder, load_config, resolve_model, save_sharded
from shared.wire.run import RunConfig
from shared.wire.tensor_file import move_into_place


def export(decoder: Decoder, copy: ForwardCopy, world: World, directory: Path, *, companions_from: Path) -> None:
    """Writes a version, gathered tensor by tensor; the directory appears whole. All ranks must call it.

    Args:
        decoder: names the layout of the shards.
        companions_from: the model directory whose tokenizer and generation config are copied.
    """
    shapes = {name: parameter.shape for name, parameter in decoder.named_parameters()}
    dtype = next(iter(copy.shards.values())).dtype

    def gathered(name: str) -> Tensor:
        return as_global(decoder, {name: copy.shards[name]})[name].full_tensor()

    if not world.is_leader:
        for name in sorted(shapes):
            gathered(name)
    else:
        temporary = _temporary(directory)
        save_sharded(shapes, gathered, decoder.config, temporary, dtype=dtype, companions_from=companions_from)
        move_into_place(temporary, directory)
    world.barrier()


def export_checkpoint(path: Path, directory: Path, *, dtype: torch.dtype | None = None) -> None:
    """Writes the masters of a checkpoint, cast as its run published them; on one process, whatever number wrote it.

    Args:
        dtype: other than the run's.

    Raises:
        CheckpointError: no checkpoint.
        ValueError: the run's model is not here.
    """
    ledger = read_ledger(path)
    run = structure(RunConfig, ledger.run_config)
    source = resolve_model(run.model)
    config = load_config(source)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Decoder(config, build_ops("fast")).named_parameters()}
    if dtype is None:
        name = ledger.dtype or run.dtype
        dtype = default_dtype() if name == "auto" else getattr(torch, name)

    def read(name: str) -> Tensor:
        state = {f"master.{name}": torch.empty(shapes[name])}
        dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
        return state[f"master.{name}"]

    temporary = _temporary(directory)
    save_sharded(shapes, read, config, temporary, dtype=dtype, companions_from=source)
    move_into_place(temporary, directory)


def _temporary(directory: Path) -> Path:
    temporary = directory.with_name(f".{directory.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    return temporary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="default: the run's")
    args = parser.parse_args()
    try:
        export_checkpoint(args.checkpoint, args.directory, dtype=args.dtype and getattr(torch, args.dtype))
    except (CheckpointError, ValueError) as error:
        print(f"{args.checkpoint}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
