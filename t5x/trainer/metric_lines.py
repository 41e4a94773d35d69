"""Lines of metrics: each covers the steps since the previous line."""

import dataclasses
import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent import futures
from typing import NamedTuple

import jax

from t5x.metrics.accumulators import Metrics, compute, merge, to_json
from t5x.network.flops import StepCost
from t5x.telemetry import Throughput
from t5x.trainer.nonfinite import FIRST_BAD_GRADIENT, is_finite
from t5x.trainer.trainer import on_host

log = logging.getLogger(__name__)

_SLOW_DATA = 0.1
_SLOW_DATA_HINT = (
    "training waits for data %.0f %% of the time: read it with more processes (utils.DatasetConfig.num_workers), or "
    "cache its tokens (`t5x cache TASK`)"
)


class NonFinite(NamedTuple):
    """Steps of which at least one has a non-finite loss or gradient, each with its metrics on the host."""

    steps: list[Metrics]
    last_step: int


@dataclasses.dataclass
class _Line:
    """The metrics since the last line.

    Attributes:
      merged: those of the first steps, combined.
      tokens: numbers of these steps and of their non-padding tokens, without those of an earlier process.
      pending: those of each later step, which the devices may still be computing.
    """

    merged: Metrics | None = None
    tokens: Counter[str] = dataclasses.field(default_factory=Counter)
    pending: list[Metrics] = dataclasses.field(default_factory=list)


class MetricLines:
    """Collects the metrics of the steps and writes them in lines.

    A checkpoint in the middle of a line includes the metrics collected so far, so that the next line is identical to
    that of an uninterrupted run.

    Args:
      write: called with a step and its metrics.
      before: metrics of an unfinished line, from the checkpoint.
      cost: cost of a step.
      concurrent: compute and write in a thread while the next steps run; otherwise `line` returns after `write`.

    Attributes:
      metrics: those of the last line.
      summary: the subset for the progress display.
    """

    def __init__(
        self,
        write: Callable[[int, Mapping[str, float]], None],
        *,
        before: Metrics | None = None,
        cost: StepCost | None = None,
        concurrent: bool = True,
    ):
        self._write, self._cost = write, cost
        self._line = _Line(merged=before)
        self._concurrent = concurrent
        self._thread = futures.ThreadPoolExecutor(1, "t5x-metrics")
        self._job: futures.Future | None = None
        self._nonfinite: NonFinite | None = None
        self._warned = False
        self.metrics: dict[str, float] = {}
        self.summary: dict[str, float] = {}

    def add(self, metrics: Metrics) -> None:
        """Add the metrics of one step, which the devices may still be computing."""
        self._line.pending.append(metrics)

    def line(self, step: int, lap: Throughput, others: Mapping[str, float]) -> None:
        """Write the metrics of all steps since the last line.

        Args:
          step: the last of these steps.
          lap: the time of these steps, or of most of them, as the devices may still run the last. Tokens are filled in.
          others: additional metrics to write.
        """
        self.wait()
        self._job = self._thread.submit(self._finish, step, self._line, lap, others)
        self._line = _Line()
        if not self._concurrent:
            self.wait()

    def unfinished(self, step: int) -> dict[str, list] | None:
        """Return the metrics since the last line, for JSON. Waits for the devices."""
        self.wait()
        self._merge(self._line, step)
        return None if self._line.merged is None else to_json(self._line.merged)

    def wait(self) -> None:
        """Wait until the last line is written. Raise its error, if any."""
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def take_nonfinite(self) -> NonFinite | None:
        """Pop the recorded non-finite steps among those written or merged. Identical on every process."""
        self.wait()
        nonfinite, self._nonfinite = self._nonfinite, None
        return nonfinite

    def close(self) -> None:
        self._thread.shutdown()

    def _finish(self, step: int, line: _Line, lap: Throughput, others: Mapping[str, float]) -> None:
        steps = self._merge(line, step)
        tokens = {
            name: round(line.tokens[name] * lap.steps / line.tokens["steps"])
            for name in ("target_tokens", "input_tokens")
        }
        lap = dataclasses.replace(lap, **tokens)
        assert line.merged is not None  # a line has at least one step
        metrics = compute(line.merged, lap.seconds)
        for name in ("target_tokens", FIRST_BAD_GRADIENT):
            metrics.pop(name, None)
        metrics |= lap.scalars(cores=jax.device_count()) | dict(others)
        if steps and "learning_rate" in steps[-1]:
            metrics["learning_rate/current"] = float(steps[-1]["learning_rate"].compute())
        if self._cost is not None:
            metrics |= self._cost.scalars(metrics["timing/steps_per_second"])
        self.metrics = metrics
        self.summary = {
            "loss": metrics.get("loss_per_nonpadding_target_token", metrics.get("loss", math.nan)),
            "tokens/s": metrics["timing/target_tokens_per_second"] + metrics["timing/input_tokens_per_second"],
        }
        if "timing/mfu" in metrics:
            self.summary["MFU %"] = 100 * metrics["timing/mfu"]
        if (waiting := metrics["timing/data_wait_share"]) > _SLOW_DATA:
            self.summary["waiting for data %"] = 100 * waiting
            if not self._warned:
                log.warning(_SLOW_DATA_HINT, 100 * waiting)
            self._warned = True
        self._write(step, metrics)

    def _merge(self, line: _Line, last_step: int) -> list[Metrics]:
        """Merge the pending steps of a line, and return them; wait for the devices."""
        steps, line.pending = on_host(line.pending), []
        if self._nonfinite is None and not all(map(is_finite, steps)):
            self._nonfinite = NonFinite(steps, last_step)
        if steps and line.merged is not None and line.merged.keys() != steps[0].keys():
            log.warning("the run now computes other metrics than before it was stopped: this line starts here")
            line.merged = None
        if steps:
            line.merged = functools.reduce(merge, steps if line.merged is None else [line.merged, *steps])
            line.tokens["steps"] += len(steps)
            if {"target_tokens", "non_padding_fraction/overall"} <= steps[0].keys():  # not of every user's model
                targets = sum(int(metrics["target_tokens"].total) for metrics in steps)
                both = sum(int(metrics["non_padding_fraction/overall"].total) for metrics in steps)
                line.tokens += Counter(target_tokens=targets, input_tokens=both - targets)
        return steps
