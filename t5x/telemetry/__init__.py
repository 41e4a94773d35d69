"""Reports of a run: metrics in files, progress on the terminal, throughput."""

from t5x.telemetry.events import EventFile
from t5x.telemetry.progress import Progress, copy_progress
from t5x.telemetry.throughput import Throughput, ThroughputClock
from t5x.telemetry.writer import MetricWriter

__all__ = ["EventFile", "MetricWriter", "Progress", "Throughput", "ThroughputClock", "copy_progress"]
