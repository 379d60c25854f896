"""Writes docs/plots/*.svg from the trainer's own functions: weight or gradient against delta = trainer - sampler logprob."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from services.trainer.correction import importance_weights
from services.trainer.filters import accept, keep_tokens
from services.trainer.loss import policy_loss
from shared.wire.algorithm import AlgorithmConfig, Filter
from timzero.report import svg

TARGET = Path(__file__).with_name("plots")
WIDTHS = (7.0, 6.0, 5.0, 4.0, 3.0, 2.2, 1.4)
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7f7f7f", "#e69f00", "#56b4e9")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 800, 340, 56, 260, 34, 44
_text = partial(svg.text, color="#222")
_line = partial(svg.line, color="#ddd")
DELTA = torch.linspace(-2.5, 2.5, 501, dtype=torch.float64)

Series = Sequence[tuple[str, Tensor]]


def plot(title: str, x: Tensor, series: Series, y_range: tuple[float, float], jump: float = 0.08) -> str:
    """Lines over x, with a gap where y jumps by more than this share of the height; later ones are thinner and lie above."""
    low, high = y_range
    first, last = float(x[0]), float(x[-1])

    def px(value: float) -> float:
        return LEFT + (value - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def py(value: float) -> float:
        return TOP + (high - min(max(value, low), high)) / (high - low) * (HEIGHT - TOP - BOTTOM)

    out = [_text(LEFT, 20, title, size=14)]
    for i in range(6):
        value = first + (last - first) * i / 5
        out += [
            _line(px(value), py(low), px(value), py(high)),
            _text(px(value), py(low) + 16, f"{value:.3g}", "middle"),
        ]
    for i in range(5):
        value = low + (high - low) * i / 4
        out += [_line(px(first), py(value), px(last), py(value)), _text(LEFT - 6, py(value) + 4, f"{value:.3g}", "end")]
    out += [_text((px(first) + px(last)) / 2, HEIGHT - 8, "delta", "middle")]
    for width, ((_, y), color) in zip(WIDTHS, zip(series, COLORS, strict=False), strict=False):
        points = [(px(a), py(b)) for a, b in zip(x.tolist(), y.tolist(), strict=True)]
        out.append(_path(points, color, width, jump * (HEIGHT - TOP - BOTTOM)))
    return _svg(out, [name for name, _ in series])


def intervals(title: str, x: Tensor, rows: Series) -> str:
    """A bar over every x that is kept."""
    first, last = float(x[0]), float(x[-1])
    step = (HEIGHT - TOP - BOTTOM) / len(rows)

    def px(value: float) -> float:
        return LEFT + (value - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    out = [_text(LEFT, 20, title, size=14)]
    for i in range(6):
        value = first + (last - first) * i / 5
        out.append(_line(px(value), TOP, px(value), HEIGHT - BOTTOM))
        out.append(_text(px(value), HEIGHT - BOTTOM + 16, f"{value:.3g}", "middle"))
    out.append(_text((px(first) + px(last)) / 2, HEIGHT - 8, "delta", "middle"))
    width = (last - first) / (len(x) - 1)
    for index, ((name, keep), color) in enumerate(zip(rows, COLORS, strict=False)):
        middle = TOP + step * (index + 0.5)
        kept = x[keep.bool()].tolist()
        if kept:
            # Every keep region here is one interval.
            assert abs(len(kept) - 1 - (kept[-1] - kept[0]) / width) < 0.5, name
            box = f'x="{px(kept[0]):.1f}" y="{middle - 8:.1f}" width="{max(px(kept[-1]) - px(kept[0]), 2):.1f}" height="16"'
            out.append(f'<rect {box} fill="{color}"/>')
        out.append(_text(WIDTH - RIGHT + 12, middle + 4, name))
    return _svg(out, [])


def _svg(parts: list[str], legend: list[str]) -> str:
    for index, (name, color) in enumerate(zip(legend, COLORS, strict=False)):
        y = TOP + 14 + 22 * index
        parts.append(_path([(WIDTH - RIGHT + 12, y - 4), (WIDTH - RIGHT + 36, y - 4)], color, 3))
        parts.append(_text(WIDTH - RIGHT + 42, y, name))
    return svg.document(WIDTH, HEIGHT, parts)


def _path(points: list[tuple[float, float]], color: str, width: float, jump: float = math.inf) -> str:
    words = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for (_, before), (x, y) in pairwise(points):
        words.append(f"{'M' if abs(y - before) > jump else 'L'}{x:.1f} {y:.1f}")
    return f'<path d="{"".join(words)}" fill="none" stroke="{color}" stroke-width="{width}"/>'


def weight(config: AlgorithmConfig, length: int = 1, delta: Tensor = DELTA) -> Tensor:
    """Of a trajectory of `length` tokens that all have the same delta."""
    values = delta.repeat_interleave(length)
    sequence = torch.arange(len(delta)).repeat_interleave(length)
    return importance_weights(values, torch.zeros_like(values), sequence, sequence, config)[::length]


def gradient(config: AlgorithmConfig, advantage: float, delta: Tensor = DELTA, sampler: float = 0.2) -> Tensor:
    """What the gradient of a token's logprob is multiplied by, for a sampler that gave it the probability `sampler`."""
    rollout = torch.full_like(delta, math.log(sampler))
    logprob = (rollout + delta).requires_grad_()
    each = torch.arange(len(delta))
    loss = policy_loss(
        config,
        logprob_T=logprob,
        proximal_T=logprob.detach(),
        rollout_T=rollout,
        advantage_T=torch.full_like(delta, advantage),
        accepted_T=torch.ones_like(delta, dtype=torch.bool),
        scale_T=torch.ones_like(delta),
        sequence_T=each,
        segment_T=each,
    ).loss
    return -torch.autograd.grad(loss, logprob)[0]


def kept(rule: Filter, *, sampler: float = 0.25, advantage: float = 1.0, delta: Tensor = DELTA) -> Tensor:
    """[x] bool for one-token trajectories."""
    config, rollout = AlgorithmConfig(filters=(rule,)), torch.full_like(delta, math.log(sampler))
    each, n = torch.arange(len(delta)), len(delta)
    sign = torch.full_like(delta, advantage)
    tokens = keep_tokens(rollout + delta, rollout, sign, each, n, config)
    return accept(rollout + delta, rollout, each, n, config).accepted_N & tokens & (rollout + delta <= 0)


def token_weights() -> str:
    series = [
        ("token TIS, cap 2", weight(AlgorithmConfig())),
        ("clamp to [0.5, 1.5]", weight(AlgorithmConfig(tis_floor=0.5, tis_cap=1.5))),
        ("IcePop [0.5, 5]", weight(AlgorithmConfig(preset="decoupled_token_icepop"))),
    ]
    return plot("Token weights", DELTA, series, (0, 6))


def sequence_weights() -> str:
    x = torch.linspace(-0.1, 0.1, 401, dtype=torch.float64)
    config = AlgorithmConfig(weight="sequence")
    series = [(f"sequence, {n} token{'s' * (n > 1)}, cap 2", weight(config, n, x)) for n in (1, 10, 100, 1000)]
    masked = AlgorithmConfig(weight="sequence", tis_cap=1.5, outside="mask")
    series.append(("geometric and segment, any length", weight(AlgorithmConfig(weight="geometric"), 100, x)))
    series.append(("sequence, 10 tokens, mask above 1.5", weight(masked, 10, x)))
    return plot("Weights of trajectories whose tokens all have this delta", x, series, (0, 2.2), jump=0.6)


def ratio_filters() -> str:
    rows = [
        ("token_k1 0.5 to 2", kept(Filter(on="token_k1", low=0.5, high=2.0))),
        ("seq_mean_k1 0.8 to 1.25", kept(Filter(on="seq_mean_k1", low=0.8, high=1.25))),
        ("seq_mean_k2 0.1", kept(Filter(on="seq_mean_k2", high=0.1))),
        ("seq_mean_k3 0.1", kept(Filter(on="seq_mean_k3", high=0.1))),
        ("seq_mean_k3 0.01", kept(Filter(on="seq_mean_k3", high=0.01))),
        ("mult_prob_error 1.5", kept(Filter(on="mult_prob_error", high=1.5))),
    ]
    return intervals("Filters on the ratio: kept where there is a bar (sampler's probability 0.25)", DELTA, rows)


def probability_filters() -> str:
    rows = [
        (f"{rule.on} {rule.high:g}{sign}, sampler {q:g}", kept(rule, sampler=q, advantage=a))
        for q in (0.3, 0.001)
        for rule, a, sign in (
            (Filter(on="kpop", high=0.1), 1.0, ""),
            (Filter(on="dppo_tv", high=0.2), 1.0, ", A > 0"),
            (Filter(on="dppo_tv", high=0.2), -1.0, ", A < 0"),
        )
    ]
    return intervals("Filters on the probability: kept where there is a bar", DELTA, rows)


def losses(advantage: float) -> Callable[[], str]:
    def draw() -> str:
        bypass = {"mode": "bypass", "tis_cap": None}
        names = {
            "ppo_clip": AlgorithmConfig(**bypass),  # type: ignore[arg-type]
            "ppo_clip, dual_clip 3": AlgorithmConfig(dual_clip=3.0, **bypass),  # type: ignore[arg-type]
            "cispo": AlgorithmConfig(loss="cispo", **bypass),  # type: ignore[arg-type]
            "dppo_tv 0.15, sampler 0.2": AlgorithmConfig(loss="dppo_tv", clip_low=0.15, clip_high=0.15, **bypass),  # type: ignore[arg-type]
            "sapo": AlgorithmConfig(loss="sapo", **bypass),  # type: ignore[arg-type]
            "topr": AlgorithmConfig(loss="topr", **bypass),  # type: ignore[arg-type]
            "reinforce, cap 2": AlgorithmConfig(loss="reinforce"),
        }
        if advantage > 0:
            del names["ppo_clip, dual_clip 3"]
        x = torch.linspace(-2.4, 1.6, 401, dtype=torch.float64)
        title = f"Weight of a token's gradient in each loss, A = {advantage:+g}, bypass"
        return plot(title, x, [(n, gradient(c, advantage, x) * advantage) for n, c in names.items()], (0, 5))

    return draw


PLOTS: dict[str, Callable[[], str]] = {
    "token_weights": token_weights,
    "sequence_weights": sequence_weights,
    "ratio_filters": ratio_filters,
    "probability_filters": probability_filters,
    "losses_positive": losses(1.0),
    "losses_negative": losses(-1.0),
}

if __name__ == "__main__":
    TARGET.mkdir(exist_ok=True)
    for name, draw in PLOTS.items():
        (TARGET / f"{name}.svg").write_text(draw())
