"""Opportunistic mode over random histories, decided by the functions that the dispatcher and the lease use.

Publishes, swaps, tokens, deaths and restarts come in any order. Whatever happened, no lease finds a token that is too old or of
a version that is not there, versions never go back within a sample, and from everywhere the run still comes to its end.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.gateway import plan
from services.gateway.partial import PartialSample
from shared.wire.pb import rollout_pb2 as pb
from shared.wire.pb import weight_sync_pb2 as ws
from shared.wire.queue import unusable
from shared.wire.run import RunConfig
from shared.wire.types import FinishReason, Group, SamplingParams, Trajectory, float32_bytes, int32_bytes

LENGTH = 3
"""Tokens of every sample."""
NAMES = ("a", "b", "c")


def version(step: int) -> ws.Version:
    return ws.Version(lineage=0, step=step, digest=f"digest-{step}")


@dataclass
class Fleet:
    """What weight_sync would say: replicas are on their way until they serve what is needed."""

    serving: dict[str, int | None] = field(default_factory=dict)
    needed: int | None = None

    def replicas(self) -> list[ws.Replica]:
        return [
            ws.Replica(
                replica=name,
                incarnation="1",
                state="ready" if step is not None and step == self.needed else "preparing",
                version=None if step is None else version(step),
            )
            for name, step in self.serving.items()
        ]


class OpportunisticRun(RuleBasedStateMachine):
    """A run of one sample a group; an evaluation is one more group, pinned to a version."""

    @initialize(
        max_lag=st.integers(0, 3), size=st.integers(1, 3), num_steps=st.integers(1, 5), interval=st.integers(1, 3),
        num_replicas=st.integers(1, 3),
    )  # fmt: skip
    def begin(self, max_lag: int, size: int, num_steps: int, interval: int, num_replicas: int) -> None:
        self.config = RunConfig(
            run="r", model="m", max_lag=max_lag, prompts_per_step=size, samples_per_prompt=2, num_steps=num_steps,
            checkpoint_interval=interval,
        )  # fmt: skip
        self.fleet = Fleet(dict.fromkeys(NAMES[:num_replicas]))
        self.published, self.trained, self.durable, self.next_number = 1, 0, 0, 0
        self.partials: dict[int, PartialSample] = {}
        self.flights: dict[int, tuple[str, ws.Version]] = {}
        """By prompt number: replica, and the version that was asked for."""
        self.pinned: int | None = None
        self.pinned_on: str | None = None
        self.frozen: set[str] = set()

    # What the services do

    @rule()
    def post(self) -> None:
        """All that the gate lets in."""
        gate = (self.durable + self.config.queue_bound_batches) * self.config.prompts_per_step
        self.next_number = min(gate, self.config.num_steps * self.config.prompts_per_step)
        self.dispatch()

    def dispatch(self) -> None:
        versions, replicas = [version(s) for s in range(self.published)], self.fleet.replicas()
        step = plan.needed_step(
            self.config, is_over=False, first_open=self.first_open, pinned=() if self.pinned is None else (self.pinned,),
            published=range(self.published), current=self.fleet.needed, is_moving=plan.is_moving(replicas, self.fleet.needed),
        )  # fmt: skip
        num_pinned = int(self.pinned_on is not None)
        if step is None or not plan.may_change(
            self.fleet.needed, step, num_samples=len(self.flights) + num_pinned, num_pinned=num_pinned
        ):
            return
        self.fleet.needed = step
        for number in plan.prompts_of(self.config, step):
            if number >= self.next_number or number in self.flights or self.is_generated(number):
                continue
            partial = self.partials.get(number)
            usable = plan.usable_versions(
                self.config, number, versions, newest=version(step), begun_by=partial.last_step if partial else -1
            )
            found = self.choose(usable, plan.SERVING)
            if found is not None:
                self.flights[number] = found.replica, found.version
        if self.pinned is not None and self.pinned_on is None and self.pinned == step:
            found = self.choose([version(step)], plan.READY)
            self.pinned_on = found.replica if found else None

    @rule(swapping=st.sets(st.integers(0, 2)), sampling=st.sets(st.integers(0, 2)), num_tokens=st.integers(1, 4))
    def go_on(self, swapping: set[int], sampling: set[int], num_tokens: int) -> None:
        """Some replicas take on what is needed, some sample, and what is complete is trained."""
        for name in sorted({self.name(i) for i in swapping}):
            self.swap_one(name)
            self.dispatch()
        for name in [self.name(i) for i in sorted(sampling)] * num_tokens:
            self.sample_one(name)
            self.dispatch()
        self.train()

    def swap_one(self, name: str) -> None:
        needed = self.fleet.needed
        if name not in self.frozen and needed is not None and needed < self.published:
            if self.pinned_on == name:
                assert self.fleet.serving[name] == needed, "a swap under a pinned sample"
            self.fleet.serving[name] = needed

    def sample_one(self, name: str) -> None:
        """One token of everything on the replica, stamped with what it serves."""
        if name in self.frozen:
            return
        if self.pinned_on == name:
            assert self.fleet.serving[name] == self.pinned
            self.pinned = self.pinned_on = None
        for number, (replica, asked) in list(self.flights.items()):
            if replica != name:
                continue
            partial = self.partials.setdefault(
                number, PartialSample(trajectory_id=f"r.{number}.0", sample_index=0, max_tokens=LENGTH)
            )
            step = self.fleet.serving[name]
            assert step is not None
            by = version(step)
            partial.add(chunk(partial), by=by, fingerprint="f", version=asked, replica=name, is_pinned=False)
            if partial.finish_reason:
                del self.flights[number]

    def train(self) -> None:
        step, size = self.trained, self.config.prompts_per_step
        batch = range(step * size, (step + 1) * size)
        if step == self.config.num_steps or not all(self.is_generated(n) for n in batch):
            return
        held = {version(s).digest for s in range(max(0, step - self.config.oldest_lag), step + 1)}
        assert [unusable(self.config, group(self.partials[n], n), held) for n in batch] == [{}] * size
        self.trained += 1
        self.published = max(self.published, self.trained + 1)
        if self.trained % self.config.checkpoint_interval == 0 or self.trained == self.config.num_steps:
            self.durable = self.trained
        self.post()

    # What goes wrong

    @rule(index=st.integers(0, 2), kind=st.sampled_from(
        ["replica_dies", "replica_freezes", "trainer_dies", "trainer_and_valkey_die", "gateway_dies"]
    ))  # fmt: skip
    def fault(self, index: int, kind: str) -> None:
        getattr(self, kind)(self.name(index))

    def replica_dies(self, name: str) -> None:
        self.fleet.serving[name] = None
        self.frozen.discard(name)
        self.break_streams(name)

    def replica_freezes(self, name: str) -> None:
        """It stays registered, on its way to whatever is needed, for ever."""
        if len(self.frozen) < len(self.fleet.serving) - 1:
            self.frozen.add(name)
            self.break_streams(name)

    def break_streams(self, name: str) -> None:
        self.flights = {n: f for n, f in self.flights.items() if f[0] != name}
        self.pinned_on = None if self.pinned_on == name else self.pinned_on
        self.dispatch()

    def trainer_dies(self, name: str) -> None:
        self.trained = self.durable

    def trainer_and_valkey_die(self, name: str) -> None:
        """A group of the first batch that no checkpoint covers is forgotten."""
        self.trained = self.durable
        number = self.durable * self.config.prompts_per_step
        if number not in self.flights:
            self.partials.pop(number, None)
            self.dispatch()

    def gateway_dies(self, name: str) -> None:
        self.flights, self.pinned_on, self.fleet.needed = {}, None, None
        self.partials = {n: p for n, p in self.partials.items() if p.finish_reason}

    @rule(back=st.integers(0, 2))
    def evaluate(self, back: int) -> None:
        if self.pinned is None:
            self.pinned = max(0, self.published - 1 - back)
            self.dispatch()

    @precondition(lambda self: hasattr(self, "config"))
    @invariant()
    def nothing_is_sampled_with_weights_that_are_not_there(self) -> None:
        for partial in self.partials.values():
            assert [s.policy_step for s in partial.spans] == sorted(s.policy_step for s in partial.spans)
            assert partial.last_step < self.published

    def teardown(self) -> None:
        """Without faults the run ends, whatever came before."""
        if not hasattr(self, "config"):
            return
        for _ in range(8 * self.config.num_steps * (LENGTH + self.config.prompts_per_step) + 8):
            self.post()
            self.dispatch()
            for name in self.fleet.serving:
                self.swap_one(name)
                self.sample_one(name)
            self.train()
        assert self.trained == self.config.num_steps, "a deadlock"
        assert self.pinned is None

    # What they see

    @property
    def first_open(self) -> int:
        generated = [n for n in range(self.next_number) if not self.is_generated(n)]
        return max(min(generated, default=self.next_number), self.durable * self.config.prompts_per_step)

    def is_generated(self, number: int) -> bool:
        return number in self.partials and self.partials[number].finish_reason is not None

    def choose(self, versions: list[ws.Version], states: tuple[str, ...]) -> ws.Replica | None:
        load = dict.fromkeys([(name, "1") for name in NAMES], 0)
        for name, _ in self.flights.values():
            load[name, "1"] += 1
        return plan.choose_replica(
            self.fleet.replicas(), versions=versions, states=states, load=load, num_samples=1, max_inflight_samples=4,
            avoid={(name, "1") for name in self.frozen},
        )  # fmt: skip

    def name(self, index: int) -> str:
        return NAMES[index % len(self.fleet.serving)]


def chunk(partial: PartialSample) -> pb.GenerateChunk:
    start = len(partial.token_ids)
    return pb.GenerateChunk(
        trajectory_id=partial.trajectory_id, start=start, token_ids=int32_bytes([1]), top1=int32_bytes([1]),
        logprobs=float32_bytes(np.zeros(1, np.float32)), kv="fresh", finish_reason="length" if start == LENGTH - 1 else "",
    )  # fmt: skip


def group(partial: PartialSample, number: int) -> Group:
    trajectory = Trajectory(
        trajectory_id=partial.trajectory_id, group_id=f"r.{number}", prompt_id="p", sample_index=0, run="r", seed=0,
        sampling=SamplingParams(), token_ids=np.ones(LENGTH, np.int32), logprobs=np.zeros(LENGTH, np.float32),
        top1=np.ones(LENGTH, np.int32), loss_mask=np.ones(LENGTH, np.uint8), spans=tuple(partial.spans),
        finish_reason=FinishReason.LENGTH, fingerprint="f", reward=0.0,
    )  # fmt: skip
    return Group(run="r", group_id=f"r.{number}", prompt_number=number, trajectories=(trajectory,))


TestOpportunisticRun = OpportunisticRun.TestCase
TestOpportunisticRun.settings = settings(stateful_step_count=40)
