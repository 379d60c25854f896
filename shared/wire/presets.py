"""What can be kept out of a loss, and the named algorithms: verl's and the recipes of the papers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from shared.config import strict

K1_FILTERS = ("token_k1", "seq_sum_k1", "seq_mean_k1", "seq_max_k1", "veto")
"""Those with bounds on the ratio; all others have an upper bound on their statistic."""


@strict
@dataclass(frozen=True, kw_only=True, slots=True)
class Filter:
    """One reason to keep a token or a whole trajectory out of the loss; formulas in the trainer's filters.py."""

    on: Literal[
        "token_k1", "token_k2", "token_k3",
        "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
        "seq_max_k1", "seq_max_k2", "seq_max_k3", "veto", "mult_prob_error",
        "kpop", "ipo", "dppo_tv", "dppo_kl", "opsm", "m2po",
    ]  # fmt: skip
    """Statistic. veto is seq_max_k1 by its usual name."""
    high: float
    """Upper bound: of the ratio for k1 and veto, of the statistic for the others."""
    low: float | None = None
    """Lower bound of the ratio for k1 and veto (required); for dppo_* the bound of negative advantages (default: high)."""

    def __post_init__(self) -> None:
        if self.on in K1_FILTERS:
            if self.low is None or not 0 < self.low <= 1 <= self.high:
                raise ValueError(
                    f"filter {self.on} bounds the ratio: give low and high with 0 < low <= 1 <= high, "
                    f"got {self.low} and {self.high}"
                )
        elif not self.high >= 0:
            raise ValueError(f"filter {self.on} needs high >= 0, got {self.high}")
        elif self.low is not None and not (self.on.startswith("dppo") and self.low >= 0):
            raise ValueError(f"filter {self.on} takes no such low bound, got {self.low}; leave it out")


def _rs(on: str, high: float, low: float | None = None) -> tuple[Filter, ...]:
    return (Filter(on=on, high=high, low=low),)  # type: ignore[arg-type]


_GEO, _K3 = _rs("seq_mean_k1", 1.001, 0.999), _rs("seq_mean_k3", 0.01)
_ICEPOP: dict[str, Any] = {"tis_floor": 0.5, "tis_cap": 5.0, "outside": "mask"}
_BYPASS: dict[str, Any] = {"mode": "bypass", "tis_cap": None}
_REINFORCE: dict[str, Any] = {"mode": "bypass", "loss": "reinforce"}

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "decoupled_token_is": {"mode": "decoupled"},
    "decoupled_seq_is": {"mode": "decoupled", "weight": "sequence"},
    "decoupled_token_icepop": {"mode": "decoupled", **_ICEPOP},
    "decoupled_seq_is_rs": {"mode": "decoupled", "weight": "sequence", "filters": _rs("seq_sum_k1", 2.0, 0.5)},
    "decoupled_geo_rs": {"mode": "decoupled", "tis_cap": None, "filters": _GEO},
    "decoupled_geo_rs_seq_tis": {"mode": "decoupled", "weight": "sequence", "filters": _GEO},
    "decoupled_geo_rs_token_tis": {"mode": "decoupled", "filters": _GEO},
    "decoupled_k3_rs": {"mode": "decoupled", "tis_cap": None, "filters": _K3},
    "decoupled_k3_rs_seq_tis": {"mode": "decoupled", "weight": "sequence", "filters": _K3},
    "decoupled_k3_rs_token_tis": {"mode": "decoupled", "filters": _K3},
    "bypass_ppo_clip": _BYPASS,
    "bypass_ppo_clip_geo_rs": {**_BYPASS, "filters": _GEO},
    "bypass_ppo_clip_k3_rs": {**_BYPASS, "filters": _K3},
    "bypass_pg_is": {**_REINFORCE, "weight": "sequence"},
    "bypass_pg_token_icepop": {**_REINFORCE, **_ICEPOP},
    "bypass_pg_geo_rs": {**_REINFORCE, "tis_cap": None, "filters": _GEO},
    "bypass_pg_geo_rs_seq_tis": {**_REINFORCE, "weight": "sequence", "filters": _GEO},
    "bypass_pg_geo_rs_token_tis": {**_REINFORCE, "filters": _GEO},
    "disabled": {"mode": "recompute", "tis_cap": None},
    "dapo": {"aggregation": "token_mean", "clip_low": 0.2, "clip_high": 0.28, "dynamic_sampling": True},
    "dr_grpo": {"advantage": "dr_grpo", "aggregation": "seq_mean_token_sum_norm"},
    "gspo": {"loss": "gspo", "mode": "bypass", "tis_cap": None, "clip_low": 3e-4, "clip_high": 4e-4,
             "aggregation": "seq_mean_token_mean"},
    "prime_rl": {"loss": "reinforce", "mode": "ratio_gradient", "tis_cap": None, "filters": _rs("dppo_tv", 0.2, 0.2)},
})  # fmt: skip
"""verl's names with verl's numbers, except that bounds on k1 act on the ratio, as its documentation says; then four recipes."""
