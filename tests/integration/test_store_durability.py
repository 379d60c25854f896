"""What was acknowledged survives: SIGKILL, a power cut, and the trap of asking the wrong connection."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
import redis

from shared.wire.embedded import EmbeddedValkey
from shared.wire.lifecycle import Lifecycle
from shared.wire.records import AcceptStatus, NotDurable, RewardItem, RewardStatus
from shared.wire.types import State
from tests.deadline import DEADLINE_S
from tests.integration.wire_testing import (
    checked_counts,
    open_store,
    prompt,
    run_async,
    run_config,
    trajectory,
    valkey_server,
)


def kill(server: EmbeddedValkey) -> None:
    server.process.kill()
    server.process.wait(DEADLINE_S)


def log_file(server: EmbeddedValkey) -> Path:
    (log,) = server.data_dir.glob("appendonlydir/*.incr.aof")
    return log


def test_acknowledged_prompts_and_rewards_survive_sigkill_under_the_same_store(tmp_path: Path):
    async def test():
        with valkey_server(tmp_path, fsync="everysec") as server:
            async with open_store(server.url) as store:
                await store.create_run(run_config())
                await store.accept_prompts("r", [prompt(0), prompt(1)])
                await Lifecycle(store).store_generated("r", trajectory(0, 0))
                await store.put_reward("r", "r.0.0", "default", 0.5)
                kill(server)
                server.start()
                # The same connections, through redis-py's retries.
                record = await store.get_trajectory("r", "r.0.0")
                assert (record.state, record.reward) == (State.REWARDED, 0.5)
                assert (await checked_counts(store)).accepted == 4

    run_async(test)


def test_after_a_power_cut_everything_acknowledged_is_there_and_the_rest_can_be_repeated(tmp_path: Path):
    async def test():
        with valkey_server(tmp_path, fsync="everysec") as server:
            async with open_store(server.url) as store:
                await store.create_run(run_config())
                await store.accept_prompts("r", [prompt(0)])
                await Lifecycle(store).store_generated("r", trajectory(0, 0))
                await store.put_reward("r", "r.0.0", "default", 1.0)
                synced = log_file(server).stat().st_size
                await store.client.config_set("appendfsync", "no")
                before = await store.last_event("r")
                unanswered = asyncio.create_task(store.accept_prompts("r", [prompt(1)]))
                assert await store.events("r", after=before, block_s=5)
                await Lifecycle(store).store_generated("r", trajectory(0, 1))
                kill(server)
                # The last write but one is torn in the middle.
                assert log_file(server).stat().st_size > synced + 30
                os.truncate(log_file(server), synced + 30)
                server.start()
                with pytest.raises(NotDurable):
                    await unanswered
                assert (await checked_counts(store)).by_state == {State.ACCEPTED: 1, State.REWARDED: 1}
                (answer,) = await store.accept_prompts("r", [prompt(1)])
                assert answer.status is AcceptStatus.ACCEPTED
                await Lifecycle(store).store_generated("r", trajectory(0, 1))
                assert (await checked_counts(store)).accepted == 4

    run_async(test)


def test_nothing_is_acknowledged_while_the_disk_does_not_sync(tmp_path: Path):
    async def test():
        with valkey_server(tmp_path, fsync="everysec") as server:
            async with open_store(server.url, durable_timeout_s=0.3) as store:
                await store.create_run(run_config())
                redis.Redis.from_url(server.url).config_set("appendfsync", "no")
                # A connection that wrote nothing itself is told yes at once: the trap.
                assert redis.Redis.from_url(server.url).execute_command("WAITAOF", 1, 0, 100) == [1, 0]
                with pytest.raises(NotDurable, match=r"not on disk after 0\.3 s"):
                    await store.accept_prompts("r", [prompt(0)])
            redis.Redis.from_url(server.url).config_set("appendfsync", "everysec")
            async with open_store(server.url) as patient:
                (answer,) = await patient.accept_prompts("r", [prompt(0)])
                assert answer.status is AcceptStatus.DUPLICATE

    run_async(test)


def test_writes_of_a_server_that_is_gone_are_not_acknowledged_by_its_successor(tmp_path: Path):
    async def test():
        with valkey_server(tmp_path, fsync="everysec") as server:
            async with open_store(server.url) as store:
                synced = log_file(server).stat().st_size

                async def write_and_lose() -> None:
                    async with store.durable():
                        await store.client.set("a", "1")
                        kill(server)
                        os.truncate(log_file(server), synced)
                        server.start()

                with pytest.raises(NotDurable, match="restarted"):
                    await write_and_lose()
                assert await store.client.get("a") is None
                async with store.durable():
                    await store.client.set("a", "1")

    run_async(test)


def test_one_sync_serves_everybody_who_waits_at_the_same_time(tmp_path: Path):
    async def test():
        with valkey_server(tmp_path, fsync="everysec") as server:
            async with open_store(server.url) as store:
                await store.create_run(run_config(num_steps=40, queue_batches=40))
                before = int(await store.client.get("tz:durable"))
                results = await asyncio.gather(*(store.accept_prompts("r", [prompt(n)]) for n in range(64)))
                assert all(r[0].status is AcceptStatus.ACCEPTED for r in results)
                rewards = [RewardItem(trajectory_id=f"r.{n}.0", value=1.0) for n in range(64)]
                answers = await asyncio.gather(*(store.put_rewards("r", [item]) for item in rewards))
                assert all(a[0].status is RewardStatus.APPLIED for a in answers)
                assert int(await store.client.get("tz:durable")) - before < 64

    run_async(test)


def test_when_valkey_stays_away_the_answer_is_not_durable(tmp_path: Path):
    async def test():
        with valkey_server(tmp_path) as server:
            async with open_store(server.url) as store:
                with pytest.raises(NotDurable, match="repeat the request"):
                    async with store.durable():
                        kill(server)

    run_async(test)
