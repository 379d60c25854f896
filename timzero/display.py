"""What `timzero train` prints: one line per step while it goes on, and the lines at the end that other tools may read."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from timzero.outcome import Evaluation, Outcome
from timzero.steps import StepSummary


class TerminalDisplay:
    """Lines on stdout; on a terminal a progress bar below them."""

    def __init__(self, title: str) -> None:
        self.console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._started = time.monotonic()
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        )
        self._title = title
        self._task: TaskID | None = None

    def __enter__(self) -> TerminalDisplay:
        self._progress.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _tb: TracebackType | None
    ) -> None:
        self._progress.stop()

    def note(self, line: str) -> None:
        self.console.print(f"[dim]{time.monotonic() - self._started:6.1f} s[/]  {_escape(line)}")

    def plain(self, line: str) -> None:
        """A line without time or colour."""
        self.console.print(line, markup=False)

    def step(self, step: StepSummary, num_steps: int) -> None:
        if self._task is None:
            self._task = self._progress.add_task(self._title, total=num_steps)
        self._progress.update(self._task, completed=step.step + 1)
        self.console.print(f"[dim]{time.monotonic() - self._started:6.1f} s[/]  {step_line(step, num_steps)}")


def step_line(step: StepSummary, num_steps: int) -> str:
    """One line of rich markup: reward, TIM, lag, tokens/s."""
    tim = step.tim
    bits = f"{step.differing_bits:,} differing bits of {step.compared_tokens:,} tokens"
    colour = "green" if step.differing_bits == 0 else "yellow"
    return (
        f"step {step.step + 1:>{len(str(num_steps))}}/{num_steps}  reward [bold]{step.reward:.3f}[/]  "
        f"TIM [{colour}]max {tim['abs_max']:.2g}, {bits}[/]  lag {step.lag:.2g}  {step.tokens_per_s:,.0f} tokens/s"
    )


def summary_lines(outcome: Outcome, report: str | None) -> list[str]:
    """The last lines, plain text. `report` is the path of the HTML file."""
    lines = []
    if outcome.before is not None or outcome.after is not None:
        lines.append(f"evaluation accuracy: {_accuracy(outcome.before)} -> {_accuracy(outcome.after)}")
    steps = outcome.steps
    compared, differing = sum(s.compared_tokens for s in steps), sum(s.differing_bits for s in steps)
    lines.append(f"tokens compared: {compared}, differing bits: {differing}")
    if outcome.run["config"]["numerics"] == "fast":
        lines.append(tim_line(steps))
    if any(s.ingested_tokens for s in steps):
        lines.append(ingested_line(steps))
    m = outcome.metrics
    lines.append(
        f"accepted {m['accepted']} = trained {m['trained']} + dropped {sum(m['dropped'].values())} + live {m['live']}"
    )
    lines.append(f"weights digest: {outcome.digest}")
    if report is not None:
        lines.append(f"report: {report}")
    return lines


def ingested_line(steps: tuple[StepSummary, ...]) -> str:
    """Tokens that another engine sampled, and how far its logprobs lie from the trainer's."""
    num_tokens = sum(s.ingested_tokens for s in steps)
    blocks = [s.metrics["ingested_tim"] for s in steps if s.ingested_tokens]
    compared = sum(b["compared_tokens"] for b in blocks)
    mean = sum(b["abs_mean"] * b["compared_tokens"] for b in blocks) / compared if compared else 0.0
    largest = max(b["abs_max"] for b in blocks)
    return f"tokens sampled elsewhere: {num_tokens}, |delta logprob|: mean {mean:.3g}, max {largest:.3g}"


def tim_line(steps: tuple[StepSummary, ...]) -> str:
    """|delta logprob| over the whole run. The p99 is the largest of the steps' own: theirs can't be joined exactly."""
    compared = sum(s.compared_tokens for s in steps)
    mean = sum(s.tim["abs_mean"] * s.compared_tokens for s in steps) / compared if compared else 0.0
    p99 = max((s.tim["abs_p99"] for s in steps), default=0.0)
    largest = max((s.tim["abs_max"] for s in steps), default=0.0)
    return (
        f"TIM |delta logprob|: mean {mean:.3g}, p99 {p99:.3g} (worst step), max {largest:.3g}, "
        f"flips: {sum(s.flips for s in steps)}"
    )


def _accuracy(evaluation: Evaluation | None) -> str:
    return "none" if evaluation is None else f"{evaluation.accuracy:.3f}"


def _escape(text: str) -> str:
    return text.replace("[", "\\[")
