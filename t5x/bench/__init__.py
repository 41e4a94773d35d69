"""Measures the product's own paths on this machine: what `t5x bench` does."""

from t5x.bench.workload import SIZES, Workload

__all__ = ["SIZES", "Workload"]
