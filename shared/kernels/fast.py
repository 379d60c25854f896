"""What other engines run: the library's kernels as they come, without the row contract.

The baseline of every speed comparison and the negative control of every exactness test; on CUDA that is
`shared.kernels.cuda.fast`, where triton is installed.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.kernels.attention_layout import AttentionLayout
from shared.kernels.logprob import LogprobOutput


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """`F.rms_norm`."""
    return F.rms_norm(x_TD, weight_D.shape, weight_D, eps)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`F.silu` times up."""
    return F.silu(gate) * up


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
    """`F.scaled_dot_product_attention`, one sequence at a time; arguments as in `attention.attention`.

    Raises:
        ValueError: a soft-cap, which the library's kernel does not have.
    """
    if softcap is not None:
        raise ValueError(f"the fast mode has no attention soft-cap, got {softcap}; use mode 'exact'")
    outputs = []
    begin = 0
    for s, (q_len, context_len) in enumerate(zip(layout.q_lens.tolist(), layout.context_lens.tolist(), strict=True)):
        rows = layout.kv_rows[s, :context_len].to(q_THD.device)
        positions = torch.arange(context_len, device=q_THD.device)
        query_positions = positions[context_len - q_len :, None]
        visible = positions <= query_positions
        if sliding_window is not None:
            visible &= positions > query_positions - sliding_window
        out = F.scaled_dot_product_attention(
            q_THD[begin : begin + q_len].transpose(0, 1)[None],
            k_RKD.index_select(0, rows).transpose(0, 1)[None],
            v_RKD.index_select(0, rows).transpose(0, 1)[None],
            attn_mask=None if q_len == 1 and sliding_window is None else visible,
            scale=scale,
            enable_gqa=q_THD.shape[1] != k_RKD.shape[1],
        )
        outputs.append(out[0].transpose(0, 1))
        begin += q_len
    return torch.cat(outputs) if outputs else torch.zeros_like(q_THD)


def head_linear(hidden_RD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    """Logits in the dtype of the weights, then float32."""
    return F.linear(hidden_RD.to(weight_VD.dtype), weight_VD, bias_V).float()


def lm_logprob(hidden_RD: Tensor, weight_VD: Tensor, targets_R: Tensor, temperature_R: Tensor) -> LogprobOutput:
    """`F.log_softmax` of all logits at once."""
    logits = head_linear(hidden_RD, weight_VD, None)
    logp = F.log_softmax(logits / torch.where(temperature_R == 0, 1.0, temperature_R)[:, None], dim=-1)
    logprob = logp.gather(1, targets_R[:, None].long()).squeeze(1)
    return LogprobOutput(logprob, logits.argmax(-1).int(), -(logp.exp() * logp).sum(-1))
