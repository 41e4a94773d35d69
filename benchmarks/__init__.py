"""Benchmarks, run from a checkout. `benchmarks.bench` measures one workload; the scripts beside it compare several."""
