"""docs/performance.md says what the records say, good or bad."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.unit.page_records import change

pytest_plugins = ("tests.unit.page_fixtures",)
ROOT = Path(__file__).resolve().parents[2]


def test_the_page_its_plots_and_the_readme_are_up_to_date(page: dict[str, Any]) -> None:
    measured = page["read"]()
    assert (ROOT / "docs/performance.md").read_text() == page["document"](measured), "run `make docs`"
    assert (ROOT / "README.md").read_text() == page["readme"](measured), "run `make docs`"
    plots = page["plots"](measured)
    assert not [n for n, svg in plots.items() if (ROOT / f"docs/plots/{n}.svg").read_text() != svg], "run `make docs`"


def test_every_plot_is_on_the_page_and_well_formed(page: dict[str, Any]) -> None:
    text = (ROOT / "docs/performance.md").read_text()
    for name, svg in page["plots"](page["read"]()).items():
        assert f"(plots/{name}.svg)" in text
        assert ElementTree.fromstring(svg).tag.endswith("svg")


def test_another_speed_is_told_wherever_it_stands(page: dict[str, Any], results: Path) -> None:
    def is_meant(r: dict) -> bool:
        return (r["case"], r["metric"], r["mode"]) == ("uniform", "output_tokens_per_s", "exact")

    before = change(results, "h200/engine", is_meant, value=31_234.0)
    measured = page["read"](results)
    old = f"{before['value']:,.0f}"
    workloads = page["document"](measured).split("## The engine")[1]
    assert "31,234" in workloads
    assert old not in workloads
    assert "31,234" in page["headline"](measured)
    assert "31,234" in page["plots"](measured)["engine_output"]


def test_a_differing_token_is_told(page: dict[str, Any], results: Path) -> None:
    change(
        results, "h200/contract", lambda r: r["metric"] == "differing_tokens" and r["params"]["kind"] == "arm", value=3
    )
    measured = page["read"](results)
    assert "tokens, 3 differing**" in page["document"](measured)
    assert " 3 of 1," in " ".join(page["headline"](measured).split())


def test_a_missed_target_is_told(page: dict[str, Any], results: Path) -> None:
    def row() -> str:
        lines = page["document"](page["read"](results)).splitlines()
        return next(line for line in lines if line.startswith("| engine: uniform, exact / fast |"))

    assert row().endswith("| yes |")
    change(
        results,
        "h200/engine",
        lambda r: (r["case"], r["metric"]) == ("uniform", "exact_to_fast"),
        value=0.96,
        ratio=0.99,
    )
    assert row().endswith("| 0.960 | **no** |")


def test_a_missing_record_is_named(page: dict[str, Any], results: Path) -> None:
    change(
        results,
        "h200/trainer",
        lambda r: (r["mode"], r["metric"]) == ("transformers compiled", "tokens_per_s"),
        metric="x",
    )
    with pytest.raises(ValueError, match=r"trainer\.json has no record of step tokens_per_s transformers compiled"):
        page["document"](page["read"](results))
