"""An operator drops a group: its batch is trained without it, in whatever state it was; what is in the weights stays."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from shared.wire.lifecycle import Closed
from shared.wire.queue import TrainQueue
from shared.wire.run import RunState
from tests.deadline import DEADLINE_S
from tests.integration.gateway_harness import HttpGateway
from timzero.client import ApiError, Client

pytest_plugins = ("tests.integration.gateway_fixtures",)


@pytest.fixture
def queue(gateway: HttpGateway) -> Iterator[TrainQueue]:
    queue = TrainQueue.connect(gateway.config.valkey)
    yield queue
    queue.close()


def fill(client: Client, gateway: HttpGateway, run: str, *numbers: int) -> None:
    """Groups that are generated, rewarded and queued."""
    client.post_prompts(run, [{"number": n, "prompt": "1"} for n in numbers])
    for n in numbers:
        for sample in range(2):
            gateway.generate(run, f"{run}.{n}.{sample}", [5])
            client.put_reward(run, f"{run}.{n}.{sample}", "default", 1.0)
        assert gateway.call(gateway.lifecycle.close_group(run, n))[0] is Closed.QUEUED


def refusal(client: Client, run: str, number: int) -> tuple[int, str]:
    with pytest.raises(ApiError) as caught:
        client.cancel_group(run, number)
    return caught.value.status, caught.value.code


def lease(queue: TrainQueue, run: str, epoch: int) -> list[int]:
    groups = queue.lease(run, 0, epoch=epoch, deadline_s=DEADLINE_S)
    assert groups is not None
    return [g.prompt_number for g in groups]


@pytest.mark.parametrize("state", ["accepted", "generating", "awaiting_reward", "rewarded", "queued"])
def test_batch_is_trained_without_a_cancelled_group(
    client: Client, gateway: HttpGateway, run: str, queue: TrainQueue, state: str
) -> None:
    fill(client, gateway, run, 0)
    ids = [f"{run}.1.0", f"{run}.1.1"]
    if state == "queued":
        fill(client, gateway, run, 1)
    else:
        client.post_prompts(run, [{"number": 1, "prompt": "1"}])
    if state == "generating":
        gateway.call(gateway.lifecycle.start_generating(run, ids))
    if state in ("awaiting_reward", "rewarded"):
        for trajectory_id in ids:
            gateway.generate(run, trajectory_id, [5])
            if state == "rewarded":
                client.put_reward(run, trajectory_id, "default", 1.0)
    assert {t["state"] for t in client.trajectories(run, ids=ids)} == {state}

    assert client.cancel_group(run, 1) == {"group_id": f"{run}.1", "number": 1, "dropped": 2}
    assert client.cancel_group(run, 1)["dropped"] == 0
    assert {(t["state"], t["reason"]) for t in client.trajectories(run, ids=ids)} == {("dropped", "cancelled")}
    assert gateway.call(gateway.lifecycle.horizon(run)).first_open == 2
    assert gateway.call(gateway.lifecycle.closable(run)) == []
    assert gateway.call(gateway.lifecycle.first_deadline(run)) is None
    (again,) = client.post_prompts(run, [{"number": 1, "prompt": "1"}])
    assert (again["status"], again["trajectory_ids"]) == (200, ids)

    epoch = queue.take_over(run, next_step=0)
    assert lease(queue, run, epoch) == [0]
    queue.record_step(run, 0, {}, epoch=epoch)
    assert refusal(client, run, 0) == (409, "group-sealed"), "its weights are about to be durable"
    assert queue.commit_trained(run, durable_step=1, epoch=epoch) == 2
    m = client.metrics(run)
    assert (m["accepted"], m["trained"], m["dropped"], m["live"]) == (4, 2, {"cancelled": 2}, 0)
    assert refusal(client, run, 0) == (409, "group-sealed")


def test_group_of_a_refused_batch_is_cancelled_and_the_run_goes_on(
    client: Client, gateway: HttpGateway, run: str, queue: TrainQueue
) -> None:
    """The trainer leases a batch, can't train it, and pauses the run; without a way to drop the group that repeats for ever."""
    fill(client, gateway, run, 0, 1)
    epoch = queue.take_over(run, next_step=0)
    assert lease(queue, run, epoch) == [0, 1]
    assert refusal(client, run, 1) == (409, "group-sealed"), "it is being trained"
    queue.set_state(run, RunState.PAUSED, epoch=epoch, reason="mismatch")
    assert refusal(client, run, 1) == (409, "group-sealed"), "it is in the weights that wait"
    queue.set_state(run, RunState.PAUSED, epoch=epoch, reason="poison")
    assert client.cancel_group(run, 1)["dropped"] == 2
    assert queue.lease(run, 0, epoch=epoch, deadline_s=0.01) is None
    client.resume(run)
    assert lease(queue, run, epoch) == [0]


def test_trainer_that_did_not_see_the_drop_leases_nothing(
    client: Client, gateway: HttpGateway, run: str, queue: TrainQueue
) -> None:
    """It reads what is dropped before it leases; a drop in between must not be trained."""
    fill(client, gateway, run, 0, 1)
    epoch = queue.take_over(run, next_step=0)
    client.cancel_group(run, 1)
    arguments = ("lease", run, 0.0, epoch, 0, 0)
    assert gateway.call(gateway.store.call(*arguments, 0, 1)) == b"dropped"
    assert client.trajectory(run, f"{run}.0.0")["state"] == "queued"
    assert gateway.call(gateway.store.call(*arguments, 0)) == b"ok"


def test_what_can_not_be_cancelled(http: httpx.Client, client: Client, run: str) -> None:
    assert refusal(client, run, 3) == (404, "not-found")
    assert refusal(client, "nobody", 0) == (404, "not-found")
    for number in ("-1", "x", str(2**31)):
        assert http.post(f"/v1/runs/{run}/groups/{number}:cancel").status_code == 422, number
    client.post_prompts(run, [{"number": 0, "prompt": "1"}])
    client.stop(run)
    assert refusal(client, run, 0) == (409, "run-state")
