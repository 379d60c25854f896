"""Rotary position embedding from a precomputed table, with the rounding points of Hugging Face.

Halves are rotated (not interleaved pairs); each product is rounded to the input dtype before the sum:
    y1 = x1 * cos - x2 * sin
    y2 = x2 * cos + x1 * sin
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def _rotate(x_THD: Tensor, cos_T1d: Tensor, sin_T1d: Tensor) -> Tensor:
    x1, x2 = x_THD.chunk(2, dim=-1)
    return torch.cat((x1 * cos_T1d - x2 * sin_T1d, x2 * cos_T1d + x1 * sin_T1d), dim=-1)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_THD: Tensor, cos_T1d: Tensor, sin_T1d: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(cos_T1d, sin_T1d)
        return _rotate(x_THD, cos_T1d, sin_T1d)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_THD: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        cos_T1d, sin_T1d = ctx.saved_tensors
        return _rotate(grad_THD, cos_T1d, -sin_T1d), None, None


def rope(x_THD: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> Tensor:
    """Rotate the heads of each token by its position.

    Args:
        x_THD: [T, H, D] queries or keys.
        cos_Td, sin_Td: [T, D / 2] in the dtype of x: the table rows of the tokens' positions (`rope_table`).

    Returns:
        [T, H, D].
    """
    return _Rope.apply(x_THD, cos_Td.unsqueeze(1), sin_Td.unsqueeze(1))


def rope_table(inv_freq_d: Tensor, num_positions: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position.

    Args:
        inv_freq_d: [D / 2] float32 inverse frequencies.
        num_positions: P, rows to compute; a row does not depend on it.
        scaling: factor on both (YaRN's attention factor, otherwise 1).

    Returns:
        cos, sin: [P, D / 2] float32.
    """
    angles = torch.arange(num_positions, dtype=torch.float32, device=inv_freq_d.device)[:, None] * inv_freq_d
    return angles.cos() * scaling, angles.sin() * scaling
