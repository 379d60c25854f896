"""`timzero submit RUN FILE.jsonl`: posts from a file, for people whose rewards, or whose samples, come from elsewhere.

A line with `samples` is a group that another engine sampled; any other is a prompt.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timzero.client import Client

BATCH = 64


class SubmitError(ValueError):
    """The file can't be submitted; the text names the line."""


@dataclass
class Submitted:
    accepted: int = 0
    repeated: int = 0
    """Accepted before, with an equal body."""
    refused: int = 0


def read_items(path: Path) -> list[dict[str, Any]]:
    """Every line is one item of `POST /v1/runs/{run}/prompts` or, with `samples`, of `.../trajectories`. Raises SubmitError."""
    items = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SubmitError(f"cannot read {path}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except json.JSONDecodeError as error:
            raise SubmitError(f"{path}:{number}: not JSON ({error.msg} at column {error.colno})") from error
        if not isinstance(item, dict):
            raise SubmitError(f"{path}:{number}: expected a JSON object, got {line[:80]!r}")
        items.append(item)
    if not items:
        raise SubmitError(f"{path} holds no prompt and no group")
    return items


def submit(
    client: Client,
    run: str,
    items: Sequence[dict[str, Any]],
    *,
    gate_deadline_s: float,
    tell: Callable[[str], None],
) -> Submitted:
    """Posts items in order, waiting for the admission gate; one without a number gets its place as number.

    Args:
        items: as `read_items` gives them.
        gate_deadline_s: how long a batch may wait for the gate.
        tell: is told about every item that is refused.

    Raises: ApiError.
    """
    items = [{"number": n} | item for n, item in enumerate(items)]
    total = Submitted()
    for start in range(0, len(items), BATCH):
        for item, result in _post(client, run, items[start : start + BATCH], gate_deadline_s):
            if result["status"] == 202:
                total.accepted += 1
            elif result["status"] == 200:
                total.repeated += 1
            else:
                total.refused += 1
                problem = result["problem"]
                fields = "".join(f"; {e['pointer']}: {e['detail']}" for e in problem.get("errors") or ())
                kind = "group" if "samples" in item else "prompt"
                tell(f"{kind} {item['number']}: {problem['code']}: {problem['detail']}{fields}")
    return total


def _post(
    client: Client, run: str, items: Sequence[dict[str, Any]], gate_deadline_s: float
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Every item with its result."""
    for is_sampled, of_kind in itertools.groupby(items, key=lambda item: "samples" in item):
        part = list(of_kind)
        post = client.post_trajectories if is_sampled else client.post_prompts
        yield from zip(part, post(run, part, gate_deadline_s=gate_deadline_s), strict=True)
