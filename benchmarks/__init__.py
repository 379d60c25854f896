"""One module per claim: `python -m benchmarks.NAME [--out FILE]` checks correctness first, then times."""
