"""Bars and points as SVG files, in the colours of the reports. Drawn by hand: the same bytes whatever matplotlib is installed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from timzero.report import svg
from timzero.report.style import AMBER, BLUE, GREY, GRID, INK, MUTED, TEAL, VIOLET

WIDTH, LEFT, RIGHT, TITLE = 800, 150, 70, 28
ROW, BAR, LEGEND, AXIS = 46, 30, 24, 42
LETTER = 6.4
"""Pixels of a letter, about."""
COLORS = (BLUE, TEAL, AMBER, VIOLET, GREY, "#5eead4", "#93b4f5", "#e2e8f0")
MODES = {"plain": GREY, "exact": TEAL}
DARK = {BLUE, TEAL, AMBER, VIOLET}


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    x: float
    y: float
    label: str


def bars(
    title: str,
    rows: Sequence[tuple[str, str, float, str]],
    *,
    floor: float | None = None,
    unit: str = "tokens / s",
    digits: int = 0,
    colors: Mapping[str, str] = MODES,
    marks: Mapping[str, float] = MappingProxyType({}),
) -> str:
    """One horizontal bar each of (name, one of `colors`, value, remark), names written once where they repeat.

    Args:
        floor: marked by a dashed line: nothing on this machine could be faster.
        marks: dashed lines across the bars of a name.
    """
    high = max([value for _, _, value, _ in rows] + [floor or 0.0])
    top, step = TITLE + LEGEND, 26
    bottom = top + step * len(rows) + 6
    scale = (WIDTH - LEFT - RIGHT) / high
    out = [*_legend(colors), *_grid(high, scale, top, bottom, unit)]
    before = ""
    for index, (name, mode, value, remark) in enumerate(rows):
        y = top + step * index + 4
        out.append(f'<rect x="{LEFT}" y="{y}" width="{value * scale:.1f}" height="18" fill="{colors[mode]}"/>')
        x, number = LEFT + max(value, marks.get(name, 0.0)) * scale + 6, f"{value:,.{digits}f}"
        out += [_text(x, y + 14, number), _text(x + 7.5 * len(number) + 6, y + 14, remark, color=MUTED)]
        if name != before:
            out.append(_text(LEFT - 8, y + 14, name, "end"))
        if name in marks:
            out.append(_dashed(LEFT + marks[name] * scale, y - 2, step))
        before = name
    if floor is not None:
        x = LEFT + floor * scale
        out.append(f'<path d="M{x:.1f} {top}V{bottom}" stroke="{INK}" stroke-dasharray="4 3"/>')
        out.append(_text(x, top - 6, f"floor {floor:,.0f}", "end"))
    return _svg(title, bottom + AXIS, out)


def stacked(
    title: str,
    unit: str,
    rows: Sequence[tuple[str, Mapping[str, float]]],
    *,
    digits: int,
    marks: Mapping[str, float] = MappingProxyType({}),
) -> str:
    """A bar of parts for each row; a part's value is written where there is room, the sum behind it.

    Args:
        marks: dashed lines across the bars of a row.
    """
    names = list(dict.fromkeys(name for _, parts in rows for name in parts))
    colors = dict(zip(names, COLORS, strict=False))
    high = max(sum(parts.values()) for _, parts in rows)
    legend = _legend(colors)
    top = TITLE + LEGEND * (1 + _lines(names))
    bottom, scale = top + ROW * len(rows), (WIDTH - LEFT - RIGHT) / high
    out = [*legend, *_grid(high, scale, top, bottom, unit)]
    for index, (row, parts) in enumerate(rows):
        x, y = float(LEFT), top + ROW * index + (ROW - BAR) / 2
        out.append(_text(LEFT - 8, y + 20, row, "end"))
        for name, value in parts.items():
            width, text = value * scale, f"{value:.{digits}f}"
            out.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BAR}" fill="{colors[name]}"/>')
            if width > LETTER * len(text) + 4:
                ink = "white" if colors[name] in DARK else INK
                out.append(_text(x + width / 2, y + 20, text, "middle", color=ink))
            x += width
        out.append(_text(x + 6, y + 20, f"{sum(parts.values()):.{digits}f}"))
        if row in marks:
            out.append(_dashed(LEFT + marks[row] * scale, y - 4, BAR + 8))
    return _svg(title, bottom + AXIS, out)


def points(
    title: str,
    axes: tuple[str, str],
    series: Mapping[str, Sequence[Point]],
    *,
    low: float = 0.0,
    doublings: Sequence[float] = (),
    limits: Sequence[tuple[float, float, float]] = (),
) -> str:
    """Points of several series; three and more are joined. x begins at 0, y at `low`.

    Args:
        doublings: values of x that are written, evenly apart, each twice the one before; none: x is linear.
        limits: dashed lines, (x from, x to, y).
    """
    every = [p for found in series.values() for p in found]
    high_x, high_y = (1.06 * max(getattr(p, axis) for p in every) for axis in "xy")
    left, top, bottom = 70, TITLE + LEGEND * (1 + _lines(list(series))) + 22, 380
    scale_y = (bottom - top) / (high_y - low)
    written = doublings or _ticks(high_x)
    colors = dict(zip(series, COLORS, strict=False))

    def across(x: float) -> float:
        if doublings:
            share = 0.02 + 0.96 * math.log(x / doublings[0]) / math.log(doublings[-1] / doublings[0])
            return left + share * (WIDTH - left - 30)
        return left + x * ((WIDTH - left - 30) / high_x)

    out = _legend(colors)
    for value in written:
        out += [
            _line(across(value), top, across(value), bottom),
            _text(across(value), bottom + 16, f"{value:,g}", "middle", color=MUTED),
        ]
    for value in (low + tick for tick in _ticks(high_y - low)):
        y = bottom - (value - low) * scale_y
        out += [_line(left, y, WIDTH - 30, y), _text(left - 6, y + 4, f"{value:,g}", "end", color=MUTED)]
    out.append(_text((left + WIDTH - 30) / 2, bottom + 34, axes[0], "middle", color=MUTED))
    out.append(_text(20, top - 8, axes[1], color=MUTED))
    for begin, end, value in limits:
        y, x, to = bottom - (value - low) * scale_y, across(begin), across(end)
        out.append(f'<path d="M{x:.1f} {y:.1f}H{to:.1f}" stroke="{INK}" stroke-dasharray="4 3"/>')
    for name, found in series.items():
        places = [(across(p.x), bottom - (p.y - low) * scale_y) for p in found]
        if len(found) > 2:
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
            out.append(f'<path d="M{path}" fill="none" stroke="{colors[name]}" stroke-opacity="0.3"/>')
        for point, (x, y) in zip(found, places, strict=True):
            out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colors[name]}"/>')
            if point.label:
                out.append(_text(x, y + 20, point.label, "middle"))
    return _svg(title, bottom + AXIS, out)


def _dashed(x: float, y: float, height: float) -> str:
    return f'<path d="M{x:.1f} {y:.1f}v{height}" stroke="{INK}" stroke-dasharray="4 3"/>'


def _ticks(high: float) -> list[float]:
    """About five round numbers from 0 on."""
    size = 10.0 ** math.floor(math.log10(high / 4))
    step = next(size * n for n in (1, 2, 5, 10) if high / (size * n) <= 6)
    return [step * i for i in range(int(high / step) + 1)]


def _grid(high: float, scale: float, top: float, bottom: float, unit: str) -> list[str]:
    out = []
    for value in _ticks(high):
        x = LEFT + value * scale
        out += [_line(x, top, x, bottom), _text(x, bottom + 16, f"{value:,g}", "middle", color=MUTED)]
    return [*out, _text((LEFT + WIDTH - RIGHT) / 2, bottom + 34, unit, "middle", color=MUTED)]


def _places(names: Sequence[str]) -> list[tuple[float, int]]:
    """(x, line) of each entry of a legend."""
    found: list[tuple[float, int]] = []
    x, line = 20.0, 0
    for name in names:
        width = 30 + LETTER * len(name) + 10
        if x + width > WIDTH and found:
            x, line = 20.0, line + 1
        found.append((x, line))
        x += width
    return found


def _lines(names: Sequence[str]) -> int:
    """Of the legend, beyond the first."""
    return _places(names)[-1][1]


def _legend(colors: Mapping[str, str]) -> list[str]:
    out = []
    for (name, color), (x, line) in zip(colors.items(), _places(list(colors)), strict=True):
        y = TITLE + LEGEND * line + 6
        out.append(f'<rect x="{x:.1f}" y="{y}" width="12" height="12" fill="{color}"/>')
        out.append(_text(x + 18, y + 10, name))
    return out


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    return svg.document(WIDTH, height, [_text(20, 18, title, size=14), *parts])


_text = partial(svg.text, color=INK)
_line = partial(svg.line, color=GRID)
