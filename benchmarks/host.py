"""What a decode step costs the host: the engine's own pipeline over a runner that prepares every input and computes nothing.

`python -m benchmarks.host [--out FILE] [--only 64 256 1024] [--like FILE]`

Milliseconds of the engine thread's own time a step, averaged over a window in which nobody comes or ends; pages fill, chunks are
sent off and batches are prepared as they are on a GPU. The device's part (launches, copies, events) is not in it.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Record, Recorder, parser, report
from services.rollout.blocks import Block, Fields
from services.rollout.config import RolloutConfig
from services.rollout.graphs import Shape, padded
from services.rollout.inputs import Batch
from services.rollout.pipeline import Pipeline
from services.rollout.runner import Flight, ModelRunner
from services.rollout.samples import GroupRequest, Sample
from services.rollout.stopping import StopRule
from shared.wire.types import SamplingParams

SIZES = (64, 256, 1024)
PAGE_SIZE, STREAM_TOKENS = 64, 32
PROMPT_TOKENS, MAX_TOKENS = 64, 640
WARM_UP, WINDOW, REPEATS = 80, 256, 7
"""Steps before a window, steps of one, windows."""
PARTS = {"schedule": ("scheduler", "schedule"), "prepare": ("runner", "launch"), "read": ("", "_read")}
"""Methods of the pipeline and of what it holds. What is left of a step is its completion."""


class IdleRunner(ModelRunner):
    """Fills in the block of a step as the GPU's runner does; every token it draws is 5."""

    def _allocate(self) -> Any:
        self._num_rows = padded(self.config.max_running)
        fields = Fields(num_slots=self.config.max_running, num_rows=self._num_rows, num_tiles=2048)
        self._block = Block(
            fields, num_tokens=self.config.max_step_tokens, device=self.device, num_hosts=self.most_in_flight
        )
        self._drawn = torch.stack([torch.full((self._num_rows,), i, dtype=torch.int32) for i in (5, 0, 5)])

    def _run(self, batch: Batch, previous_end: Any | None) -> Flight:
        tokens = padded(batch.num_tokens)
        shape = Shape(tokens=tokens, ones=self._num_rows, longs=0, chunks=1, chunk=1024, tiles=1024)
        self._block.fill(batch, self.tables, shape, self.config.tokens_per_page, 16)
        now = self.clock.mark()
        return Flight(batch, self._drawn, None, now, now, now, previous_end, batch.num_tokens)


def pipeline_of(size: int) -> Pipeline:
    """`size` samples in line."""
    config = RolloutConfig(
        device="cpu", kv_cache_tokens=size * 1024, page_size=PAGE_SIZE, max_running=size, max_step_tokens=padded(8192),
        stream_tokens=STREAM_TOKENS,
    )  # fmt: skip
    made = Pipeline(config)
    made.pages.reset("benchmark")
    numerics = SimpleNamespace(ops=SimpleNamespace(device=torch.device("cpu")))
    run = SimpleNamespace(config=SimpleNamespace(max_model_len=1024))
    made.runner = IdleRunner(config, SimpleNamespace(numerics=numerics, run=run, version=None))  # type: ignore[arg-type]
    made.runner.times = made.times
    sampling = SamplingParams(max_tokens=MAX_TOKENS, stop_token_ids=(0, 2))
    rng = np.random.default_rng(0)
    for number in range(size):
        prompt = array("i", rng.integers(8, 1000, PROMPT_TOKENS + number % PAGE_SIZE).tolist())
        made.scheduler.add(
            Sample(
                arrival=number, token_ids=prompt, limit=len(prompt) + MAX_TOKENS, trajectory_id=str(number), sample_index=0,
                request=GroupRequest(seed=1, prompt_number=number, sampling=sampling, stream=None),
                num_prompt_tokens=len(prompt), num_continued_tokens=0, stop_rule=StopRule(sampling),
            )
        )  # fmt: skip
    return made


def measured(size: int) -> dict[str, float]:
    """Milliseconds a step, by part; `step`: all of it."""
    made = pipeline_of(size)
    for _ in range(WARM_UP):
        made.step()
    made.times.reset()
    gc.collect()
    sums = {part: timed(getattr(made, owner) if owner else made, name) for part, (owner, name) in PARTS.items()}
    begin = time.thread_time()
    for _ in range(WINDOW):
        made.step()
        made.outputs.chunks.clear()
    sums["step"] = [time.thread_time() - begin]
    assert made.times.num_sampled == size * WINDOW, "nobody comes or ends in the window"
    return {part: 1e3 * sum(seconds) / WINDOW for part, seconds in sums.items()}


def timed(owner: Any, name: str) -> list[float]:
    """Has every call of a method leave its seconds of this thread in the list."""
    method, seconds = getattr(owner, name), []

    def run(*args: Any) -> Any:
        begin = time.thread_time()
        result = method(*args)
        seconds.append(time.thread_time() - begin)
        return result

    setattr(owner, name, run)
    return seconds


def main(words: Sequence[str] | None = None) -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument(
        "--like", type=Path, help="records of an earlier commit, to compare with and to keep beside ours"
    )
    args = arguments.parse_args(words)
    earlier = json.loads(args.like.read_text()) if args.like else []
    before = {(r["params"]["sequences"], r["metric"]): r for r in earlier if r["mode"] == "ours"}
    recorder = Recorder(args.out)
    for old in before.values():
        recorder.add(Record(**old | {"mode": "before"}))
    for size in map(int, args.only or SIZES):
        runs = [measured(size) for _ in range(REPEATS)]
        for part in runs[0]:
            values = [run[part] for run in runs]
            value, metric = median(values), f"{part}_ms"
            record = Record(
                "host",
                "decode",
                {"sequences": size},
                "ours",
                metric,
                value,
                "ms/step",
                spread=[min(values), max(values)],
            )
            if (size, metric) in before:
                old = before[size, metric]
                record.baseline, record.ratio = f"commit {old['commit']}", old["value"] / value
            recorder.add(record)
    recorder.save()
    report(recorder.records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
