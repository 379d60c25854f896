"""The model under training: fp32 masters sharded by FSDP2, the forward that every logprob comes from, and its backward.

The forward casts the masters to the published dtype when it gathers them, so it computes with exactly the bytes that are
published. Older versions are scored by a second, gradient-free shell that holds no masters: their kept casts are copied
into it.

Legend: T trainable tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from services.trainer.batch import Batch, MicroBatch, MiniStep
from services.trainer.distributed import World
from shared.kernels import LogprobOutput, Ops, to_device
from shared.models import Decoder, ModelConfig, Recompute, load_config, weight_files


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


@dataclass(frozen=True)
class Placement:
    """Where the model lies between its uses; changes no bit of a forward."""

    reshard_after_forward: bool = True
    """Free the gathered weights behind each layer's forward; False gathers them once for forward and backward."""
    offload: bool = False
    """Masters, gradients and optimizer in the host's memory; each layer is copied to the device when it is gathered."""


def load_policy(
    directory: Path,
    ops: Ops,
    dtype: torch.dtype,
    world: World,
    *,
    activation_checkpointing: Recompute,
    placement: Placement = Placement(),
) -> Decoder:
    """A decoder with fp32 masters whose forward runs in `dtype`; every rank reads its own shards and nothing else.

    Raises:
        ValueError: an unsupported model, or tensors that are missing, unknown or of another shape.
    """
    with torch.device("meta"):
        decoder = Decoder(load_config(directory), ops, activation_checkpointing=activation_checkpointing)
    shard(decoder, world, dtype, placement)
    decoder.to_empty(device="cpu" if placement.offload else world.device)
    load_shards(decoder, directory)
    return decoder


def build_shell(config: ModelConfig, ops: Ops, dtype: torch.dtype, world: World) -> Decoder:
    """A sharded decoder of `dtype` without weights; `fill` gives it some."""
    with torch.device("meta"):
        decoder = Decoder(config, ops).to(dtype)
    shard(decoder, world, dtype).requires_grad_(False)
    return decoder.to_empty(device=world.device)


def shard(decoder: Decoder, world: World, dtype: torch.dtype, placement: Placement = Placement()) -> Decoder:
    """FSDP2 over layers and root: gather in `dtype`, reduce in float32 by plain sums."""
    # Inputs stay as they are: a rotary table or a temperature rounded to `dtype` would change bits.
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if placement.offload else OffloadPolicy()
    # The root too, which FSDP would keep gathered.
    reshard = placement.reshard_after_forward
    for module in (*decoder.model.layers, decoder):
        fully_shard(module, mesh=world.mesh, mp_policy=precision, reshard_after_forward=reshard, offload_policy=offload)
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
def load_shards(decoder: Decoder, directory: Path) -> None:
    """Reads this rank's rows of every parameter from a Hugging Face directory, cast to the parameter's dtype.

    Raises:
        ValueError: tensors that are missing, unknown or of another shape, all of them named.
    """
    wanted, locals_ = dict(decoder.named_parameters()), local_shards(decoder)
    found, wrong = set(), []
    for file in weight_files(directory):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and decoder.lm_head is None):
                    continue
                shape = tensors.get_slice(name).get_shape()
                if name not in wanted or list(wanted[name].shape) != shape:
                    wrong.append(f"{name} {shape} {'is unknown' if name not in wanted else list(wanted[name].shape)}")
                    continue
                found.add(name)
                first = _first_row(_sharded(wanted[name]))
                if rows := len(locals_[name]):
                    locals_[name].copy_(tensors.get_slice(name)[first : first + rows])
    wrong += [f"{name} is missing" for name in sorted(wanted.keys() - found)]
    if wrong:
        raise ValueError(f"the weights in {directory} do not fit its config.json: {'; '.join(wrong[:5])}")


def _first_row(parameter: DTensor) -> int:
    """Of this rank's shard; FSDP2 cuts the first dimension."""
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return offset[0]


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
    micro = on_device(micro, device)
    positions = micro.layout.derived(("positions", device), lambda: to_device(micro.layout.positions, device))
    output = decoder.score(micro.token_ids, positions, micro.layout, micro.rows, micro.targets, micro.temperature)
    if not torch.is_grad_enabled():
        # What a forward without a backward leaves gathered would outlive the next optimizer step.
        for module in (*decoder.model.layers, decoder):
            if isinstance(module, FSDPModule):
                module.reshard()
    return output


def on_device(micro: MicroBatch, device: torch.device) -> MicroBatch:
    """The same micro-batch with its tensors on the device; the host does not wait for the copies."""
    return replace(
        micro,
        token_ids=to_device(micro.token_ids, device),
        rows=to_device(micro.rows, device),
        targets=to_device(micro.targets, device),
        temperature=to_device(micro.temperature, device),
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
    meanwhile: Callable[[], None] | None,
) -> TokenScores:
    """Forward and backward of one mini-step, micro-batch after micro-batch.

    Args:
        loss_of: a micro-batch's share of the loss from its logprobs and entropies; a scalar connected to them.
        meanwhile: what this rank's host does, again and again, until its device has computed everything.

    Returns:
        The scores of the mini-step's tokens (zeros elsewhere).
    """

    def visit(micro: MicroBatch, output: LogprobOutput) -> None:
        loss_of(micro, output).backward()

    return _run(decoder, batch, [mini_step], world, visit, meanwhile)


def _run(
    decoder: Decoder,
    batch: Batch,
    mini_steps: Iterable[MiniStep],
    world: World,
    visit: Callable[[MicroBatch, LogprobOutput], None],
    meanwhile: Callable[[], None] | None = None,
) -> TokenScores:
    """All inputs go to the device before the first forward and all scores come back after the last: no copy waits in between."""
    micros = [m for mini_step in mini_steps for m in mini_step.of_rank(world.rank, world.size)]
    micros = [on_device(micro, world.device) for micro in micros]
    bits = torch.zeros((3, batch.num_tokens), dtype=torch.int32, device=world.device)
    for micro in micros:
        output = score_micro_batch(decoder, micro, world.device)
        visit(micro, output)
        for row, values in zip(bits, output, strict=True):
            row[micro.tokens] = values.detach().contiguous().view(torch.int32)
    if meanwhile is not None:
        _until_computed(world.device, meanwhile)
    scores = TokenScores(bits.cpu())
    world.merge(scores.bits)
    return scores


def _until_computed(device: torch.device, work: Callable[[], None]) -> None:
    """Does this work, at least once, until what was launched is computed."""
    computed = torch.cuda.Event() if device.type == "cuda" else None
    if computed is not None:
        computed.record()
    work()
    while computed is not None and not computed.query():
        work()


def _sharded(parameter: Tensor) -> DTensor:
    assert isinstance(parameter, DTensor), "the decoder is not sharded"
    return parameter
