"""The decoder as the engine runs it on a GPU: forward only, over a paged cache, with projections of the same input merged.

The weights lie merged in memory (queries, keys and values; gate and up) and the decoder's parameters are views of them, so names,
digests and a swap of the bytes in place stay those of `decoder.py`. An output column of a product is a function of its own
weight row, and the row operations are compared on the device, so the bits are those of `Decoder.forward`.

Legend: T tokens, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shared.kernels import Ops
from shared.kernels.certify import Table
from shared.kernels.cuda.attention import CachedPlan, attend
from shared.kernels.cuda.merged import MergedRows, silu_mul_halves
from shared.kernels.cuda.ops import CudaOps
from shared.models.config import ModelConfig
from shared.models.decoder import Decoder, Layer, Linear
from shared.models.kv_cache import KVCache


class MergedDecoder:
    """Runs a decoder's layers; the decoder itself keeps names, norms and the head."""

    def __init__(self, decoder: Decoder, ops: CudaOps, *, num_positions: int) -> None:
        """Merge the weights of `decoder` in memory: its parameters are views from now on, and keep nothing of the memory that it
        was given.

        Args:
            num_positions: that any position will lie below; the rotary table is made once, so that graphs can keep it.

        Raises:
            InexactKernelError: mode 'exact', and a row operation without another way to run has other bits than the trainer's.
        """
        self.decoder, self.ops, self.config = decoder, ops, decoder.config
        self._num_positions = num_positions
        weight = decoder.head_weight
        self.rows = MergedRows(
            self.config.heads,
            weight.dtype,
            weight.device,
            has_norms=self.config.qk_norm,
            is_exact=ops.mode == "exact",
        )
        self._layers = [_MergedLayer(layer) for layer in decoder.model.layers]
        _own(decoder.model.embed_tokens, decoder.model.norm, decoder.lm_head)
        decoder.rope_table.rows(
            torch.zeros(1, dtype=torch.int64, device=weight.device), weight.dtype, num_positions=num_positions
        )

    def forward(self, token_ids: Tensor, positions: Tensor, slots: Tensor, plan: CachedPlan, cache: KVCache) -> Tensor:
        """Hidden states [T, D] after the final norm.

        Args:
            token_ids, positions: [T] int64.
            slots: [T] int64: cache row of each token, negative for a row of padding, whose results mean nothing.
            plan: how the queries meet the cache, for all layers.
        """
        config, rows, product = self.config, self.rows, self.ops.table.linear
        body, eps, scale = self.decoder.model, self.config.rms_norm_eps, self.config.head_dim**-0.5
        residual = nn.functional.embedding(token_ids, body.embed_tokens.weight)
        table = self.decoder.rope_table.rows(positions, residual.dtype, num_positions=self._num_positions)
        x = self.ops.rms_norm(residual, self._layers[0].input_norm, eps)
        for i, layer in enumerate(self._layers):
            qkv = product(x, *layer.qkv)
            q = rows.place_qkv(qkv, layer.qk_norms, eps, table, cache.layers[i], slots)
            out = attend(q, *cache.layers[i], plan, scale, window=config.window(i) or 0)
            out = product(out.flatten(1), *layer.output)
            x, residual = rows.add_norm(out, residual, layer.mlp_norm, eps)
            out = product(silu_mul_halves(product(x, *layer.gate_up)), *layer.down)
            following = self._layers[i + 1].input_norm if i + 1 < len(self._layers) else body.norm.weight
            x, residual = rows.add_norm(out, residual, following, eps)
        return x


class _MergedLayer:
    """Weights of one layer; products as (weight [N, K], bias [N] or None)."""

    def __init__(self, layer: nn.Module) -> None:
        assert isinstance(layer, Layer)
        attention, mlp = layer.self_attn, layer.mlp
        _own(attention.o_proj, attention.q_norm, attention.k_norm, mlp.down_proj)
        _own(layer.input_layernorm, layer.post_attention_layernorm)
        self.qkv = _merge(attention.q_proj, attention.k_proj, attention.v_proj)
        self.output = attention.o_proj.weight, attention.o_proj.bias
        self.gate_up = _merge(mlp.gate_proj, mlp.up_proj)
        self.down = mlp.down_proj.weight, mlp.down_proj.bias
        self.input_norm, self.mlp_norm = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        self.qk_norms = None
        if attention.q_norm is not None and attention.k_norm is not None:
            self.qk_norms = attention.q_norm.weight, attention.k_norm.weight


# Ordinary tensors: those of inference mode could not be written to by a thread outside of it.
@torch.inference_mode(False)
@torch.no_grad()
def _merge(*linears: Linear) -> tuple[Tensor, Tensor | None]:
    """One weight (and bias) of all rows; the projections' own become views of it."""
    sizes = [linear.weight.shape[0] for linear in linears]
    weight = torch.cat([*(linear.weight for linear in linears)])
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    bias = torch.cat(biases) if biases else None
    _settle(weight)
    for linear, part in zip(linears, weight.split(sizes), strict=True):
        linear.weight = nn.Parameter(part, requires_grad=False)
    if bias is not None:
        for linear, part in zip(linears, bias.split(sizes), strict=True):
            linear.bias = nn.Parameter(part, requires_grad=False)
    return weight, bias


@torch.inference_mode(False)
@torch.no_grad()
def _own(*modules: nn.Module | None) -> None:
    """Parameters that are parts of a larger buffer get memory of their own: one of them would keep all of it alive."""
    for module in modules:
        for name, weight in list(module.named_parameters(recurse=False)) if module is not None else ():
            if weight.untyped_storage().nbytes() > weight.nbytes:
                copy = weight.detach().clone()
                _settle(copy)
                setattr(module, name, nn.Parameter(copy, requires_grad=False))


def _settle(copy: Tensor) -> None:
    """Waits for the copy: who staged the original gets its memory back, in another stream."""
    if copy.is_cuda:
        torch.cuda.current_stream(copy.device).synchronize()


def certify_merged(ops: Ops, config: ModelConfig, dtype: torch.dtype) -> None:
    """Certifies the products of a merged decoder that the unmerged one lacks, and the head's.

    Raises:
        InexactKernelError: a shape without an exact product.
    """
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    d, i = config.hidden_size, config.intermediate_size
    if not isinstance(ops, CudaOps) or not isinstance(ops.table, Table):
        return
    for n, k, has_bias in (
        (q + 2 * kv, d, config.qkv_bias),
        (d, q, config.output_bias),
        (2 * i, d, config.mlp_bias),
        (d, i, config.mlp_bias),
    ):
        ops.table.entry(n, k, dtype, dtype, has_bias=has_bias)
    ops.table.entry(config.vocab_size, d, dtype, torch.float32)
