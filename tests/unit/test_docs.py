"""The documentation agrees with the code, and leads nowhere that does not exist."""

from __future__ import annotations

import re
import runpy
import subprocess
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from shared.wire.algorithm import PRESETS, Filter
from tests.deadline import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(p for p in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")))


def test_the_configuration_page_is_up_to_date() -> None:
    document = runpy.run_path(str(ROOT / "docs/generate_configuration.py"))["document"]
    assert (ROOT / "docs/configuration.md").read_text() == document(), "run `make docs`"


def test_the_plots_of_the_corrections_are_up_to_date() -> None:
    plots = runpy.run_path(str(ROOT / "docs/generate_correction_plots.py"))["PLOTS"]
    stale = [name for name, draw in plots.items() if (ROOT / f"docs/plots/{name}.svg").read_text() != draw()]
    assert not stale, "run `make docs`"


def test_the_page_of_the_corrections_names_every_preset_and_filter() -> None:
    text = (ROOT / "docs/corrections.md").read_text()
    assert not [name for name in PRESETS if f"`{name}`" not in text]
    special = [n for n in get_args(get_type_hints(Filter)["on"]) if not n.startswith(("token", "seq"))]
    assert not [name for name in special if f"`{name}`" not in text and f"`{name.split('_')[0]}_*`" not in text]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_a_page_links_to_files_that_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_a_page_names_files_and_make_targets_that_exist(page: Path) -> None:
    text = page.read_text()
    paths = re.findall(r"`((?:shared|services|timzero|deploy|tests|docs|protos|configs|benchmarks)/[\w./-]+)`", text)
    missing = [path for path in paths if not (ROOT / path).exists()]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    missing += [f"make {target}" for target in re.findall(r"`make ([a-z-]+)", text) if target not in targets]
    assert not missing


def test_the_readme_names_six_files_to_read_first() -> None:
    text = (ROOT / "README.md").read_text()
    section = text.split("## Six files to read first")[1].split("\n## ")[0]
    assert len(re.findall(r"^\d\. \[", section, flags=re.MULTILINE)) == 6


def test_nothing_tracked_names_a_path_of_one_machine() -> None:
    # Spelt in pieces, or this file would be found.
    machine = "|".join(["/" + "work/", "/" + "root/"])
    done = subprocess.run(
        ["git", "grep", "-nIE", machine, "--", ".", ":!LICENSE"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 1, done.stdout + done.stderr
