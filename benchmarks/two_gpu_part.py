"""A process of benchmarks.two_gpu: the engine that samples, or one rank of the trainer that scores and steps.

python -m benchmarks.two_gpu_part sample MODEL_DIR OUT DEVICE DTYPE
torchrun --nproc-per-node N -m benchmarks.two_gpu_part train MODEL_DIR OUT DEVICE DTYPE
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

# cuBLAS is deterministic only with a fixed workspace, and reads this when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import numpy as np
import torch

from services.rollout.config import RolloutConfig
from services.rollout.offline import OfflineEngine
from services.trainer.distributed import join, leave
from services.trainer.optimizer import apply, build_optimizer
from services.trainer.packing import MicroBatch
from services.trainer.policy import load_policy, on_device, score_micro_batch
from shared.kernels import build_ops, self_check
from shared.models import load_config, packed_layout, read_tensors
from shared.wire.run import OptimizerConfig

NUM_SEQUENCES = 8
"""A multiple of every world size in use."""
NUM_REPEATS = 3


def sample(directory: Path, out: Path, device: str, dtype: str) -> None:
    """Sequences and their logprobs, as the engine recorded them."""
    is_tiny = device == "cpu"
    config = RolloutConfig(
        device=device,
        kv_cache_tokens=4096 if is_tiny else 65536,
        page_size=16 if is_tiny else 64,
        max_running=NUM_SEQUENCES,
    )
    weights = dict(read_tensors(directory))
    engine = OfflineEngine(load_config(directory), config, dtype=dtype, weights=weights, max_model_len=2048)
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
    world = join(device, timeout_s=600)
    ops, config = build_ops("exact", world.device), load_config(directory)
    of = getattr(torch, dtype)
    self_check(ops, of, linear_shapes=config.linear_shapes, heads=config.heads)
    decoder = load_policy(directory, ops, of, world, activation_checkpointing="none" if device == "cpu" else "mlp")
    optimizer = build_optimizer(decoder, OptimizerConfig(lr=1e-6))
    mine = range(world.rank, NUM_SEQUENCES, world.size)
    micros = {i: micro_of(out / f"sequence-{i}.npz", world.device) for i in mine}
    with torch.no_grad():
        for index, micro in micros.items():
            logprobs = score_micro_batch(decoder, micro, world.device).logprob.cpu().numpy()
            np.save(out / f"scored-{world.size}-{index}.npy", logprobs)
    seconds = []
    for _ in range(1 + NUM_REPEATS):
        world.barrier()
        begin = time.perf_counter()
        for micro in micros.values():
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


def micro_of(path: Path, device: torch.device) -> MicroBatch:
    """The sampled tokens of one sequence, each predicted by the row before it."""
    with np.load(path) as file:
        ids, num_sampled = torch.from_numpy(file["ids"].astype(np.int64)), len(file["logprobs"])
    rows = torch.arange(len(ids) - num_sampled - 1, len(ids) - 1)
    micro = MicroBatch(
        token_ids=ids,
        layout=packed_layout([len(ids)]),
        rows=rows,
        targets=ids[rows + 1],
        temperature=torch.ones(len(rows)),
        tokens=slice(0, len(rows)),
    )
    return on_device(micro, device)


def main() -> int:
    command, directory, out, device, dtype = sys.argv[1:]
    {"sample": sample, "train": train}[command](Path(directory), Path(out), device, dtype)
    return 0


if __name__ == "__main__":
    sys.exit(main())
