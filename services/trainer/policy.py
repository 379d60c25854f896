"""The model under training: fp32 masters sharded by FSDP2, the forward that every logprob comes from, and its backward.

The forward casts the masters to the published dtype when it gathers them, so it computes with exactly the bytes that are
published. Older versions are scored by a second, gradient-free shell that holds no masters: their kept casts are copied
into it.

Legend: T trainable tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from services.trainer.batch import Batch, MicroBatch, MiniStep
from services.trainer.distributed import World
from shared.kernels import LogprobOutput, Ops
from shared.models import Decoder, ModelConfig, Recompute, load_model


@dataclass(frozen=True)
class TokenScores:
    """What a forward says of every trainable token of the batch, on the CPU; kept as bits, so that merging changes none."""

    bits: Tensor
    """[3, T] int32: logprob, top-1, entropy."""

    @classmethod
    def blank(cls, num_tokens: int) -> TokenScores:
        """Zeros."""
        return cls(torch.zeros((3, num_tokens), dtype=torch.int32))

    @property
    def logprob_T(self) -> Tensor:
        """[T] float32."""
        return self.bits[0].view(torch.float32)

    @property
    def top1_T(self) -> Tensor:
        """[T] int32."""
        return self.bits[1]

    @property
    def entropy_T(self) -> Tensor:
        """[T] float32, nats, at the sampling temperature."""
        return self.bits[2].view(torch.float32)


def load_policy(
    directory: Path, ops: Ops, dtype: torch.dtype, world: World, *, activation_checkpointing: Recompute
) -> Decoder:
    """A decoder with fp32 masters whose forward runs in `dtype`, sharded over the world."""
    decoder = load_model(directory, ops, torch.float32, activation_checkpointing=activation_checkpointing)
    return shard(decoder, world, dtype)


def build_shell(config: ModelConfig, ops: Ops, dtype: torch.dtype, world: World) -> Decoder:
    """A sharded decoder of `dtype` without weights; `fill` gives it some."""
    with torch.device("meta"):
        decoder = Decoder(config, ops).to(dtype)
    shard(decoder, world, dtype).requires_grad_(False)
    return decoder.to_empty(device=world.device)


def shard(decoder: Decoder, world: World, dtype: torch.dtype) -> Decoder:
    """FSDP2 over layers and root: gather in `dtype`, reduce in float32 by plain sums."""
    # Inputs stay as they are: a rotary table or a temperature rounded to `dtype` would change bits.
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in decoder.model.layers:
        fully_shard(layer, mesh=world.mesh, mp_policy=precision)
    # The root is resharded too: parameters that stay gathered after a gradient-free forward would outlive the next step.
    fully_shard(decoder, mesh=world.mesh, mp_policy=precision, reshard_after_forward=True)
    for module in decoder.modules():
        # The loss carries its global denominator, so gradients add up instead of being averaged (a world of one does neither).
        if world.size > 1 and isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    return decoder


def local_shards(decoder: Decoder) -> dict[str, Tensor]:
    """This rank's part of each parameter, by name, sharing its memory."""
    return {name: _sharded(p).to_local().detach() for name, p in decoder.named_parameters()}


@torch.no_grad()
def fill(decoder: Decoder, shards: Mapping[str, Tensor]) -> None:
    """Copies shards into the decoder's parameters."""
    for name, local in local_shards(decoder).items():
        local.copy_(shards[name])


def as_global(decoder: Decoder, shards: Mapping[str, Tensor]) -> dict[str, DTensor]:
    """The same shards as distributed tensors, laid out as the decoder's parameters."""
    layout = {name: _sharded(p) for name, p in decoder.named_parameters()}
    return {
        name: DTensor.from_local(
            local,
            layout[name].device_mesh,
            layout[name].placements,
            shape=layout[name].shape,
            stride=layout[name].stride(),
        )
        for name, local in shards.items()
    }


def score_micro_batch(decoder: Decoder, micro: MicroBatch, device: torch.device) -> LogprobOutput:
    """One forward; logprob and entropy carry gradients when they are enabled."""
    return decoder.score(
        micro.token_ids.to(device),
        micro.layout.positions.to(device),
        micro.layout,
        micro.rows.to(device),
        micro.targets.to(device),
        micro.temperature.to(device),
    )


@torch.no_grad()
def score_batch(decoder: Decoder, batch: Batch, world: World) -> TokenScores:
    """Every trainable token under the decoder's weights."""
    return _run(decoder, batch, batch.mini_steps, world, lambda micro, output: None)


def accumulate_gradients(
    decoder: Decoder,
    batch: Batch,
    mini_step: MiniStep,
    world: World,
    loss_of: Callable[[MicroBatch, LogprobOutput], Tensor],
) -> TokenScores:
    """Forward and backward of one mini-step, micro-batch after micro-batch.

    Args:
        loss_of: a micro-batch's share of the loss from its logprobs and entropies; a scalar connected to them.

    Returns:
        The scores of the mini-step's tokens (zeros elsewhere).
    """
    return _run(decoder, batch, [mini_step], world, lambda micro, output: loss_of(micro, output).backward())


def _run(
    decoder: Decoder,
    batch: Batch,
    mini_steps: Iterable[MiniStep],
    world: World,
    visit: Callable[[MicroBatch, LogprobOutput], None],
) -> TokenScores:
    scores = TokenScores.blank(batch.num_tokens)
    for mini_step in mini_steps:
        for micro in mini_step.of_rank(world.rank, world.size):
            output = score_micro_batch(decoder, micro, world.device)
            visit(micro, output)
            for row, values in zip(scores.bits, output, strict=True):
                row[micro.tokens] = values.detach().contiguous().view(torch.int32).cpu()
    world.merge(scores.bits)
    return scores


def _sharded(parameter: Tensor) -> DTensor:
    assert isinstance(parameter, DTensor), "the decoder is not sharded"
    return parameter
