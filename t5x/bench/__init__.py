"""Benchmarks of the product's own code paths on this machine, for `t5x bench`."""

# ruff: noqa: F401

from t5x.bench.workload import SIZES, Workload
