"""Publishing over loopback and through a shared directory, all bytes and only what changed: bits first, then seconds.

`python -m benchmarks.weight_sync [--out FILE] [--only smollm2 synthetic learning_rate]`

weight_sync is a process of its own; this one is the trainer, then the replica. A version is fetched after it is published.
Versions are bfloat16 casts of float32 masters, one AdamW step apart; random gradients move every weight by the whole learning
rate, which is more than training does.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Record, arguments, report, save
from shared.config import unstructure
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
DEADLINE_S = 300.0

Versions = list[dict[str, RawTensor]]


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


def masters_of_size(num_bytes: int) -> dict[str, Tensor]:
    """Normal weights of a model that takes `num_bytes` in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    shape = (2048, 4096)
    num_tensors = round(num_bytes / (2 * shape[0] * shape[1]))
    return {f"layer.{i:03}.weight": 0.02 * torch.randn(shape, generator=generator) for i in range(num_tensors)}


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


def versions_of(masters: dict[str, Tensor]) -> Versions:
    versions = [published(masters)]
    for step in range(1, NUM_STEPS):
        adamw_step(masters, lr=STEP_LR, seed=step)
        versions.append(published(masters))
    return versions


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


def timed(versions: Versions, root: Path, *, transport: str, is_delta: bool) -> dict[str, list[float]]:
    """Seconds and bytes of every step but the first. Raises AssertionError unless what arrives is what was published."""
    found: dict[str, list[float]] = {"publish_s": [], "fetch_s": [], "total_s": [], "publish_bytes": []}
    directory = root / "shared" if transport == "directory" else None
    with (
        weight_sync(root / "data") as address,
        Publisher(address, transport=transport, directory=directory, delta=is_delta) as publisher,  # type: ignore[arg-type]
    ):
        for step, tensors in enumerate(versions):
            manifest = manifest_of(step, tensors)
            begin = time.perf_counter()
            publisher.publish(manifest, tensors, epoch=1, deadline_s=DEADLINE_S)
            sent = time.perf_counter()
            base = versions[step - 1] if manifest.base_digest else None
            got = fetch(manifest, address=address, deadline_s=DEADLINE_S, base=base)
            end = time.perf_counter()
            assert same_bytes(got, tensors), f"{transport}, delta {is_delta}: step {step} arrived with other bytes"
            assert bool(manifest.base_digest) == (is_delta and step > 0)
            if step:
                values = (sent - begin, end - sent, end - begin, publisher.sent.num_bytes)
                for key, value in zip(found, values, strict=True):
                    found[key].append(value)
            publisher.retain("bench", step, epoch=1, deadline_s=DEADLINE_S)
    shutil.rmtree(root)
    return found


def transports(name: str, masters: dict[str, Tensor]) -> list[Record]:
    versions = versions_of(masters)
    full_bytes = sum(t.nbytes for t in versions[0].values())
    params = {"model": name, "bytes": full_bytes, "lr": STEP_LR}
    records = []
    full_s = 0.0
    for transport, is_delta in (("grpc", False), ("grpc", True), ("directory", False)):
        root = Path(tempfile.mkdtemp(prefix="weight_sync_"))
        found = timed(versions, root, transport=transport, is_delta=is_delta)
        case, mode = transport, "delta" if is_delta else "full"
        total_s = statistics.median(found["total_s"])
        full_s = full_s or total_s
        for metric, unit in (("publish_s", "s"), ("fetch_s", "s"), ("total_s", "s"), ("publish_bytes", "B")):
            values = sorted(found[metric])
            spread = [values[0], values[-1]]
            records.append(
                Record("weight_sync", case, params, mode, metric, statistics.median(values), unit, spread=spread)
            )
        share = statistics.median(found["publish_bytes"]) / full_bytes
        records.append(Record("weight_sync", case, params, mode, "bytes_share", share, "of full"))
        rate = full_bytes / total_s / 1e6
        records.append(
            Record(
                "weight_sync", case, params, mode, "rate", rate, "MB/s", baseline="grpc full", ratio=full_s / total_s
            )
        )
        print(f"{name}: {transport} {mode}: {total_s:.2f} s, {100 * share:.1f}% of the bytes", flush=True)
    return records


def learning_rates() -> list[Record]:
    """Share of a version's bytes that a delta takes, one step from the checkpoint, and one from settled masters."""
    records = []
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
            records.append(
                Record("weight_sync", "learning_rate", params, "delta", "changed_share", changed, "of weights")
            )
            records.append(Record("weight_sync", "learning_rate", params, "delta", "bytes_share", share, "of full"))
    return records


def count_changed(a: RawTensor, b: RawTensor) -> int:
    words = [torch.frombuffer(raw_view(t.data), dtype=torch.int16) for t in (a, b)]
    return int((words[0] != words[1]).sum())


SECTIONS = {
    "smollm2": lambda: transports(MODEL, masters_of_model()),
    "synthetic": lambda: transports("synthetic", masters_of_size(10**9)),
    "learning_rate": learning_rates,
}


def main() -> int:
    args = arguments(__doc__ or "")
    torch.set_num_threads(1)
    records: list[Record] = []
    for name in args.only or SECTIONS:
        records += SECTIONS[name]()
        save(records, args.out)
    report(records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
