"""SwiGLU's elementwise half: silu(gate) * up, silu rounded to the input dtype before the product, as Hugging Face does.

`F.silu` and `sigmoid` take a scalar path in the tail of a vector and leak the element's place in memory into its last bit;
x / (1 + exp(-x)) does not.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(gate, up)
        gate32 = gate.float()
        return (gate32 / gate32.neg().exp_().add_(1)).to(gate.dtype) * up

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        gate, up = ctx.saved_tensors
        gate32 = gate.float()
        sigmoid = torch.sigmoid(gate32)
        silu = gate32 * sigmoid
        grad_up = grad * silu.to(gate.dtype)
        # d silu / d gate = silu + sigmoid * (1 - silu)
        slope = torch.addcmul(silu, sigmoid, 1 - silu)
        return slope.mul_((grad * up).float()).to(gate.dtype), grad_up


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up.

    Args:
        gate, up: equal shapes, float32 or bfloat16.

    Returns:
        The same shape and dtype.
    """
    return _SiluMul.apply(gate, up)
