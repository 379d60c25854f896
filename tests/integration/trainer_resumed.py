"""One rank of several: goes on from a checkpoint, saves in the background, exports. For test_trainer_checkpoints.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=... python -m tests.integration.trainer_resumed DIRECTORY BATCHES
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from services.trainer import checkpoint
from services.trainer.checkpoint import Saver
from services.trainer.distributed import join, leave
from services.trainer.export import export
from shared.config import structure
from shared.process import end_process
from shared.wire.run import RunConfig
from tests.integration.test_trainer_checkpoints import DEADLINE_S, go_on
from tests.integration.trainer_testing import build_learner


def main() -> None:
    directory, archive = Path(sys.argv[1]), sys.argv[2]
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    world = join("cpu", timeout_s=DEADLINE_S)
    config = structure(RunConfig, json.loads((directory / "config.json").read_text()))
    learner = build_learner(config, world)
    path = checkpoint.latest(directory / "one")
    assert path is not None
    checkpoint.load(path, learner)
    (metrics,) = go_on(learner, archive, range(2, 3))
    saver = Saver(directory / "two", world, keep=1, in_background=True)
    saver.begin(learner)
    # The main thread's collectives run beside those of the writer.
    go_on(learner, archive, range(3, 4))
    assert saver.settle(wait=True) == 3
    saver.close()
    learner = build_learner(config, world)
    checkpoint.load(directory / "two" / "step-00000003", learner)
    export(learner.decoder, learner.copies.current, world, directory / "shards", companions_from=Path(config.model))
    if world.is_leader:
        (directory / "metrics.json").write_text(json.dumps(metrics))
    leave()


if __name__ == "__main__":
    main()
    end_process(0)
