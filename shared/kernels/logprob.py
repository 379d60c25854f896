"""The language-model head: float32 logits, log-probability, argmax and entropy of each row.

With z = logits / temperature and m = max z:
    lse = m + log Σ exp(z - m),   logprob = z[target] - lse,   entropy = lse - Σ exp(z - m) z / Σ exp(z - m)
Gradients: d logprob / d z = onehot - p,   d entropy / d z = -p (log p + entropy).

Logits exist for a chunk of rows at a time; the backward pass recomputes them.

Legend: R rows, D hidden size, V vocabulary.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shared.kernels.linear import ROW_MULTIPLE, Linear, pad_rows, padded_linear

CHUNK_ELEMENTS = 1 << 25
"""Most logits held at once (128 MiB of float32). Not part of the bits."""


class LogprobOutput(NamedTuple):
    """What the head says of each row's target."""

    logprob: Tensor
    """[R] float32, of the distribution at the row's temperature; differentiable."""
    top1: Tensor
    """[R] int32: the most probable token, the lowest id among equals."""
    entropy: Tensor
    """[R] float32, nats, at the row's temperature; differentiable."""


def row_chunks(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """Slices of rows whose logits fit in CHUNK_ELEMENTS."""
    step = max(CHUNK_ELEMENTS // vocab_size // ROW_MULTIPLE, 1) * ROW_MULTIPLE
    for begin in range(0, num_rows, step):
        yield slice(begin, min(begin + step, num_rows))


def scaled_logits(hidden_RD: Tensor, weight32_VD: Tensor, temperature_R: Tensor, linear: Linear) -> Tensor:
    """Float32 logits over temperature, rows padded; a temperature of 0 (greedy) reads as 1.

    Returns:
        [R padded to ROW_MULTIPLE, V] float32; padded rows are zero.
    """
    divisor = torch.where(temperature_R == 0, 1.0, temperature_R).float()
    padded = pad_rows(hidden_RD.float())
    divisor = torch.nn.functional.pad(divisor, (0, padded.shape[0] - divisor.shape[0]), value=1.0)
    return linear(padded, weight32_VD, None).div_(divisor.unsqueeze(1))


def log_sum_exp(z_RV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """lse [R], exp(z - max) [R, V] and its row sums [R]; rows must be padded, so that no row is ever split over threads."""
    max_R1 = z_RV.amax(-1, keepdim=True)
    exp_RV = (z_RV - max_R1).exp_()
    sum_R = exp_RV.sum(-1)
    return max_R1.squeeze(1) + sum_R.log(), exp_RV, sum_R


class _LmLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, weight32, linear):  # type: ignore[no-untyped-def]
        num_rows, vocab_size = hidden.shape[0], weight.shape[0]
        weight32 = weight.float() if weight32 is None else weight32
        lse, logprob, entropy = (hidden.new_full((num_rows,), torch.nan, dtype=torch.float32) for _ in range(3))
        top1 = torch.full((num_rows,), -1, dtype=torch.int32, device=hidden.device)
        for rows in row_chunks(num_rows, vocab_size):
            n = rows.stop - rows.start
            z = scaled_logits(hidden[rows], weight32, temperature[rows], linear)
            chunk_lse, exp, total = log_sum_exp(z)
            lse[rows] = chunk_lse[:n]
            logprob[rows] = z[:n].gather(1, targets[rows, None].long()).squeeze(1) - chunk_lse[:n]
            top1[rows] = z.argmax(-1)[:n].int()
            entropy[rows] = (chunk_lse - exp.mul_(z).sum(-1) / total)[:n]
        ctx.save_for_backward(hidden, weight, targets, temperature, lse, entropy)
        ctx.linear = linear
        ctx.mark_non_differentiable(top1)
        return logprob, top1, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprob, _, grad_entropy):  # type: ignore[no-untyped-def, override]
        hidden, weight, targets, temperature, lse, entropy = ctx.saved_tensors
        weight32 = weight.float()
        grad_hidden = torch.full_like(hidden, torch.nan) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for rows in row_chunks(hidden.shape[0], weight.shape[0]):
            n = rows.stop - rows.start
            z = scaled_logits(hidden[rows], weight32, temperature[rows], ctx.linear)[:n]
            logp = z.sub_(lse[rows, None])
            grad_z = logp.exp()
            if bool(grad_entropy[rows].any()):
                grad_z *= -grad_logprob[rows, None] - grad_entropy[rows, None] * (logp + entropy[rows, None])
            else:
                grad_z *= -grad_logprob[rows, None]
            grad_z.scatter_add_(1, targets[rows, None].long(), grad_logprob[rows, None])
            grad_z /= torch.where(temperature[rows] == 0, 1.0, temperature[rows])[:, None]
            grad_z = grad_z.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = grad_z @ weight
            if grad_weight is not None:
                grad_weight += grad_z.t() @ hidden[rows]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


def lm_logprob(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    targets_R: Tensor,
    temperature_R: Tensor,
    *,
    weight32_VD: Tensor | None = None,
    linear: Linear = padded_linear,
) -> LogprobOutput:
    """Log-probability of each row's target token.

    Args:
        hidden_RD: [R, D] final hidden states, after the last norm, float32 or bfloat16.
        weight_VD: [V, D] head weights of the same dtype; the product runs in float32.
        targets_R: [R] int32 or int64 token ids.
        temperature_R: [R] float32; 0 (greedy) reads as 1.
        weight32_VD: `weight_VD.float()` computed beforehand, or None.
        linear: the float32 product.

    Returns:
        LogprobOutput; logprob and entropy carry gradients to hidden and weight.
    """
    return LogprobOutput(*_LmLogprob.apply(hidden_RD, weight_VD, targets_R, temperature_R.float(), weight32_VD, linear))
