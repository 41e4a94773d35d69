"""Reports of a run: metrics in files, progress on the terminal, throughput."""

# ruff: noqa: F401

from t5x.telemetry.metric_writer import EventFile, MetricWriter
from t5x.telemetry.progress import Progress, copy_progress
from t5x.telemetry.throughput import Throughput, ThroughputClock
