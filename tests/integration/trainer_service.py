"""Real processes around the trainer's tests: Valkey, weight_sync, the trainer; and the dispatcher's part played in the test."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import redis

from services.trainer.batch import PolicyVersion
from shared.models import ModelConfig
from shared.wire import rpc
from shared.wire.lifecycle import Closed, Lifecycle
from shared.wire.pb import weight_sync_pb2 as pb
from shared.wire.pb.weight_sync_pb2_grpc import WeightSyncStub
from shared.wire.prompts import PromptItem
from shared.wire.records import AcceptStatus, RewardItem
from shared.wire.run import RunConfig, RunState
from shared.wire.store import RunStore
from shared.wire.types import State
from shared.wire.valkey import key
from shared.wire.weights import Publisher, fetch
from tests.deadline import DEADLINE_S
from tests.integration.trainer_testing import Engine, plain_decoder


class Process:
    """A service whose JSON log lines can be waited for."""

    def __init__(self, *argv: str) -> None:
        self._popen = subprocess.Popen(
            argv, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.log: list[dict[str, Any]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._popen.poll() is None:
            self.kill(signal.SIGKILL)
        if error is not None:
            print("\n".join(str(line) for line in self.log[-40:]), file=sys.stderr)

    def _read(self) -> None:
        assert self._popen.stderr is not None
        for line in self._popen.stderr:
            try:
                self._lines.put(json.loads(line))
            except ValueError:
                self._lines.put({"event": line.rstrip()})
        self._lines.put(None)

    def wait_for(self, event: str, **fields: Any) -> dict[str, Any]:
        """The next log line with this event and these fields."""
        end = time.monotonic() + DEADLINE_S
        while True:
            line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
            assert line is not None, f"the process ended before it said {event!r}: {self.log[-5:]}"
            self.log.append(line)
            if line.get("event") == event and all(line.get(k) == v for k, v in fields.items()):
                return line

    def wait(self) -> int:
        """Its exit code, after the rest of its log."""
        code = self._popen.wait(DEADLINE_S)
        while (line := self._lines.get(timeout=DEADLINE_S)) is not None:
            self.log.append(line)
        return code

    def kill(self, number: signal.Signals = signal.SIGKILL) -> int:
        self._popen.send_signal(number)
        return self.wait()


class Stage:
    """Everything but the trainer, and the run's other side: prompts in, samples by an engine, rewards, groups into the queue."""

    def __init__(self, url: str, weight_sync: str) -> None:
        self.url, self.weight_sync = url, weight_sync
        self._engines: dict[str, Engine] = {}
        self.store: RunStore
        self.lifecycle: Lifecycle

    async def __aenter__(self) -> Stage:
        self.store = await RunStore.connect(self.url)
        self.lifecycle = Lifecycle(self.store)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.store.close()

    def trainer(self, run_dir: Path, *extra: str, ranks: int = 1) -> Process:
        launch = (
            ["-m"]
            if ranks == 1
            else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
        )
        return Process(
            sys.executable, *launch, "services.trainer", f"redis_url={self.url}", f"weight_sync={self.weight_sync}",
            f"run_dir={run_dir}", "poll_s=0.5", *extra,
        )  # fmt: skip

    def wait_version(self, run: str, step: int) -> PolicyVersion:
        """As soon as weight_sync has it."""
        with rpc.channel(self.weight_sync) as channel:
            fleets: Iterator[pb.Fleet] = WeightSyncStub(channel).Watch(
                pb.WatchRequest(), timeout=DEADLINE_S, wait_for_ready=True
            )
            for fleet in fleets:
                for v in fleet.versions:
                    if fleet.run == run and v.step == step:
                        return PolicyVersion(v.lineage, v.step, v.digest)
        raise AssertionError(f"version {step} of {run} was never published")

    def engine(self, run: str, step: int) -> Engine:
        """A decoder with the published bytes of one version."""
        version = self.wait_version(run, step)
        if version.digest not in self._engines:
            with Publisher(self.weight_sync) as publisher:
                manifest = publisher.manifest(run, version.digest)
            tensors = fetch(manifest, address=self.weight_sync, deadline_s=DEADLINE_S)
            config = ModelConfig.from_hf(json.loads(manifest.model_config_json))
            self._engines[version.digest] = Engine(plain_decoder(config, tensors), version)
        engine = self._engines[version.digest]
        engine.version = version
        return engine

    async def serve_batch(self, config: RunConfig, batch: int, engine: Engine | None = None) -> None:
        """Posts, samples, rewards and queues the prompts of one batch."""
        engine = engine or self.engine(config.run, config.version_for(batch))
        size = config.prompts_per_step
        groups = [engine.group(config, n) for n in range(batch * size, (batch + 1) * size)]
        items = [
            PromptItem(
                number=g.prompt_number,
                token_ids=tuple(g.trajectories[0].token_ids[: g.trajectories[0].num_prompt_tokens].tolist()),
                n=len(g.trajectories),
                sampling=g.trajectories[0].sampling,
            )
            for g in groups
        ]
        results = await self.store.accept_prompts(config.run, items)
        assert {r.status for r in results} <= {AcceptStatus.ACCEPTED, AcceptStatus.DUPLICATE}, results
        for group in groups:
            ids = [t.trajectory_id for t in group.trajectories]
            assert await self.lifecycle.start_generating(config.run, ids) == set(ids)
            for t in group.trajectories:
                assert await self.lifecycle.store_generated(config.run, t) is State.AWAITING_REWARD
            await self.store.put_rewards(
                config.run,
                [RewardItem(trajectory_id=t.trajectory_id, value=t.reward or 0.0) for t in group.trajectories],
            )
            closed, _ = await self.lifecycle.close_group(config.run, group.prompt_number)
            assert closed is Closed.QUEUED, closed

    def wait_stream(self, run: str, name: str, field: bytes, value: str, *, after: str = "0-0") -> str:
        """Until an entry of the run's stream has this field; returns its id."""
        end = time.monotonic() + DEADLINE_S
        client = redis.Redis.from_url(self.url, protocol=2, socket_timeout=DEADLINE_S)
        while (left := end - time.monotonic()) > 0:
            for _, entries in client.xread({key(run, name): after}, block=int(left * 1000)):
                for entry_id, fields in entries:
                    after = entry_id.decode()
                    if fields.get(field) == value.encode():
                        client.close()
                        return after
        raise AssertionError(f"no {field!r} = {value} in {name} of {run}")

    def wait_state(self, run: str, state: RunState) -> str:
        return self.wait_stream(run, "events", b"type", f"run.{state}")


def steps_of(run_dir: Path, run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / run / "steps.jsonl").read_text().splitlines()]
