"""Random histories of a run against a model of it: whatever happens in whatever order, every trajectory is where the model
says, accepted = trained + dropped + live, the queue holds each group once, and a repeat changes nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from shared.wire.ingest import IngestedGroup
from shared.wire.lifecycle import Lifecycle
from shared.wire.queue import TrainQueue
from shared.wire.records import Fenced, GroupSealed, IllegalTransition, UnknownTrajectory
from shared.wire.run import RunState
from shared.wire.store import RunStore
from tests.integration.wire_testing import (
    check_histories,
    checked_counts,
    empty,
    prompt,
    run_config,
    trajectory,
)

CONFIG = run_config(num_steps=3)
NUMBERS = CONFIG.num_steps * CONFIG.prompts_per_step
BOUND = CONFIG.queue_bound_batches * CONFIG.prompts_per_step
LATE = ("queued", "leased", "trained", "dropped")

numbers = st.integers(0, NUMBERS)
samples = st.integers(0, 1)
revisions = st.integers(0, 2)
values = st.sampled_from([0.0, 1.0])


class History(RuleBasedStateMachine):
    url = ""

    @initialize(num_trained=st.integers(0, CONFIG.num_steps), num_durable=st.integers(0, CONFIG.num_steps))
    def begin(self, num_trained: int, num_durable: int) -> None:
        empty(self.url)
        self.loop = asyncio.new_event_loop()
        self.connect()
        self.do(self.store.create_run(CONFIG))
        self.bodies: dict[int, tuple[object, ...]] = {}
        self.states: dict[tuple[int, int], str] = {}
        self.rewards: dict[tuple[int, int], tuple[int, float]] = {}
        self.reasons: dict[tuple[int, int], str] = {}
        self.cancelled: set[int] = set()
        self.late = 0
        self.step = self.durable = 0
        self.is_stopped = self.is_paused = False
        self.queue = TrainQueue.connect(self.url)
        self.epoch = self.queue.take_over("r", next_step=0)
        for _ in range(num_trained):
            self.everything_for_the_next_batch(1.0, True)
            if self.step == num_durable:
                self.checkpoint()

    def connect(self) -> None:
        self.store = self.do(RunStore.connect(self.url))
        self.lifecycle = Lifecycle(self.store)

    def do(self, coroutine):
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, 10))

    def group_is(self, number: int, state: str) -> bool:
        return all(self.states.get((number, s)) == state for s in range(2))

    def teardown(self) -> None:
        if hasattr(self, "store"):
            event(f"durable steps: {self.durable}, stopped: {self.is_stopped}")
            self.queue.close()
            self.do(self.store.close())
            self.loop.close()

    # clients

    @rule(number=numbers, body=st.booleans())
    def post(self, number: int, body: bool) -> None:
        item = prompt(number, metadata={"body": body})
        (result,) = self.do(self.store.accept_prompts("r", [item]))
        if self.accepts(number, ("prompt", body), result.status):
            self.states |= {(number, s): "accepted" for s in range(2)}

    @rule(number=numbers, body=st.booleans(), num_rewarded=st.integers(0, 2))
    def ingest(self, number: int, body: bool, num_rewarded: int) -> None:
        """A group that was sampled elsewhere, with the rewards of its first samples."""
        step = CONFIG.version_for(CONFIG.batch_of(number))
        group = IngestedGroup(
            prompt=prompt(number, metadata={"body": body}),
            trajectories=tuple(replace(trajectory(number, s, step=step), sampler="elsewhere") for s in range(2)),
            rewards=tuple({"default": 1.0} if s < num_rewarded else {} for s in range(2)),
        )
        (result,) = self.do(self.store.accept_groups("r", [(group.fingerprint, group)]))
        if self.accepts(number, ("ingested", body, num_rewarded), result.status):
            for s in range(2):
                self.states[number, s] = "rewarded" if s < num_rewarded else "awaiting_reward"
                if s < num_rewarded:
                    self.rewards[number, s] = 0, 1.0

    def accepts(self, number: int, body: tuple[object, ...], status: str) -> bool:
        """Checks the answer to a post; whether the body is new and taken."""
        if number in self.bodies:
            expected = "duplicate" if self.bodies[number] == body else "conflict"
        elif self.is_stopped:
            expected = "run_over"
        elif number >= NUMBERS:
            expected = "out_of_range"
        else:
            expected = "accepted" if number < self.durable * 2 + BOUND else "gate_closed"
        assert status == expected
        if expected == "accepted":
            self.bodies[number] = body
        return expected == "accepted"

    @rule(number=numbers, sample=samples, value=values, revision=revisions)
    def reward(self, number: int, sample: int, value: float, revision: int) -> None:
        key = number, sample
        result = self.do(self.store.put_reward("r", f"r.{number}.{sample}", "default", value, revision=revision))
        stored = self.rewards.get(key)
        if key not in self.states:
            expected = "unknown"
        elif stored == (revision, value):
            expected = "unchanged"
        elif stored is not None and revision <= stored[0]:
            expected = "conflict"
        elif self.states[key] in LATE:
            expected = "late"
            self.late += 1
        else:
            expected = "applied"
            self.rewards[key] = revision, value
            if self.states[key] == "awaiting_reward":
                self.states[key] = "rewarded"
        assert result.status == expected

    @precondition(lambda self: not self.is_stopped)
    @rule(state=st.sampled_from([RunState.PAUSED, RunState.RUNNING]))
    def pause_or_resume(self, state: RunState) -> None:
        self.do(self.store.set_run_state("r", state))
        self.is_paused = state is RunState.PAUSED

    @precondition(lambda self: not self.is_stopped and len(self.bodies) > 3)
    @rule(dice=st.integers(0, 9))
    def stop_run(self, dice: int) -> None:
        if dice:
            return
        self.do(self.store.set_run_state("r", RunState.STOPPED))
        self.is_stopped = True
        for key, state in self.states.items():
            if state != "trained":
                self.states[key], self.reasons[key] = "dropped", "cancelled"

    @rule(number=numbers, dice=st.integers(0, 2))
    def cancel_group(self, number: int, dice: int) -> None:
        if dice:
            return
        states = {self.states.get((number, s)) for s in range(2)}
        if number not in self.bodies:
            refusal: type[Exception] | None = UnknownTrajectory
        elif number in self.cancelled:
            refusal = None
        elif self.is_stopped:
            refusal = IllegalTransition
        else:
            refusal = GroupSealed if states & {"leased", "trained"} else None
        if refusal is not None:
            with pytest.raises(refusal):
                self.do(self.store.cancel_group("r", number))
            return
        num_dropped = self.do(self.store.cancel_group("r", number))
        assert num_dropped == (0 if number in self.cancelled else 2)
        self.cancelled.add(number)
        for s in range(2):
            self.states[number, s], self.reasons[number, s] = "dropped", "cancelled"

    # dispatcher

    @rule(number=numbers, sample=samples)
    def start(self, number: int, sample: int) -> None:
        key = number, sample
        started = self.do(self.lifecycle.start_generating("r", [f"r.{number}.{sample}"]))
        assert bool(started) == (self.states.get(key) in ("accepted", "generating") and not self.is_paused)
        if started:
            self.states[key] = "generating"

    @rule(number=numbers)
    def generate(self, number: int) -> None:
        for sample in range(2):
            key = number, sample
            step = CONFIG.version_for(CONFIG.batch_of(number))
            state = self.do(self.lifecycle.store_generated("r", trajectory(number, sample, step=step)))
            if self.states.get(key) in ("accepted", "generating"):
                self.states[key] = "rewarded" if key in self.rewards else "awaiting_reward"
            assert state == self.states.get(key)

    @rule()
    def dispatcher_restarts(self) -> None:
        self.do(self.store.close())
        self.connect()
        self.do(self.lifecycle.reset_generating("r"))
        for key, state in self.states.items():
            if state == "generating":
                self.states[key] = "accepted"

    @rule()
    def close_groups(self) -> None:
        closable = self.do(self.lifecycle.closable("r"))
        assert closable == [n for n in sorted(self.bodies) if self.group_is(n, "rewarded")]
        for number in closable:
            answer, group = self.do(self.lifecycle.close_group("r", number))
            assert answer == "queued"
            assert [t.reward for t in group.trajectories] == [self.rewards[number, s][1] for s in range(2)]
            self.states |= {(number, s): "queued" for s in range(2)}

    @rule(number=numbers)
    def close_any_group(self, number: int) -> None:
        is_ready = self.group_is(number, "rewarded")
        answer, _ = self.do(self.lifecycle.close_group("r", number))
        assert answer == ("queued" if is_ready else "not_ready")
        if is_ready:
            self.states |= {(number, s): "queued" for s in range(2)}

    @rule(value=values, is_trained=st.booleans())
    def everything_for_the_next_batch(self, value: float, is_trained: bool) -> None:
        """Chance alone would seldom bring a whole batch to the trainer."""
        for number in (2 * self.step, 2 * self.step + 1):
            self.post(number, True)
            self.generate(number)
            for sample in range(2):
                if (number, sample) not in self.rewards:
                    self.reward(number, sample, value, 0)
        self.close_groups()
        if is_trained and not self.is_stopped:
            self.train_a_step()

    # trainer

    @precondition(lambda self: not self.is_stopped)
    @rule()
    def train_a_step(self) -> None:
        batch = [n for n in (self.step * 2, self.step * 2 + 1) if n not in self.cancelled]
        is_complete = all(self.group_is(n, "queued") or self.group_is(n, "leased") for n in batch)
        is_running = self.do(self.store.get_run("r")).state is RunState.RUNNING
        is_due = is_complete and is_running
        groups = self.queue.lease("r", self.step, epoch=self.epoch, deadline_s=10 if is_due else 0.01)
        if not is_due:
            assert groups is None
            return
        assert [g.prompt_number for g in groups] == batch
        self.states |= {(n, s): "leased" for n in batch for s in range(2)}
        self.queue.record_step("r", self.step, {}, epoch=self.epoch)
        self.step += 1

    @rule()
    def checkpoint(self) -> None:
        moved = self.queue.commit_trained("r", durable_step=self.step, epoch=self.epoch)
        assert moved == self.become_trained(self.step)

    @precondition(lambda self: not self.is_stopped)
    @rule(lost=st.integers(0, 2), same_host=st.booleans())
    def trainer_restarts(self, lost: int, same_host: bool) -> None:
        """With the checkpoint that `commit_trained` named, or with a newer one whose commit was never sent."""
        old, old_epoch = self.queue, self.epoch
        self.step = max(self.durable, self.step - lost)
        self.queue = TrainQueue.connect(self.url, consumer="trainer-0" if same_host else "trainer-1")
        self.epoch = self.queue.take_over("r", next_step=self.step)
        self.become_trained(self.step)
        with pytest.raises(Fenced):
            old.commit_trained("r", durable_step=CONFIG.num_steps, epoch=old_epoch)
        old.close()

    def become_trained(self, step: int) -> int:
        covered = [
            key
            for key in self.states
            if key[0] < step * 2 and key[0] not in self.cancelled and self.states[key] != "trained"
        ]
        for key in covered:
            self.states[key] = "trained"
            self.reasons.pop(key, None)
        self.durable = max(self.durable, step)
        return len(covered)

    # what must hold after every step

    @invariant()
    def every_trajectory_is_where_it_should_be(self) -> None:
        if not hasattr(self, "states"):
            return
        counts = self.do(checked_counts(self.store))
        found = self.do(self.store.list_trajectories("r", limit=1000)).items
        assert {(t.number, t.sample_index): t.state.value for t in found} == self.states
        assert {(t.number, t.sample_index): t.reason for t in found if t.reason} == self.reasons
        assert counts.rewards_late == self.late
        assert counts.queue_depth == sum(self.group_is(n, "queued") or self.group_is(n, "leased") for n in self.bodies)
        generated = [n for n in self.bodies if not {"accepted", "generating"} & {self.states[n, s] for s in range(2)}]
        horizon = self.do(self.lifecycle.horizon("r"))
        if not self.is_stopped:
            assert horizon.first_open == min(set(range(NUMBERS + 1)) - set(generated))


def test_histories_of_a_run_agree_with_the_model(tmp_path_factory):
    check_histories(History, tmp_path_factory.mktemp("valkey"), max_examples=20, step_count=30)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_histories_of_a_run_agree_with_the_model(tmp_path_factory):
    check_histories(History, tmp_path_factory.mktemp("valkey"), max_examples=500, step_count=60)
