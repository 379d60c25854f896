"""Workloads, gate, clock and budget of `benchmarks.engine`; shapes and arms of `benchmarks.contract`."""
