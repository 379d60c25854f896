"""The records of one JSON file, found by what they say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1] / "results"

Found = dict[str, Any]
"""A record as the file has it, see benchmarks.harness.Record."""


class Results:
    """What one run of one benchmark left behind; no records where there is no file."""

    def __init__(self, root: Path, name: str) -> None:
        """Args: name, of the file below `root` without its ending, such as `h200/engine`."""
        self.name, self.path = name, root / f"{name}.json"
        self.records: list[Found] = json.loads(self.path.read_text()) if self.path.exists() else []

    @property
    def where(self) -> str:
        """The machine, as the page calls it."""
        return self.name.split("/")[0].upper()

    def all(self, case: str | None, metric: str, mode: str | None = None, **params: Any) -> list[Found]:
        """In the file's order; None as a parameter's value asks for records without it."""
        return [
            r for r in self.records
            if case in (None, r["case"]) and r["metric"] == metric and mode in (None, r["mode"])
            and all(r["params"].get(key) == value for key, value in params.items())
        ]  # fmt: skip

    def first(self, case: str, metric: str, mode: str | None = "exact", **params: Any) -> Found:
        """Raises ValueError where there is none."""
        found = self.all(case, metric, mode, **params)
        if not found:
            raise ValueError(f"{self.path} has no record of {case} {metric} {mode} {params}: run its benchmark again")
        return found[0]

    def maybe(self, case: str, metric: str, mode: str | None = "exact", **params: Any) -> Found | None:
        found = self.all(case, metric, mode, **params)
        return found[0] if found else None

    def value(self, case: str, metric: str, mode: str | None = "exact", **params: Any) -> float:
        return float(self.first(case, metric, mode, **params)["value"])

    def has(self, case: str, metric: str, mode: str | None = "exact", **params: Any) -> bool:
        return bool(self.all(case, metric, mode, **params))

    def origin(self) -> tuple[str, str, str]:
        """(machine, versions, commit), each joined where records differ in it."""
        versions = (", ".join(f"{name} {v}" for name, v in r["versions"].items()) for r in self.records)
        columns = ((r["machine"] for r in self.records), versions, (r["commit"] for r in self.records))
        machine, version, commit = (" and ".join(dict.fromkeys(column)) for column in columns)
        return machine, version, commit


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def ratio(found: Found | None) -> float | None:
    return None if found is None else float(found["ratio"])


def percent(share: float) -> str:
    """With at least two digits that count."""
    return f"{100 * share:.1f} %" if share >= 0.01 else f"{100 * share:.2g} %"
