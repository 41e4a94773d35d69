"""Metrics of `Trainer.train` and `Trainer.eval`, written to a directory; `t5x train` has lines of its own."""

import os
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import jax

from t5x.metrics.accumulators import Metrics, compute, set_step_metrics_num_steps
from t5x.telemetry import MetricWriter


class MetricsManager:
    """Writes metrics to a directory, on the first process only.

    Args:
      name: directory below `summary_dir`.
      summary_dir: None writes nothing.
    """

    def __init__(self, name: str, summary_dir: str | None = None):
        self._name = name
        self.summary_dir = os.path.join(summary_dir, name) if summary_dir else None
        self._writer: MetricWriter | None = None
        self._began = time.perf_counter()

    @property
    def summary_writer(self) -> MetricWriter | None:
        """The writer, created when it is first used; None if nothing is written."""
        if self._writer is None and self.summary_dir is not None and jax.process_index() == 0:
            self._writer = MetricWriter(self.summary_dir, collection=self._name)
        return self._writer

    def start_duration_timer(self, block_on: Any = ()) -> None:
        """Start to measure the duration of the next summary, once the arrays of `block_on` are computed."""
        jax.block_until_ready([x for x in jax.tree.leaves(block_on) if not getattr(x, "is_deleted", bool)()])
        self._began = time.perf_counter()

    def write_scalar(self, key: str, val: float, step: int) -> None:
        self.write_scalars(step, {key: val})

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        if self.summary_writer is not None:
            self.summary_writer.write_scalars(int(step), {name: float(value) for name, value in scalars.items()})

    def write_metrics_summary(self, metrics: Metrics, step: int, num_steps: int) -> Future:
        """Write the metrics of `num_steps` steps, merged; `result()` of the returned future gives their values."""
        metrics, duration = set_step_metrics_num_steps(metrics, num_steps), time.perf_counter() - self._began
        summary = compute(metrics, duration, texts=True)
        texts = {name: value for name, value in summary.items() if isinstance(value, str)}
        self.write_scalars(step, {name: value for name, value in summary.items() if name not in texts})
        if self.summary_writer is not None:
            for name, text in texts.items():
                self.summary_writer.write_text(step, name, text)
        self.flush()
        future: Future[dict[str, Any]] = Future()
        future.set_result(summary)
        return future

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
