"""`timzero submit RUN FILE.jsonl`: posts prompts from a file, for people whose rewards come from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
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
    """Every line is one item as `POST /v1/runs/{run}/prompts` takes it. Raises SubmitError."""
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
        raise SubmitError(f"{path} holds no prompt")
    return items


def submit(
    client: Client,
    run: str,
    items: Sequence[dict[str, Any]],
    *,
    gate_deadline_s: float,
    tell: Callable[[str], None],
) -> Submitted:
    """Posts prompts in order, waiting for the admission gate; one without a number gets its place as number.

    Args:
        items: as `read_items` gives them.
        gate_deadline_s: how long a batch may wait for the gate.
        tell: is told about every prompt that is refused.

    Raises: ApiError.
    """
    items = [{"number": n} | item for n, item in enumerate(items)]
    total = Submitted()
    for start in range(0, len(items), BATCH):
        batch = items[start : start + BATCH]
        for item, result in zip(batch, client.post_prompts(run, batch, gate_deadline_s=gate_deadline_s), strict=True):
            if result["status"] == 202:
                total.accepted += 1
            elif result["status"] == 200:
                total.repeated += 1
            else:
                total.refused += 1
                problem = result["problem"]
                fields = "".join(f"; {e['pointer']}: {e['detail']}" for e in problem.get("errors") or ())
                tell(f"prompt {item['number']}: {problem['code']}: {problem['detail']}{fields}")
    return total
