"""Records for the page on performance, made by the benchmarks' own code from invented times."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import loop, overlap, two_gpu
from benchmarks.harness import Record, save
from benchmarks.two_gpu_part import NUM_SEQUENCES
from benchmarks.weight_serving import records_of, setting_of
from tests.unit.loop_fixture import outcome
from timzero.job import load_job

JOB = load_job(loop.CONFIG, [])
SEQUENCE_TOKENS = 512
"""Of each sequence of `fsdp`."""
TWO_GPU = ("h200x2/two_gpu_fsdp", "h200x2/two_gpu_broadcast", "h200x2/two_gpu_loop")


def write(results: Path, name: str, records: Iterable[Record]) -> None:
    save(list(records), results / f"{name}.json")


def change(results: Path, name: str, is_meant: Callable[[dict], bool], **new: Any) -> dict[str, Any]:
    """Overwrites keys of the first record that is meant, and returns the record as it was."""
    path = results / f"{name}.json"
    records = json.loads(path.read_text())
    record = next(r for r in records if is_meant(r))
    before = dict(record)
    record |= new
    path.write_text(json.dumps(records))
    return before


def serving(*, transport: str = "ipc", pause_s: float = 0.031) -> list[Record]:
    """What benchmarks.weight_sync says of a replica on a GPU that took three versions."""
    found = {"gather_s": 0.02, "digest_s": 0.05, "announce_s": 0.004, "prepare_s": 0.4, "commit_s": 0.06, "total_s": 0.534,
             "pause_s": pause_s, "tokens_per_s": 20_000.0, "prepare_tokens_per_s": 19_000.0}  # fmt: skip
    setting = setting_of(device="cuda", is_tiny=False)
    return records_of(setting, {name: [value] * 3 for name, value in found.items()}, transport, 3_441_000_000)


def overlapped(*, differing_bits: int = 0) -> Iterable[Record]:
    """Three settings: nothing hidden, all hidden, half."""
    for name, begin in (("lag 0", 6.0), ("lag 1", 2.0), ("max_lag 1", 4.0)):
        found, series = outcome(begin_training=begin, differing_bits=differing_bits)
        yield from overlap.records(name, JOB, found, overlap.parts_of(found, series), 10.0 if begin < 6 else None)


def fsdp(directory: Path) -> Iterable[Record]:
    """Two ranks that take 0.6 s where one takes 1 s."""
    logprobs = np.linspace(-3, -1, SEQUENCE_TOKENS, dtype=np.float32)
    for i in range(NUM_SEQUENCES):
        np.savez(directory / f"sequence-{i}.npz", logprobs=logprobs)
        for size in (1, 2):
            np.save(directory / f"scored-{size}-{i}.npy", logprobs)
    for size, seconds in ((1, [1.0, 0.98, 1.01]), (2, [0.6, 0.59, 0.62])):
        np.save(directory / f"step_s-{size}.npy", np.array(seconds))
    return two_gpu.compared(directory, 2048)


def main_job(monkeypatch: pytest.MonkeyPatch) -> Iterable[Record]:
    """Of steps of 10 s with 6 s of generation beside 4 s of training."""
    monkeypatch.setattr(loop, "run", lambda *args, **options: outcome(begin_training=2.0))
    return list(two_gpu.main_job(two_gpu.arguments(["--cpu", "--tiny"])))
