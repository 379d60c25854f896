"""A small mixture of experts out of the real operations, to run on a device or under Triton's interpreter."""

from itertools import starmap
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shared.kernels.cuda.grouped import combine, grouped_linear, route
from shared.kernels.ops import Ops
from shared.kernels.router import route_sigmoid, route_softmax
from tests.kernels.cuda_testing import DEVICE
from tests.kernels.kernel_testing import wide

ROUTERS = ("softmax", "sigmoid")
DEEPSEEK = {"scale": 2.5, "num_groups": 3, "top_groups": 2}


class Sizes(NamedTuple):
    experts: int
    top_k: int
    hidden: int
    inner: int


SMALL = Sizes(6, 2, 32, 24)


def bias_of(num_experts: int) -> Tensor:
    return torch.linspace(-0.2, 0.3, num_experts)


def route_by(name: str, logits: Tensor, top_k: int, recorded: Tensor | None) -> tuple[Tensor, Tensor]:
    """Experts and gates [T, K] of a router of ROUTERS."""
    if name == "softmax":
        return route_softmax(logits, top_k, recorded)
    return route_sigmoid(logits, bias_of(logits.shape[1]).to(logits.device), top_k, recorded, **DEEPSEEK)  # type: ignore[arg-type]


def records(num_tokens: int, seed: int = 0, sizes: Sizes = SMALL) -> Tensor:
    """[T, K] valid rows."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_tokens, sizes.experts, generator=generator).argsort(1)[:, : sizes.top_k].contiguous()


class Mixture(nn.Module):
    """SwiGLU experts behind a router: Qwen3-MoE's block, or DeepSeek-V3's without its shared expert."""

    def __init__(self, ops: Ops, name: str, dtype: torch.dtype, sizes: Sizes = SMALL, block: int = 16) -> None:
        super().__init__()
        self.ops, self.name, self.sizes, self.block = ops, name, sizes, block
        e, _, hidden, inner = sizes
        shapes = (e, hidden), (e, inner, hidden), (e, inner, hidden), (e, hidden, inner)
        weights = (wide(*shape, dtype=dtype, seed=seed) / 8 for seed, shape in enumerate(shapes))
        self.router, self.gate, self.up, self.down = (nn.Parameter(w.to(DEVICE)) for w in weights)

    def forward(self, x: Tensor, recorded: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[T, D] -> ([T, D], experts [T, K])."""
        experts, gates = route_by(self.name, self.ops.linear(x, self.router), self.sizes.top_k, recorded)
        routing = route(experts, self.sizes.experts, self.block)
        gate, up = (grouped_linear(x, w, routing, gather=True) for w in (self.gate, self.up))
        rows = grouped_linear(self.ops.silu_mul(gate, up), self.down, routing, gather=False)
        return combine(rows, gates, routing), experts

    def graded(self, x: Tensor, recorded: Tensor | None, *, recompute: bool) -> tuple[Tensor, ...]:
        """Experts, output, and the gradients of the input, the router and the experts' weights."""
        x = x.clone().requires_grad_()
        out, experts = checkpoint(self, x, recorded, use_reentrant=False) if recompute else self(x, recorded)
        grads = torch.autograd.grad(out, (x, *self.parameters()), wide(*x.shape, dtype=x.dtype, seed=9).to(DEVICE))
        return experts, out.detach(), *grads


def plain(mixture: Mixture, x: Tensor, experts: Tensor) -> tuple[Tensor, ...]:
    """`graded` without the experts, which are given; token by token in float64."""
    x, *weights = (w.detach().double().requires_grad_() for w in (x, *mixture.parameters()))
    router, gate, up, down = weights

    def token(row: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
        inner = [nn.functional.silu(gate[e] @ row) * (up[e] @ row) for e in chosen.tolist()]
        return torch.stack([down[e] @ h for e, h in zip(chosen.tolist(), inner, strict=True)], 1) @ gates

    gates = route_by(mixture.name, x @ router.t(), mixture.sizes.top_k, experts)[1]
    out = torch.stack(list(starmap(token, zip(x, experts, gates, strict=True))))
    grads = torch.autograd.grad(out, (x, *weights), wide(*x.shape, seed=9).to(DEVICE).double())
    return out.detach(), *grads
