"""Routers of mixtures of experts, native and replayed: a row's experts and gates are a function of its own logits and record.

Replay (R3, arXiv 2510.11370) freezes the selection alone. Gates always come from the live logits, so that gradients reach the
router. A record is an argument of the call and no queue that calls consume: what runs again for the backward gets it again.
Terms are added slot by slot, and ties go to the lowest expert, so that no bit depends on the other rows.

Legend: T tokens, E experts, K experts per token ("slots").
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor


def route_softmax(logits_TE: Tensor, top_k: int, recorded_TK: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Experts and gates of Qwen3-MoE: g_i = exp(s_i) / sum of exp(s_j) over the chosen.

    It is published as softmax, gather, renormalise, and elsewhere as gather, softmax. Both have this value, but in float32 the
    first is 0 / 0 for recorded experts that the router has left far behind, so the second is what runs.

    Args:
        logits_TE: any float dtype; computed in float32, or float64 if that is what they are.
        recorded_TK: expert ids as `check_record` wants them, None to select here.

    Returns:
        Experts [T, K] int64, in the record's order or by falling logit; gates [T, K] float32 or float64, with gradient.
    """
    logits_TE = _wide(logits_TE)
    experts_TK = _select(logits_TE, top_k, recorded_TK)
    chosen_TK = logits_TE.gather(1, experts_TK)
    weights_TK = torch.exp(chosen_TK - chosen_TK.detach().amax(1, keepdim=True))
    return experts_TK, weights_TK / _total(weights_TK)


def route_sigmoid(
    logits_TE: Tensor,
    bias_E: Tensor,
    top_k: int,
    recorded_TK: Tensor | None = None,
    *,
    scale: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
) -> tuple[Tensor, Tensor]:
    """Experts and gates of DeepSeek-V3 (arXiv 2412.19437): sigmoid, gather, renormalise, scale.

    Args:
        logits_TE, recorded_TK: as in `route_softmax`.
        bias_E: float32, added where experts are selected and nowhere else; it gets no gradient.
        scale: of the gates of a token, which sum to it.
        num_groups, top_groups: select within the `top_groups` groups of E / num_groups neighbours whose two best sum highest.

    Returns:
        As `route_softmax`.
    """
    scores_TE = _sigmoid(_wide(logits_TE))
    choice_TE = scores_TE.detach() + bias_E
    if num_groups > 1 and recorded_TK is None:
        best_TG2 = choice_TE.unflatten(1, (num_groups, -1)).topk(2, -1).values
        groups = _largest(best_TG2[..., 0] + best_TG2[..., 1], top_groups)
        is_out_TG = torch.ones_like(best_TG2[..., 0], dtype=torch.bool).scatter_(1, groups, False)
        choice_TE = choice_TE.masked_fill(is_out_TG.repeat_interleave(choice_TE.shape[1] // num_groups, 1), -torch.inf)
    experts_TK = _select(choice_TE, top_k, recorded_TK)
    weights_TK = scores_TE.gather(1, experts_TK)
    return experts_TK, weights_TK / (_total(weights_TK) + 1e-20) * scale


def check_record(recorded_TK: Tensor, num_tokens: int, top_k: int, num_experts: int) -> None:
    """Raise ValueError unless a record can be replayed. One that lies on a GPU is waited for; one on the host is not.

    Every row of the forward has one. Padding, and the last sampled token, which the engine never fed, take any valid row, such as
    0 to K - 1: no other row sees which. A row of zeros is what a lost row looks like; for K = 1 nothing tells it from a record.

    Args:
        recorded_TK: integers of any width: logical ids, distinct in a row, in the order in which gates and results are added.
    """
    if recorded_TK.dtype.is_floating_point or recorded_TK.dtype == torch.bool:
        raise ValueError(
            f"recorded experts are integers, got {recorded_TK.dtype}; pass the ids and not a mask or gates"
        )
    if recorded_TK.shape != (num_tokens, top_k):
        raise ValueError(
            f"recorded experts must have shape {(num_tokens, top_k)}, a row for every token, got {tuple(recorded_TK.shape)}; "
            "pad with valid rows, and cut the record with the tokens"
        )
    ordered_TK = recorded_TK.long().sort(1).values
    is_bad_T = ((ordered_TK < 0) | (ordered_TK >= num_experts)).any(1) | (ordered_TK.diff(dim=1) == 0).any(1)
    if bool(is_bad_T.any()):
        row = int(is_bad_T.nonzero()[0])
        raise ValueError(
            f"recorded experts must be distinct and within 0 to {num_experts - 1}, got {recorded_TK[row].tolist()} for token "
            f"{row}; its row was lost, or holds the ids of physical experts"
        )


def overlap(experts_TK: Tensor, recorded_TK: Tensor) -> Tensor:
    """[T] float32: share of a token's experts that both sides chose. Rows moved by one show here, valid as each of them is."""
    return (experts_TK[:, :, None] == recorded_TK[:, None, :]).any(2).float().mean(1)


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _sigmoid(x: Tensor) -> Tensor:
    """torch.sigmoid's last bit depends on the element's place in memory; 1 / (1 + exp(-x)) loses its gradient below -44."""
    power = torch.exp(torch.where(x < 0, x, -x))
    return torch.where(x < 0, power, 1) / (1 + power)


def _largest(values: Tensor, count: int) -> Tensor:
    """[T, count] int64: topk leaves open which of two equal values it takes."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _select(choice_TE: Tensor, top_k: int, recorded_TK: Tensor | None) -> Tensor:
    if recorded_TK is None:
        return _largest(choice_TE.detach(), top_k)
    check_record(recorded_TK, choice_TE.shape[0], top_k, choice_TE.shape[1])
    return recorded_TK.to(choice_TE.device, torch.int64)


def _total(weights_TK: Tensor) -> Tensor:
    """[T, 1]: a library's sum may order its terms by the shape of the whole tensor."""
    return reduce(torch.add, weights_TK.split(1, 1))
