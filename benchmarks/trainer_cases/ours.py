"""Our trainer on random weights: FSDP2 over fp32 masters, the policy's forward and backward, clipping and AdamW."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness import Record
from benchmarks.trainer_cases.shapes import Case
from services.trainer.distributed import World
from services.trainer.optimizer import apply, build_optimizer
from services.trainer.packing import MicroBatch
from services.trainer.policy import local_shards, on_device, score_micro_batch, shard
from shared.kernels import AttentionLayout, LogprobOutput, Ops, build_ops
from shared.models import Decoder, ModelConfig, Recompute, packed_layout, prefix_shared_layout
from shared.wire.run import OptimizerConfig


class Trainer:
    """A policy and its optimizer; `use` changes its kernels, `decoder.activation_checkpointing` what it recomputes."""

    def __init__(self, config: ModelConfig, ops: Ops, world: World, dtype: torch.dtype) -> None:
        self.world = world
        with torch.device("meta"):
            self.decoder = Decoder(config, ops)
        shard(self.decoder, world, dtype)
        self.decoder.to_empty(device=world.device)
        fill_randomly(self.decoder)
        self.optimizer = build_optimizer(self.decoder, OptimizerConfig(lr=1e-6))

    def use(self, ops: Ops, recompute: Recompute, *, reshard: bool = True) -> None:
        """From the next forward on.

        Args:
            reshard: free each layer's gathered weights behind its forward, instead of keeping them for the backward.
        """
        self.decoder.set_reshard_after_forward(reshard)  # type: ignore[operator]
        for module in self.decoder.modules():
            if hasattr(module, "ops"):
                module.ops = ops  # type: ignore[assignment]
        ops.activate()
        self.decoder.activation_checkpointing = recompute

    def batch(self, case: Case) -> MicroBatch:
        """Random tokens on the device; every row predicts the next one."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.decoder.config.vocab_size, (case.tokens,), generator=generator)
        layout = packed_layout([case.length] * case.sequences)
        return on_device(micro_batch(ids, layout, torch.arange(case.tokens)), self.world.device)

    @torch.no_grad()
    def forward(self, micro: MicroBatch) -> LogprobOutput:
        """Logprobs of every row."""
        return score_micro_batch(self.decoder, micro, self.world.device)

    def backward(self, micro: MicroBatch) -> LogprobOutput:
        """Forward and backward of the mean logprob."""
        output = score_micro_batch(self.decoder, micro, self.world.device)
        (-output.logprob.mean()).backward()
        return output

    def step(self, micro: MicroBatch) -> None:
        """Everything that changes the weights once."""
        self.backward(micro)
        apply(self.optimizer, lr=1e-6, max_grad_norm=1.0, is_empty=False)


def micro_batch(ids: Tensor, layout: AttentionLayout, rows: Tensor) -> MicroBatch:
    """Rows that predict the token behind them."""
    return MicroBatch(
        token_ids=ids,
        layout=layout,
        rows=rows,
        targets=ids.roll(-1)[rows],
        temperature=torch.ones(len(rows)),
        tokens=slice(0, len(rows)),
    )


@torch.no_grad()
def fill_randomly(decoder: Decoder) -> None:
    """Norms 1, everything else normal with deviation 0.02, drawn where the shards are."""
    for index, (name, local) in enumerate(sorted(local_shards(decoder).items())):
        if name.endswith("norm.weight"):
            local.fill_(1)
        else:
            generator = torch.Generator(device=local.device).manual_seed(index)
            local.normal_(0, 0.02, generator=generator)


def exact_ops(config: ModelConfig, world: World, dtype: torch.dtype, directory: Path) -> Ops:
    """Exact operations; on a device over the products that training needs, certified now.

    Args:
        directory: of a table that nothing else uses, because it knows the reference alone for few rows.
    """
    if world.device.type == "cpu":
        return build_ops("exact", "cpu")
    from shared.kernels.certify import Table, certify_large, shape_key
    from shared.kernels.cuda.ops import CudaOps

    table = Table(directory)
    shapes = {(n, k): dtype for k, n in config.linear_shapes[:-1]}
    shapes[config.vocab_size, config.hidden_size] = torch.float32
    for (n, k), out in shapes.items():
        table.record(shape_key(n, k, dtype, out, False), certify_large(n, k, dtype=dtype, out_dtype=out))
    return CudaOps(world.device, table)


def check(trainer: Trainer, ops: Ops, *, scale: int) -> Iterator[Record]:
    """Differing bits of logprobs of a small batch: packed and prefix-shared against each sequence alone, with and without
    gradients, at every degree of recomputation; and of gradients computed twice.

    Args:
        scale: 1 for some hundred rows, 10 for so many that a device takes other products.
    """
    vocab = trainer.decoder.config.vocab_size
    prompt, completions = 70 * scale, (13 * scale, 60 * scale, 1)
    generator = torch.Generator().manual_seed(1)
    head, *tails = (torch.randint(vocab, (n,), generator=generator) for n in (prompt, *completions))
    sequences = [torch.cat((head, tail)) for tail in tails]
    trainer.use(ops, "none")
    alone = []
    for ids in sequences:
        rows = torch.arange(prompt - 1, len(ids) - 1)
        alone.append(trainer.forward(micro_batch(ids, packed_layout([len(ids)]), rows)).logprob)
    expected = torch.cat(alone)
    ends = torch.tensor([0, *map(len, sequences)]).cumsum(0).tolist()
    rows = torch.cat([torch.arange(a + prompt - 1, b - 1) for a, b in pairwise(ends)])
    packed = micro_batch(torch.cat(sequences), packed_layout([len(s) for s in sequences]), rows)
    yield _differing("packed", {}, trainer.forward(packed).logprob, expected)
    shared = prefix_shared_layout([prompt], [completions])
    begins = [prompt + sum(completions[:i]) for i in range(len(completions))]
    rows = torch.cat(
        [torch.tensor([prompt - 1, *range(b, b + n - 1)]) for b, n in zip(begins, completions, strict=True)]
    )
    group = micro_batch(torch.cat((head, *tails)), shared, rows)
    group.targets[:] = torch.cat(tails)
    yield _differing("prefix_shared", {}, trainer.forward(group).logprob, expected)
    for recompute in ("none", "elementwise", "mlp", "layer"):
        trainer.use(ops, recompute)
        gradients = []
        for _ in range(2):
            output = trainer.backward(group)
            gradients.append(torch.cat([p.grad.to_local().flatten() for p in trainer.decoder.parameters()]))  # type: ignore[union-attr]
            trainer.optimizer.zero_grad(set_to_none=True)
        yield _differing("training_forward", {"recompute": recompute}, output.logprob.detach(), expected)
        yield _differing("gradient_twice", {"recompute": recompute}, *gradients)


def _differing(case: str, params: dict[str, str], ours: Tensor, expected: Tensor) -> Record:
    count = int((ours.view(torch.int32) != expected.view(torch.int32)).sum())
    return Record("trainer", case, params, "exact", "differing_bits", count, "elements")
