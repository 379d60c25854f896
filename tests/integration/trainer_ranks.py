"""Run by torchrun: trains a few steps and leaves behind what one rank must agree with.

torchrun --standalone --nproc-per-node 2 -m tests.integration.trainer_ranks CONFIG.json BATCHES OUT
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.trainer import checkpoint
from services.trainer.batch import build_batch
from services.trainer.copies import FileShards
from services.trainer.distributed import join, leave
from services.trainer.learner import Learner
from services.trainer.link import Refused
from shared.config import structure
from shared.process import end_process
from shared.wire.archive import read_step
from shared.wire.pb.weight_sync_pb2 import Manifest
from shared.wire.run import RunConfig
from shared.wire.tensor_file import WEIGHTS_FILE, read_file, write_file
from shared.wire.tensors import tensor_entry
from tests.deadline import DEADLINE_S
from tests.integration.trainer_testing import VOCAB, build_learner, publish


def train(learner: Learner, archive: str, out: Path) -> None:
    """Two steps on archived batches; scores, metrics and the checkpoint go to `out`."""
    for step in range(2):
        batch = build_batch(read_step(archive, step), learner.config, step=step, vocab_size=VOCAB)
        scores = learner.score(batch)
        result = learner.train(batch, scores)
        publish(learner, step + 1)
        if learner.world.is_leader:
            sampled = scores.sampled.logprob_T if scores.sampled else torch.zeros(0)
            torch.save(
                {
                    "sampled": sampled.view(torch.int32),
                    "metrics": json.dumps(result.metrics),
                    "exact": result.mismatch.is_exact,
                    "compared": result.mismatch.compared_tokens,
                    "loss": result.metrics["loss"],
                    "grad_norm": result.metrics["grad_norm"],
                },
                out / f"step-{step}.pt",
            )
    checkpoint.save(out / "checkpoints", learner, keep=1)
    shards_in_a_file_are_those_in_memory(learner, out)
    torch.save(faults(learner, archive), out / f"faults-{learner.world.rank}.pt")


def shards_in_a_file_are_those_in_memory(learner: Learner, out: Path) -> None:
    """Every rank reads back exactly its own part of a published version."""
    tensors = publish(learner, 2)
    directory = out / "whole"
    if learner.world.is_leader:
        directory.mkdir()
        write_file(
            directory / WEIGHTS_FILE, Manifest(tensors=[tensor_entry(n, t) for n, t in tensors.items()]), tensors
        )
    learner.world.barrier()
    read = FileShards(learner.decoder, read_file(directory / WEIGHTS_FILE))
    kept = learner.copies.current.shards
    assert dict(read).keys() == dict(kept).keys()
    for name, shard in kept.items():
        assert torch.equal(read[name].view(torch.uint8), shard.contiguous().view(torch.uint8)), name


def faults(learner: Learner, archive: str) -> dict[str, int]:
    """Nothing hangs and every rank decides alike where a rank has only rejected trajectories, or all have."""
    said = {}
    batch = build_batch(read_step(archive, 1), learner.config, step=1, vocab_size=VOCAB)
    first = batch.mini_steps[0].micro_batches[0].tokens
    for name, of in (("one", first), ("all", slice(None))):
        rollout = batch.rollout_T.clone()
        rollout[of] = torch.nan
        broken = replace(batch, rollout_T=rollout)
        before = [p.detach().to_local().clone() for p in learner.decoder.parameters()]  # type: ignore[attr-defined]
        metrics = learner.train(broken, learner.score(broken)).metrics
        after = [p.detach().to_local() for p in learner.decoder.parameters()]  # type: ignore[attr-defined]
        said[f"{name}.broken"] = len(batch.sequence_T[of].unique())
        said[f"{name}.rejected"] = metrics["rejected_trajectories"]
        said[f"{name}.steps"] = metrics["optimizer_steps"]
        said[f"{name}.moved"] = sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
        said[f"{name}.finite"] = all(bool(p.isfinite().all()) for p in after)
    return said


def main() -> None:
    config_path, archive, out = sys.argv[1:]
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    world = join("cpu", timeout_s=DEADLINE_S)
    learner = build_learner(structure(RunConfig, json.loads(Path(config_path).read_text())), world)
    train(learner, archive, Path(out))
    # What rank 0 learns, all ranks do: values and errors alike.
    assert world.from_leader(lambda: {"n": [1, b"x", None]}) == {"n": [1, b"x", None]}

    def refuse() -> None:
        raise Refused("no")

    with pytest.raises(Refused, match="no"):
        world.from_leader(refuse)
    # One of their tensors is likely to be in the hands of gloo's threads yet when the process ends.
    for _ in range(50):
        world.from_leader(int)
    (Path(out) / f"rank-{world.rank}").touch()
    leave()


if __name__ == "__main__":
    main()
    end_process(0)
