"""What leaves the trainer: a version's bytes, gathered, and the probe that every replica must reproduce.

Gathering walks the parameters in name order on all ranks together; only rank 0 keeps what was gathered.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from services.trainer.batch import MicroBatch, PolicyVersion
from services.trainer.copies import ForwardCopy
from services.trainer.distributed import World
from services.trainer.offers import Slot
from services.trainer.policy import as_global, score_micro_batch
from shared.config import unstructure
from shared.models import Decoder, ModelConfig, packed_layout
from shared.transfer.arena import ArenaLayout
from shared.wire.pb.weight_sync_pb2 import Manifest
from shared.wire.run import RunConfig
from shared.wire.tensors import RawTensor, build_manifest
from shared.wire.types import float32_bytes, int32_bytes

PROBE_LENGTHS = (5, 17, 33)
"""Tokens of the probe sequences: odd sizes around the row multiples of the kernels."""
PROBE_TEMPERATURE = 1.0


def gather(decoder: Decoder, copy: ForwardCopy, world: World, slot: Slot | None = None) -> dict[str, RawTensor]:
    """The whole version on rank 0, nothing on the others; all ranks must call it.

    Args:
        decoder: names the layout of the shards.
        slot: of rank 0, to gather into, one parameter after the other; None: fresh memory on the CPU.
    """
    tensors = {}
    # One rank has everything, and hundreds of tensors go through DTensor slowly.
    shards = {} if world.size == 1 else as_global(decoder, copy.shards)
    for name in sorted(copy.shards):
        full = shards[name].full_tensor() if shards else copy.shards[name]
        if slot is not None:
            slot.fill(name, full)
        elif world.is_leader:
            tensors[name] = raw_tensor(full)
    if slot is not None:
        slot.finish()
        return slot.tensors()
    return tensors


def arena_layout(decoder: Decoder, copy: ForwardCopy) -> ArenaLayout:
    """Where the version's tensors lie in a slot."""
    shapes = {name: tuple(p.shape) for name, p in decoder.named_parameters()}
    return ArenaLayout.of((n, str(s.dtype).removeprefix("torch."), shapes[n]) for n, s in copy.shards.items())


def raw_tensor(tensor: Tensor) -> RawTensor:
    """The bytes of a tensor, sharing its memory when it is on the CPU."""
    data: np.ndarray = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    return RawTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)


def probe_token_ids(config: RunConfig, vocab_size: int) -> list[np.ndarray]:
    """The run's fixed probe: int32 sequences drawn from its seed."""
    generator = torch.Generator().manual_seed(config.seed)
    lengths = [min(n, config.max_model_len) for n in PROBE_LENGTHS]
    return [torch.randint(vocab_size, (n,), generator=generator, dtype=torch.int32).numpy() for n in lengths if n >= 2]


@torch.no_grad()
def score_probe(decoder: Decoder, sequences: list[np.ndarray], device: torch.device) -> list[np.ndarray]:
    """float32 logprobs of each sequence's tokens from the second on, by the trainer's own path; all ranks must call it."""
    lengths = [len(s) for s in sequences]
    ends = np.cumsum(lengths)
    token_ids = torch.from_numpy(np.concatenate(sequences).astype(np.int64))
    rows = torch.from_numpy(np.setdiff1d(np.arange(ends[-1]), ends - 1))
    micro = MicroBatch(
        token_ids=token_ids,
        layout=packed_layout(lengths),
        rows=rows,
        targets=token_ids[rows + 1],
        temperature=torch.full((len(rows),), PROBE_TEMPERATURE),
        tokens=slice(0, len(rows)),
    )
    logprobs = score_micro_batch(decoder, micro, device).logprob.cpu().numpy()
    return np.split(logprobs, np.cumsum(np.array(lengths) - 1)[:-1])


def describe(
    version: PolicyVersion,
    tensors: Mapping[str, RawTensor],
    *,
    config: RunConfig,
    model_config: ModelConfig,
    fingerprint: str,
    probe: list[np.ndarray],
    probe_logprobs: list[np.ndarray],
) -> Manifest:
    """The manifest of a gathered version."""
    return build_manifest(
        run=config.run,
        lineage=version.lineage,
        step=version.step,
        tensors=tensors,
        model_config_json=json.dumps(model_config.to_hf()),
        run_config_json=json.dumps(unstructure(config)),
        fingerprint=fingerprint,
        probe_token_ids=[int32_bytes(s) for s in probe],
        probe_logprobs=[float32_bytes(l) for l in probe_logprobs],
        # On a CPU the cores are the replicas'.
        num_threads=min(8, os.cpu_count() or 1) if torch.cuda.is_initialized() else 1,
    )
