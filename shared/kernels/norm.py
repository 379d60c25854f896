"""RMSNorm with the rounding points of Hugging Face: float32 statistics, cast, then the weight.

y = weight * cast(x * rsqrt(mean(x²) + eps))
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:  # type: ignore[no-untyped-def]
        x32 = x_TD.float()
        scale_T1 = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x_TD, weight_D, scale_T1)
        return weight_D * (x32 * scale_T1).to(x_TD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TD: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[no-untyped-def]
        x_TD, weight_D, scale_T1 = ctx.saved_tensors
        normed = x_TD.float() * scale_T1
        grad32 = grad_TD.float()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_normed = grad32 * weight_D.float()
            along = (grad_normed * normed).mean(-1, keepdim=True)
            grad_x = ((grad_normed - normed * along) * scale_T1).to(x_TD.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = (grad32 * normed).flatten(0, -2).sum(0).to(weight_D.dtype)
        return grad_x, grad_weight, None


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalise each row by its root mean square.

    Args:
        x_TD: [..., D] float32 or bfloat16.
        weight_D: [D] of the same dtype.
        eps: added to the mean square.

    Returns:
        [..., D] in the dtype of x.
    """
    return _RmsNorm.apply(x_TD, weight_D, eps)
