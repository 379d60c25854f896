"""A replica that samples while it takes version after version: tokens/s undisturbed and during Prepare, the pause, the total.

This process is the trainer (versions lie in its memory) and calls Prepare and Commit as weight_sync does; weight_sync and the
replica are processes of their own. weight_sync hears of every version and gets no bytes: gigabytes on their way there for many
seconds would be beside all that is measured here and part of nothing. A probe that differs in one bit ends the benchmark. Rates
are compared within a version: Prepares in a row against the time just before and behind them, long after the last version's
prefixes were computed again.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.harness import Record, quarters
from benchmarks.parts import START_S, service
from benchmarks.timeline import parse
from benchmarks.weight_load import CALL_S, Load, Setting, setting_of
from services.rollout.offline import random_weights
from services.rollout.weights import Numerics, ServedRun, certified
from services.trainer.batch import PolicyVersion
from services.trainer.config import TrainerConfig
from services.trainer.offers import Offers
from services.trainer.weights import describe, probe_token_ids, score_probe
from shared.metrics import names
from shared.models import Decoder
from shared.transfer.arena import ArenaLayout
from shared.wire import rpc
from shared.wire.pb import rollout_pb2 as pb
from shared.wire.pb.rollout_pb2_grpc import RolloutEngineStub
from shared.wire.pb.weight_sync_pb2 import Manifest, PublishChunk
from shared.wire.pb.weight_sync_pb2_grpc import WeightSyncStub
from shared.wire.run import RunConfig

POLL_S = 0.01
TAKE_S = 60.0
"""Of a Prepare or Commit. A replica that can't read the trainer's memory waits for bytes that never come."""
BYTES_MOVED, FALLBACKS = names.WEIGHT_SYNC_BYTES.name, names.SOURCE_FALLBACKS.name
"""Counters of a replica: by transport what came from the trainer's memory, and what did not come that way."""
TOTAL = ("gather_s", "digest_s", "announce_s", "prepare_s", "commit_s")
"""What passes between the optimizer's step and the first token of its version."""


class Progress:
    """Lines for whoever waits, with the seconds since the beginning; and whether there is time for more."""

    def __init__(self, limit_s: float | None) -> None:
        self._begin, self._limit_s = time.monotonic(), limit_s

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begin

    def say(self, line: str) -> None:
        print(f"serving: {self.seconds:6.1f} s  {line}", file=sys.stderr, flush=True)

    def has_time_for(self, seconds: float) -> bool:
        return self._limit_s is None or self.seconds + seconds <= self._limit_s


class Trainer:
    """Versions of random weights in this process's memory."""

    def __init__(self, setting: Setting, device: torch.device, address: str, transport: str) -> None:
        self._setting, self._device = setting, device
        self._run = RunConfig(run="bench", model=setting.name, max_model_len=4096)
        self.numerics: Numerics = certified(ServedRun(self._run, setting.model, setting.dtype), str(device))
        self.transport = transport
        self._offers = Offers(TrainerConfig(transport=transport), device)  # type: ignore[arg-type]
        self._channel = rpc.channel(address)
        self._weight_sync = WeightSyncStub(self._channel)

    def close(self) -> None:
        self._channel.close()
        self._offers.close()

    def publish(self, step: int) -> tuple[Manifest, dict[str, float]]:
        """One version, and the seconds it took. Its weights and its probe are made before the clock starts."""
        weights = random_weights(self._setting.model, step, ops=self.numerics.ops, dtype=self._setting.dtype)
        probe = probe_token_ids(self._run, self._setting.model.vocab_size)
        with torch.device("meta"):
            decoder = Decoder(self._setting.model, self.numerics.ops)
        decoder.load_state_dict(weights, assign=True)
        scores = score_probe(decoder, probe, self._device)
        begin = time.perf_counter()
        layout = ArenaLayout.of((n, str(w.dtype).removeprefix("torch."), tuple(w.shape)) for n, w in weights.items())
        slot = self._offers.room(layout)
        assert slot is not None, "both buffers are being read"
        for name, weight in weights.items():
            slot.fill(name, weight)
        slot.finish()
        gathered = time.perf_counter()
        tensors = slot.tensors()
        manifest = describe(
            PolicyVersion(0, step, ""),
            tensors,
            config=self._run,
            model_config=self._setting.model,
            fingerprint=self.numerics.fingerprint,
            probe=probe,
            probe_logprobs=scores,
        )
        self._offers.offer(manifest, slot)
        digested = time.perf_counter()
        announcement = PublishChunk(epoch=1, manifest=manifest, announce=True)
        self._weight_sync.Publish(iter([announcement]), timeout=CALL_S, wait_for_ready=True)
        announced = time.perf_counter()
        times = {"gather_s": gathered - begin, "digest_s": digested - gathered, "announce_s": announced - digested}
        return manifest, times


def serving(
    *,
    device: str,
    is_tiny: bool,
    num_versions: int,
    transport: str = "",
    replica_device: str = "",
    limit_s: float | None = None,
    so_far: Callable[[list[Record]], object] = lambda records: None,
) -> list[Record]:
    """Medians and quartiles over the versions after the first.

    Args:
        device: of this process, the trainer.
        num_versions: two at least are measured, and no more than there is time for.
        transport: shm | ipc | broadcast; empty: what suits the device.
        replica_device: empty: the same.
        limit_s: of all of it, as far as the first two versions leave a choice.
        so_far: called after every version with the records of those that were measured.
    """
    setting = setting_of(device=replica_device or device, is_tiny=is_tiny)
    transport = transport or ("ipc" if device.startswith("cuda") else "shm")
    found: dict[str, list[float]] = {}
    records: list[Record] = []
    progress = Progress(limit_s)
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory(prefix="weight_sync_"))
        store = stack.enter_context(service("weight_sync", f"data_dir={Path(root) / 'data'}", "port=0"))()
        address = f"127.0.0.1:{store['port']}"
        starting = stack.enter_context(service("rollout", f"weight_sync={address}", *setting.words))
        trainer = Trainer(setting, torch.device(device), address, transport)
        stack.callback(trainer.close)
        manifest, _ = trainer.publish(0)
        progress.say("the trainer's kernels are certified, version 0 is published")
        replica = starting()
        stub = RolloutEngineStub(stack.enter_context(rpc.channel(replica["address"])))
        first(stub, manifest, progress)
        load = stack.enter_context(Load(setting, stub, manifest.version.digest))
        until(stub, lambda status: status.num_sampled_tokens >= setting.warm_tokens)
        progress.say(f"{setting.prompts * setting.samples} sequences are sampled")
        nbytes = sum(e.nbytes for e in manifest.tensors)
        for step in range(1, num_versions + 1):
            begin = progress.seconds
            times = version(step, trainer, stub, load, setting)
            for name, value in times.items():
                found.setdefault(name, []).append(value)
            progress.say(f"version {step} of {num_versions}: {told(times)}")
            require_way(replica["metrics_port"], transport, nbytes * (1 + int(sum(found["prepares"]))))
            records = records_of(setting, found, transport, nbytes)
            so_far(records)
            if 2 <= step < num_versions and not progress.has_time_for(progress.seconds - begin):
                progress.say(f"no time for more than {step} of {num_versions} versions within {limit_s:g} s")
                break
    return records


def first(stub: RolloutEngineStub, manifest: Manifest, progress: Progress) -> None:
    """The version that a replica starts with."""
    stub.PrepareWeights(pb.PrepareWeightsRequest(manifest=manifest), timeout=START_S, wait_for_ready=True)
    progress.say("the replica's kernels are certified, version 0 is staged")
    commit(stub, manifest, timeout_s=START_S)
    kernels = stub.Status(pb.StatusRequest(), timeout=CALL_S).kernels
    said = "".join(f"; {name}: {kernels[name]}" for name in ("graphs", "digests") if name in kernels)
    progress.say(f"the replica serves version 0{said}")


def version(step: int, trainer: Trainer, stub: RolloutEngineStub, load: Load, setting: Setting) -> dict[str, float]:
    """One version from the trainer's weights until prefixes are computed again under it; what it took."""
    # The weights that are made for it are nothing that a Prepare does.
    manifest, times = trainer.publish(step)
    until(stub, lambda status: not status.is_recomputing)
    times |= prepared(stub, manifest, setting.window_s)
    times |= commit(stub, manifest)
    load.digest = manifest.version.digest
    times["reprefill_s"] = until(stub, lambda status: not status.is_recomputing).recompute_seconds
    times["total_s"] = sum(times[name] for name in TOTAL)
    return times


def told(times: dict[str, float]) -> str:
    share = times["prepare_tokens_per_s"] / max(times["tokens_per_s"], 1e-9)
    return (
        f"total {times['total_s']:.2f} s (gather {times['gather_s']:.2f}, Prepare {times['prepare_s']:.2f}), "
        f"pause {1e3 * times['pause_s']:.0f} ms, {times['tokens_per_s']:,.0f} tokens/s, {share:.2f} of it during Prepare, "
        f"prefixes again in {times['reprefill_s']:.1f} s"
    )


def require_way(metrics_port: int, transport: str, nbytes: int) -> None:
    """Raises AssertionError when the replica had to fetch a version from weight_sync, which no answer of it tells."""
    totals = parse(httpx.get(f"http://127.0.0.1:{metrics_port}/metrics", timeout=CALL_S).text)
    moved, num_fallbacks = totals.get(f"{BYTES_MOVED}:{transport}", 0.0), totals.get(FALLBACKS, 0.0)
    assert (moved, num_fallbacks) == (nbytes, 0), (
        f"{moved:,.0f} of {nbytes:,} bytes came by {transport}, {num_fallbacks:.0f} versions did not; see the replica's log"
    )


def until(stub: RolloutEngineStub, is_so: Callable[[pb.StatusReply], bool]) -> pb.StatusReply:
    """The first status that is so. Raises TimeoutError after CALL_S."""
    end, pause = time.monotonic() + CALL_S, threading.Event()
    while time.monotonic() < end:
        status = stub.Status(pb.StatusRequest(), timeout=CALL_S)
        if is_so(status):
            return status
        pause.wait(POLL_S)
    raise TimeoutError(f"the replica did not get there within {CALL_S} s: {status}")


@contextlib.contextmanager
def rate(stub: RolloutEngineStub) -> Iterator[list[float]]:
    """Tokens/s sampled within the block, appended at its end."""
    rates: list[float] = []
    before, begin = stub.Status(pb.StatusRequest(), timeout=CALL_S).num_sampled_tokens, time.perf_counter()
    yield rates
    after, end = stub.Status(pb.StatusRequest(), timeout=CALL_S).num_sampled_tokens, time.perf_counter()
    rates.append((after - before) / (end - begin))


def prepared(stub: RolloutEngineStub, manifest: Manifest, window_s: float) -> dict[str, float]:
    """Undisturbed sampling, Prepare after Prepare for as long, undisturbed sampling: a single Prepare is only a few steps long.

    Returns:
        Seconds of the first Prepare, how many there were, tokens/s undisturbed and during Prepare, and how alike the undisturbed
        ones behind are to those before.
    """
    window = threading.Event()
    seconds: list[float] = []
    with rate(stub) as before:
        window.wait(window_s)
    with rate(stub) as during:
        end = time.perf_counter() + window_s
        while time.perf_counter() < end:
            if seconds:
                stub.AbortWeights(pb.AbortWeightsRequest(), timeout=CALL_S)
            begin = time.perf_counter()
            stub.PrepareWeights(pb.PrepareWeightsRequest(manifest=manifest), timeout=TAKE_S)
            seconds.append(time.perf_counter() - begin)
    with rate(stub) as behind:
        window.wait(window_s)
    usual = (before[0] + behind[0]) / 2
    return {
        "prepare_s": seconds[0],
        "prepares": len(seconds),
        "tokens_per_s": usual,
        "prepare_tokens_per_s": during[0],
        "undisturbed_share": behind[0] / max(before[0], 1e-9),
    }


def commit(stub: RolloutEngineStub, manifest: Manifest, *, timeout_s: float = TAKE_S) -> dict[str, float]:
    """Seconds of Commit, of the pause and of its parts. Raises AssertionError unless the replica holds the version to the bit."""
    begin = time.perf_counter()
    request = pb.CommitWeightsRequest(manifest_digest=manifest.version.digest, mode="reprefill")
    reply = stub.CommitWeights(request, timeout=timeout_s)
    seconds = time.perf_counter() - begin
    assert reply.manifest_digest == manifest.version.digest
    assert (reply.probe_tokens, reply.probe_differing) == (52, 0), f"the probe differs: {reply}"
    parts = {f"pause_{name}_s": value for name, value in reply.pause_parts.items()}
    return {"commit_s": seconds, "pause_s": reply.pause_seconds, **parts}


def records_of(setting: Setting, found: dict[str, list[float]], transport: str, nbytes: int) -> list[Record]:
    params: dict[str, Any] = {
        "model": setting.name,
        "bytes": nbytes,
        "sequences": setting.prompts * setting.samples,
        "versions": len(found["total_s"]),
    }
    # Of each version's own pair: the rate of one moment is not that of another.
    pairs = zip(found["prepare_tokens_per_s"], found["tokens_per_s"], strict=True)
    found = found | {"prepare_share": [during / max(usual, 1e-9) for during, usual in pairs]}
    records = []
    for name, values in sorted(found.items()):
        unit = "tokens/s" if name.endswith("tokens_per_s") else "s" if name.endswith("_s") else ""
        against: dict[str, Any] = {}
        if name == "prepare_tokens_per_s":
            against = {"baseline": "undisturbed", "ratio": statistics.median(found["prepare_share"])}
        value, spread = statistics.median(values), quarters(values)
        records.append(Record("weight_sync", "serving", params, transport, name, value, unit, spread=spread, **against))
    return records
