"""The engine's numbers as Prometheus metrics."""

from __future__ import annotations

from services.rollout.engine import CommitResult, Engine
from services.rollout.weights import ServedModel
from shared.metrics import names
from shared.metrics.server import metric


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
        phases = ("schedule", "prepare", "wait", "read", "forward", "sample", "idle")
        self._seconds = [metric(names.ENGINE_SECONDS).labels(replica=replica, phase=phase) for phase in phases]
        self._running, self._waiting, self._usage, self._graphs = (
            metric(spec).labels(replica=replica)
            for spec in (names.RUNNING_SEQUENCES, names.WAITING_SEQUENCES, names.KV_USAGE, names.CAPTURED_GRAPHS)
        )
        self._step_seconds = metric(names.ENGINE_STEP_SECONDS).labels(replica=replica)
        self._last: tuple[float, ...] = (0,) * (8 + len(phases))

    def observe(self, engine: Engine, step_seconds: float | None) -> None:
        """After every round of the loop; `step_seconds` is None where nothing was computed."""
        c, s, t = engine.counters, engine.scheduler, engine.times
        now = (
            *(c.sampled_tokens, c.continued_tokens, c.prefill_tokens, s.num_prefix_hit_tokens, s.num_preemptions),
            *(c.dropped_rows, t.num_graph_steps, t.num_steps - t.num_graph_steps),
            *(t.schedule_s, t.prepare_s, t.wait_s, t.read_s, t.device_s, t.sample_s, t.idle_s),
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
        if step_seconds is not None:
            self._step_seconds.observe(step_seconds)

    def prepared(self, seconds: float) -> None:
        metric(names.WEIGHT_SYNC_SECONDS).labels(phase="prepare").observe(seconds)

    def committed(self, model: ServedModel, result: CommitResult, kernels: dict[str, str]) -> None:
        metric(names.KERNELS).labels(role="rollout").info(kernels)
        metric(names.POLICY_STEP).labels(role="rollout", member=self._replica).set(model.version.step)
        metric(names.WEIGHT_SYNC_SECONDS).labels(phase="commit").observe(result.pause_s)
        metric(names.PARITY_MISMATCH).labels(replica=self._replica).inc(result.probe_differing)

    def failed(self, phase: str) -> None:
        metric(names.WEIGHT_SYNC_FAILURES).labels(phase=phase).inc()
