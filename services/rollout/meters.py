"""The engine's numbers as Prometheus metrics."""

from __future__ import annotations

import time

from services.rollout.engine import CommitResult, Engine
from services.rollout.weights import ServedModel
from shared.metrics import names
from shared.metrics.server import metric

INTERVAL_S = 0.05
"""Between two updates while nothing but tokens changes: a step must not wait for twenty metrics and their locks."""


class Meters:
    """All metrics of one replica."""

    def __init__(self, replica: str) -> None:
        self._replica = replica
        self._sampled, self._continued, self._prefill, self._hits, self._preemptions = (
            metric(spec).labels(replica=replica)
            for spec in (
                names.SAMPLED_TOKENS,
                names.CONTINUED_TOKENS,
                names.PREFILL_TOKENS,
                names.PREFIX_HIT_TOKENS,
                names.PREEMPTIONS,
            )
        )
        self._dropped = metric(names.DROPPED_ROWS).labels(replica=replica)
        self._steps = [metric(names.ENGINE_STEPS).labels(replica=replica, mode=mode) for mode in ("graph", "eager")]
        phases = ("schedule", "prepare", "wait", "read", "forward", "sample", "idle", "full", "full_idle")
        self._seconds = [metric(names.ENGINE_SECONDS).labels(replica=replica, phase=phase) for phase in phases]
        self._running, self._waiting, self._usage, self._graphs = (
            metric(spec).labels(replica=replica)
            for spec in (names.RUNNING_SEQUENCES, names.WAITING_SEQUENCES, names.KV_USAGE, names.CAPTURED_GRAPHS)
        )
        self._step_seconds = metric(names.ENGINE_STEP_SECONDS).labels(replica=replica)
        self._last: tuple[float, ...] = (0,) * (8 + len(phases))
        self._seen: list[float] = []
        """Seconds of the steps since the last update."""
        self._load = (0, 0)
        self._due = 0.0

    def observe(self, engine: Engine, step_seconds: float | None) -> None:
        """After every round of the loop; `step_seconds` is None where nothing was computed.

        Updates the metrics where sequences came or went, or nothing is left to do; otherwise every INTERVAL_S.
        """
        if step_seconds is not None:
            self._seen.append(step_seconds)
        now, load = time.monotonic(), (len(engine.scheduler.running), len(engine.scheduler.waiting))
        if now >= self._due or load != self._load or not engine.has_work:
            self._due, self._load = now + INTERVAL_S, load
            self._update(engine)

    def _update(self, engine: Engine) -> None:
        c, s, t = engine.counters, engine.scheduler, engine.times
        now = (
            *(c.sampled_tokens, c.continued_tokens, c.prefill_tokens, s.num_prefix_hit_tokens, s.num_preemptions),
            *(c.dropped_rows, t.num_graph_steps, t.num_steps - t.num_graph_steps),
            *(t.schedule_s, t.prepare_s, t.wait_s, t.read_s, t.device_s, t.sample_s, t.idle_s, t.full_s, t.full_idle_s),
        )
        counters = (self._sampled, self._continued, self._prefill, self._hits, self._preemptions, self._dropped)
        for counter, value, last in zip((*counters, *self._steps, *self._seconds), now, self._last, strict=True):
            if value != last:
                counter.inc(value - last)
        self._last = now
        self._running.set(len(s.running))
        self._waiting.set(len(s.waiting))
        self._usage.set(engine.kv_usage)
        self._graphs.set(engine.num_graphs)
        for seconds in self._seen:
            self._step_seconds.observe(seconds)
        self._seen.clear()

    def prepared(self, seconds: float) -> None:
        metric(names.WEIGHT_SYNC_SECONDS).labels(phase="prepare").observe(seconds)

    def committed(self, model: ServedModel, result: CommitResult, kernels: dict[str, str]) -> None:
        metric(names.KERNELS).labels(role="rollout").info({**kernels, "fingerprint": model.numerics.fingerprint})
        metric(names.POLICY_STEP).labels(role="rollout", member=self._replica).set(model.version.step)
        metric(names.WEIGHT_SYNC_SECONDS).labels(phase="commit").observe(result.pause_s)
        metric(names.PARITY_MISMATCH).labels(replica=self._replica).inc(result.probe_differing)

    def failed(self, phase: str) -> None:
        metric(names.WEIGHT_SYNC_FAILURES).labels(phase=phase).inc()
