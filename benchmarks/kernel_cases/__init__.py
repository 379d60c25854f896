"""One module per operation, each with `check() -> records` and `time(limits) -> records`."""
