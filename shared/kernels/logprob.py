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

CHUNK_ELEMENTS = 1 << 22
"""Most logits held at once: 16 MiB of float32 stay in the cache and below glibc's limit for reuse. Not part of the bits."""

GRADIENT_ELEMENTS = 1 << 26
"""Most logit gradients held at once, in the dtype of the hidden states, so that the weight's gradient takes few products."""


class LogprobOutput(NamedTuple):
    """What the head says of each row's target."""

    logprob: Tensor
    """[R] float32, of the distribution at the row's temperature; differentiable."""
    top1: Tensor
    """[R] int32: the most probable token, the lowest id among equals."""
    entropy: Tensor
    """[R] float32, nats, at the row's temperature; differentiable."""


def row_chunks(
    num_rows: int, vocab_size: int, *, begin: int = 0, num_elements: int = CHUNK_ELEMENTS
) -> Iterator[slice]:
    """Slices that cover the rows from `begin` to `num_rows`, each of at most `num_elements` logits."""
    step = max(num_elements // vocab_size // ROW_MULTIPLE, 1) * ROW_MULTIPLE
    for start in range(begin, num_rows, step):
        yield slice(start, min(start + step, num_rows))


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
        lse, logprob, entropy = (hidden.new_empty(num_rows, dtype=torch.float32) for _ in range(3))
        top1 = hidden.new_empty(num_rows, dtype=torch.int32)
        for rows in row_chunks(num_rows, vocab_size):
            n = rows.stop - rows.start
            z = scaled_logits(hidden[rows], weight32, temperature[rows], linear)
            chunk_lse, exp, total = log_sum_exp(z)
            lse[rows] = chunk_lse[:n]
            logprob[rows] = z[:n].gather(1, targets[rows, None].long()).squeeze(1) - chunk_lse[:n]
            top1[rows] = z.argmax(-1)[:n].int()
            entropy[rows] = (chunk_lse - exp.mul_(z).sum(-1) / total)[:n]
        # Kept because widening the weight again costs as much as a hundred rows.
        ctx.save_for_backward(hidden, weight, weight32, targets, temperature, lse, entropy)
        ctx.linear = linear
        ctx.mark_non_differentiable(top1)
        return logprob, top1, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprob, _, grad_entropy):  # type: ignore[no-untyped-def]
        hidden, weight, weight32, targets, temperature, lse, entropy = ctx.saved_tensors
        num_rows, vocab_size = hidden.shape[0], weight.shape[0]
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight: Tensor | None = None
        for outer in row_chunks(num_rows, vocab_size, num_elements=GRADIENT_ELEMENTS):
            grad_z = hidden.new_empty((outer.stop - outer.start, vocab_size))
            for rows in row_chunks(outer.stop, vocab_size, begin=outer.start):
                logits = scaled_logits(hidden[rows], weight32, temperature[rows], ctx.linear)[: rows.stop - rows.start]
                grad_z[rows.start - outer.start : rows.stop - outer.start] = _logit_gradient(
                    logits,
                    *(x[rows, None] for x in (targets, temperature, lse, entropy, grad_logprob, grad_entropy)),
                )
            if grad_hidden is not None:
                grad_hidden[outer] = grad_z @ weight
            if ctx.needs_input_grad[1]:
                product = grad_z.t() @ hidden[outer]
                grad_weight = product if grad_weight is None else product.float().add_(grad_weight)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight) if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _logit_gradient(
    z_RV: Tensor,
    target_R1: Tensor,
    temperature_R1: Tensor,
    lse_R1: Tensor,
    entropy_R1: Tensor,
    grad_logprob_R1: Tensor,
    grad_entropy_R1: Tensor,
) -> Tensor:
    """Gradient of the unscaled logits [R, V] float32; overwrites z."""
    logp = z_RV.sub_(lse_R1)
    if bool(grad_entropy_R1.any()):
        weight = -grad_logprob_R1 - grad_entropy_R1 * (logp + entropy_R1)
    else:
        weight = -grad_logprob_R1
    grad = logp.exp_().mul_(weight)
    grad.scatter_add_(1, target_R1.long(), grad_logprob_R1)
    return grad.div_(torch.where(temperature_R1 == 0, 1.0, temperature_R1))


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
