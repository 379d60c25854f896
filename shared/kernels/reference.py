"""Every operation in plain PyTorch: the definition that the kernels are tested against.

Row by row, position by position, with Hugging Face's rounding points; nothing here is fast.
"""

import math

import torch
from torch import Tensor

from shared.kernels.attention_layout import AttentionLayout


def linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """[T, N] = x Wᵀ + b, summed in float64 and rounded once."""
    y = x_TK.double() @ weight_NK.double().t()
    return (y if bias_N is None else y + bias_N.double()).to(x_TK.dtype)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """weight * cast(x * rsqrt(mean(x²) + eps))."""
    x32 = x_TD.float()
    return weight_D * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)).to(x_TD.dtype)


def rope(x_THD: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> Tensor:
    """x * cos + rotate_half(x) * sin, tables doubled over the two halves."""
    cos = torch.cat((cos_Td, cos_Td), -1)[:, None]
    sin = torch.cat((sin_Td, sin_Td), -1)[:, None]
    x1, x2 = x_THD.chunk(2, dim=-1)
    return x_THD * cos + torch.cat((-x2, x1), -1) * sin


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate), rounded, times up."""
    return torch.nn.functional.silu(gate.double()).to(gate.dtype) * up


def embedding(token_ids_T: Tensor, weight_VD: Tensor) -> Tensor:
    """One weight row per token."""
    return torch.stack([weight_VD[i] for i in token_ids_T.tolist()])


def attention(
    q_THD: Tensor,
    k_RKD: Tensor,
    v_RKD: Tensor,
    layout: AttentionLayout,
    scale: float,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """One softmax per query and head, in float64 (differentiable, so that gradients have a reference too)."""
    group = q_THD.shape[1] // k_RKD.shape[1]
    rows: list[Tensor] = []
    for s, (q_len, context_len) in enumerate(zip(layout.q_lens.tolist(), layout.context_lens.tolist(), strict=True)):
        for position in range(context_len - q_len, context_len):
            begin = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            store_rows = layout.kv_rows[s, begin : position + 1]
            k = k_RKD[store_rows].double().repeat_interleave(group, dim=1)
            v = v_RKD[store_rows].double().repeat_interleave(group, dim=1)
            scores = torch.einsum("hd,chd->hc", q_THD[len(rows)].double() * scale, k)
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            rows.append(torch.einsum("hc,chd->hd", scores.softmax(-1), v))
    return torch.stack(rows).to(q_THD.dtype)


def lm_logprob(
    hidden_RD: Tensor, weight_VD: Tensor, targets_R: Tensor, temperature_R: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """logprob, argmax and entropy of each row, in float64."""
    logits = hidden_RD.double() @ weight_VD.double().t()
    logp = (logits / torch.where(temperature_R == 0, 1.0, temperature_R).double()[:, None]).log_softmax(-1)
    return logp.gather(1, targets_R[:, None].long()).squeeze(1), logits.argmax(-1), -(logp.exp() * logp).sum(-1)


def grouped_linear(x_TD: Tensor, weight_END: Tensor, experts_TK: Tensor) -> Tensor:
    """[T, K, N]: each token through the weights of each of its experts."""
    products = (weight_END[chosen].double() @ x for x, chosen in zip(x_TD.double(), experts_TK, strict=True))
    return torch.stack(list(products)).to(x_TD.dtype)


def combine(rows_TKD: Tensor, gates_TK: Tensor) -> Tensor:
    """[T, D]: the rows of a token's slots, weighted and added in float64, rounded once."""
    return (rows_TKD.double() * gates_TK.double()[:, :, None]).sum(1).to(rows_TKD.dtype)


def write_kv(rows_TKD: Tensor, store_RKD: Tensor, slots_T: Tensor) -> Tensor:
    """The store with the rows of the slots that are not negative."""
    store = store_RKD.clone()
    for row, slot in zip(rows_TKD, slots_T.tolist(), strict=True):
        if slot >= 0:
            store[slot] = row
    return store


def route_softmax(logits_TE: Tensor, top_k: int, recorded_TK: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Qwen3-MoE's order: softmax over all experts, the chosen ones gathered, renormalised; in float64."""
    probs_TE = logits_TE.double().softmax(1)
    experts_TK = _best(logits_TE, top_k) if recorded_TK is None else recorded_TK.long()
    chosen_TK = probs_TE.gather(1, experts_TK)
    return experts_TK, chosen_TK / chosen_TK.sum(1, keepdim=True)


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
    """DeepSeek-V3's order: sigmoid, the best with bias in the best groups gathered without, renormalised, scaled; in float64."""
    scores_TE = logits_TE.double().sigmoid()
    biased_TE = (scores_TE + bias_E).detach()
    if num_groups > 1:
        for row in biased_TE.view(len(biased_TE), num_groups, -1):
            row[_best(row.sort(1).values[None, :, -2:].sum(2), num_groups)[0, top_groups:]] = -math.inf
    experts_TK = _best(biased_TE, top_k) if recorded_TK is None else recorded_TK.long()
    chosen_TK = scores_TE.gather(1, experts_TK)
    return experts_TK, chosen_TK / (chosen_TK.sum(1, keepdim=True) + 1e-20) * scale


def _best(values: Tensor, count: int) -> Tensor:
    """The columns of each row's largest values, the lower column first where they are equal."""
    return torch.tensor([sorted(range(len(row)), key=lambda i: -row[i])[:count] for row in values.tolist()])


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 on Python integers, as Random123 writes it."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def gumbel(seed: int, prompt: int, sample: int, position: int, vocab_entry: int) -> float:
    """The noise of one vocabulary entry."""
    words = philox4x32((vocab_entry // 4, position, sample, prompt), (seed & 0xFFFFFFFF, seed >> 32))
    return -math.log(-math.log1p(-(words[vocab_entry % 4] + 0.5) / 2**32))
