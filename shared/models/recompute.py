"""Products whose input is computed again in the backward pass instead of being kept.

The forward runs the very operations of the plain path, so its bits are the same; the backward runs them once more to get the
input back, and only then multiplies. Nothing of the product itself is repeated, which a generic checkpoint would do.

Legend: T tokens, K inputs and N outputs of a product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shared.kernels import Ops

Recompute = Literal["none", "elementwise", "mlp", "layer"]
"""What the backward computes again. elementwise: norms and SwiGLU; mlp: the gate and up products too; layer: everything."""

Build = Callable[..., Tensor]
"""Makes the input [T, K] of the products from tensors; a function of these alone."""

Projection = tuple[Tensor, Tensor | None]
"""Weight [N, K] and bias [N] or None."""


def products(ops: Ops, build: Build, inputs: Sequence[Tensor], projections: Sequence[Projection]) -> tuple[Tensor, ...]:
    """`build(*inputs)` times each weight, [T, N] each; keeps `inputs` and the weights for the backward, and nothing else.

    Args:
        build: deterministic; runs again in the backward, with gradients.
        inputs: float tensors, one shape or another.
        projections: of the built input.
    """
    weights = [weight for weight, _ in projections]
    biases = [bias for _, bias in projections]
    return _Products.apply(ops, build, len(inputs), *inputs, *weights, *biases)


class _Products(torch.autograd.Function):
    """(ops, build, number of inputs, inputs, weights, biases) -> one output per weight."""

    @staticmethod
    def forward(ctx: Any, ops: Ops, build: Build, num_inputs: int, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        ctx.build, ctx.num_inputs = build, num_inputs
        num_products = (len(tensors) - num_inputs) // 2
        inputs, weights = tensors[:num_inputs], tensors[num_inputs : num_inputs + num_products]
        ctx.save_for_backward(*inputs, *weights)
        x = build(*inputs)
        return tuple(ops.linear(x, w, b) for w, b in zip(weights, tensors[num_inputs + num_products :], strict=True))  # type: ignore[arg-type]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weights = ctx.saved_tensors[: ctx.num_inputs], ctx.saved_tensors[ctx.num_inputs :]
        needs = ctx.needs_input_grad[3:]
        leaves = [x.detach().requires_grad_(n) for x, n in zip(inputs, needs, strict=False)]
        with torch.enable_grad():
            x = ctx.build(*leaves)
        grads = tuple(g.contiguous() for g in grads)
        grad_x = torch.mm(grads[0], weights[0])
        for g, w in zip(grads[1:], weights[1:], strict=True):
            grad_x = torch.addmm(grad_x, g, w)
        flat = x.detach()
        grad_weights = [torch.mm(g.t(), flat) if n else None for g, n in zip(grads, needs[len(inputs) :], strict=False)]
        grad_biases = [g.sum(0) if n else None for g, n in zip(grads, needs[len(inputs) + len(weights) :], strict=True)]
        del flat, grads
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found = iter(torch.autograd.grad(x, wanted, grad_x) if wanted else ())
        grad_inputs = [next(found) if leaf.requires_grad else None for leaf in leaves]
        return (None, None, None, *grad_inputs, *grad_weights, *grad_biases)
