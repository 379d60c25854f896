"""How a run learns: advantage, loss, correction. What would silently do nothing, or count the same thing twice, is refused.

A loss sees two ratios: to the policy before the batch's update (proximal) and to the policy that sampled (rollout).
    mode            ratio in the loss        weight before the loss
    recompute       theta / proximal         none: the sampler is ignored, for ablations
    decoupled       theta / proximal         proximal / rollout, frozen over the batch
    bypass          theta / rollout          none; for `reinforce`, which has no ratio: theta / rollout, detached
    ratio_gradient  theta / rollout          none; loss -A r, whose gradient is -A r grad log theta
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

from shared.config import strict
from shared.wire.presets import PRESETS, Filter

__all__ = ["GROUP_ADVANTAGES", "PRESETS", "AlgorithmConfig", "Filter"]

GROUP_ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce_baseline", "maxrl")
"""Advantages that compare siblings."""

LOSS_MODES = {"reinforce": ("bypass", "ratio_gradient"), "topr": ("bypass",)}
"""reinforce has no ratio of its own, topr is defined on the one to the sampler; the others take any but ratio_gradient."""


@strict
@dataclass(frozen=True, kw_only=True, slots=True)
class AlgorithmConfig:
    """Advantage, loss and correction. Formulas and their sources are in the trainer's modules of the same names."""

    preset: str | None = None
    """Name in docs/corrections.md whose values these keys take; another value beside it is refused."""
    advantage: Literal[
        "grpo", "dr_grpo", "rloo", "maxrl", "reinforce_baseline", "reinforce_whitened", "reinforce_plus_plus"
    ] = "grpo"
    """grpo, dr_grpo, rloo, maxrl: against the siblings of the group. reinforce_whitened (REINFORCE++): against the batch.
    reinforce_baseline: siblings first, then the batch."""
    loss: Literal["ppo_clip", "reinforce", "gspo", "cispo", "dppo_tv", "dppo_kl", "sapo", "topr"] = "ppo_clip"
    """ppo_clip: the clipped ratio to the policy before this batch's update."""
    mode: Literal["recompute", "decoupled", "bypass", "ratio_gradient"] | None = None
    """Which ratio the loss sees and which the weight. None: bypass for reinforce and topr, else decoupled."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]; for dppo_* they bound the change of the probability."""
    dual_clip: float | None = None
    """Of ppo_clip: a token with negative advantage costs at most -A times this (3 is usual)."""
    sapo_tau: tuple[float, float] = (1.0, 1.05)
    """Temperatures of sapo's gate for positive and negative advantages."""
    aggregation: Literal[
        "token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"
    ] = "token_mean"
    """Every token weighs the same, or every trajectory does; the denominators are those of the whole optimizer step."""
    aggregation_length: int | None = None
    """Constant that seq_mean_token_sum_norm divides by: the longest completion possible."""
    entropy_coef: float = 0.0
    """Times the entropy at the sampling temperature, subtracted from the loss of every accepted token."""
    kl: Literal["none", "k1", "k2", "k3+"] = "none"
    """Penalty towards a reference policy: k1 in the reward of the trajectory, k2 or k3+ in the loss of each token."""
    kl_coef: float = 0.0
    """Times the penalty; with kl_target where it starts."""
    kl_reference: str | None = None
    """Hugging Face directory or hub name of the same architecture. None: version 0, the run's own model."""
    kl_cap: float = 2.0
    """Of k2 and k3+: the sampler drew their tokens, so each counts min(policy / sampler, cap)."""
    kl_target: float | None = None
    """After each step the coefficient is multiplied by 1 + clip(kl / target - 1, +-0.2) * trajectories / kl_horizon, with kl the
    mean penalty per token. None: it stays."""
    kl_horizon: int = 10_000
    """Trajectories over which an error of one would double the coefficient."""
    dynamic_sampling: bool = False
    """Train only on groups whose rewards are not all alike (DAPO); the batch stays as long as prompts_per_step says."""
    dynamic_groups: int = 0
    """Of the groups that dynamic_sampling leaves, the first so many by number, so prompts_per_step oversamples. 0: all."""
    overlong_buffer: int = 0
    """Tokens before overlong_limit over which the reward falls by overlong_factor. 0: no shaping."""
    overlong_limit: int = 0
    """Sampled tokens of a trajectory at which the whole overlong_factor is lost."""
    overlong_factor: float = 1.0
    mini_steps: int = 1
    """Optimizer steps per batch; the batch is cut into this many parts by group, in order."""
    weight: Literal["token", "sequence", "geometric", "segment"] = "token"
    """What one importance weight covers: a token; the product or geometric mean over a trajectory; that over a turn."""
    tis_cap: float | None = 2.0
    """Truncated importance sampling, w = min(r_corr, cap). None: no weight."""
    tis_floor: float = 0.0
    """Lower end of the weight."""
    outside: Literal["clamp", "mask"] = "clamp"
    """A ratio outside [tis_floor, tis_cap] becomes the nearer end, or 0 (IcePop, masked importance sampling)."""
    batch_normalize: bool = False
    """Divide the weights of a batch by their mean."""
    rejection: Literal["none", "seq_mean_k1", "seq_mean_k3", "seq_sum_k1", "seq_sum_k3"] = "none"
    """Statistic of the correction ratio that keeps a whole trajectory out of the loss: short for one entry of `filters`."""
    rejection_bounds: tuple[float, float] = (0.5, 2.0)
    """Ratio bounds (low, high) for k1; for k3 only the second is used, as an upper bound on the statistic."""
    filters: tuple[Filter, ...] = ()
    """What keeps tokens and trajectories out of the loss: [{on = "veto", low = 1e-4, high = 1e4}, ...]; all must be passed."""

    def __post_init__(self) -> None:
        if self.preset is not None:
            _take_preset(self)
        _check_numbers(self)
        _check_correction(self)
        _check_loss(self)
        _check_kl(self)

    @property
    def ratio_mode(self) -> str:
        """`mode`, or what the loss implies."""
        return self.mode or ("bypass" if self.loss in ("reinforce", "topr") else "decoupled")

    @property
    def all_filters(self) -> tuple[Filter, ...]:
        """`rejection` and `filters` as one list."""
        if self.rejection == "none":
            return self.filters
        low, high = self.rejection_bounds
        is_k1 = self.rejection.endswith("k1")
        return (Filter(on=self.rejection, low=low if is_k1 else None, high=high), *self.filters)

    @property
    def is_decided_before(self) -> bool:
        """Something needs the whole batch's logprobs before the first gradient."""
        return bool(self.all_filters) or self.batch_normalize or self.kl == "k1"

    def check_clip(self) -> None:
        """Raises ValueError where bounds were chosen that nothing in a run would look at."""
        defaults = {f.name: f.default for f in fields(self)}
        used = {"reinforce": (), "sapo": (), "topr": (), "cispo": ("clip_high",)}.get(
            self.loss, ("clip_low", "clip_high")
        )
        if self.loss == "ppo_clip" and self.mini_steps == 1 and self.ratio_mode in ("recompute", "decoupled"):
            used = ()
        for name in ("clip_low", "clip_high"):
            if name not in used and getattr(self, name) != defaults[name]:
                raise ValueError(
                    f"algorithm.{name} {getattr(self, name)} does nothing in loss {self.loss}, mode {self.ratio_mode}, with "
                    f"mini_steps {self.mini_steps}: no ratio there is clipped by it; leave it out, or set mini_steps above 1"
                )


def _take_preset(c: AlgorithmConfig) -> None:
    assert c.preset is not None
    if c.preset not in PRESETS:
        raise ValueError(f"algorithm.preset must be one of {', '.join(PRESETS)}; got {c.preset!r}")
    defaults = {f.name: f.default for f in fields(c)}
    for name, value in PRESETS[c.preset].items():
        if getattr(c, name) not in (defaults[name], value):
            raise ValueError(
                f"algorithm.preset {c.preset} sets {name} to {value}, got {getattr(c, name)}; leave out one of the two"
            )
        object.__setattr__(c, name, value)


def _check_numbers(c: AlgorithmConfig) -> None:
    for name, value, low in (("mini_steps", c.mini_steps, 1), ("clip_high", c.clip_high, 0.0),
                             ("entropy_coef", c.entropy_coef, 0.0), ("overlong_buffer", c.overlong_buffer, 0)):  # fmt: skip
        if not value >= low:
            raise ValueError(f"algorithm.{name} must be >= {low}, got {value}")
    if not 0.0 <= c.clip_low <= 1.0:
        raise ValueError(f"algorithm.clip_low must be in [0.0, 1.0], got {c.clip_low}")
    if c.tis_cap is not None and not c.tis_cap > 0:
        raise ValueError(f"algorithm.tis_cap must be above 0 or absent, got {c.tis_cap}")
    if not 0 <= c.tis_floor < (c.tis_cap or 1):
        raise ValueError(f"algorithm.tis_floor must be in [0, tis_cap), got {c.tis_floor}")
    if c.dual_clip is not None and not c.dual_clip > 1:
        raise ValueError(f"algorithm.dual_clip must be above 1 or absent, got {c.dual_clip}")
    if not min(c.sapo_tau) > 0:
        raise ValueError(f"algorithm.sapo_tau must be above 0, got {c.sapo_tau}")
    if c.rejection == "none" and c.rejection_bounds != (0.5, 2.0):
        raise ValueError(f"algorithm.rejection_bounds {c.rejection_bounds} do nothing without rejection; set it")
    low, high = c.rejection_bounds
    if not 0 < low <= 1 <= high and c.rejection.endswith("k1"):
        raise ValueError(f"algorithm.rejection_bounds must satisfy 0 < low <= 1 <= high, got {c.rejection_bounds}")
    if c.overlong_buffer and not (c.overlong_limit > c.overlong_buffer and c.overlong_factor > 0):
        raise ValueError(
            f"algorithm.overlong_buffer {c.overlong_buffer} needs overlong_limit above it and overlong_factor above 0, "
            f"got {c.overlong_limit} and {c.overlong_factor}"
        )
    if not c.overlong_buffer and (c.overlong_limit or c.overlong_factor != 1.0):
        raise ValueError("algorithm.overlong_limit and overlong_factor do nothing without overlong_buffer; set it")


def _check_correction(c: AlgorithmConfig) -> None:
    has_weight = c.tis_cap is not None
    if not has_weight and (c.weight != "token" or c.tis_floor or c.outside != "clamp" or c.batch_normalize):
        raise ValueError(
            "algorithm.weight, tis_floor, outside and batch_normalize do nothing without a weight; set tis_cap"
        )
    if c.outside == "mask" and not c.tis_floor and c.tis_cap == math.inf:
        raise ValueError("algorithm.outside mask has no bounds to mask outside of; set tis_floor or a finite tis_cap")
    if has_weight and c.ratio_mode == "recompute":
        raise ValueError("algorithm.mode recompute ignores the sampler and applies no weight; set tis_cap to none")
    if has_weight and (c.ratio_mode == "ratio_gradient" or (c.ratio_mode == "bypass" and c.loss != "reinforce")):
        raise ValueError(
            f"algorithm.loss {c.loss} with mode {c.ratio_mode} has the ratio to the sampler inside the loss, so a weight would "
            "count it twice; set tis_cap to none"
        )
    if c.batch_normalize and (c.ratio_mode != "decoupled" or c.weight not in ("token", "sequence")):
        raise ValueError(
            "algorithm.batch_normalize needs weights that are known before the update, mode decoupled, per token or sequence; "
            f"got mode {c.ratio_mode} and weight {c.weight}"
        )
    names = [f.on for f in c.all_filters]
    twice = {n for n in names if names.count(n) > 1}
    if twice:
        raise ValueError(f"algorithm.filters names {', '.join(sorted(twice))} more than once; keep the tighter bounds")


def _check_loss(c: AlgorithmConfig) -> None:
    modes = LOSS_MODES.get(c.loss, ("recompute", "decoupled", "bypass"))
    if c.ratio_mode not in modes:
        raise ValueError(f"algorithm.loss {c.loss} runs in mode {' or '.join(modes)}, got {c.ratio_mode}")
    is_one = c.ratio_mode in ("recompute", "decoupled") and c.mini_steps == 1
    if is_one and (c.loss != "ppo_clip" or c.dual_clip is not None):
        raise ValueError(
            f"algorithm.loss {c.loss} (dual_clip {c.dual_clip}) acts on the ratio to the policy before the batch, which is 1 "
            f"throughout a single optimizer step; set mode to bypass or mini_steps above 1"
        )
    if c.dual_clip is not None and c.loss != "ppo_clip":
        raise ValueError(f"algorithm.dual_clip belongs to ppo_clip and does nothing in {c.loss}; leave it out")
    if c.sapo_tau != (1.0, 1.05) and c.loss != "sapo":
        raise ValueError(f"algorithm.sapo_tau belongs to sapo and does nothing in {c.loss}; leave it out")
    if (c.aggregation == "seq_mean_token_sum_norm") != (c.aggregation_length is not None):
        raise ValueError(
            "algorithm.aggregation_length belongs to seq_mean_token_sum_norm, which needs it; "
            f"got {c.aggregation_length} with {c.aggregation}"
        )
    if c.aggregation_length is not None and c.aggregation_length < 1:
        raise ValueError(f"algorithm.aggregation_length must be >= 1, got {c.aggregation_length}")
    if c.dynamic_groups and not c.dynamic_sampling:
        raise ValueError(
            "algorithm.dynamic_groups does nothing without dynamic_sampling; set it, or lower prompts_per_step"
        )
    if c.dynamic_groups < 0:
        raise ValueError(f"algorithm.dynamic_groups must be >= 0, got {c.dynamic_groups}")


def _check_kl(c: AlgorithmConfig) -> None:
    if c.kl == "none":
        if (c.kl_coef, c.kl_reference, c.kl_cap, c.kl_target, c.kl_horizon) != (0.0, None, 2.0, None, 10_000):
            raise ValueError(
                "algorithm.kl_coef, kl_reference, kl_cap, kl_target and kl_horizon do nothing without kl; set it"
            )
        return
    if not 0 < c.kl_coef < math.inf:
        raise ValueError(f"algorithm.kl {c.kl} does nothing without a finite kl_coef above 0, got {c.kl_coef}")
    if c.kl == "k1" and c.kl_cap != 2.0:
        raise ValueError(
            "algorithm.kl_cap belongs to k2 and k3+; a k1 in the reward has no weight of its own; leave it out"
        )
    if not c.kl_cap > 0:
        raise ValueError(f"algorithm.kl_cap must be above 0, got {c.kl_cap}")
    if c.kl_target is None and c.kl_horizon != 10_000:
        raise ValueError("algorithm.kl_horizon does nothing without kl_target; set it")
    if (c.kl_target is not None and not c.kl_target > 0) or c.kl_horizon < 1:
        raise ValueError(
            f"algorithm.kl_target must be above 0 and kl_horizon at least 1, got {c.kl_target} and {c.kl_horizon}"
        )
