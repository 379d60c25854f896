"""A replica that samples while it takes version after version: tokens/s undisturbed and during Prepare, the pause, the total.

This process is the trainer (versions lie in its memory) and calls Prepare and Commit as weight_sync does; weight_sync and the
replica are processes of their own. A probe that differs in one bit ends the benchmark.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import torch

from benchmarks.architectures import QWEN3_1_7B
from benchmarks.harness import Record
from benchmarks.timeline import parse
from services.rollout.offline import random_weights
from services.rollout.weights import Numerics, ServedRun, certified
from services.trainer.config import TrainerConfig
from services.trainer.offers import Offers
from shared.config import unstructure
from shared.metrics import names
from shared.models import Decoder, ModelConfig, Rope, load_config, packed_layout
from shared.transfer.arena import ArenaLayout
from shared.wire import rpc
from shared.wire.pb import rollout_pb2 as pb
from shared.wire.pb.rollout_pb2_grpc import RolloutEngineStub
from shared.wire.pb.weight_sync_pb2 import Manifest
from shared.wire.run import RunConfig
from shared.wire.tensors import build_manifest
from shared.wire.types import float32_bytes, int32_bytes
from shared.wire.weights import Publisher
from timzero.model.get import get

CALL_S = 600.0
TEMPERATURE = 1.0
BYTES_MOVED, FALLBACKS = names.WEIGHT_SYNC_BYTES.name, names.SOURCE_FALLBACKS.name
"""Counters of a replica: by transport what came from the trainer's memory, and what did not come that way."""


@dataclass(frozen=True)
class Setting:
    """What is served, and under which load."""

    name: str
    model: ModelConfig
    dtype: torch.dtype
    prompts: int
    samples: int
    """Of each prompt."""
    prompt_tokens: int
    max_tokens: int
    window_s: float
    """Of undisturbed sampling before each version."""
    words: tuple[str, ...]
    """Configuration of the replica."""


def setting_of(*, device: str, is_tiny: bool) -> Setting:
    words: tuple[str, ...] = ("max_step_tokens=8192", f"device={device}")
    if is_tiny:
        rope = Rope(head_dim=8)
        model = ModelConfig(family="llama", vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
                            num_kv_heads=2, head_dim=8, max_position_embeddings=256, rope=rope, tie_word_embeddings=True,
                            eos_token_ids=())  # fmt: skip
        words = (*words, "kv_cache_tokens=4096", "max_running=16")
        return Setting("tiny", model, torch.float32, 2, 4, 16, 200, 0.2, words)
    if device.startswith("cuda"):
        words = (*words, "kv_cache_tokens=524288", "max_running=256", "page_size=64")
        return Setting("1.7b", QWEN3_1_7B, torch.bfloat16, 32, 8, 256, 1600, 3.0, words)
    model = load_config(get("smollm2-135m-instruct"))
    words = (*words, "kv_cache_tokens=32768", "max_running=32")
    return Setting("smollm2-135m", model, torch.bfloat16, 4, 4, 64, 900, 5.0, words)


@contextlib.contextmanager
def service(name: str, *words: str) -> Iterator[dict[str, Any]]:
    """A process, and what it said when it was ready. Its log is read to the end, so that it never blocks on it."""
    process = subprocess.Popen([sys.executable, "-m", f"services.{name}", *words], stderr=subprocess.PIPE, text=True)
    lines: list[str] = []
    is_ready = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if '"ready"' in line:
                is_ready.set()
        is_ready.set()

    threading.Thread(target=read, daemon=True).start()
    try:
        is_ready.wait(CALL_S)
        said = [line for line in lines if '"ready"' in line]
        if not said:
            raise RuntimeError(f"{name} did not start")
        yield json.loads(said[0])
    except BaseException:
        print(f"--- end of the log of {name}\n{''.join(lines[-20:])}", file=sys.stderr)
        raise
    finally:
        process.terminate()
        process.wait(CALL_S)


class Trainer:
    """Versions of random weights in this process's memory."""

    def __init__(self, setting: Setting, device: torch.device, address: str, transport: str) -> None:
        self._setting, self._device = setting, device
        self._run = RunConfig(run="bench", model=setting.name, max_model_len=4096)
        self.numerics: Numerics = certified(ServedRun(self._run, setting.model, setting.dtype), str(device))
        self.transport = transport
        self._offers = Offers(TrainerConfig(transport=transport), device)  # type: ignore[arg-type]
        self._publisher = Publisher(address)

    def close(self) -> None:
        self._publisher.settle(CALL_S)
        self._publisher.close()
        self._offers.close()

    def publish(self, step: int) -> tuple[Manifest, dict[str, float]]:
        """One version, and the seconds it took. Its weights and its probe are made before the clock starts."""
        weights = random_weights(self._setting.model, step, ops=self.numerics.ops, dtype=self._setting.dtype)
        probe = [np.arange(n, dtype=np.int32) % 50 + 3 for n in (5, 17, 33)]
        scores = self._score(weights, probe)
        self._publisher.settle(CALL_S)
        begin = time.perf_counter()
        layout = ArenaLayout.of((n, str(w.dtype).removeprefix("torch."), tuple(w.shape)) for n, w in weights.items())
        slot = self._offers.room(layout)
        assert slot is not None, "both buffers are being read"
        for name, weight in weights.items():
            slot.fill(name, weight)
        slot.finish()
        gathered = time.perf_counter()
        tensors = slot.tensors()
        manifest = build_manifest(
            run="bench",
            lineage=0,
            step=step,
            tensors=tensors,
            model_config_json=json.dumps(self._setting.model.to_hf()),
            run_config_json=json.dumps(unstructure(self._run)),
            fingerprint=self.numerics.fingerprint,
            probe_token_ids=[int32_bytes(ids) for ids in probe],
            probe_logprobs=[float32_bytes(s) for s in scores],
            num_threads=8 if self._device.type == "cuda" else 1,
        )
        self._offers.offer(manifest, slot)
        digested = time.perf_counter()
        self._publisher.publish(manifest, tensors, epoch=1, deadline_s=CALL_S)
        announced = time.perf_counter()
        times = {"gather_s": gathered - begin, "digest_s": digested - gathered, "announce_s": announced - digested}
        return manifest, times

    @torch.no_grad()
    def _score(self, weights: dict[str, torch.Tensor], probe: list[np.ndarray]) -> list[np.ndarray]:
        with torch.device("meta"):
            decoder = Decoder(self._setting.model, self.numerics.ops)
        decoder.load_state_dict(weights, assign=True)
        lengths = [len(p) for p in probe]
        ids = torch.from_numpy(np.concatenate(probe).astype(np.int64))
        ends = np.cumsum(lengths)
        rows = torch.from_numpy(np.setdiff1d(np.arange(ends[-1]), ends - 1))
        layout = packed_layout(lengths)
        temperature = torch.full((len(rows),), TEMPERATURE)
        on = self._device
        out = decoder.score(
            ids.to(on), layout.positions.to(on), layout, rows.to(on), ids[rows + 1].to(on), temperature.to(on)
        )
        return np.split(out.logprob.cpu().numpy(), np.cumsum(np.array(lengths) - 1)[:-1])


class Load:
    """Keeps the replica sampling until the end of the block; samples go on across swaps."""

    def __init__(self, setting: Setting, stub: RolloutEngineStub, digest: str) -> None:
        self._setting, self._stub = setting, stub
        self.digest = digest
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(setting.prompts)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def _run(self, number: int) -> None:
        s = self._setting
        prompt = (np.arange(s.prompt_tokens) * (number + 1) % 50 + 3).astype(np.int32)
        sampling = pb.SamplingParams(temperature=TEMPERATURE, max_tokens=s.max_tokens)
        while not self._stop.is_set():
            samples = [pb.Sample(trajectory_id=f"bench.{number}.{i}", sample_index=i) for i in range(s.samples)]
            request = pb.GenerateRequest(
                run="bench",
                manifest_digest=self.digest,
                seed=1,
                prompt_number=number,
                prompt_token_ids=int32_bytes(prompt),
                sampling=sampling,
                samples=samples,
            )
            # A version may have come between the look at the digest and the call, and the end of it all too.
            with contextlib.suppress(grpc.RpcError):
                for _ in self._stub.Generate(request, timeout=CALL_S):
                    if self._stop.is_set():
                        return


def serving(
    *, device: str, is_tiny: bool, num_versions: int, transport: str = "", replica_device: str = ""
) -> list[Record]:
    """Medians over the versions after the first.

    Args:
        device: of this process, the trainer.
        transport: shm | ipc | broadcast; empty: what suits the device.
        replica_device: empty: the same.
    """
    setting = setting_of(device=replica_device or device, is_tiny=is_tiny)
    transport = transport or ("ipc" if device.startswith("cuda") else "shm")
    found: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory(prefix="weight_sync_"))
        store = stack.enter_context(service("weight_sync", f"data_dir={Path(root) / 'data'}", "port=0"))
        address = f"127.0.0.1:{store['port']}"
        replica = stack.enter_context(service("rollout", f"weight_sync={address}", *setting.words))
        stub = RolloutEngineStub(stack.enter_context(rpc.channel(replica["address"])))
        trainer = Trainer(setting, torch.device(device), address, transport)
        stack.callback(trainer.close)
        manifest, _ = trainer.publish(0)
        take(stub, manifest, found={})
        load = stack.enter_context(Load(setting, stub, manifest.version.digest))
        for step in range(1, num_versions + 1):
            # Weights and probe of the next version are made by now, or they would disturb.
            manifest, times = trainer.publish(step)
            undisturbed(stub, setting.window_s, found)
            take(stub, manifest, found)
            load.digest = manifest.version.digest
            for name, seconds in times.items():
                found.setdefault(name, []).append(seconds)
            total_s = sum(times.values()) + found["prepare_s"][-1] + found["commit_s"][-1]
            found.setdefault("total_s", []).append(total_s)
        nbytes = sum(e.nbytes for e in manifest.tensors)
        require_way(replica["metrics_port"], transport, nbytes * (1 + num_versions))
    return records_of(setting, found, trainer.transport, nbytes)


def require_way(metrics_port: int, transport: str, nbytes: int) -> None:
    """Raises AssertionError when the replica had to fetch a version from weight_sync, which no answer of it tells."""
    totals = parse(httpx.get(f"http://127.0.0.1:{metrics_port}/metrics", timeout=CALL_S).text)
    moved, num_fallbacks = totals.get(f"{BYTES_MOVED}:{transport}", 0.0), totals.get(FALLBACKS, 0.0)
    assert (moved, num_fallbacks) == (nbytes, 0), (
        f"{moved:,.0f} of {nbytes:,} bytes came by {transport}, {num_fallbacks:.0f} versions did not; see the replica's log"
    )


def sampled(stub: RolloutEngineStub) -> tuple[float, int]:
    """Now, and the tokens sampled so far."""
    status = stub.Status(pb.StatusRequest(), timeout=CALL_S)
    return time.perf_counter(), status.num_sampled_tokens


def undisturbed(stub: RolloutEngineStub, seconds: float, found: dict[str, list[float]]) -> None:
    begin, before = sampled(stub)
    threading.Event().wait(seconds)
    end, after = sampled(stub)
    found.setdefault("tokens_per_s", []).append((after - before) / (end - begin))


def take(stub: RolloutEngineStub, manifest: Manifest, found: dict[str, list[float]]) -> None:
    """Prepare and Commit. Raises AssertionError unless the replica holds the version to the bit."""
    begin, before = sampled(stub)
    stub.PrepareWeights(pb.PrepareWeightsRequest(manifest=manifest), timeout=CALL_S)
    end, after = sampled(stub)
    request = pb.CommitWeightsRequest(manifest_digest=manifest.version.digest)
    reply = stub.CommitWeights(request, timeout=CALL_S)
    committed = time.perf_counter()
    assert reply.manifest_digest == manifest.version.digest
    assert (reply.probe_tokens, reply.probe_differing) == (52, 0), f"the probe differs: {reply}"
    values = {
        "prepare_s": end - begin,
        "prepare_tokens_per_s": (after - before) / (end - begin),
        "commit_s": committed - end,
        "pause_s": reply.pause_seconds,
    }
    for name, value in values.items():
        found.setdefault(name, []).append(value)


def records_of(setting: Setting, found: dict[str, list[float]], transport: str, nbytes: int) -> list[Record]:
    params: dict[str, Any] = {
        "model": setting.name,
        "bytes": nbytes,
        "sequences": setting.prompts * setting.samples,
        "versions": len(found["total_s"]),
    }
    records = []
    usual = statistics.median(found["tokens_per_s"])
    for name, values in sorted(found.items()):
        unit = "tokens/s" if name.endswith("tokens_per_s") else "s"
        value = statistics.median(values)
        against: dict[str, Any] = {}
        if name == "prepare_tokens_per_s":
            against = {"baseline": "undisturbed", "ratio": value / max(usual, 1e-9)}
        spread = [min(values), max(values)]
        records.append(Record("weight_sync", "serving", params, transport, name, value, unit, spread=spread, **against))
    return records
