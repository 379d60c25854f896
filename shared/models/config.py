"""The architecture of a dense decoder, read from a Hugging Face config and written back to one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.models.rope import Rope

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Everything that decides what the decoder computes."""

    family: str
    """A key of FAMILIES."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rope: Rope
    rms_norm_eps: float = 1e-6
    qkv_bias: bool = False
    """Bias on the query, key and value projections."""
    output_bias: bool = False
    """Bias on the attention's output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm on each query and key head, before the rotary embedding."""
    tie_word_embeddings: bool = False
    """The head uses the embedding's weight."""
    sliding_window: int | None = None
    """Positions that a token of a sliding layer sees, itself included."""
    sliding_layers: tuple[int, ...] = ()
    """Indices of the layers that slide."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Any of these ends a sequence."""

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"unknown model family {self.family!r}; use one of {', '.join(FAMILIES)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}; fix the config"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for the rotary embedding, got {self.head_dim}; fix the config")

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer, None where it sees everything."""
        return self.sliding_window if layer in self.sliding_layers else None

    @property
    def window_in_use(self) -> int | None:
        """The sliding window, None where no layer has it."""
        return self.sliding_window if self.sliding_layers else None

    @property
    def linear_shapes(self) -> tuple[tuple[int, int], ...]:
        """(K, N) of the projections, the hidden size first, and a slice of the head, for `self_check`."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        d, i = self.hidden_size, self.intermediate_size
        return ((d, q), (d, kv), (q, d), (d, i), (i, d), (d, min(self.vocab_size, 4096 + self.vocab_size % 64)))

    @property
    def heads(self) -> tuple[int, int, int]:
        """(H, Hkv, D), for `self_check`."""
        return self.num_heads, self.num_kv_heads, self.head_dim

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "ModelConfig":
        """From the content of a config.json, of transformers 4 or 5.

        Raises:
            ValueError: an architecture, activation or RoPE variant that the decoder does not compute.
        """
        family = hf.get("model_type")
        if family not in FAMILIES:
            raise ValueError(
                f"model_type {family!r} (architectures {hf.get('architectures')}) is not supported; "
                f"use a model of {', '.join(FAMILIES)}"
            )
        if hf.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act {hf['hidden_act']!r} is not supported; use a model with 'silu'")
        if hf.get("quantization_config"):
            raise ValueError("the weights are quantized; use the unquantized model")
        attention_bias = family == "qwen2" or (family in ("llama", "qwen3") and bool(hf.get("attention_bias")))
        num_layers, num_heads = hf["num_hidden_layers"], hf["num_attention_heads"]
        head_dim = hf.get("head_dim") or hf["hidden_size"] // num_heads
        window, sliding_layers = _sliding(family, hf, num_layers)
        return cls(
            family=family,
            vocab_size=hf["vocab_size"],
            hidden_size=hf["hidden_size"],
            intermediate_size=hf["intermediate_size"],
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=hf.get("num_key_value_heads") or num_heads,
            head_dim=head_dim,
            max_position_embeddings=hf["max_position_embeddings"],
            rope=Rope.from_hf(hf, head_dim),
            rms_norm_eps=hf.get("rms_norm_eps", 1e-6),
            qkv_bias=attention_bias,
            output_bias=attention_bias and family != "qwen2",
            mlp_bias=family == "llama" and bool(hf.get("mlp_bias")),
            qk_norm=family == "qwen3",
            tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
            sliding_window=window,
            sliding_layers=sliding_layers,
            bos_token_id=hf.get("bos_token_id"),
            eos_token_ids=token_ids(hf.get("eos_token_id")),
        )

    def to_hf(self) -> dict[str, Any]:
        """The content of a config.json that transformers 4 and 5 both read."""
        eos = list(self.eos_token_ids)
        hf: dict[str, Any] = {
            "architectures": [FAMILIES[self.family]],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
            **self.rope.to_hf(),
        }
        if self.family in ("llama", "qwen3"):
            hf["attention_bias"] = self.qkv_bias
        if self.family == "llama":
            hf["mlp_bias"] = self.mlp_bias
        if self.family == "mistral":
            hf["sliding_window"] = self.sliding_window
        if self.family in ("qwen2", "qwen3"):
            hf["use_sliding_window"] = bool(self.sliding_layers)
            hf["sliding_window"] = self.sliding_window
            hf["max_window_layers"] = min(self.sliding_layers, default=self.num_layers)
            hf["layer_types"] = [
                "sliding_attention" if i in self.sliding_layers else "full_attention" for i in range(self.num_layers)
            ]
        return hf


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """A config's token id, list of ids or nothing, as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _sliding(family: str, hf: Mapping[str, Any], num_layers: int) -> tuple[int | None, tuple[int, ...]]:
    window = hf.get("sliding_window")
    if family == "llama" or window is None or (family != "mistral" and not hf.get("use_sliding_window")):
        return None, ()
    if family == "mistral":
        return window, tuple(range(num_layers))
    types = hf.get("layer_types")
    if types is None:
        return window, tuple(range(hf.get("max_window_layers", 28), num_layers))
    return window, tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")
