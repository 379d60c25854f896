"""The dense decoder of Llama, Mistral, Qwen2 and Qwen3: one definition for the rollout engine and the trainer.

Parameter names are Hugging Face's, so state dicts map one to one. Under FSDP2 wrap each of `decoder.model.layers` and
then the decoder; every parameter is used inside the forward of the module that was wrapped.

Legend: T tokens of the forward, D hidden size, R scored rows.
"""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shared.kernels import AttentionLayout, LogprobOutput, Ops
from shared.models.config import ModelConfig
from shared.models.kv_cache import KVCache
from shared.models.recompute import Projection, Recompute, products
from shared.models.rope import RopeTable


class Score:
    """Rows to put through the head within a forward.

    No dataclass on purpose: FSDP2's mixed precision casts the float tensors that it finds among a forward's arguments,
    and a temperature rounded to bfloat16 is another temperature.
    """

    def __init__(self, rows: Tensor, targets: Tensor, temperature: Tensor) -> None:
        """Keep.

        Args:
            rows: [R] int64 packed rows.
            targets: [R] int32 or int64: the token that each row is to predict.
            temperature: [R] float32; 0 reads as 1.
        """
        self.rows, self.targets, self.temperature = rows, targets, temperature


class Linear(nn.Module):
    """A projection through the mode's product."""

    def __init__(self, num_inputs: int, num_outputs: int, bias: bool, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.weight = nn.Parameter(torch.empty(num_outputs, num_inputs))
        self.bias = nn.Parameter(torch.empty(num_outputs)) if bias else None

    @property
    def projection(self) -> Projection:
        """Weight and bias."""
        return self.weight, self.bias

    def forward(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N]."""
        return self.ops.linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """A norm through the mode's kernel."""

    def __init__(self, size: int, eps: float, ops: Ops) -> None:
        super().__init__()
        self.ops, self.eps = ops, eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return self.ops.rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Projections, rotary embedding and attention of one layer."""

    def __init__(self, config: ModelConfig, ops: Ops, layer_index: int) -> None:
        super().__init__()
        self.ops, self.head_dim = ops, config.head_dim
        self.window = config.window(layer_index)
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, q_size, config.qkv_bias, ops)
        self.k_proj = Linear(config.hidden_size, kv_size, config.qkv_bias, ops)
        self.v_proj = Linear(config.hidden_size, kv_size, config.qkv_bias, ops)
        self.o_proj = Linear(q_size, config.hidden_size, config.output_bias, ops)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, ops) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, ops) if config.qk_norm else None

    def forward(
        self, x_TD: Tensor, cos: Tensor, sin: Tensor, layout: AttentionLayout, store: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """[T, D] -> [T, D]; keys and values go to the store's rows if there is one, and are the store otherwise."""
        return self.attend(self.q_proj(x_TD), self.k_proj(x_TD), self.v_proj(x_TD), cos, sin, layout, store)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        layout: AttentionLayout,
        store: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """What follows the projections q [T, H * head_dim], k and v [T, Hkv * head_dim]; -> [T, D]."""
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.ops.rope(q, cos, sin), self.ops.rope(k, cos, sin)
        if store is not None:
            k, v = self.ops.write_kv(k, v, store, layout)
        out = self.ops.attention(q, k, v, layout, self.head_dim**-0.5, sliding_window=self.window)
        return self.o_proj(out.flatten(1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, config.mlp_bias, ops)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, config.mlp_bias, ops)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, config.mlp_bias, ops)

    def forward(self, x_TD: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        return self.down_proj(self.ops.silu_mul(self.gate_proj(x_TD), self.up_proj(x_TD)))


class Layer(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: ModelConfig, ops: Ops, layer_index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.self_attn = Attention(config, ops, layer_index)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.mlp = MLP(config, ops)
        self.ops, self.eps = ops, config.rms_norm_eps

    def forward_lean(
        self, x_TD: Tensor, cos: Tensor, sin: Tensor, layout: AttentionLayout, *, keeps_gate_and_up: bool
    ) -> Tensor:
        """[T, D] -> [T, D], the bits of `forward`; the backward computes norms and SwiGLU again, and gate and up unless kept."""
        norm, attention, mlp = self.post_attention_layernorm, self.self_attn, self.mlp
        qkv = [p.projection for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
        q, k, v = products(self.ops, self._norm, (x_TD, self.input_layernorm.weight), qkv)
        x_TD = x_TD + attention.attend(q, k, v, cos, sin, layout, None)
        gate_up = (mlp.gate_proj.projection, mlp.up_proj.projection)
        if keeps_gate_and_up:
            gate, up = products(self.ops, self._norm, (x_TD, norm.weight), gate_up)
            (out,) = products(self.ops, self.ops.silu_mul, (gate, up), [mlp.down_proj.projection])
        else:
            tensors = [t for projection in gate_up for t in projection if t is not None]
            (out,) = products(self.ops, self._swiglu, (x_TD, norm.weight, *tensors), [mlp.down_proj.projection])
        return x_TD + out

    def _norm(self, x_TD: Tensor, weight: Tensor) -> Tensor:
        return self.ops.rms_norm(x_TD, weight, self.eps)

    def _swiglu(self, x_TD: Tensor, norm: Tensor, *gate_up: Tensor) -> Tensor:
        """gate_up: both weights, each followed by its bias if there is one."""
        x_TD = self._norm(x_TD, norm)
        half = len(gate_up) // 2
        return self.ops.silu_mul(self.ops.linear(x_TD, *gate_up[:half]), self.ops.linear(x_TD, *gate_up[half:]))

    def forward(
        self,
        x_TD: Tensor,
        cos: Tensor,
        sin: Tensor,
        layout: AttentionLayout,
        store: tuple[Tensor, Tensor] | None,
        recompute: Recompute = "none",
    ) -> Tensor:
        """[T, D] -> [T, D]."""
        if recompute != "none":
            return self.forward_lean(x_TD, cos, sin, layout, keeps_gate_and_up=recompute == "elementwise")
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), cos, sin, layout, store)
        return x_TD + self.mlp(self.post_attention_layernorm(x_TD))


class Embedding(nn.Module):
    """Token embedding."""

    def __init__(self, vocab_size: int, size: int, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.weight = nn.Parameter(torch.empty(vocab_size, size))

    def forward(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, D]."""
        return self.ops.embedding(token_ids, self.weight)


class Body(nn.Module):
    """Holds what Hugging Face keeps under the prefix `model`; `Decoder.forward` runs it."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, ops)
        self.layers = nn.ModuleList(Layer(config, ops, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)


class Decoder(nn.Module):
    """A causal language model.

    Weights are left uninitialised: load them (`loader.py`), or call `init_weights`. Build it under `torch.device("meta")`
    to allocate them later (`to_empty`).
    """

    def __init__(self, config: ModelConfig, ops: Ops, *, activation_checkpointing: Recompute = "none") -> None:
        """Build.

        Args:
            config: the architecture.
            ops: the numerics mode's operations.
            activation_checkpointing: what the backward pass computes again instead of keeping it; changes no bit of the forward.
        """
        super().__init__()
        self.config, self.ops = config, ops
        self.activation_checkpointing = activation_checkpointing
        self.rope_table = RopeTable(config.rope)
        self.model = Body(config, ops)
        self.lm_head = None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size, False, ops)

    @property
    def head_weight(self) -> Tensor:
        """[V, D]: the head's weight, the embedding's where they are tied."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        layout: AttentionLayout,
        kv_cache: KVCache | None = None,
        score: Score | None = None,
    ) -> Tensor | LogprobOutput:
        """Run the layers, and the head on the rows to score.

        Args:
            token_ids: [T] int64 or int32, packed in the layout's order.
            positions: [T] int64 absolute positions (`layout.positions`).
            layout: which rows each query sees: slots of the cache if one is given, else rows of this forward.
            kv_cache: receives this forward's keys and values at `layout.query_rows`; use it under `no_grad`.
            score: rows for the head, or None.

        Returns:
            Hidden states [T, D] after the final norm, or the LogprobOutput of `score`.
        """
        x = self.model.embed_tokens(token_ids)
        cos, sin = self.rope_table.rows(positions, x.dtype, num_positions=layout.num_positions)
        for i, layer in enumerate(self.model.layers):
            store = None if kv_cache is None else kv_cache.layers[i]
            if store is not None or not torch.is_grad_enabled():
                x = layer(x, cos, sin, layout, store)
            elif self.activation_checkpointing == "layer":
                x = checkpoint(layer, x, cos, sin, layout, store, use_reentrant=False)
            else:
                x = layer(x, cos, sin, layout, store, self.activation_checkpointing)
        x = self.model.norm(x)
        return x if score is None else self.logprobs(x[score.rows], score.targets, score.temperature)

    def score(
        self,
        token_ids: Tensor,
        positions: Tensor,
        layout: AttentionLayout,
        rows: Tensor,
        targets: Tensor,
        temperature: Tensor,
    ) -> LogprobOutput:
        """Log-probabilities of `targets` [R] at packed `rows` [R], in one forward: what a trainer calls under FSDP2.

        Args: as for `forward` and `Score`.
        """
        output = self(token_ids, positions, layout, None, Score(rows, targets, temperature))
        assert isinstance(output, LogprobOutput)
        return output

    def logprobs(
        self, hidden_RD: Tensor, targets: Tensor, temperature: Tensor, *, weight32_VD: Tensor | None = None
    ) -> LogprobOutput:
        """The head on hidden states [R, D]; under FSDP2 use `score`.

        Args:
            hidden_RD: rows of `forward`.
            targets: [R] token ids; temperature: [R] float32.
            weight32_VD: `head_weight.float()` computed beforehand, or None.
        """
        return self.ops.lm_logprob(hidden_RD, self.head_weight, targets, temperature, weight32_VD=weight32_VD)

    @torch.no_grad()
    def init_weights(self, seed: int = 0, std: float = 0.02) -> None:
        """Random weights: norms 1, biases 0, everything else normal, drawn in float32 in the order of `parameters`."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1)
            elif name.endswith(".bias"):
                parameter.zero_()
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
