"""`timzero watch RUN`: where the run is, live, from its events and steps."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from shared.wire.run import RunState
from timzero.client import Client
from timzero.display import step_line
from timzero.steps import StepSummary, by_step

SHOWN_STEPS = 12
REFRESH_S = 1.0
"""Shortest time between two looks at the counts; they change with every event."""


def watch(client: Client, run: str, console: Console) -> int:
    """Shows the run until it is over, or ctrl-C. Returns the exit code: 1 for a run that failed."""
    wake: queue.Queue[str] = queue.Queue()
    stopping = threading.Event()
    threading.Thread(target=_listen, args=(client, run, wake, stopping), name="events", daemon=True).start()
    try:
        return _follow(client, run, console, wake)
    finally:
        stopping.set()


def _follow(client: Client, run: str, console: Console, wake: queue.Queue[str]) -> int:
    steps: dict[int, StepSummary] = {}
    cursor: str | None = None
    with Live(console=console, auto_refresh=False) as live:
        while True:
            record, metrics = client.get_run(run), client.metrics(run)
            news = list(client.steps(run, after=cursor))
            cursor = news[-1]["cursor"] if news else cursor
            for step in by_step(news):
                steps[step.step] = step
                if not console.is_terminal:
                    console.print(step_line(step, record["config"]["num_steps"]))
            if console.is_terminal:
                live.update(_view(record, metrics, steps), refresh=True)
            if RunState(record["state"]).is_over:
                console.print(f"run {run} is {record['state']}{_reason(record)}")
                return 1 if record["state"] == RunState.FAILED else 0
            _wait(wake)


def _listen(client: Client, run: str, wake: queue.Queue[str], stopping: threading.Event) -> None:
    """Consumes: the run's events. Produces: wake-ups. Waits for: events. Unblocked by: the gateway; the client's end."""
    cursor = "0"
    try:
        while not stopping.is_set():
            for event in client.stream_events(run, last_event_id=cursor, deadline_s=60.0):
                cursor = event.cursor
                wake.put(event.type)
    except RuntimeError:
        # httpx says so of a client that was closed, which is how this thread ends.
        if not stopping.is_set():
            raise


def _wait(wake: queue.Queue[str]) -> None:
    """Returns when something happened, but not sooner than REFRESH_S, nor later than ten seconds."""
    began = time.monotonic()
    try:
        wake.get(timeout=10.0)
    except queue.Empty:
        return
    time.sleep(max(0.0, REFRESH_S - (time.monotonic() - began)))
    while not wake.empty():
        wake.get_nowait()


def _view(record: Mapping[str, Any], metrics: Mapping[str, Any], steps: Mapping[int, StepSummary]) -> Group:
    num_steps = record["config"]["num_steps"]
    counts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    counts.add_row("[bold]run", f"[bold]{record['run']}[/]  {record['state']}{_reason(record)}")
    counts.add_row("step", f"{record['step']} of {num_steps}, durable {record['durable_step']}")
    counts.add_row("trajectories", "  ".join(f"{state} {n}" for state, n in metrics["states"].items() if n) or "none")
    dropped = sum(metrics["dropped"].values())
    counts.add_row(
        "counts",
        f"accepted {metrics['accepted']} = trained {metrics['trained']} + dropped {dropped} + live {metrics['live']}",
    )
    counts.add_row("replicas", "  ".join(f"{state} {n}" for state, n in metrics["replicas"].items() if n) or "none")
    lines = [step_line(steps[s], num_steps) for s in sorted(steps)[-SHOWN_STEPS:]]
    return Group(counts, *lines)


def _reason(record: Mapping[str, Any]) -> str:
    return f" ({record['reason']}: {record['detail']})" if record["reason"] else ""
