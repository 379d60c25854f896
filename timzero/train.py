"""The environment driver behind `timzero train`: posts prompts, grades what is sampled, puts rewards, watches the steps.

    tasks by number ──post──▶ gateway ──events──▶ listener ──ids──▶ grade ──rewards──▶ gateway
                       ▲ 429                                          ▲ trajectory by id

A plain client of the HTTP API that keeps nothing: what is posted, graded or trained is asked of the server. Killed at any
moment and started again it posts the same prompts under the same numbers and grades whatever still awaits a reward.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from shared.config import unstructure
from shared.wire.run import RunState
from timzero.client import ApiError, Client
from timzero.envs import Completion, Environment, Task, make
from timzero.job import Job
from timzero.outcome import Evaluation, Outcome
from timzero.steps import StepSummary, by_step

AWAITING = ("accepted", "generating", "awaiting_reward")
"""States from which a trajectory may still ask for a reward."""
REWARD_SOURCE = "default"
REWARD_BATCH = 256
LOOK_S = 1.0
"""Longest time without a look at new steps while there is always something to grade."""
WAITING_REASONS = ("operator", "no_replica")
"""Reasons of a pause after which somebody is expected to resume the run; any other ends the driver."""


class DriverError(RuntimeError):
    """The run can't go on, or this driver can't serve it; the text says what to do."""


class Display(Protocol):
    """What the driver tells a person."""

    def note(self, line: str) -> None: ...

    def step(self, step: StepSummary, num_steps: int) -> None: ...


@dataclass
class Driver:
    """Args:
    client: of the gateway.
    job: what to run; `job.run.model` is a path as the services see it.
    check: raises when the services can't go on (a local stack that gave a process up).
    stall_s: without any event or step for so long the driver gives up.
    """

    client: Client
    job: Job
    display: Display
    check: Callable[[], None] = lambda: None
    stall_s: float = 600.0
    _inbox: queue.Queue[tuple[str, Any]] = field(default_factory=queue.Queue)
    _stopping: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.run = self.job.run.run
        self._environment: Environment = make(self.job.environment)
        self._held_out: Environment = make(self.job.environment | self.job.evaluation.environment)
        self._sampling = {
            "max_tokens": self.job.sampling.max_tokens,
            "stop": list(self.job.sampling.stop),
            "stop_token_ids": list(self.job.sampling.stop_token_ids),
        }
        self._steps: dict[int, StepSummary] = {}
        self._step_cursor: str | None = None
        self._is_over = False

    def drive(self) -> Outcome:
        """Creates or joins the run and serves it to its end. Raises DriverError, ApiError, and whatever a grader raises."""
        self._join()
        before = self._evaluation("before", version=0)
        graded = self._graded_before()
        with self._threads(self._listen, self._post):
            self._serve(graded)
        record = self.client.get_run(self.run)
        after = None
        if record["state"] == RunState.COMPLETED:
            after = self._evaluation("after", version=self.job.run.num_steps)
        versions = self.client.versions(self.run)
        return Outcome(
            run=record,
            steps=tuple(self._steps[s] for s in sorted(self._steps)),
            metrics=self.client.metrics(self.run),
            before=self._grade_evaluation(before) if before is not None else None,
            after=self._grade_evaluation(after) if after is not None else None,
            published_digest=max(versions, key=lambda v: (v["lineage"], v["step"]))["digest"] if versions else "",
        )

    def _join(self) -> None:
        """The run with this very configuration, created or found."""
        try:
            record = self.client.create_run(unstructure(self.job.run))
        except ApiError as error:
            if error.code in ("run-exists", "run-active"):
                raise DriverError(
                    f"{error.document.get('detail')}. Give this run another name with --run, or stop the other one first"
                ) from error
            raise
        if record["step"] or record["state"] != RunState.RUNNING:
            self.display.note(f"joined run {self.run}: {record['state']}, next step {record['step']}")

    # Evaluation

    def _evaluation(self, name: str, *, version: int) -> int | None:
        """Creates the evaluation of this name, or finds the one that an earlier driver created. Returns its id."""
        if not self.job.evaluation.num_tasks:
            return None
        for found in self.client.evals(self.run):
            if found["metadata"].get("name") == name:
                return int(found["eval_id"])
        items = [_prompt(task) | {"metadata": task.metadata} for task in self._held_out_tasks()]
        deadline = time.monotonic() + self.stall_s
        while True:
            try:
                created = self.client.create_eval(
                    self.run,
                    items,
                    sampling=self._sampling | {"temperature": 0.0},
                    version=version,
                    metadata={"name": name},
                    deadline_s=self.stall_s,
                )
                return int(created["eval_id"])
            except ApiError as error:
                # Until the trainer has loaded the model, nothing is published that an evaluation could be pinned to.
                if error.code != "version-unknown" or time.monotonic() > deadline:
                    raise
            self.check()
            self._stopping.wait(0.5)

    def _held_out_tasks(self) -> list[Task]:
        table = self.job.evaluation
        return [self._held_out.task(n, seed=table.seed) for n in range(table.num_tasks)]

    def _grade_evaluation(self, eval_id: int) -> Evaluation:
        evaluation = self.client.wait_eval(self.run, eval_id, deadline_s=self.stall_s)
        rewards = []
        for task, item in zip(self._held_out_tasks(), evaluation["items"], strict=True):
            sample = item["samples"][0]
            if sample["text"] is None:
                raise DriverError(f"evaluation sample {sample['trajectory_id']} was dropped: {sample['reason']}")
            completion = Completion(
                text=sample["text"], token_ids=tuple(sample["token_ids"]), finish_reason=sample["finish_reason"]
            )
            rewards.append(self._finite(self._held_out.grade(task, completion), sample["trajectory_id"]))
        return Evaluation(rewards=tuple(rewards))

    # Prompts

    def _post(self) -> None:
        """Consumes: task numbers in order. Produces: prompts. Waits for: the admission gate (Retry-After).
        Unblocked by: the gateway as batches become durable; `_stopping`."""
        size, last = self.job.run.prompts_per_step, self.job.run.num_steps * self.job.run.prompts_per_step
        first = self.client.get_run(self.run)["durable_step"] * size
        for start in range(first, last, size):
            items = [self._item(n) for n in range(start, min(start + size, last))]
            while items and not self._stopping.is_set():
                results = self.client.post_prompts(self.run, items, gate_deadline_s=5.0)
                for result in results:
                    if result["status"] not in (200, 202, 429) and not self._is_run_over(result):
                        number, problem = items[result["index"]]["number"], result["problem"]
                        raise DriverError(f"prompt {number} was refused: {problem['code']}: {problem['detail']}")
                items = [items[r["index"]] for r in results if r["status"] == 429]

    def _item(self, number: int) -> dict[str, Any]:
        task = self._environment.task(number, seed=self.job.run.seed)
        return {
            **_prompt(task),
            "number": number,
            "n": self.job.run.samples_per_prompt,
            "sampling": self._sampling,
            "reward": {"deadline_s": self.job.run.reward_deadline_s, "sources": [REWARD_SOURCE]},
            "metadata": task.metadata,
        }

    @staticmethod
    def _is_run_over(result: Mapping[str, Any]) -> bool:
        return (result.get("problem") or {}).get("code") == "run-over"

    # Events

    def _listen(self) -> None:
        """Consumes: the run's event stream from its beginning. Produces: trajectory ids and run changes in the inbox.
        Waits for: events. Unblocked by: the gateway; the run's end; every deadline of the stream looks at `_stopping`."""
        types = ["trajectory.awaiting_reward", "trajectory.leased", *(f"run.{s.value}" for s in RunState)]
        ends = {f"run.{s.value}" for s in RunState if s.is_over}
        cursor = "0"
        while not self._stopping.is_set():
            for event in self.client.stream_events(self.run, last_event_id=cursor, deadline_s=20.0, types=types):
                cursor = event.cursor
                self._inbox.put((event.type, event.trajectory_id))
                if event.type in ends or self._stopping.is_set():
                    return

    def _graded_before(self) -> set[str]:
        """Trajectories that need no reward any more; the event stream begins at the beginning and repeats them."""
        return {t["trajectory_id"] for t in self.client.trajectories(self.run) if t["state"] not in AWAITING}

    # The loop

    def _serve(self, graded: set[str]) -> None:
        """Consumes: the inbox. Produces: rewards, one line per step. Waits for: events, one second at most.
        Unblocked by: the listener; the end of the run; `stall_s` without anything new."""
        progress = looked = time.monotonic()
        self._look_at_run()
        while not self._is_over:
            kinds, ids = self._receive()
            fresh = [i for i in dict.fromkeys(ids) if i not in graded]
            for start in range(0, len(fresh), REWARD_BATCH):
                self._reward(fresh[start : start + REWARD_BATCH])
            graded.update(fresh)
            if any(kind.startswith("run.") for kind in kinds):
                self._look_at_run()
            # The trainer waits for rewards, but nobody for a step's line.
            is_due = not fresh or time.monotonic() - looked >= LOOK_S
            if is_due:
                looked = time.monotonic()
            if (is_due and self._look_at_steps()) or kinds:
                progress = time.monotonic()
            self.check()
            if time.monotonic() - progress > self.stall_s:
                raise DriverError(f"nothing happened for {self.stall_s:.0f} s: {self._situation()}")
        self._look_at_steps()

    def _receive(self) -> tuple[set[str], list[str]]:
        """Event types and the ids of trajectories that await a reward: all that is there, or what comes within a second."""
        kinds: set[str] = set()
        ids: list[str] = []
        timeout_s: float | None = 1.0
        while True:
            try:
                kind, value = self._inbox.get(timeout=timeout_s) if timeout_s else self._inbox.get_nowait()
            except queue.Empty:
                return kinds, ids
            if isinstance(value, BaseException):
                raise value
            kinds.add(kind)
            if kind == "trajectory.awaiting_reward":
                ids.append(value)
            timeout_s = None

    def _reward(self, trajectory_ids: list[str]) -> None:
        items = []
        for record in self.client.trajectories(self.run, ids=trajectory_ids, full=True):
            trajectory_id = record["trajectory_id"]
            if record["state"] != "awaiting_reward":
                continue
            task = self._environment.task(record["number"], seed=self.job.run.seed)
            sampled = tuple(record["token_ids"][record["num_prompt_tokens"] :])
            completion = Completion(text=record["text"], token_ids=sampled, finish_reason=record["finish_reason"])
            value = self._finite(self._environment.grade(task, completion), trajectory_id)
            items.append({"trajectory_id": trajectory_id, "source": REWARD_SOURCE, "value": value, "revision": 0})
        if not items:
            return
        for item, result in zip(items, self.client.put_rewards(self.run, items), strict=True):
            # A late one was put by an earlier driver, or the run was stopped meanwhile: the server counts it.
            if result["status"] >= 400 and result["problem"]["code"] not in ("reward-too-late", "run-over"):
                raise DriverError(f"reward of {item['trajectory_id']} was refused: {result['problem']['detail']}")

    @staticmethod
    def _finite(value: float, trajectory_id: str) -> float:
        if not math.isfinite(value):
            raise DriverError(f"the grader gave {value} for {trajectory_id}; a reward must be a finite number")
        return value

    def _look_at_run(self) -> None:
        """Takes note of the run's end or pause. Raises DriverError for a pause that nobody is going to end."""
        record = self.client.get_run(self.run)
        state, reason = RunState(record["state"]), record["reason"]
        self._is_over = state.is_over
        if state is not RunState.PAUSED:
            return
        if reason == "missing_reward":
            # The rewards that were missing are the ones that this driver puts now.
            self.display.note(f"run {self.run} was paused for missing rewards; resuming it")
            self.client.resume(self.run)
        elif reason in WAITING_REASONS:
            detail = f": {record['detail']}" if record["detail"] else ""
            self.display.note(f"run {self.run} is paused ({reason}){detail}; waiting for it to be resumed")
        else:
            raise DriverError(f"run {self.run} is paused: {reason}: {record['detail']}")

    def _look_at_steps(self) -> bool:
        """Fetches and shows steps that are new, or trained again after a restart. Returns whether there were any."""
        records = list(self.client.steps(self.run, after=self._step_cursor))
        for step in by_step(records):
            self._steps[step.step] = step
            self.display.step(step, self.job.run.num_steps)
        if records:
            self._step_cursor = records[-1]["cursor"]
        return bool(records)

    def _situation(self) -> str:
        m = self.client.metrics(self.run)
        return (
            f"run {m['state']}, next step {m['step']}, trajectories {m['states']}, prompts admitted below number "
            f"{m['gate']['limit']}, queue {m['queue_depth']}, replicas {m['replicas']}"
        )

    @contextmanager
    def _threads(self, *loops: Callable[[], None]) -> Iterator[None]:
        """Runs loops beside the body; what one raises arrives in the inbox."""

        def run(loop: Callable[[], None]) -> None:
            try:
                loop()
            except Exception as error:
                self._inbox.put(("error", error))

        threads = [threading.Thread(target=run, args=(loop,), name=loop.__name__, daemon=True) for loop in loops]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            # Daemons: one that is still inside a request is no reason to keep a person waiting.
            for thread in threads:
                thread.join(1.0)


def _prompt(task: Task) -> dict[str, Any]:
    """The prompt in the field that its kind has in the HTTP API."""
    if isinstance(task.prompt, str):
        return {"prompt": task.prompt}
    if isinstance(task.prompt[0], int):
        return {"prompt_token_ids": list(task.prompt)}
    return {"messages": list(task.prompt)}
