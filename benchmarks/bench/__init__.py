"""Measure training, generation, scoring, data and checkpoints: `python -m benchmarks.bench`."""
