"""What benchmarks.trainer measures: our trainer, others on the same model, and the parts of a step."""
