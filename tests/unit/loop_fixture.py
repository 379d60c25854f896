"""A run of the loop of services in which every second is known."""

from __future__ import annotations

from benchmarks import loop
from benchmarks.timeline import Series
from shared.metrics import names
from timzero.outcome import Outcome
from timzero.steps import StepSummary

BYTES = f"{names.WEIGHT_SYNC_BYTES.name}:broadcast"
PHASES = [f"timzero_engine_seconds_total:{phase}" for phase in loop.PHASES]


def outcome(*, begin_training: float, differing_bits: int = 0) -> tuple[Outcome, Series]:
    """Five steps of 10 s: the replica computes for the first 6 s of each, the trainer for 4 s from `begin_training` on."""
    steps = []
    for step in range(5):
        at = 10.0 * step + begin_training
        phases = {"score": [at, at + 1], "train": [at + 1, at + 4]}
        tim = {"differing_bits": differing_bits, "compared_tokens": 64}
        metrics = {
            "time": 10.0 * (step + 1),
            "phases": phases,
            "lag": 1.0,
            "tokens": 64,
            "tim": tim,
            "weights_digest": "d",
        }
        steps.append(StepSummary(step=step, epoch=1, metrics=metrics))
    series = Series()
    for step in range(6):
        for at, busy in ((10.0 * step, 6.0 * step), (10.0 * step + 6, 6.0 * (step + 1))):
            series.add(
                at, {loop.BUSY: busy, loop.STEPS: 10.0 * at, BYTES: 1e6 * at, **dict.fromkeys(PHASES, 0.1 * busy)}
            )
    run = {"state": "completed", "config": {"numerics": "exact"}, "reason": ""}
    metrics = {"dropped": {}, "accepted": 320, "trained": 320, "live": 0}
    return Outcome(run=run, steps=tuple(steps), metrics=metrics, before=None, after=None, published_digest="d"), series
