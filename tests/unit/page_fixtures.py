"""Folders of results for the page on performance, and the page's generator."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.page.results import ROOT as RESULTS
from tests.unit import kernel_records, page_records
from tests.unit.page_records import TWO_GPU


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    return runpy.run_path(str(RESULTS.parents[1] / "docs/generate_performance.py"))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A copy of the records, to be changed."""
    return Path(shutil.copytree(RESULTS, tmp_path / "results"))


@pytest.fixture(scope="session")
def kernel_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """h200/kernels.json as today's code writes it."""
    root = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as monkeypatch:
        page_records.write(root, "h200/kernels", kernel_records.make(monkeypatch))
    return root / "h200/kernels.json"


@pytest.fixture
def kernel_results(kernel_file: Path, tmp_path: Path) -> Path:
    """A folder with a copy of it, to be changed."""
    (tmp_path / "h200").mkdir()
    shutil.copy(kernel_file, tmp_path / "h200/kernels.json")
    return tmp_path


@pytest.fixture
def everything(results: Path, tmp_path: Path, kernel_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Results with every file that there is a section for."""
    shutil.copy(kernel_file, results / "h200/kernels.json")
    page_records.write(results, "h200/weight_sync", page_records.serving())
    page_records.write(results, "h200/overlap", page_records.overlapped())
    page_records.write(results, TWO_GPU[0], page_records.fsdp(tmp_path))
    page_records.write(results, TWO_GPU[1], page_records.serving(transport="broadcast"))
    page_records.write(results, TWO_GPU[2], page_records.main_job(monkeypatch))
    return results
