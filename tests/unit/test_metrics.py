"""Metric names follow the Prometheus conventions, each exists once, and the server exports what was set."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

from shared.metrics import names, server
from shared.metrics.names import Metric
from tests.deadline import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]
METRICS: dict[str, Metric] = {k: v for k, v in vars(names).items() if isinstance(v, Metric)}

BOUNDED_LABELS = {
    "run",
    "state",
    "reason",
    "route",
    "method",
    "status",
    "replica",
    "role",
    "member",
    "phase",
    "statistic",
    "series",
    "staleness",
    "length",
    "transport",
    "mode",
}
"""Labels whose values are few. A trajectory, group or prompt id is never one of them."""


def test_every_name_exists_once() -> None:
    repeated = [name for name, count in Counter(m.name for m in METRICS.values()).items() if count > 1]
    assert not repeated


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda m: m.name)
def test_a_metric_follows_the_conventions(metric: Metric) -> None:
    assert re.fullmatch(r"timzero_[a-z][a-z0-9]*(_[a-z0-9]+)*", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert not re.search(r"_(count|sum|bucket|info|created)$", metric.name), "a suffix that the client library adds"
    assert not re.search(r"_((milli|micro|nano)seconds|ms|us|minutes|[km]i?b|percent|pct)(_|$)", metric.name), (
        "base units"
    )
    assert metric.help
    assert not metric.help.endswith(".")
    assert set(metric.labels) <= BOUNDED_LABELS
    assert len(metric.labels) == len(set(metric.labels))
    assert list(metric.buckets) == sorted(set(metric.buckets))


def test_every_metric_is_written_by_some_service() -> None:
    source = "\n".join(p.read_text() for f in ("services", "timzero", "shared/wire") for p in (ROOT / f).rglob("*.py"))
    silent = [name for name in METRICS if not re.search(rf"\b{name}\b", source)]
    assert not silent, f"nothing writes {silent}"


EXPORT = """
import urllib.request
from shared.metrics import names, server
server.metric(names.TRAJECTORIES_DROPPED).labels(run="demo", reason="stale").inc(2)
server.metric(names.STEP_SECONDS).labels(run="demo", phase="score").observe(0.25)
server.metric(names.KERNELS).labels(role="trainer").info({"linear": "padded16"})
assert server.metric(names.STEP) is server.metric(names.STEP)
assert server.value(names.TRAJECTORIES_DROPPED, run="demo", reason="stale") == 2
assert server.value(names.TRAJECTORIES_DROPPED, run="demo", reason="poison") == 0
port = server.serve("127.0.0.1", 0)
print(urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read().decode())
"""


def test_what_was_set_is_exported() -> None:
    # A process of its own: the registry is one per process.
    done = subprocess.run([sys.executable, "-c", EXPORT], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    for line in (
        'timzero_trajectories_dropped_total{reason="stale",run="demo"} 2.0',
        'timzero_step_seconds_bucket{le="0.5",phase="score",run="demo"} 1.0',
        'timzero_kernels_info{linear="padded16",role="trainer"} 1.0',
    ):
        assert line in done.stdout


def test_two_servers_of_one_process_get_ports_of_their_own() -> None:
    first, second = server.serve("127.0.0.1", 0), server.serve("127.0.0.1", 0)
    assert first != second
    for port in (first, second):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S) as answer:
            assert answer.status == 200
