"""What a step is reported as: one JSON row, and the process's metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from prometheus_client import Gauge, Histogram
from torch import Tensor

from services.trainer.batch import Batch, PolicyVersion
from services.trainer.learner import StepResult
from shared.metrics import names
from shared.metrics.server import metric
from shared.wire.weights import Sent

CORRECTION_STATISTICS = ("k1", "k3", "chi2_token", "ess_raw", "ess_applied", "ppl_ratio", "skew_index")
"""The few of the mismatch metrics that are exported; steps.jsonl has all."""


def step_row(
    batch: Batch,
    result: StepResult,
    *,
    version: PolicyVersion,
    sent: Sent,
    phases: Mapping[str, list[float]],
    world_size: int,
) -> dict[str, Any]:
    """The row of steps.jsonl.

    Args:
        version: published after the step.
        sent: what publishing it took.
        phases: name -> [start, end], unix seconds; `checkpoint` is the one that ended before this step began.
    """
    begin = min(start for start, _ in phases.values())
    busy_s = sum(end - start for name, (start, end) in phases.items() if name not in ("lease", "checkpoint"))
    wall_s = time.time() - begin
    return {
        "step": batch.step,
        "policy_step": version.step,
        "lineage": version.lineage,
        "weights_digest": version.digest,
        "publish_bytes": sent.num_bytes,
        "full_bytes": sent.full_bytes,
        "sampled_by": [version.step for version in batch.versions],
        **result.metrics,
        "tokens_per_s": batch.num_tokens / max(wall_s, 1e-9),
        "busy_s": busy_s,
        "wall_s": wall_s,
        "phases": dict(phases),
        "world_size": world_size,
        "time": time.time(),
    }


def headline(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a log line shows of a row."""
    keys = ("step", "reward_mean", "loss", "grad_norm", "entropy", "lag", "tokens", "tokens_per_s", "weights_digest",
            "publish_bytes", "full_bytes")  # fmt: skip
    tim = row["tim"]
    seconds = {f"{name}_s": round(end - start, 3) for name, (start, end) in row["phases"].items()}
    return {
        **{key: row[key] for key in keys},
        "compared_tokens": tim["compared_tokens"],
        "differing_tokens": tim["differing_tokens"],
        "tim_abs_max": tim["abs_max"],
        **seconds,
    }


def count_mismatch(run: str, result: StepResult) -> None:
    """The step's TIM, counted before anything is decided on it."""
    m = result.mismatch
    metric(names.COMPARED_TOKENS).labels(run=run).inc(m.compared_tokens)
    metric(names.DIFFERING_TOKENS).labels(run=run).inc(m.differing_tokens)
    metric(names.TOP1_FLIPS).labels(run=run).inc(m.top1_flips)
    metric(names.NONFINITE).labels(run=run).inc(m.nonfinite)
    metric(names.TIM_MAX_DELTA).labels(run=run).set(m.delta.abs_max)
    observe_all(metric(names.TIM_DELTA).labels(run=run), result.abs_delta_T)
    metric(names.EQUAL_FRACTION).labels(run=run).set(m.equal_fraction)
    metric(names.ULP_MAX).labels(run=run).set(m.ulp_max)
    for reason, tokens in result.metrics["tim"]["unaudited"].items():
        metric(names.UNAUDITED_TOKENS).labels(run=run, reason=reason).inc(tokens)
    observe_all(metric(names.INGESTED_DELTA).labels(run=run), result.ingested_abs_delta_T)


def export(run: str, batch: Batch, result: StepResult, row: Mapping[str, Any]) -> None:
    """Gauges, counters and histograms of a trained step."""
    metric(names.STEP).labels(run=run).set(batch.step + 1)
    metric(names.POLICY_STEP).labels(role="trainer", member="trainer").set(batch.step + 1)
    metric(names.TRAINED_TOKENS).labels(run=run).inc(batch.num_tokens)
    metric(names.REJECTED_TRAJECTORIES).labels(run=run).inc(row["rejected_trajectories"])
    metric(names.OPTIMIZER_STEPS_SKIPPED).labels(run=run).inc(
        # A batch that dynamic sampling or an operator left empty is a step left out as well.
        max(len(batch.mini_steps), 1) - row["optimizer_steps"]
    )
    for spec, key in (
        (names.LOSS, "loss"),
        (names.REWARD, "reward_mean"),
        (names.GRAD_NORM, "grad_norm"),
        (names.ENTROPY, "entropy"),
    ):
        metric(spec).labels(run=run).set(row[key])
    export_mismatch(run, result, row)
    for statistic in CORRECTION_STATISTICS:
        # Absent where the batch has no tokens.
        if statistic in row["mismatch"]["correction"]:
            metric(names.CORRECTION).labels(run=run, statistic=statistic).set(row["mismatch"]["correction"][statistic])
    for name, (start, end) in row["phases"].items():
        metric(names.STEP_SECONDS).labels(run=run, phase=name).observe(end - start)
    observe_all(metric(names.STALENESS_STEPS).labels(run=run), result.staleness_T)
    metric(names.LAST_STEP_TIMESTAMP).labels(run=run).set(row["time"])


def export_mismatch(run: str, result: StepResult, row: Mapping[str, Any]) -> None:
    """Every table's scalars as gauges, the sums by length, and what the correction did."""
    tables = row["mismatch"]
    gauges: dict[tuple[str, ...], float] = {}
    parts = {
        "same_version": {"all": tables["same_version"], **tables["same_version_by_staleness"]},
        "ingested": {"all": tables["ingested"]},
        "correction": {"all": {**tables["correction"], **row["correction"]}, **tables["correction_by_staleness"]},
        "staleness": {"all": row["staleness"]},
        "drift": {"all": row["drift"]},
    }
    for series, buckets in parts.items():
        for bucket, table in buckets.items():
            scalars = {k: v for k, v in table.items() if isinstance(v, int | float)}
            gauges.update({(series, bucket, statistic): value for statistic, value in scalars.items()})
    set_all(metric(names.MISMATCH), run, gauges)
    set_all(
        metric(names.ACCUMULATED_MISMATCH),
        run,
        {
            (statistic, str(bucket["bucket"])): value
            for bucket in tables["correction"].get("accumulated", ())
            for statistic, value in bucket.items()
            if statistic not in ("bucket", "longest")
        },
    )
    set_all(metric(names.CLIP), run, {(statistic,): value for statistic, value in row["clip"].items()})
    set_all(metric(names.REFERENCE_KL), run, {(statistic,): value for statistic, value in row["kl"].items()})
    for name, rejected in row["correction"]["rejected_by"].items():
        metric(names.REJECTED_TOKENS).labels(run=run, reason=name).inc(rejected["tokens"])
    for reason in ("uniform", "surplus"):
        metric(names.UNTRAINED_GROUPS).labels(run=run, reason=reason).inc(row[f"{reason}_groups"])
    observe_all(metric(names.TRAJECTORY_K3).labels(run=run), result.k3_N)
    observe_all(metric(names.CORRECTION_DELTA).labels(run=run), result.correction_delta_T.abs())


def set_all(gauge: Gauge, run: str, values: Mapping[tuple[str, ...], float]) -> None:
    """Sets these and removes the run's others: what the last step does not have is not what it had before.

    Args:
        values: by the labels behind `run`.
    """
    for labels in list(gauge._metrics):
        if labels[0] == run and labels[1:] not in values:
            gauge.remove(*labels)
    for labels, value in values.items():
        gauge.labels(run, *labels).set(value)


def observe_all(histogram: Histogram, values: Tensor) -> None:
    """`histogram.observe` of every finite value at once: a step has more tokens than a Python loop should visit."""
    values = values[values.isfinite()]
    bounds = torch.tensor(histogram._upper_bounds, dtype=torch.float64)
    counts = torch.bincount(torch.searchsorted(bounds, values.double()), minlength=len(bounds))
    for bucket, count in zip(histogram._buckets, counts.tolist(), strict=False):
        bucket.inc(count)
    histogram._sum.inc(float(values.double().sum()))


def export_checkpoint(run: str, step: int) -> None:
    metric(names.CHECKPOINT_STEP).labels(run=run).set(step)


def export_kernels(kernels: Mapping[str, str], fingerprint: str) -> None:
    """The implementations executed, read back, and what their bits are a property of."""
    metric(names.KERNELS).labels(role="trainer").info({**kernels, "fingerprint": fingerprint})
