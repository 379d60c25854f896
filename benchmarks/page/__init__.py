"""docs/performance.md, section by section, from the records in benchmarks/results; docs/generate_performance.py joins them."""
