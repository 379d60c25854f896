"""What was to be reached, what was measured, and whether it was reached."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchmarks.page.results import Found, table

NOT_MEASURED = "not measured"


class Goal(NamedTuple):
    """A row of the table of targets."""

    what: str
    limit: str
    measured: str
    is_met: bool | None
    """None: there is no record of it."""


def at_least(what: str, least: float, value: float | None, unit: str = "", *, digits: int = 3) -> Goal:
    return _goal(what, f"at least {least:g}", value, unit, digits, value is not None and value >= least)


def at_most(what: str, most: float, value: float | None, unit: str = "", *, digits: int = 3) -> Goal:
    return _goal(what, f"at most {most:g}", value, unit, digits, value is not None and value <= most)


def none_differ(what: str, found: Sequence[Found], of: str) -> Goal:
    """Args: found, counts of what differs; of, among what."""
    if not found:
        return Goal(what, "0", NOT_MEASURED, None)
    differing = sum(f["value"] for f in found)
    return Goal(what, "0", f"{differing:,.0f} in {of}", differing == 0)


def _goal(what: str, limit: str, value: float | None, unit: str, digits: int, is_met: bool) -> Goal:
    limit = f"{limit} {unit}".rstrip()
    if value is None:
        return Goal(what, limit, NOT_MEASURED, None)
    return Goal(what, limit, f"{value:.{digits}f} {unit}".rstrip(), is_met)


def goals_table(goals: Iterable[Goal]) -> str:
    words = {True: "yes", False: "**no**", None: "-"}
    return table(["", "target", "measured", "met"], [[g.what, g.limit, g.measured, words[g.is_met]] for g in goals])
