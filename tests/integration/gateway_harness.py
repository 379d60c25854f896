"""A gateway's HTTP side on loopback, with a real Valkey and a real weight_sync behind it.

Only the rollout engine is missing: a test generates a sample by saying what it is, through the same `Lifecycle` calls that
the dispatcher makes.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import uvicorn

from services.gateway.__main__ import HttpServer, listen
from services.gateway.assemble import create_app
from services.gateway.auth import Keyring
from services.gateway.config import GatewayConfig
from services.gateway.context import Gateway
from services.gateway.events import Feeds
from services.gateway.progress import Progress
from services.gateway.tokenizer import Tokenizers
from shared.wire import rpc
from shared.wire.lifecycle import Lifecycle
from shared.wire.pb.weight_sync_pb2_grpc import WeightSyncStub
from shared.wire.prompts import EvalItem, PromptItem
from shared.wire.queue import TrainQueue
from shared.wire.store import RunStore
from shared.wire.tensors import RawTensor, build_manifest
from shared.wire.types import FinishReason, Kv, Span, SpanKind, Trajectory
from shared.wire.weights import Publisher
from tests.deadline import DEADLINE_S
from timzero.model import tiny

T = TypeVar("T")


def write_model(directory: Path) -> Path:
    """tiny-sort's configuration and tokenizer: 32 words, ids by place in `tiny.WORDS`."""
    directory.mkdir(parents=True, exist_ok=True)
    tiny.write(directory)
    (directory / "model.safetensors").unlink()
    return directory


@contextmanager
def weight_sync(data_dir: Path) -> Iterator[str]:
    """A weight_sync process. Yields its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "services.weight_sync", f"data_dir={data_dir}", "port=0"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield f"127.0.0.1:{ready_line(process)['port']}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(DEADLINE_S)


def ready_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The JSON log line "ready" of a service; what it logs later is thrown away."""
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record.get("event") == "ready":
            threading.Thread(target=lambda: [None for _ in process.stderr], daemon=True).start()
            return record
    raise AssertionError(f"exited with {process.wait()} before it was ready:\n{''.join(lines)}")


def publish(address: str, config: dict[str, Any], step: int, *, epoch: int = 1) -> str:
    """Publishes a version of one small tensor as the trainer of a run would. Returns its digest."""
    tensor = RawTensor("float32", (4,), np.full(4, step, "<f4").tobytes())
    manifest = build_manifest(
        run=config["run"], lineage=0, step=step, tensors={"w": tensor}, model_config_json="{}",
        run_config_json=json.dumps(config), fingerprint="f",
        probe_token_ids=[], probe_logprobs=[],
    )  # fmt: skip
    with Publisher(address) as publisher:
        return publisher.publish(manifest, {"w": tensor}, epoch=epoch, deadline_s=DEADLINE_S).digest


class HttpGateway:
    """The application under a real uvicorn in a thread of its own.

    Args:
        valkey_url, weight_sync_address: what is behind it.
        config: further settings, e.g. `keys` or limits.
    """

    def __init__(self, valkey_url: str, weight_sync_address: str, **config: Any) -> None:
        self.config = GatewayConfig(valkey=valkey_url, weight_sync=weight_sync_address, port=0, **config)
        self.replicas: dict[str, int] = {}
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> HttpGateway:
        self._thread.start()
        assert self._started.wait(DEADLINE_S)
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        if self._thread.is_alive():
            self.call(self.gateway.feeds.close())
            self.server.should_exit = True
            self._thread.join(DEADLINE_S)
            assert not self._thread.is_alive(), "the server did not stop"

    def call(self, awaitable: Awaitable[T]) -> T:
        """Runs something in the server's event loop and waits for it."""

        async def run() -> T:
            return await awaitable

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(DEADLINE_S)

    def _run(self) -> None:
        try:
            # Cancels what libraries left running in the loop, as a process of its own does.
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._started.set()

    async def _serve(self) -> None:
        config, self._loop = self.config, asyncio.get_running_loop()
        self.store = await RunStore.connect(config.valkey, retries=4)
        self.lifecycle = Lifecycle(self.store)
        channel = rpc.aio_channel(config.weight_sync)
        self.gateway = Gateway(
            config=config,
            keyring=Keyring(config.keys, config.keys_file),
            store=self.store,
            weight_sync=WeightSyncStub(channel),
            tokenizers=Tokenizers(config.tokenizer_timeout_s),
            feeds=Feeds(self.store),
            progress=Progress(),
            replicas=lambda: self.replicas,
        )
        listener = listen(config.host, 0)
        self.port = listener.getsockname()[1]
        application = create_app(self.gateway)
        self.server = HttpServer(uvicorn.Config(application, log_config=None, access_log=False, lifespan="off"))
        serving = asyncio.create_task(self.server.serve(sockets=[listener]))
        # The socket listens already: a request that comes before uvicorn accepts waits in the backlog.
        self._started.set()
        await serving
        await channel.close()
        await self.store.close()

    # the dispatcher's part

    def generate(
        self,
        run: str,
        trajectory_id: str,
        token_ids: Sequence[int],
        *,
        logprobs: Sequence[float] | None = None,
        finish: FinishReason = FinishReason.STOP,
        reward: float | None = None,
    ) -> None:
        """Makes a sample generated: `token_ids` are the sampled ones."""
        self.call(self._generate(run, trajectory_id, token_ids, logprobs, finish, reward))

    async def _generate(
        self,
        run: str,
        trajectory_id: str,
        token_ids: Sequence[int],
        logprobs: Sequence[float] | None,
        finish: FinishReason,
        reward: float | None,
    ) -> None:
        group_id, _, sample = trajectory_id.rpartition(".")
        prompt = await self._prompt(run, group_id)
        await self.lifecycle.start_generating(run, [trajectory_id])
        first, last = len(prompt.token_ids), len(prompt.token_ids) + len(token_ids)
        spans = [Span(start=0, end=first, kind=SpanKind.PROMPT)]
        if token_ids:
            spans.append(
                Span(start=first, end=last, kind=SpanKind.SAMPLED, policy_step=0, manifest_digest="d", kv=Kv.FRESH)
            )
        trajectory = Trajectory(
            trajectory_id=trajectory_id,
            group_id=group_id,
            prompt_id=prompt.prompt_id if isinstance(prompt, PromptItem) else group_id,
            sample_index=int(sample),
            run=run,
            seed=0,
            sampling=prompt.sampling,
            token_ids=np.asarray([*prompt.token_ids, *token_ids], np.int32),
            logprobs=np.asarray(logprobs if logprobs is not None else [-0.1] * len(token_ids), np.float32),
            top1=np.asarray(token_ids, np.int32),
            loss_mask=np.asarray([0] * first + [1] * len(token_ids), np.uint8),
            spans=tuple(spans),
            finish_reason=finish,
            fingerprint="cpu",
            replicas=("r0",),
        )
        await self.lifecycle.store_generated(run, trajectory, reward=reward)

    def record_step(self, run: str, step: int, metrics: dict[str, Any]) -> None:
        """Records a step as the trainer would (a trainer that restarts before each step)."""
        queue = TrainQueue.connect(self.config.valkey)
        queue.record_step(run, step, metrics, epoch=queue.take_over(run, next_step=0))
        queue.close()

    async def _prompt(self, run: str, group_id: str) -> PromptItem | EvalItem:
        name = group_id[len(run) + 1 :]
        if name.startswith("e"):
            eval_id, _, item = name[1:].partition(".")
            return (await self.store.get_eval(run, int(eval_id))).items[int(item)]
        (group,) = await self.lifecycle.pending_prompts(run, first=int(name), end=int(name) + 1)
        return group.prompt


def run_config(name: str, model: Path, **fields: Any) -> dict[str, Any]:
    return {"run": name, "model": str(model), "num_steps": 4, "prompts_per_step": 2, "samples_per_prompt": 2,
            "max_model_len": 32, "checkpoint_interval": 1, "lag": 1, **fields}  # fmt: skip
