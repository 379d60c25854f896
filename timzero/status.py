"""`timzero up`: what runs here, live."""

from __future__ import annotations

import time
from queue import Empty, SimpleQueue

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from timzero.local import LocalStack
from timzero.supervisor import Process, ProcessState, SupervisionError

_COLOURS = {ProcessState.READY: "green", ProcessState.STOPPED: "dim", ProcessState.FAILED: "red"}


def show_until(stack: LocalStack, console: Console, stop: SimpleQueue[int]) -> None:
    """Shows the processes until something is in `stop`, put there by a signal handler. Raises SupervisionError when one was
    given up."""
    with Live(_table(stack), console=console, auto_refresh=False, transient=True) as live:
        while not _holds_something(stop, wait_s=1.0):
            live.update(_table(stack), refresh=console.is_terminal)
            stack.check()


def _holds_something(stop: SimpleQueue[int], *, wait_s: float) -> bool:
    try:
        stop.get(timeout=wait_s)
    except Empty:
        return False
    return True


def _table(stack: LocalStack) -> Table:
    table = Table(title=f"API at {stack.base_url}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("process", "state", "pid", "address", "up", "restarts"):
        table.add_column(column, header_style="dim", justify="right" if column in ("pid", "up", "restarts") else "left")
    for process in stack:
        colour = _COLOURS.get(process.state, "yellow")
        table.add_row(
            process.name, Text(process.state, style=colour), _pid(process), process.spec.address.removeprefix("redis://"),
            f"{time.time() - process.started_at:.0f} s" if process.state is ProcessState.READY else "", str(process.num_restarts),
        )  # fmt: skip
    return table


def _pid(process: Process) -> str:
    try:
        return str(process.pid)
    except SupervisionError:
        return ""
