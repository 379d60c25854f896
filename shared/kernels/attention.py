"""Causal attention over row stores, exact whatever the batch, the chunking, the pages and the padding.

Keys are taken in blocks of 64 anchored at absolute positions, in float32. With s the scaled scores of one query:
    m = max s,   p = exp(s - m),   out = (Σ_blocks p_b V_b) / (Σ_blocks Σ p_b),   blocks in ascending order.
A block that a query cannot see adds exact zeros, so a tile may hold any number of them. The backward pass recomputes p
block by block from the saved log-sum-exp (FlashAttention-2, https://arxiv.org/abs/2307.08691, section 3.1).

Legend: T queries, R store rows, H heads, K key-value heads, D head size; n, q, M, b as in attention_layout.py;
B = n * K.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shared.kernels.attention_layout import BLOCK, AttentionLayout, TileBatch

COLUMN_MULTIPLE = 16
"""Head sizes are padded with zeros to a multiple of this."""


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
    """Attend from packed queries to the rows that the layout names.

    Args:
        q_THD: [T, H, D] float32 or bfloat16, sequence after sequence.
        k_RKD, v_RKD: [R, Hkv, D] row stores of the same dtype: this forward's packed rows, or a layer's KV cache. Rows
            shared by several sequences accumulate their gradients. Zero a cache when it is allocated: rows that the
            layout does not name are not read, but nothing finite is ever lost by it.
        layout: positions to rows.
        scale: factor on the scores.
        sliding_window: positions a query sees, itself included; None for all.
        softcap: c in c * tanh(score / c), before the mask; None for none.

    Returns:
        [T, H, D] in the dtype of q.

    Raises:
        ValueError: shapes that do not fit each other or the layout.
    """
    num_heads, num_kv_heads = q_THD.shape[1], k_RKD.shape[1]
    if num_heads % num_kv_heads or k_RKD.shape != v_RKD.shape or q_THD.shape[0] != layout.num_queries:
        raise ValueError(
            f"attention got q {list(q_THD.shape)}, k {list(k_RKD.shape)}, v {list(v_RKD.shape)} and a layout of "
            f"{layout.num_queries} queries; q needs one row per query, k and v equal shapes and a head count that divides q's"
        )
    head_dim = q_THD.shape[2]
    # Below a full vector of columns (6, 10, 11 were seen) MKL's product depends on where a row stands.
    missing = -head_dim % COLUMN_MULTIPLE
    if missing:
        q_THD, k_RKD, v_RKD = (F.pad(x, (0, missing)) for x in (q_THD, k_RKD, v_RKD))
    return _Attention.apply(q_THD, k_RKD, v_RKD, layout, scale, sliding_window, softcap)[..., :head_dim]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, layout, scale, sliding_window, softcap) -> Tensor:  # type: ignore[no-untyped-def]
        out = torch.empty_like(q)
        lse_TH = q.new_empty(q.shape[:2], dtype=torch.float32)
        plan = layout.plan(q.shape[1], k.shape[1], sliding_window)
        for batch in plan:
            rows, row_lse = _attend(
                _queries(q, batch, k.shape[1], scale), _keys(k, batch), _keys(v, batch), batch, softcap
            )
            out.index_copy_(0, batch.query_rows, _unpack(rows, batch, q.shape[1]).to(q.dtype))
            lse_TH.index_copy_(0, batch.query_rows, _unpack(row_lse.unsqueeze(-1), batch, q.shape[1]).squeeze(-1))
        ctx.save_for_backward(q, k, v, out, lse_TH)
        ctx.plan, ctx.scale, ctx.softcap = plan, scale, softcap
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):  # type: ignore[no-untyped-def]
        q, k, v, out, lse_TH = ctx.saved_tensors
        num_heads, num_kv_heads = q.shape[1], k.shape[1]
        grad_q = torch.empty_like(q)
        grad_k = torch.zeros_like(k, dtype=torch.float32)
        grad_v = torch.zeros_like(v, dtype=torch.float32)
        delta_TH1 = (out.float() * grad_out.float()).sum(-1, keepdim=True)
        for batch in ctx.plan:
            # A repeated query must not count twice: its gradient enters as zero.
            weight = batch.is_query.view(-1, 1, 1)
            grad_rows = _rows(grad_out.index_select(0, batch.query_rows).float() * weight, batch, num_kv_heads)
            delta = _rows(delta_TH1.index_select(0, batch.query_rows) * weight, batch, num_kv_heads)
            lse = _rows(lse_TH.index_select(0, batch.query_rows).unsqueeze(-1), batch, num_kv_heads)
            queries = _queries(q, batch, num_kv_heads, ctx.scale)
            keys, values = _keys(k, batch), _keys(v, batch)
            hidden = batch.bias.isinf()
            grad_queries = torch.zeros_like(queries)
            grad_keys, grad_values = torch.empty_like(keys), torch.empty_like(values)
            for block in range(batch.num_blocks):
                raw = torch.bmm(queries, keys[block].transpose(1, 2))
                scores = raw if ctx.softcap is None else ctx.softcap * torch.tanh(raw / ctx.softcap)
                probs = torch.exp(scores - lse)
                _by_tile(_used(probs.unsqueeze(0), batch), batch).masked_fill_(hidden[block : block + 1], 0)
                torch.bmm(probs.transpose(1, 2), grad_rows, out=grad_values[block])
                grad_scores = probs.mul_(torch.bmm(grad_rows, values[block].transpose(1, 2)).sub_(delta))
                if ctx.softcap is not None:
                    grad_scores *= 1 - (scores / ctx.softcap).square()
                grad_queries.baddbmm_(grad_scores, keys[block])
                torch.bmm(grad_scores.transpose(1, 2), queries, out=grad_keys[block])
            grad_rows_q = _unpack(grad_queries, batch, num_heads)[batch.is_query.view(-1) > 0]
            grad_q.index_copy_(0, batch.query_rows[batch.is_query.view(-1) > 0], (grad_rows_q * ctx.scale).to(q.dtype))
            grad_k.index_add_(0, batch.key_rows, _unkeys(grad_keys, batch))
            grad_v.index_add_(0, batch.key_rows, _unkeys(grad_values, batch))
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None, None


def _attend(
    q_BMD: Tensor, k_bBCD: Tensor, v_bBCD: Tensor, batch: TileBatch, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Outputs [B, M, D] and log-sum-exps [B, M - padding] of one batch of tiles."""
    scores = _scores(q_BMD, k_bBCD, softcap)
    out, lse = _combine(scores, v_bBCD, batch)
    if not torch.isfinite(out.sum()):
        # 0 * NaN is NaN: a later token of the tile may have poisoned rows that do not see it. Rows that do see a
        # non-finite value become NaN, all others keep the bits they have when it is absent.
        scores = _scores(q_BMD, k_bBCD, softcap)
        hidden = batch.bias.isinf()
        _by_tile(_used(scores, batch), batch).masked_fill_(hidden, 0)
        is_bad = ~v_bBCD.isfinite()
        visible = (~hidden).float().expand(-1, -1, v_bBCD.shape[1] // batch.num_tiles, -1, -1).flatten(1, 2)
        sees_bad = (visible @ is_bad.float() > 0).any(0)
        out, lse = _combine(scores, v_bBCD.masked_fill(is_bad, 0), batch)
        out[:, : sees_bad.shape[1]].masked_fill_(sees_bad, torch.nan)
    return out, lse


def _scores(q_BMD: Tensor, k_bBCD: Tensor, softcap: float | None) -> Tensor:
    """[b, B, M, BLOCK] float32 scores, one product per block."""
    scores = q_BMD.new_empty((*k_bBCD.shape[:2], q_BMD.shape[1], BLOCK))
    for block in range(scores.shape[0]):
        torch.bmm(q_BMD, k_bBCD[block].transpose(1, 2), out=scores[block])
    return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)


def _combine(scores_bBMC: Tensor, v_bBCD: Tensor, batch: TileBatch) -> tuple[Tensor, Tensor]:
    """Softmax over blocks and the weighted sum of values; overwrites the scores."""
    used = _used(scores_bBMC, batch)
    _by_tile(used, batch).add_(batch.bias)
    max_BM = used.amax(-1).amax(0)
    sums_bBM = used.sub_(max_BM.unsqueeze(-1)).exp_().sum(-1)
    # Starting from +0 keeps the accumulators from being -0, to which a masked block's +0 would not be neutral.
    denominator = torch.zeros_like(max_BM)
    out = v_bBCD.new_zeros((*scores_bBMC.shape[1:3], v_bBCD.shape[-1]))
    for block in range(batch.num_blocks):
        denominator += sums_bBM[block]
        out += torch.bmm(scores_bBMC[block], v_bBCD[block])
    out[:, : denominator.shape[1]].div_(denominator.unsqueeze(-1))
    return out, denominator.log().add_(max_BM)


def _used(x_bBMC: Tensor, batch: TileBatch) -> Tensor:
    """The rows that are no padding; padded rows hold finite scores and go nowhere."""
    return x_bBMC[:, :, : batch.bias.shape[3]]


def _by_tile(x_bBMC: Tensor, batch: TileBatch) -> Tensor:
    return x_bBMC.unflatten(1, (batch.num_tiles, -1))


def _queries(q_THD: Tensor, batch: TileBatch, num_kv_heads: int, scale: float) -> Tensor:
    return _rows(q_THD.index_select(0, batch.query_rows), batch, num_kv_heads).mul_(scale)


def _rows(x_NHD: Tensor, batch: TileBatch, num_kv_heads: int) -> Tensor:
    """Pack rows [n * q, H, D] into zero-padded float32 tiles [B, M, D]; the group's heads follow one another."""
    n, q, group = batch.num_tiles, batch.num_queries, x_NHD.shape[1] // num_kv_heads
    tiles = x_NHD.new_zeros((n, num_kv_heads, batch.num_rows, x_NHD.shape[2]), dtype=torch.float32)
    view = x_NHD.view(n, q, num_kv_heads, group, -1).transpose(1, 2)
    tiles[:, :, : q * group].unflatten(2, (q, group)).copy_(view)
    return tiles.flatten(0, 1)


def _unpack(tiles_BMD: Tensor, batch: TileBatch, num_heads: int) -> Tensor:
    """The inverse of `_rows`: [n * q, H, D]."""
    n, q = batch.num_tiles, batch.num_queries
    num_kv_heads = tiles_BMD.shape[0] // n
    group = num_heads // num_kv_heads
    view = tiles_BMD.view(n, num_kv_heads, -1, tiles_BMD.shape[2])[:, :, : q * group].unflatten(2, (q, group))
    return view.transpose(1, 2).reshape(n * q, num_heads, -1)


def _keys(store_RKD: Tensor, batch: TileBatch) -> Tensor:
    """[b, B, BLOCK, D] float32 rows of the store, block by block."""
    rows = store_RKD.index_select(0, batch.key_rows)
    blocks = rows.view(batch.num_blocks, batch.num_tiles, BLOCK, *store_RKD.shape[1:]).transpose(2, 3)
    return blocks.to(torch.float32, memory_format=torch.contiguous_format).flatten(1, 2).contiguous()


def _unkeys(grad_bBCD: Tensor, batch: TileBatch) -> Tensor:
    """The inverse of `_keys`: [b * n * BLOCK, Hkv, D]."""
    by_tile = grad_bBCD.view(batch.num_blocks, batch.num_tiles, -1, BLOCK, grad_bBCD.shape[-1])
    return by_tile.transpose(2, 3).flatten(0, 2)
