"""Colours and chart settings that all charts share, and a chart as inline SVG."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl

mpl.use("svg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

INK, MUTED, GRID = "#1d2733", "#6b7785", "#e4e8ed"
BLUE, TEAL, AMBER, RED, VIOLET, GREY = "#2563eb", "#0d9488", "#d97706", "#dc2626", "#7c3aed", "#94a3b8"
PHASES = {"lease": "#e2e8f0", "score": "#5eead4", "train": TEAL, "publish": AMBER, "checkpoint": VIOLET}
"""Trainer phases; `lease` is waiting for a batch."""

_RC: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "lines.markersize": 3.5,
}


@contextmanager
def _settings(name: str) -> Any:
    with mpl.rc_context(_RC | {"svg.hashsalt": name}):
        yield


def svg(name: str, draw: Callable[[Axes], None], *, size: tuple[float, float] = (5.6, 2.7)) -> str:
    """Draws one chart and returns it as an `<svg>` element without anything that a page would fetch.

    Args:
        name: unique on the page; element ids derive from it.
        draw: draws into the axes.
        size: inches.
    """
    with _settings(name):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" class="chart" role="img">', text, count=1)
    # The element ids that matplotlib counts up are the same in every chart.
    text = re.sub(r'\bid="([a-z]+[\w.]*_\d+)"', rf'id="{name}-\1"', text)
    return text.replace("xlink:href", "href")


def integer_steps(axes: Axes) -> None:
    """Steps on the x axis, as whole numbers."""
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
