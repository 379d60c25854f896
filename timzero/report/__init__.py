"""`timzero report`: one HTML file that says what a run did."""

from __future__ import annotations

from pathlib import Path

from timzero.report.data import ReportData, collect
from timzero.report.page import render

__all__ = ["ReportData", "collect", "render", "write"]


def write(data: ReportData, path: Path) -> Path:
    """Writes the page, and its data as JSON beside it, so that it can be drawn again without the services."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(data), encoding="utf-8")
    data.save(path.with_suffix(".json"))
    return path.resolve()
