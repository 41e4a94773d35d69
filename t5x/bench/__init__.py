"""Benchmarks of the product's own code paths on this machine, for `t5x bench`."""

from t5x.bench.workload import SIZES, Workload

__all__ = ["SIZES", "Workload"]
