"""Weights from trainer to replica by every transport, all bytes and only what changed: bits first, then seconds.

`python -m benchmarks.weight_sync [--out FILE] [--only SECTION ...] [--steps N] [--seconds S] [--bytes N] [--device cpu|cuda]
[--tiny]`

smollm2        SmolLM2 over gRPC, as deltas, through a directory and through shared memory
synthetic      a model of --bytes by the same ways, one version at a time
learning_rate  share of a version that changes, and that a delta takes, by learning rate
delta          --steps of the main job: bytes of every publish, verified by a reader of its own
serving        a real replica that samples while it takes versions: tokens/s during Prepare, pause, total

weight_sync is a process of its own; this one is the trainer, then the replica. A version is fetched after it is published.
Versions of smollm2 and learning_rate are bfloat16 casts of float32 masters, one AdamW step apart; random gradients move every
weight by the whole learning rate, which is more than training does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import Record, Recorder, report
from benchmarks.weight_delta import training
from benchmarks.weight_serving import serving
from services.rollout.sources import Sources
from services.trainer.config import TrainerConfig
from services.trainer.offers import Offers, Slot
from shared.config import unstructure
from shared.transfer.arena import ArenaLayout
from shared.wire import delta
from shared.wire.pb.weight_sync_pb2 import Manifest
from shared.wire.run import RunConfig
from shared.wire.tensor_file import read_file
from shared.wire.tensors import RawTensor, build_manifest, raw_view
from shared.wire.weights import Publisher, fetch
from timzero.model.get import get

MODEL = "smollm2-135m-instruct"
LEARNING_RATES = (1e-6, 1e-5, 1e-4, 1e-3)
STEP_LR = 1e-5
NUM_STEPS = 4
"""Versions of one timing; the first has no base and is left out."""
NUM_SYNTHETIC = 3
DEADLINE_S = 600.0
CPU = torch.device("cpu")

Tensors = dict[str, RawTensor]


def masters_of_model() -> dict[str, Tensor]:
    """float32 masters as training leaves them: anywhere in the cell that rounds to the published weight."""
    generator = torch.Generator().manual_seed(0)
    path = get(MODEL) / "model.safetensors"
    masters = {}
    for name, raw in read_file(path).items():
        weights = torch.frombuffer(bytearray(raw.data), dtype=torch.bfloat16).reshape(raw.shape)
        # Half a bfloat16 step to either side, in units of the last float32 bit.
        offset = torch.randint(-(2**15) + 1, 2**15, raw.shape, generator=generator, dtype=torch.int32)
        settled = (weights.float().view(torch.int32) + offset).view(torch.float32)
        masters[name] = torch.where(weights == 0, 0.0, settled)
    return masters


def adamw_step(masters: Mapping[str, Tensor], *, lr: float, seed: int) -> None:
    """One first step, in place, tensor by tensor: the state of one is alive at once."""
    generator = torch.Generator().manual_seed(seed)
    for weights in masters.values():
        weights.requires_grad_()
        weights.grad = torch.randn(weights.shape, generator=generator)
        torch.optim.AdamW([weights], lr=lr, betas=(0.9, 0.95), weight_decay=0.0).step()
        weights.grad = None
        weights.requires_grad_(False)


def published(masters: Mapping[str, Tensor]) -> dict[str, RawTensor]:
    return {
        name: RawTensor("bfloat16", tuple(w.shape), w.bfloat16().view(torch.uint8).numpy())
        for name, w in masters.items()
    }


def versions_of(masters: dict[str, Tensor]) -> Iterator[Tensors]:
    yield published(masters)
    for step in range(1, NUM_STEPS):
        adamw_step(masters, lr=STEP_LR, seed=step)
        yield published(masters)


def synthetic_versions(num_bytes: int) -> Iterator[Tensors]:
    """Of a model that takes `num_bytes` in bfloat16, each in the memory of the one before, with one element in 32 moved."""
    rng = np.random.default_rng(0)
    shape = (2048, 4096)
    names = [f"layer.{i:03}.weight" for i in range(max(1, round(num_bytes / (2 * math.prod(shape)))))]
    # Bits of numbers between 2^-7 and 2^-5.
    words = {name: rng.integers(0x3C00, 0x3D00, shape, np.uint16) for name in names}
    for step in range(NUM_SYNTHETIC):
        if step:
            for w in words.values():
                w.reshape(-1)[rng.integers(0, w.size, w.size // 32)] ^= 1
        yield {name: RawTensor("bfloat16", shape, w.view(np.uint8)) for name, w in words.items()}


def manifest_of(step: int, tensors: Mapping[str, RawTensor]) -> Manifest:
    return build_manifest(
        run="bench",
        lineage=0,
        step=step,
        tensors=tensors,
        model_config_json="{}",
        run_config_json=json.dumps(unstructure(RunConfig(run="bench", model="m"))),
        fingerprint="",
        probe_token_ids=[],
        probe_logprobs=[],
    )


@contextlib.contextmanager
def weight_sync(data_dir: Path) -> Iterator[str]:
    """Address of a process that serves until the end of the block."""
    words = [sys.executable, "-m", "services.weight_sync", f"data_dir={data_dir}", "port=0"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = json.loads(process.stderr.readline())
        yield f"127.0.0.1:{line['port']}"
    finally:
        process.terminate()
        process.communicate()


def same_bytes(a: Mapping[str, RawTensor], b: Mapping[str, RawTensor]) -> bool:
    return a.keys() == b.keys() and all(raw_view(a[n].data) == raw_view(b[n].data) for n in a)


METRICS = {"digest_s": "s", "publish_s": "s", "fetch_s": "s", "total_s": "s", "stored_s": "s", "publish_bytes": "B"}
"""digest: of the trainer; publish: until the version may be had; fetch: until the replica has it, verified; total: all three;
stored: from then on until weight_sync has the bytes."""


def timed(versions: Iterable[Tensors], root: Path, *, transport: str, is_delta: bool) -> dict[str, list[float]]:
    """Seconds and bytes of every step but the first. Raises AssertionError unless what arrives is what was published."""
    found: dict[str, list[float]] = {name: [] for name in METRICS}
    directory = root / "shared" if transport == "directory" else None
    offers = Offers(TrainerConfig(transport="shm"), CPU) if transport == "shm" else None
    sources = Sources("bench", CPU)
    before: Tensors | None = None
    with (
        weight_sync(root / "data") as address,
        Publisher(
            address, transport="directory" if directory else "grpc", directory=directory, delta=is_delta
        ) as publisher,
    ):
        for step, tensors in enumerate(versions):
            begin = time.perf_counter()
            slot = filled(offers, tensors) if offers else None
            manifest = manifest_of(step, slot.tensors() if slot else tensors)
            if offers and slot:
                offers.offer(manifest, slot)
            digested = time.perf_counter()
            publisher.publish(manifest, slot.tensors() if slot else tensors, epoch=1, deadline_s=DEADLINE_S)
            sent = time.perf_counter()
            if slot:
                got = {name: raw_of(t) for name, t in sources.copy(manifest, deadline_s=DEADLINE_S).items()}
            else:
                base = before if manifest.base_digest else None
                got = fetch(manifest, address=address, deadline_s=DEADLINE_S, base=base)
            end = time.perf_counter()
            publisher.settle(DEADLINE_S)
            stored = time.perf_counter()
            assert same_bytes(got, tensors), f"{transport}, delta {is_delta}: step {step} arrived with other bytes"
            assert bool(manifest.base_digest) == (is_delta and step > 0)
            if step:
                times = digested - begin, sent - digested, end - sent, end - begin, stored - end
                for key, value in zip(found, (*times, publisher.sent.num_bytes), strict=True):
                    found[key].append(value)
            publisher.retain("bench", step, epoch=1, deadline_s=DEADLINE_S)
            before = tensors if is_delta else None
            del got
    if offers:
        offers.close()
    shutil.rmtree(root)
    return found


def filled(offers: Offers, tensors: Tensors) -> Slot:
    """As the trainer gathers: one tensor after the other into a slot."""
    slot = offers.room(ArenaLayout.of((n, t.dtype, t.shape) for n, t in tensors.items()))
    assert slot is not None
    for name, tensor in tensors.items():
        slot.fill(name, torch.from_numpy(np.frombuffer(raw_view(tensor.data), np.uint8)))
    slot.finish()
    return slot


def raw_of(tensor: Tensor) -> RawTensor:
    data = tensor.view(-1).view(torch.uint8).numpy()
    return RawTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)


def transports(
    name: str, versions: Callable[[], Iterable[Tensors]], ways: Sequence[tuple[str, bool]], full_bytes: int
) -> Iterator[Record]:
    """Args:
    ways: (transport, whether as deltas); the first one is what the others are compared with.
    """
    params: dict[str, Any] = {"model": name, "bytes": full_bytes}
    first_s = 0.0
    for transport, is_delta in ways:
        root = Path(tempfile.mkdtemp(prefix="weight_sync_"))
        found = timed(versions(), root, transport=transport, is_delta=is_delta)
        case, mode = transport, "delta" if is_delta else "full"
        total_s = statistics.median(found["total_s"])
        first_s = first_s or total_s
        for metric, unit in METRICS.items():
            spread = [min(found[metric]), max(found[metric])]
            value = statistics.median(found[metric])
            yield Record("weight_sync", case, params, mode, metric, value, unit, spread=spread)
        share = statistics.median(found["publish_bytes"]) / full_bytes
        yield Record("weight_sync", case, params, mode, "bytes_share", share, "of full")
        for metric in ("publish_s", "fetch_s", "total_s"):
            rate = full_bytes / statistics.median(found[metric]) / 1e6
            against: dict[str, Any] = (
                {"baseline": "grpc full", "ratio": first_s / total_s} if metric == "total_s" else {}
            )
            what = metric.removesuffix("_s")
            yield Record("weight_sync", case, params, mode, f"{what}_rate", rate, "MB/s", **against)
        print(f"{name}: {transport} {mode}: {total_s:.2f} s, {100 * share:.1f}% of the bytes", flush=True)


def smollm2() -> Iterator[Record]:
    full_bytes = sum(2 * w.numel() for w in masters_of_model().values())
    ways = (("grpc", False), ("grpc", True), ("directory", False), ("shm", False))
    return transports(MODEL, lambda: versions_of(masters_of_model()), ways, full_bytes)


def synthetic(num_bytes: int) -> Iterator[Record]:
    ways = (("grpc", False), ("directory", False), ("shm", False))
    full_bytes = sum(t.nbytes for t in next(synthetic_versions(num_bytes)).values())
    return transports("synthetic", lambda: synthetic_versions(num_bytes), ways, full_bytes)


def learning_rates() -> Iterator[Record]:
    """Share of a version's bytes that a delta takes, one step from the checkpoint, and one from settled masters."""
    settled = masters_of_model()
    starts = {"checkpoint": {n: w.bfloat16().float() for n, w in settled.items()}, "settled": settled}
    for start, masters in starts.items():
        before = published(masters)
        for lr in LEARNING_RATES:
            stepped = {n: w.clone() for n, w in masters.items()}
            adamw_step(stepped, lr=lr, seed=1)
            after = published(stepped)
            manifest = manifest_of(1, after)
            chunks = list(delta.delta_chunks(manifest, after, base=before))
            for chunk, raw in zip(chunks, delta.decoded(chunks, manifest, base=before), strict=True):
                view = raw_view(after[chunk.name].data)[chunk.offset : chunk.offset + len(raw.data)]
                assert view == raw.data, f"{chunk.name} at {chunk.offset} is not what was encoded"
            changed = sum(count_changed(before[n], after[n]) for n in after) / sum(w.numel() for w in masters.values())
            share = sum(len(c.data) for c in chunks) / sum(t.nbytes for t in after.values())
            params: dict[str, Any] = {"model": MODEL, "masters": start, "lr": lr}
            yield Record("weight_sync", "learning_rate", params, "delta", "changed_share", changed, "of weights")
            yield Record("weight_sync", "learning_rate", params, "delta", "bytes_share", share, "of full")


def count_changed(a: RawTensor, b: RawTensor) -> int:
    words = [torch.frombuffer(raw_view(t.data), dtype=torch.int16) for t in (a, b)]
    return int((words[0] != words[1]).sum())


SECTIONS = {
    "smollm2": lambda args: smollm2(),
    "synthetic": lambda args: synthetic(args.bytes),
    "learning_rate": lambda args: learning_rates(),
    "delta": lambda args: training(args.config, [f"num_steps={args.steps}"]),
}
"""Whose records come one by one; `serving` measures its own again with every version."""
SERVING_S = 70.0
"""Of serving on a GPU, so that it is over in 80 with all that is imported before and closed behind."""


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [*SECTIONS, "serving"]
    parser.add_argument("--out", type=Path, help="JSON file for the records")
    parser.add_argument("--only", nargs="*", choices=every, default=every, metavar="SECTION")
    parser.add_argument("--config", type=Path, default=Path("configs/products.toml"), help="the job of delta")
    parser.add_argument("--steps", type=int, default=20, help="of delta; versions of serving")
    parser.add_argument(
        "--seconds",
        type=float,
        help=f"of serving, which then takes fewer versions; on a GPU {SERVING_S:g} if not given",
    )
    parser.add_argument("--bytes", type=int, default=3_400_000_000, help="of synthetic")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="serving: a model of 100k parameters")
    args = parser.parse_args(words)
    if args.steps < 2:
        parser.error(f"--steps must be at least 2, got {args.steps}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU, and there is none here")
    if args.seconds is None and args.device == "cuda":
        args.seconds = SERVING_S
    return args


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    torch.set_num_threads(1)
    with Recorder(args.out) as recorder:
        for name in args.only:
            if name in SECTIONS:
                for record in SECTIONS[name](args):
                    recorder.add(record)
                recorder.save()
                continue
            serving(
                device=args.device,
                is_tiny=args.tiny,
                num_versions=args.steps,
                limit_s=args.seconds,
                so_far=partial(recorder.renew, since=len(recorder.records)),
            )
    report(recorder.records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
