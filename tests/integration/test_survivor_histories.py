"""Random histories of a run under max_lag, in which samples are lost in every way, against a model of it.

Whatever happens in whatever order: every trajectory is where the model says, accepted = trained + dropped by reason + live,
a checkpoint makes TRAINED exactly what its steps leased, no trained group has fewer than `min_group` samples, none that was
dropped comes back, and no batch is left without a group unless the run was told so.
"""

from __future__ import annotations

import asyncio
import time

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

from shared.wire.lifecycle import Lifecycle
from shared.wire.queue import TrainQueue
from shared.wire.records import GroupSealed
from shared.wire.run import RunState
from shared.wire.store import RunStore
from shared.wire.types import DropReason
from tests.deadline import DEADLINE_S
from tests.integration.wire_testing import check_histories, checked_counts, empty, prompt, run_config, trajectory

SIZE, N = 2, 3
CONFIG = run_config(max_lag=1, num_steps=3, prompts_per_step=SIZE, samples_per_prompt=N)
NUMBERS = CONFIG.num_steps * SIZE
Key = tuple[int, int]
"""(prompt number, sample index)"""

numbers = st.integers(0, NUMBERS - 1)
places = st.integers(0, N - 1)
losses = st.sampled_from([set(), {0}, {1, 2}, {0, 1, 2}])
ages = st.sampled_from([0, 0, 0, 0, 1, 2, -1])
"""Of a sample: its batch minus its version. 2 is stale, -1 is of a version that does not exist."""


class LossyHistory(RuleBasedStateMachine):
    url = ""

    @initialize()
    def begin(self) -> None:
        empty(self.url)
        self.loop = asyncio.new_event_loop()
        self.store = self.do(RunStore.connect(self.url))
        self.lifecycle = Lifecycle(self.store)
        self.do(self.store.create_run(CONFIG))
        self.queue = TrainQueue.connect(self.url)
        self.epoch = self.queue.take_over("r", next_step=0)
        self.states: dict[Key, str] = {}
        self.reasons: dict[Key, str] = {}
        self.ages: dict[Key, int] = {}
        self.draws: dict[int, int] = {}
        self.rewarded: set[Key] = set()
        self.gone: set[int] = set()
        """Groups that their batch does without."""
        self.leased: dict[int, set[Key]] = {}
        self.step = self.durable = self.late = 0
        self.is_paused = self.is_stopped = False

    def do(self, coroutine):
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, DEADLINE_S))

    def teardown(self) -> None:
        if hasattr(self, "store"):
            event(f"durable steps: {self.durable}")
            for reason in sorted(set(self.reasons.values())):
                event(f"dropped: {reason}")
            event(f"sampled again: {sum(self.draws.values()) > 0}")
            self.queue.close()
            self.do(self.store.close())
            self.loop.close()

    # the model

    def members(self, number: int) -> list[Key]:
        first = N * self.draws.get(number, 0)
        return [(number, first + i) for i in range(N)] if (number, 0) in self.states else []

    def of_state(self, number: int, *states: str) -> list[Key]:
        return [k for k in self.members(number) if self.states[k] in states]

    def drop(self, key: Key, reason: str) -> None:
        self.states[key], self.reasons[key] = "dropped", reason

    def is_closable(self, number: int) -> bool:
        members = self.members(number)
        settled = self.of_state(number, "rewarded", "dropped")
        return not self.is_stopped and number not in self.gone and bool(members) and settled == members

    def fall_short(self, number: int) -> None:
        for key in self.members(number):
            if self.states[key] != "dropped":
                self.drop(key, "small_group")
        draws = self.draws.get(number, 0)
        begin = number // SIZE * SIZE
        is_last = {*range(begin, begin + SIZE)} - self.gone == {number}
        if draws and not is_last:
            self.gone.add(number)
            return
        self.draws[number] = draws + 1
        self.states |= dict.fromkeys(self.members(number), "accepted")
        self.is_paused = self.is_paused or (is_last and draws > 0)

    # clients

    @rule(number=numbers)
    def post(self, number: int) -> None:
        if (
            not self.is_stopped
            and (number, 0) not in self.states
            and number < (self.durable + CONFIG.queue_bound_batches) * SIZE
        ):
            self.do(self.store.accept_prompts("r", [prompt(number, n=N, deadline_s=1e-9)]))
            self.states |= {(number, s): "accepted" for s in range(N)}

    @rule(number=numbers, place=places, draw=st.integers(0, 2))
    def reward(self, number: int, place: int, draw: int) -> None:
        key = number, N * draw + place
        status = self.do(self.store.put_reward("r", f"r.{number}.{key[1]}", "default", float(place))).status
        state = self.states.get(key)
        if state is None:
            assert status == "unknown"
        elif key in self.rewarded:
            assert status == "unchanged"
        elif state in ("dropped", "queued", "leased", "trained"):
            assert status == "late"
            self.late += 1
        else:
            assert status == "applied"
            self.rewarded.add(key)
            if state == "awaiting_reward":
                self.states[key] = "rewarded"

    @precondition(lambda self: not self.is_stopped)
    @rule(state=st.sampled_from([RunState.PAUSED, RunState.RUNNING, RunState.RUNNING]))
    def pause_or_resume(self, state: RunState) -> None:
        self.do(self.store.set_run_state("r", state))
        self.is_paused = state is RunState.PAUSED

    @precondition(lambda self: self.step and not self.is_stopped)
    @rule(dice=st.integers(0, 9))
    def stop_run(self, dice: int) -> None:
        """What is live is cancelled, and TRAINED after all where a checkpoint turns out to hold it."""
        if dice:
            return
        self.do(self.store.set_run_state("r", RunState.STOPPED))
        self.is_stopped, self.is_paused = True, False
        for key, state in self.states.items():
            if state not in ("trained", "dropped"):
                self.drop(key, "cancelled")

    @precondition(lambda self: not self.is_stopped)
    @rule(number=numbers, dice=st.integers(0, 3))
    def cancel_group(self, number: int, dice: int) -> None:
        if dice or (number, 0) not in self.states:
            return
        if number not in self.gone and self.of_state(number, "leased", "trained"):
            with pytest.raises(GroupSealed):
                self.do(self.store.cancel_group("r", number))
            return
        live = [k for k in self.members(number) if self.states[k] != "dropped"]
        assert self.do(self.store.cancel_group("r", number)) == (0 if number in self.gone else len(live))
        for key in live if number not in self.gone else ():
            self.drop(key, "cancelled")
        self.gone.add(number)

    # the gateway

    @rule(number=numbers, samples=st.lists(st.tuples(places, ages), min_size=1, max_size=N))
    def generate(self, number: int, samples: list[tuple[int, int]]) -> None:
        for place, age in samples:
            members = self.members(number)
            key = members[place] if members else (number, place)
            step = max(0, number // SIZE - age)
            state = self.do(self.lifecycle.store_generated("r", trajectory(number, key[1], step=step)))
            if self.states.get(key) == "accepted":
                self.states[key] = "rewarded" if key in self.rewarded else "awaiting_reward"
                self.ages[key] = number // SIZE - step
            assert state == self.states.get(key)

    @rule(number=numbers)
    def fail(self, number: int) -> None:
        """Replica after replica broke on what is unfinished of a group."""
        unfinished = self.of_state(number, "accepted")
        samples = [sample for _, sample in self.members(number)]
        for num in (len(unfinished), 0):
            assert num == self.do(self.lifecycle.drop_unfinished("r", f"r.{number}", samples, DropReason.INFRA_ERROR))
        for key in unfinished:
            self.drop(key, "infra_error")

    @rule()
    def expire(self) -> None:
        overdue = [k for k, state in self.states.items() if state == "awaiting_reward" and not self.is_paused]
        assert self.do(self.lifecycle.expire("r")) == len(overdue)
        for key in overdue:
            self.drop(key, "reward_timeout")

    @rule()
    def close_groups(self) -> None:
        closable = self.do(self.lifecycle.closable("r"))
        assert closable == [n for n in range(NUMBERS) if self.is_closable(n)]
        for number in closable:
            survivors = self.of_state(number, "rewarded")
            answer, group = self.do(self.lifecycle.close_group("r", number))
            if len(survivors) < CONFIG.min_group:
                self.fall_short(number)
                assert answer == ("dropped" if number in self.gone else "replaced")
            else:
                assert answer == "queued"
                assert [(number, t.sample_index) for t in group.trajectories] == survivors
                assert all(t.reward is not None for t in group.trajectories)
                self.states |= dict.fromkeys(survivors, "queued")
            # A repeat changes nothing, also where other samples have taken their place.
            assert self.do(self.lifecycle.close_group("r", number))[0] == "not_ready"

    @rule(lost=st.tuples(losses, losses), is_trained=st.booleans())
    def everything_for_the_next_batch(self, lost: tuple[set[int], set[int]], is_trained: bool) -> None:
        """Chance alone would seldom bring a whole batch to the trainer. Some rewards of its groups never come."""
        for number in range(SIZE * self.step, min(SIZE * (self.step + 1), NUMBERS)):
            self.post(number)
            for key in self.members(number):
                self.generate(number, [(key[1] % N, 0)])
                if key[1] % N not in lost[number % SIZE]:
                    self.reward(number, key[1] % N, key[1] // N)
        self.expire()
        self.close_groups()
        if is_trained and self.step < CONFIG.num_steps and not self.is_stopped:
            self.train_a_step()

    # the trainer

    @precondition(lambda self: self.step < CONFIG.num_steps and not self.is_stopped)
    @rule()
    def train_a_step(self) -> None:
        """What can't be trained is dropped at the lease: nothing else, and none of the others."""
        batch = range(SIZE * self.step, SIZE * (self.step + 1))
        present = [n for n in batch if n not in self.gone]
        if self.is_paused or not all(self.of_state(n, "queued", "leased") for n in present):
            return
        for number in present:
            held = self.of_state(number, "queued", "leased")
            bad = [k for k in held if not 0 <= self.ages[k] <= CONFIG.max_lag]
            for key in bad:
                self.drop(key, "stale" if self.ages[key] > 0 else "orphan_lineage")
            if bad and len(held) - len(bad) < CONFIG.min_group:
                self.fall_short(number)
        present = [n for n in batch if n not in self.gone]
        if self.is_paused or not all(self.of_state(n, "queued", "leased") for n in present):
            self.lease_until_as_modelled()
            return
        digests = [f"d{s}" for s in range(max(0, self.step - 1), self.step + 1)]
        groups = self.queue.lease("r", self.step, epoch=self.epoch, deadline_s=DEADLINE_S, digests=digests)
        leased = {(g.prompt_number, t.sample_index) for g in groups for t in g.trajectories}
        assert leased == {k for n in present for k in self.of_state(n, "queued", "leased")}
        assert all(len(g.trajectories) >= CONFIG.min_group for g in groups)
        self.states |= dict.fromkeys(leased, "leased")
        self.leased[self.step] = leased
        self.queue.record_step("r", self.step, {}, epoch=self.epoch)
        self.step += 1

    def lease_until_as_modelled(self) -> None:
        """The batch does not become complete: a group of it is to be sampled again."""
        end = time.monotonic() + DEADLINE_S
        digests = [f"d{s}" for s in range(max(0, self.step - 1), self.step + 1)]
        while time.monotonic() < end:
            assert self.queue.lease("r", self.step, epoch=self.epoch, deadline_s=0.02, digests=digests) is None
            if self.do(self.store.counts("r")).replaced == sum(self.draws.values()):
                break

    @rule()
    def checkpoint(self) -> None:
        self.queue.commit_trained("r", durable_step=self.step, epoch=self.epoch)
        self.become_trained()

    @precondition(lambda self: not self.is_stopped)
    @rule(lost=st.integers(0, 2))
    def trainer_restarts(self, lost: int) -> None:
        self.step = max(self.durable, self.step - lost)
        self.queue.close()
        self.queue = TrainQueue.connect(self.url)
        self.epoch = self.queue.take_over("r", next_step=self.step)
        self.become_trained()

    def become_trained(self) -> None:
        for step in range(self.durable, self.step):
            for key in self.leased[step]:
                self.states[key] = "trained"
                self.reasons.pop(key, None)
        self.durable = max(self.durable, self.step)

    # what must hold after every step

    @invariant()
    def every_trajectory_is_where_it_should_be(self) -> None:
        if not hasattr(self, "states"):
            return
        counts = self.do(checked_counts(self.store))
        found = self.do(self.store.list_trajectories("r", limit=1000)).items
        assert {(t.number, t.sample_index): t.state.value for t in found} == self.states
        assert {(t.number, t.sample_index): t.reason for t in found if t.reason} == self.reasons
        assert all(t.step is None for t in found if t.reason in ("reward_timeout", "infra_error"))
        assert counts.accepted == counts.trained + sum(counts.dropped.values()) + counts.live
        assert counts.replaced == sum(self.draws.values())
        assert counts.rewards_late == self.late
        run = self.do(self.store.get_run("r"))
        assert (run.state is RunState.PAUSED) == self.is_paused
        assert self.do(self.lifecycle.dropped("r", range(NUMBERS))) == self.gone
        pending = self.do(self.lifecycle.pending_prompts("r", first=0, end=NUMBERS))
        assert {(g.number, s) for g in pending for s in g.samples} == {
            k for k, state in self.states.items() if state == "accepted"
        }


def test_histories_in_which_samples_are_lost_agree_with_the_model(tmp_path_factory):
    check_histories(LossyHistory, tmp_path_factory.mktemp("valkey"), max_examples=12, step_count=30)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_histories_in_which_samples_are_lost_agree_with_the_model(tmp_path_factory):
    check_histories(LossyHistory, tmp_path_factory.mktemp("valkey"), max_examples=200, step_count=60)
