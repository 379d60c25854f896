"""A stack of two replicas, one of them behind proxies as trainer and gateway are, and runs on it.

trainer ──publish──▶ weight_sync ◀──watch── gateway
                      ▲       └──front──▶ rollout-1 ◀──front── gateway
                      └──fetch── rollout-1
"""

from __future__ import annotations

import itertools
import json
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.wire.pb import rollout_pb2, rollout_pb2_grpc
from shared.wire.rpc import channel
from tests.chaos.http2 import Frame
from tests.chaos.proxy import CUT, DEADLINE_S, Proxy, Verdict
from timzero import model
from timzero.client import Client
from timzero.job import Job, load_job
from timzero.local import LocalStack
from timzero.outcome import Outcome
from timzero.steps import StepSummary
from timzero.supervisor import ProcessState
from timzero.train import Driver

CONFIG = Path(__file__).parents[2] / "configs" / "sort.toml"
SMALL = [
    "num_steps=5", "prompts_per_step=4", "samples_per_prompt=4", "checkpoint_interval=2", "evaluation.num_tasks=0",
    "environment.num_digits=4", "sampling.max_tokens=16", "max_model_len=40",
]  # fmt: skip


@dataclass
class Display:
    """Keeps what the driver says, and calls back after a step."""

    after_step: Callable[[int], None] = lambda step: None
    notes: list[str] = field(default_factory=list)

    def note(self, line: str) -> None:
        self.notes.append(line)

    def step(self, step: StepSummary, num_steps: int) -> None:
        self.after_step(step.step)


@dataclass(frozen=True)
class Sampled:
    """How one trajectory came to be."""

    trajectory_id: str
    steps: list[int]
    """Of the versions that sampled it, in order."""
    replicas: list[str]


@dataclass(kw_only=True)
class Chaos:
    stack: LocalStack
    client: Client
    job: Job
    publish: Proxy
    fetch: Proxy
    watch: Proxy
    front: Proxy

    @property
    def proxies(self) -> tuple[Proxy, ...]:
        return self.publish, self.fetch, self.watch, self.front

    def run(self, name: str, *, after_step: Callable[[int], None] = lambda step: None, **changes: Any) -> Outcome:
        """Drives a run of this name to its end: nothing is wrong with it and every trajectory is accounted for."""
        job = self.job.with_run(run=name, **changes)
        outcome = Driver(self.client, job, Display(after_step), check=self.stack.check).drive()
        assert outcome.problems == []
        m = outcome.metrics
        assert m["accepted"] == job.run.num_steps * job.run.prompts_per_step * job.run.samples_per_prompt
        assert m["accepted"] == m["trained"] + sum(m["dropped"].values())
        assert m["live"] == 0
        return outcome

    def opportunistic(self, name: str, *, max_lag: int, **how: Any) -> list[Sampled]:
        """`run` under max_lag: every span is its version's to the bit. Returns the spans of every trajectory."""
        outcome = self.run(name, max_lag=max_lag, **how)
        assert outcome.metrics["dropped"] == {}
        size = self.job.with_run(**{k: v for k, v in how.items() if k != "after_step"}).run.prompts_per_step
        found = []
        for t in self.client.trajectories(name, full=True):
            spans = [s for s in t["spans"] if s["kind"] == "sampled"]
            steps = [s["policy_step"] for s in spans]
            ends = [t["num_prompt_tokens"], *(s["end"] for s in spans)]
            assert [s["start"] for s in spans] == ends[:-1]
            assert ends[-1] == len(t["token_ids"])
            assert steps == sorted(set(steps)), "versions go back"
            batch = t["number"] // size
            assert max(0, batch - max_lag) <= steps[0] <= steps[-1] <= batch
            assert {s["kv"] for s in spans} == {"fresh"}
            found.append(Sampled(t["trajectory_id"], steps, t["replicas"]))
        assert sum(s.compared_tokens for s in outcome.steps) == sum(s.tokens for s in outcome.steps) > 0
        assert sum(s.differing_bits for s in outcome.steps) == 0
        return found

    def events(self, name: str, event: str) -> list[dict[str, Any]]:
        """What a service logged under this name, in order."""
        lines = self.stack[name].log_path.read_text().splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{")]
        return [e for e in found if e["event"] == event]

    def wait_for_events(self, run: str, kind: str, num: int) -> None:
        """Until the run's stream has told of so many. Raises TimeoutError."""
        told = self.client.stream_events(run, deadline_s=DEADLINE_S, types=[kind])
        if sum(1 for _ in itertools.islice(told, num)) < num:
            raise TimeoutError(f"run {run} has not told of {num} times {kind} within {DEADLINE_S:.0f} s")

    def post(self, run: str, number: int) -> int:
        """Status of one more prompt."""
        item = {"number": number, "prompt": "1 2 =", "n": 4, "sampling": {"max_tokens": 4}}
        return int(self.client.post_prompts(run, [item])[0]["status"])

    def replicas(self) -> list[str]:
        """Names of the rollout processes that run."""
        return [p.name for p in self.stack if p.name.startswith("rollout") and p.state is ProcessState.READY]


class Killer:
    """Kills a process as a frame passes, which is lost with it."""

    def __init__(self, rig: Chaos, name: str) -> None:
        self.process = rig.stack[name]
        self.generation = -1

    def __call__(self, frame: Frame) -> Verdict:
        self.generation = self.process.kill(signal.SIGKILL)
        return CUT

    def wait_restarted(self) -> None:
        assert self.generation >= 0, "it was never killed"
        self.process.wait_restarted(self.generation, DEADLINE_S)


class Churn:
    """After a step a replica comes or goes, at random. To be given to `Chaos.run`."""

    def __init__(self, rig: Chaos, *, seed: int) -> None:
        self._rig, self._choices = rig, random.Random(seed)
        self.changes: list[str] = []

    def __call__(self, step: int) -> None:
        alive = self._rig.replicas()
        change = self._choices.choice(["joins", "leaves", "dies", "none", "none"])
        if change == "joins" and len(alive) < 4:
            self._rig.stack.add_replica()
        elif change == "leaves" and len(alive) > 2:
            self._rig.stack.remove_replica(self._choices.choice(alive))
        elif change == "dies" and len(alive) > 1:
            self._rig.stack[self._choices.choice(alive)].kill(signal.SIGKILL)
        else:
            return
        self.changes.append(change)


def status(address: str) -> rollout_pb2.StatusReply:
    """An engine's own counters."""
    with channel(address) as connection:
        stub = rollout_pb2_grpc.RolloutEngineStub(connection)
        return stub.Status(rollout_pb2.StatusRequest(), timeout=DEADLINE_S, wait_for_ready=True)


def tiny_job(directory: Path, overrides: list[str]) -> Job:
    """Of a model with random weights made in the directory."""
    return load_job(CONFIG, overrides).with_run(model=str(model.get("tiny-sort", directory / "tiny-sort")))


@contextmanager
def chaos(directory: Path, overrides: list[str] = SMALL, **services: dict[str, Any]) -> Iterator[Chaos]:
    """Args: services: more keys of a service's configuration."""
    with ExitStack() as entered:
        publish, fetch, watch, front = (entered.enter_context(Proxy()) for _ in range(4))
        keys = {
            "trainer": {"weight_sync": publish.address},
            # So slow that samples are always under way, of which nothing is held back.
            "rollout": {"stream_tokens": 1, "max_step_tokens": 4},
            "gateway": {"weight_sync": watch.address, "dispatcher.stream_idle_s": 2},
            # A replica that stands still is gone after three seconds.
            "weight_sync": {"heartbeat_s": 1, "lease_s": 3, "retry_s": 1},
        }
        for service, more in services.items():
            keys[service] |= more
        stack = LocalStack(directory / "stack", **keys)
        for proxy in (publish, fetch, watch):
            proxy.connect_to(stack.weight_sync_address)
        entered.enter_context(stack)
        second = stack.add_replica(advertised_address=front.address, weight_sync=fetch.address)
        front.connect_to(second.spec.address)
        client = entered.enter_context(Client(stack.base_url))
        job = tiny_job(directory, overrides)
        yield Chaos(
            stack=stack, client=client, job=job, publish=publish, fetch=fetch, watch=watch, front=front
        )  # fmt: skip
