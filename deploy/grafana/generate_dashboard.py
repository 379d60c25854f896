"""Writes dashboards/timzero.json from the metrics: `make docs`. Tests compare the two, and ask for every metric in some panel."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shared.metrics import names as n
from shared.metrics.names import Metric

TARGET = Path(__file__).with_name("dashboards") / "timzero.json"

SOURCE = {"type": "prometheus", "uid": "prometheus"}
COLUMNS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    title: str
    series: tuple[tuple[str, str], ...]
    """(legend, PromQL)."""
    about: str = ""
    kind: Literal["timeseries", "stat", "heatmap", "table"] = "timeseries"
    width: int = 8
    """Of 24 columns."""
    unit: str = "short"
    low: float | None = None
    high: float | None = None
    decimals: int | None = None
    is_stacked: bool = False
    colors: tuple[tuple[float | None, str], ...] = ((None, "text"),)
    """Of a stat: (from this value on, color), the first one from None."""

    @property
    def height(self) -> int:
        return 4 if self.kind == "stat" else 7


RED_FROM_1 = ((None, "green"), (1, "red"))


def selected(metric: Metric, suffix: str = "", **labels: str) -> str:
    """The metric's series of the chosen runs, if it knows runs; labels match these expressions, or with "!" in front do not."""
    chosen = {"run": "$run", **labels} if "run" in metric.labels else labels
    matchers = [f'{k}{"!" if v.startswith("!") else "="}~"{v.removeprefix("!")}"' for k, v in chosen.items()]
    return metric.name + suffix + (f"{{{','.join(matchers)}}}" if matchers else "")


def rate(metric: Metric, by: str = "", suffix: str = "", **labels: str) -> str:
    """Per second, summed, by labels if any are given."""
    grouping = f" by ({by}) " if by else ""
    return f"sum{grouping}(rate({selected(metric, suffix, **labels)}[$__rate_interval]))"


def mean(metric: Metric, by: str = "") -> str:
    """Of a histogram's observations."""
    return f"{rate(metric, by, '_sum')} / {rate(metric, by, '_count')}"


def quantile(q: float, metric: Metric, by: str = "", **labels: str) -> str:
    """Of a histogram."""
    return f"histogram_quantile({q}, {rate(metric, f'le, {by}' if by else 'le', '_bucket', **labels)})"


def total(metric: Metric, by: str = "", **labels: str) -> str:
    return f"sum{f' by ({by}) ' if by else ''}({selected(metric, **labels)})"


def stat(title: str, expression: str, about: str = "", **fields: Any) -> Panel:
    return Panel(title=title, series=(("", expression),), about=about, kind="stat", width=4, **fields)


def lines(title: str, *series: tuple[str, str], about: str = "", **fields: Any) -> Panel:
    return Panel(title=title, series=series, about=about, **fields)


def deltas(title: str, metric: Metric, about: str) -> Panel:
    """A histogram over time."""
    increase = f"sum by (le) (increase({selected(metric, '_bucket')}[$__rate_interval]))"
    return Panel(title=title, series=(("{{le}}", increase),), about=about, kind="heatmap")


EXACTNESS = (
    stat("Differing tokens", total(n.DIFFERING_TOKENS), colors=RED_FROM_1, about="Trained tokens whose logprob differs between "
         "engine and trainer under the same weights. 0 in exact mode."),
    stat("Compared tokens", total(n.COMPARED_TOKENS), "Every trained token but those that the audit's panel names."),
    stat("Equal bits", f"1 - {total(n.DIFFERING_TOKENS)} / {total(n.COMPARED_TOKENS)}", unit="percentunit", decimals=4,
         colors=((None, "red"), (1, "green"))),
    stat("Probe mismatches", total(n.PARITY_MISMATCH), colors=RED_FROM_1,
         about="Tokens of the fixed probe that a replica scored with other bits. Such a replica is kept out."),
    stat("Argmax flips", total(n.TOP1_FLIPS), colors=RED_FROM_1),
    stat("Not finite, refused", total(n.NONFINITE), colors=RED_FROM_1),
    lines("Largest |delta logprob| of a step", ("{{run}}", selected(n.TIM_MAX_DELTA)), low=0),
    lines("|delta logprob|, same version", ("p50", quantile(0.5, n.TIM_DELTA)), ("p99", quantile(0.99, n.TIM_DELTA)), low=0,
          about="Fast mode: the mismatch. Exact mode: zero."),
    deltas("|delta logprob|, same version, tokens", n.TIM_DELTA, "Tokens by upper bound of the bucket. Exact mode: all at 0."),
    lines("Differing bits of a step", ("share of tokens {{run}}", f"1 - {selected(n.EQUAL_FRACTION)}"),
          ("largest distance in float32 values {{run}}", selected(n.ULP_MAX)), low=0),
    lines("Audit: trained tokens that were not compared", ("{{reason}}", rate(n.UNAUDITED_TOKENS, "reason")), low=0,
          about="Per second. share: audit_share is below 1."),
    Panel(title="Kernels executed", series=(("", f"{n.KERNELS.name}_info"),), kind="table",
          about="Implementation per operation, read back from each process."),
)  # fmt: skip

PIPELINE = (
    lines("Trajectories by state", ("{{state}}", total(n.TRAJECTORIES, "state")), width=12, is_stacked=True,
          about="accepted = trained + dropped + live, at every moment."),
    lines("Accepted and dropped per second", ("accepted", rate(n.TRAJECTORIES_ACCEPTED)),
          ("of these sampled elsewhere", rate(n.TRAJECTORIES_INGESTED)),
          ("dropped: {{reason}}", rate(n.TRAJECTORIES_DROPPED, "reason")),
          ("groups sampled again", rate(n.REPLACED_GROUPS)), width=12),
    lines("Queue depth", ("{{run}}", selected(n.QUEUE_DEPTH)), width=6, low=0,
          about="Groups, leased ones included; entries stay until the checkpoint that covers them is durable."),
    lines("Admission gate, in batches", ("gate", selected(n.GATE_STEP)), ("step", selected(n.STEP)),
          ("durable checkpoint", selected(n.CHECKPOINT_STEP)), width=6, low=0,
          about="Prompts of batches from the gate on are refused until a later checkpoint is durable."),
    lines("Refused per second", ("prompts, gate closed", rate(n.GATE_CLOSED)), ("rewards, too late", rate(n.REWARD_LATE)),
          ("groups sampled elsewhere: {{reason}}", rate(n.INGEST_REFUSED, "reason")), width=6),
    lines("Reward wait", ("p50", quantile(0.5, n.REWARD_WAIT_SECONDS)), ("p95", quantile(0.95, n.REWARD_WAIT_SECONDS)), width=6,
          unit="s"),
    lines("Staleness of trained tokens", ("mean", mean(n.STALENESS_STEPS)), ("max", quantile(1.0, n.STALENESS_STEPS)),
          ("allowed", f"max({selected(n.LAG_LIMIT)})"), width=6, low=0, about="Step minus version; allowed: lag, or max_lag."),
    lines("Dispatch per second", ("groups", rate(n.DISPATCHED_GROUPS)), ("continued elsewhere", rate(n.CONTINUED_TRAJECTORIES)),
          ("broken streams: {{reason}}", rate(n.REPLICA_FAILURES, "reason")), width=6),
    lines("HTTP requests per second", ("{{status}}", rate(n.HTTP_REQUESTS, "status")), width=6),
    # A stream lasts for as long as its client listens.
    lines("HTTP time, p95", ("{{route}}", quantile(0.95, n.HTTP_SECONDS, "route", route="!.*/stream")), width=6, unit="s"),
)  # fmt: skip

LEARNING = (
    stat("Step", f"max({selected(n.STEP)})"),
    stat("Durable checkpoint", f"max({selected(n.CHECKPOINT_STEP)})"),
    stat("Since the last step", f"time() - max({selected(n.LAST_STEP_TIMESTAMP)})", unit="s", decimals=0),
    stat("Trained tokens", total(n.TRAINED_TOKENS)),
    stat("Reward", f"avg({selected(n.REWARD)})", decimals=3),
    stat("Trained tokens per second", rate(n.TRAINED_TOKENS), decimals=0),
    lines("Reward", ("{{run}}", selected(n.REWARD)), width=6),
    lines("Entropy", ("{{run}}", selected(n.ENTROPY)), width=6),
    lines("Loss", ("{{run}}", selected(n.LOSS)), width=6),
    lines("Gradient norm", ("{{run}}", selected(n.GRAD_NORM)), width=6),
    lines("Step time by phase", ("{{phase}}", mean(n.STEP_SECONDS, "phase")), unit="s", is_stacked=True, width=16,
          about="lease: the trainer waits for samples. publish: training stands still until the version is on its way."),
    lines("Left out of training per second", ("trajectories rejected by the correction", rate(n.REJECTED_TRAJECTORIES)),
          ("groups: {{reason}}", rate(n.UNTRAINED_GROUPS, "reason")),
          ("optimizer steps skipped", rate(n.OPTIMIZER_STEPS_SKIPPED)), ("lineage forks", rate(n.LINEAGE_FORKS))),
    lines("Clipped share", ("{{statistic}}", selected(n.CLIP)), low=0),
    lines("Against the reference policy", ("{{statistic}}", selected(n.REFERENCE_KL))),
    lines("Tokens that one filter alone would reject, per second", ("{{reason}}", rate(n.REJECTED_TOKENS, "reason")), low=0),
)  # fmt: skip

CORRECTION = (
    lines("Trainer before the step against sampler", ("{{statistic}}", selected(n.CORRECTION, statistic="k1|k3|chi2_token")),
          about="What lag and mismatch do to the ratio; the corrections act on it."),
    lines("Effective sample size", ("{{statistic}}", selected(n.CORRECTION, statistic="ess_raw|ess_applied")), low=0, high=1,
          about="Share of the tokens that the weights leave."),
    lines("Perplexity ratio and skew", ("{{statistic}}", selected(n.CORRECTION, statistic="ppl_ratio|skew_index"))),
    deltas("|trainer before the step - sampler logprob|, tokens", n.CORRECTION_DELTA, "Tokens by upper bound of the bucket."),
    deltas("k3 of a trajectory", n.TRAJECTORY_K3, "Trajectories by upper bound of the bucket."),
    deltas("|delta logprob| of tokens sampled elsewhere", n.INGESTED_DELTA, "Same version; another engine has other bits."),
    lines("k3 by staleness", ("{{series}}, {{staleness}} steps",
                              selected(n.MISMATCH, statistic="k3", series="same_version|correction")), width=12),
    lines("Summed over a trajectory, by its length", ("{{statistic}}, {{length}} tokens",
          selected(n.ACCUMULATED_MISMATCH, statistic="!trajectories")), width=12),
)  # fmt: skip

WEIGHTS = (
    lines("Version held", ("{{role}} {{member}}", n.POLICY_STEP.name),
          about="The distance between trainer and replicas is the lag."),
    lines("Replicas by state", ("{{state}}", n.REPLICAS.name), low=0, is_stacked=True),
    lines("Weight sync by phase, p95", ("{{phase}}", quantile(0.95, n.WEIGHT_SYNC_SECONDS, "phase")), unit="s",
          about="publish: at weight_sync. prepare: fetched and verified while the replica samples."),
    lines("Pauses", ("training, publish, mean", rate(n.STEP_SECONDS, suffix="_sum", phase="publish") + " / "
                     + rate(n.STEP_SECONDS, suffix="_count", phase="publish")),
          ("sampling, commit, p95", quantile(0.95, n.WEIGHT_SYNC_SECONDS, phase="commit")), unit="s", low=0,
          about="How long the trainer and a replica stand still for one version."),
    lines("Bytes moved", ("{{transport}}", rate(n.WEIGHT_SYNC_BYTES, "transport")), unit="Bps"),
    lines("Published: sent of all bytes", ("sent", rate(n.PUBLISH_BYTES)), ("whole versions", rate(n.PUBLISH_FULL_BYTES)),
          unit="Bps", low=0, about="With deltas less is sent than the versions have."),
    lines("Given up for weight_sync or for all bytes, per second",
          ("delta: {{phase}} {{reason}}", rate(n.DELTA_FALLBACKS, "phase, reason")),
          ("memory: {{transport}} {{reason}}", rate(n.SOURCE_FALLBACKS, "transport, reason")), width=12, low=0),
    lines("Failed phases per second", ("{{phase}}", rate(n.WEIGHT_SYNC_FAILURES, "phase")), width=12),
)  # fmt: skip

HOST = rate(n.ENGINE_SECONDS, "replica", phase="idle")
DEVICE = rate(n.ENGINE_SECONDS, "replica", phase="forward|sample|idle")

ENGINE = (
    lines("Sampled tokens per second", ("{{replica}}", rate(n.SAMPLED_TOKENS, "replica")), width=6),
    lines("Prefill tokens per second", ("computed", rate(n.PREFILL_TOKENS)),
          ("found in the prefix cache", rate(n.PREFIX_HIT_TOKENS)), width=6),
    lines("Prefix hits", ("{{replica}}", f"{rate(n.PREFIX_HIT_TOKENS, 'replica')} / ({rate(n.PREFIX_HIT_TOKENS, 'replica')} + "
                          f"{rate(n.PREFILL_TOKENS, 'replica')})"), width=6, unit="percentunit", low=0, high=1,
          about="Share of the tokens to prefill that were there already."),
    lines("KV pages in use", ("{{replica}}", n.KV_USAGE.name), width=6, unit="percentunit", low=0, high=1),
    lines("Time of the host", ("{{phase}}", rate(n.ENGINE_SECONDS, "phase", phase="schedule|prepare|wait|read")), is_stacked=True,
          low=0, unit="s", about="Seconds per second, all replicas. wait: for the device's results, as it should."),
    lines("Time of the device", ("{{phase}}", rate(n.ENGINE_SECONDS, "phase", phase="forward|sample|idle")), is_stacked=True,
          low=0, unit="s", about="Seconds per second, all replicas. idle: between two steps, waiting for the host."),
    lines("Device waits for the host", ("{{replica}}", f"{HOST} / {DEVICE}"), unit="percentunit", low=0,
          about="Share of the device's time; to be below 5 %."),
    lines("Engine step time", ("p50", quantile(0.5, n.ENGINE_STEP_SECONDS)), ("p99", quantile(0.99, n.ENGINE_STEP_SECONDS)),
          unit="s"),
    lines("Steps per second", ("{{mode}}", rate(n.ENGINE_STEPS, "mode")), is_stacked=True, low=0,
          about="graph: replayed from a captured graph."),
    lines("Graphs captured", ("{{replica}}", n.CAPTURED_GRAPHS.name), low=0, about="Steps and draws; 0 on a CPU."),
    lines("Sequences", ("running", total(n.RUNNING_SEQUENCES)), ("waiting", total(n.WAITING_SEQUENCES))),
    lines("Preempted and continued per second", ("preemptions {{replica}}", rate(n.PREEMPTIONS, "replica")),
          ("continued tokens", rate(n.CONTINUED_TOKENS))),
    lines("Rows behind the end of their sequence, per second", ("{{replica}}", rate(n.DROPPED_ROWS, "replica")), low=0,
          about="Dropped: the end was not known when the step was launched."),
)  # fmt: skip

ROWS = {
    "Exactness": EXACTNESS,
    "Pipeline": PIPELINE,
    "Learning": LEARNING,
    "Correction": CORRECTION,
    "Weights": WEIGHTS,
    "Engine": ENGINE,
}


def field_config(panel: Panel) -> dict[str, Any]:
    bounds = {"min": panel.low, "max": panel.high, "decimals": panel.decimals}
    defaults: dict[str, Any] = {"unit": panel.unit} | {k: v for k, v in bounds.items() if v is not None}
    if panel.kind == "stat":
        steps = [{"color": color, "value": value} for value, color in panel.colors]
        defaults |= {"color": {"mode": "thresholds"}, "thresholds": {"mode": "absolute", "steps": steps}}
    if panel.kind == "timeseries":
        custom: dict[str, Any] = {
            "lineWidth": 1,
            "fillOpacity": 40 if panel.is_stacked else 0,
            "showPoints": "never",
            "spanNulls": True,
        }
        if panel.is_stacked:
            custom["stacking"] = {"mode": "normal", "group": "A"}
        defaults |= {"color": {"mode": "palette-classic"}, "custom": custom}
    return {"defaults": defaults, "overrides": []}


OPTIONS: dict[str, dict[str, Any]] = {
    "stat": {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "none",
    },
    "timeseries": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}},
    "heatmap": {
        "calculate": False,
        "cellGap": 1,
        "color": {"mode": "scheme", "scheme": "Blues", "scale": "exponential", "exponent": 0.5, "steps": 64},
        "filterValues": {"le": 1e-9},
        "yAxis": {"axisPlacement": "left", "unit": "short"},
        "legend": {"show": False},
        "tooltip": {"mode": "single", "yHistogram": True},
    },
    "table": {"showHeader": True},
}  # fmt: skip
FORMATS: dict[str, dict[str, Any]] = {"heatmap": {"format": "heatmap"}, "table": {"instant": True, "format": "table"}}
HIDDEN = {"id": "organize", "options": {"excludeByName": {"Time": True, "Value": True, "__name__": True}}}


def panel_json(panel: Panel) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + i),
            "datasource": SOURCE,
            "expr": expression,
            "legendFormat": legend,
            **FORMATS.get(panel.kind, {}),
        }
        for i, (legend, expression) in enumerate(panel.series)
    ]
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "fieldConfig": field_config(panel),
        "options": OPTIONS[panel.kind],
        "targets": targets,
        **({"transformations": [HIDDEN]} if panel.kind == "table" else {}),
    }  # fmt: skip


def placed() -> list[dict[str, Any]]:
    """Rows under one another, the panels of each from left to right."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        grid = {"h": 1, "w": COLUMNS, "x": 0, "y": y}
        panels.append({"type": "row", "title": title, "collapsed": False, "gridPos": grid, "panels": []})
        x, y, height = 0, y + 1, 0
        for panel in row:
            if x + panel.width > COLUMNS:
                x, y, height = 0, y + height, 0
            grid = {"h": panel.height, "w": panel.width, "x": x, "y": y}
            panels.append(panel_json(panel) | {"gridPos": grid})
            x, height = x + panel.width, max(height, panel.height)
        y += height
    return [{"id": i, **panel} for i, panel in enumerate(panels, start=1)]


def document() -> str:
    runs = f"label_values({n.TRAJECTORIES.name}, run)"
    variable = {
        "name": "run", "label": "Run", "type": "query", "datasource": SOURCE, "query": {"query": runs, "refId": "run"},
        "definition": runs, "refresh": 2, "sort": 2, "multi": True, "includeAll": True,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }  # fmt: skip
    dashboard = {
        "uid": "timzero", "title": "timzero", "tags": ["timzero"], "timezone": "browser", "schemaVersion": 39, "version": 1,
        "editable": False, "refresh": "5s", "graphTooltip": 1, "time": {"from": "now-30m", "to": "now"},
        "annotations": {"list": []}, "links": [], "templating": {"list": [variable]}, "panels": placed(),
    }  # fmt: skip
    return json.dumps(dashboard, indent=1) + "\n"


if __name__ == "__main__":
    TARGET.write_text(document())
