"""Where `timzero report RUN` takes its data from, and where the page goes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from timzero.connect import connect
from timzero.report import ReportData, collect, write

REPORT_FILE = "report.html"


def make(run: str, out: Path | None, url: str, api_key: str | None) -> Path:
    """Args:
        run: a run's name, asked of the gateway; or a report's JSON file, or the directory that holds it.
        out: the HTML file; default: beside the JSON file, or runs/RUN/report.html.

    Raises: ApiError, httpx.TransportError, ValueError.
    """
    path = Path(run)
    kept = path if path.suffix == ".json" else path / Path(REPORT_FILE).with_suffix(".json")
    if kept.is_file():
        return write(ReportData.load(kept), out or kept.with_suffix(".html"))
    target = out or Path("runs") / run / REPORT_FILE
    with connect(url, api_key) as client:
        data = collect(client, run)
    return write(_with_evaluations(data, target.with_suffix(".json")), target)


def _with_evaluations(data: ReportData, kept: Path) -> ReportData:
    """Only the driver can grade an evaluation: what it kept beside an earlier report of this run is taken over."""
    if not kept.is_file():
        return data
    earlier = ReportData.load(kept)
    is_same = (earlier.run["run"], earlier.run["created"]) == (data.run["run"], data.run["created"])
    return replace(data, evaluations=earlier.evaluations) if is_same else data
