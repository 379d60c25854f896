"""A process of benchmarks.two_gpu: one that certifies, the engine that samples, or one rank of the trainer that scores and steps.

python -m benchmarks.two_gpu_part certify|sample MODEL_DIR OUT DEVICE DTYPE
torchrun --nproc-per-node N -m benchmarks.two_gpu_part train MODEL_DIR OUT DEVICE DTYPE
"""

from __future__ import annotations

import faulthandler
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from services.rollout.config import RolloutConfig
from services.rollout.offline import OfflineEngine
from services.rollout.weights import ServedRun, certified
from services.trainer.distributed import join, leave
from services.trainer.optimizer import apply, build_optimizer
from services.trainer.packing import MicroBatch
from services.trainer.policy import load_policy, on_device, score_micro_batch
from shared.kernels import build_ops, self_check
from shared.models import load_config, named_weights, packed_layout, save_model
from shared.process import end_process
from shared.wire.run import OptimizerConfig, RunConfig

NUM_SEQUENCES = 32
MICRO_SEQUENCES = 16
"""Of one forward and backward: as many on every rank of every world size in use."""
NUM_REPEATS = 3
HANG_S = 170.0
"""After which a part says where each of its threads stands, and ends."""


def certify(directory: Path, out: Path, device: str, dtype: str) -> None:
    """Every product that a replica and a trainer of this model need is in the table afterwards."""
    torch.cuda.set_device(device)
    run = ServedRun(RunConfig(run="bench", model="bench"), load_config(directory), getattr(torch, dtype))
    with torch.inference_mode():
        certified(run, device)


def sample(directory: Path, out: Path, device: str, dtype: str) -> None:
    """Random weights for a directory that holds a config, and sequences with their logprobs as the engine recorded them."""
    is_tiny = device == "cpu"
    config = RolloutConfig(
        device=device,
        kv_cache_tokens=4096 if is_tiny else 65536,
        page_size=16 if is_tiny else 64,
        max_running=NUM_SEQUENCES,
    )
    engine = OfflineEngine(load_config(directory), config, dtype=dtype, max_model_len=2048)
    model = engine.engine.model
    assert model is not None
    save_model(dict(named_weights(model.decoder)), model.run.model, directory)
    prompt = [3 + i % 50 for i in range(17 if is_tiny else 257)]
    ids = engine.submit(prompt, samples=NUM_SEQUENCES, max_tokens=24 if is_tiny else 512)
    results = engine.run()
    for index, name in enumerate(ids):
        found = results[name]
        np.savez(
            out / f"sequence-{index}.npz",
            ids=np.array(prompt + found.token_ids, np.int32),
            logprobs=np.array(found.logprobs, np.float32),
        )


def train(directory: Path, out: Path, device: str, dtype: str) -> None:
    """Scores this rank's sequences, then times steps over all of them."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    world = join(device, timeout_s=HANG_S)
    ops, config = build_ops("exact", world.device), load_config(directory)
    of = getattr(torch, dtype)
    self_check(ops, of, linear_shapes=config.linear_shapes, heads=config.heads, sliding_window=config.window_in_use)
    decoder = load_policy(directory, ops, of, world, activation_checkpointing="none" if device == "cpu" else "mlp")
    optimizer = build_optimizer(decoder, OptimizerConfig(lr=1e-6))
    mine = range(world.rank, NUM_SEQUENCES, world.size)
    cuts = [mine[i : i + MICRO_SEQUENCES] for i in range(0, len(mine), MICRO_SEQUENCES)]
    sequences = [[np.load(out / f"sequence-{i}.npz") for i in cut] for cut in cuts]
    micros = [on_device(micro_of(files), world.device) for files in sequences]
    with torch.no_grad():
        for cut, files, micro in zip(cuts, sequences, micros, strict=True):
            logprobs = score_micro_batch(decoder, micro, world.device).logprob.cpu().numpy()
            ends = np.cumsum([len(file["logprobs"]) for file in files])
            for index, part in zip(cut, np.split(logprobs, ends[:-1]), strict=True):
                np.save(out / f"scored-{world.size}-{index}.npy", part)
    seconds = []
    for _ in range(1 + NUM_REPEATS):
        world.barrier()
        begin = time.perf_counter()
        for micro in micros:
            (-score_micro_batch(decoder, micro, world.device).logprob.sum() / NUM_SEQUENCES).backward()
        # Returns the norm to the host: everything before it is done.
        apply(optimizer, lr=1e-6, max_grad_norm=1.0, is_empty=False)
        if device == "cuda":
            torch.cuda.synchronize()
        world.barrier()
        seconds.append(time.perf_counter() - begin)
    if world.is_leader:
        np.save(out / f"step_s-{world.size}.npy", np.array(seconds[1:]))
    leave()


def micro_of(files: Sequence[Mapping[str, np.ndarray]]) -> MicroBatch:
    """The sampled tokens of sequences packed one after another, each predicted by the row before it."""
    lengths = [len(file["ids"]) for file in files]
    ids = torch.from_numpy(np.concatenate([file["ids"] for file in files]).astype(np.int64))
    ends = np.cumsum(lengths)
    rows = torch.from_numpy(
        np.concatenate([np.arange(end - len(f["logprobs"]) - 1, end - 1) for end, f in zip(ends, files, strict=True)])
    )
    return MicroBatch(
        token_ids=ids,
        layout=packed_layout(lengths),
        rows=rows,
        targets=ids[rows + 1],
        temperature=torch.ones(len(rows)),
        tokens=slice(0, len(rows)),
    )


def main() -> int:
    command, directory, out, device, dtype = sys.argv[1:]
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    {"certify": certify, "sample": sample, "train": train}[command](Path(directory), Path(out), device, dtype)
    faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    end_process(main())
