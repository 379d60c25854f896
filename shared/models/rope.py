"""Inverse frequencies of the rotary embedding's variants, and the table rows of a forward.

Formulas and rounding follow transformers' modeling_rope_utils.py (float32 throughout).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shared.kernels.rope import rope_table

_PARAMETERS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
}
_REQUIRED = {
    "linear": {"factor"},
    "llama3": _PARAMETERS["llama3"],
    "yarn": {"factor"},
}


@dataclass(frozen=True, kw_only=True)
class Rope:
    """A rotary embedding: its variant, base and the variant's parameters."""

    head_dim: int
    theta: float = 10000.0
    variant: str = "default"
    """default, linear, llama3 or yarn."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """The variant's parameters under Hugging Face's names."""

    def __post_init__(self) -> None:
        if self.variant not in _PARAMETERS:
            raise ValueError(f"RoPE variant {self.variant!r} is not supported; use one of {', '.join(_PARAMETERS)}")
        missing = _REQUIRED.get(self.variant, set()) - self.parameters.keys()
        unknown = self.parameters.keys() - _PARAMETERS[self.variant]
        if missing or unknown:
            raise ValueError(
                f"RoPE variant {self.variant!r} got parameters {dict(self.parameters)}; "
                f"missing: {sorted(missing)}, unknown: {sorted(unknown)}; fix rope_parameters in the model's config.json"
            )

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], head_dim: int) -> "Rope":
        """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4).

        Raises:
            ValueError: an unknown variant, a partial rotation, or parameters that do not fit.
        """
        given = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
        variant = given.pop("rope_type", None) or given.pop("type", None) or "default"
        given.pop("type", None)
        theta = given.pop("rope_theta", None) or hf.get("rope_theta") or 10000.0
        if given.pop("partial_rotary_factor", None) not in (None, 1.0) or hf.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError("a partial rotary embedding is not supported; use a model that rotates whole heads")
        if variant == "yarn":
            given.setdefault("original_max_position_embeddings", hf["max_position_embeddings"])
        if variant == "default":
            given = {}
        return cls(head_dim=head_dim, theta=theta, variant=variant, parameters=given)

    def to_hf(self) -> dict[str, Any]:
        """The keys of a config.json, in the form that transformers 4 and 5 both read."""
        scaling = None if self.variant == "default" else {"rope_type": self.variant, **self.parameters}
        return {"rope_theta": self.theta, "rope_scaling": scaling}

    def inverse_frequencies(self) -> tuple[Tensor, float]:
        """Inverse frequencies [D / 2] float32 and the factor on cos and sin."""
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float) / self.head_dim
        inv_freq = 1.0 / (self.theta**exponent)
        if self.variant == "linear":
            return inv_freq / self.parameters["factor"], 1.0
        if self.variant == "llama3":
            return self._llama3(inv_freq), 1.0
        if self.variant == "yarn":
            return self._yarn(self.theta**exponent)
        return inv_freq, 1.0

    def _llama3(self, inv_freq: Tensor) -> Tensor:
        p = self.parameters
        low_wavelength = p["original_max_position_embeddings"] / p["low_freq_factor"]
        high_wavelength = p["original_max_position_embeddings"] / p["high_freq_factor"]
        wavelength = 2 * math.pi / inv_freq
        slowed = torch.where(wavelength > low_wavelength, inv_freq / p["factor"], inv_freq)
        smooth = (p["original_max_position_embeddings"] / wavelength - p["low_freq_factor"]) / (
            p["high_freq_factor"] - p["low_freq_factor"]
        )
        smoothed = (1 - smooth) * slowed / p["factor"] + smooth * slowed
        is_medium = ~(wavelength < high_wavelength) & ~(wavelength > low_wavelength)
        return torch.where(is_medium, smoothed, slowed)

    def _yarn(self, frequencies: Tensor) -> tuple[Tensor, float]:
        p = self.parameters
        factor = p["factor"]

        def mscale(weight: float = 1) -> float:
            return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

        def dimension(rotations: float) -> float:
            length = p["original_max_position_embeddings"] / (rotations * 2 * math.pi)
            return self.head_dim * math.log(length) / (2 * math.log(self.theta))

        low, high = dimension(p.get("beta_fast") or 32), dimension(p.get("beta_slow") or 1)
        if p.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.head_dim - 1)
        high = high + 0.001 if low == high else high
        ramp = ((torch.arange(self.head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        keep = 1 - ramp
        inv_freq = 1.0 / (factor * frequencies) * (1 - keep) + 1.0 / frequencies * keep

        scaling = p.get("attention_factor")
        if scaling is None and p.get("mscale") and p.get("mscale_all_dim"):
            scaling = mscale(p["mscale"]) / mscale(p["mscale_all_dim"])
        return inv_freq, mscale() if scaling is None else scaling


class RopeTable:
    """Cosines and sines by position, grown on demand; not a buffer, so that no cast, shard or meta device reaches it."""

    def __init__(self, rope: Rope) -> None:
        self.rope = rope
        self._cos = self._sin = torch.empty(0)

    def rows(
        self, positions_T: Tensor, dtype: torch.dtype, *, num_positions: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """cos and sin [T, D / 2] of the positions, computed in float32 and rounded to dtype.

        Args:
            positions_T: [T] int64.
            num_positions: that they lie below, where the caller knows it; otherwise a device is asked and waited for.
        """
        if num_positions is None:
            num_positions = int(positions_T.max()) + 1 if positions_T.numel() else 1
        if self._cos.shape[0] < num_positions or self._cos.device != positions_T.device:
            inv_freq, scaling = self.rope.inverse_frequencies()
            size = max(1 << (num_positions - 1).bit_length(), 256)
            self._cos, self._sin = rope_table(inv_freq.to(positions_T.device), size, scaling)
        return self._cos[positions_T].to(dtype), self._sin[positions_T].to(dtype)
