"""Prometheus objects made from `shared.metrics.names`, one registry per process, served on /metrics."""

from __future__ import annotations

from functools import cache
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, Info, start_http_server

from shared.metrics.names import Metric


@cache
def metric(spec: Metric) -> Any:
    """The process's prometheus object for this metric.

    >>> metric(names.STEP).labels(run="demo").set(3)
    """
    if spec.kind == "histogram":
        return Histogram(spec.name, spec.help, spec.labels, buckets=spec.buckets)
    kinds = {"counter": Counter, "gauge": Gauge, "info": Info}
    return kinds[spec.kind](spec.name, spec.help, spec.labels)


def value(spec: Metric, **labels: str) -> float:
    """Current value of a counter or gauge; 0 where it was never touched."""
    return REGISTRY.get_sample_value(spec.name, labels) or 0.0


def serve(host: str, port: int) -> int:
    """Serves /metrics from a daemon thread. Returns the port bound (port 0 picks one)."""
    server, _ = start_http_server(port, addr=host)
    return server.server_port
