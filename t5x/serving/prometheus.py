"""Metrics of the server in Prometheus' text format."""

import threading
from collections import defaultdict
from collections.abc import Callable

_HELP = {
    "t5x_requests_total": "Answered requests by route and status.",
    "t5x_request_seconds": "Time from the end of a request's headers to the end of its response.",
    "t5x_requests_in_progress": "Requests that have been accepted and not answered.",
    "t5x_queued_rows": "Rows that wait for a batch.",
    "t5x_batches_total": "Computed batches by kind.",
    "t5x_batch_rows_total": "Rows of the computed batches, without padding.",
    "t5x_batch_seconds_total": "Time spent on batches, compilation included.",
    "t5x_input_tokens_total": "Input tokens of answered requests.",
    "t5x_output_tokens_total": "Generated tokens of answered requests.",
    "t5x_reloads_total": "Model reloads by model and result.",
    "t5x_ready": "Whether all models are loaded and warmed up.",
}
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_Labels = tuple[tuple[str, str], ...]


class Metrics:
    """Counters, one histogram per name, and gauges that are evaluated by `text`.

    >>> metrics = Metrics()
    >>> metrics.add("t5x_batches_total", kind="rank")
    >>> print(metrics.text())
    # HELP t5x_batches_total Computed batches by kind.
    # TYPE t5x_batches_total counter
    t5x_batches_total{kind="rank"} 1
    <BLANKLINE>
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._counters: dict[str, dict[_Labels, float]] = defaultdict(lambda: defaultdict(float))
        self._histograms: dict[str, dict[_Labels, list[float]]] = defaultdict(dict)
        self._gauges: dict[str, Callable[[], float]] = {}

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Increase a counter."""
        with self._lock:
            self._counters[name][tuple(labels.items())] += amount

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Count a value in a histogram."""
        with self._lock:
            counts = self._histograms[name].setdefault(tuple(labels.items()), [0.0] * (len(_BUCKETS) + 2))
            for i, bound in enumerate(_BUCKETS):
                counts[i] += value <= bound
            counts[-2] += 1
            counts[-1] += value

    def set_gauge(self, name: str, read: Callable[[], float]) -> None:
        self._gauges[name] = read

    def text(self) -> str:
        """Return all metrics."""
        lines = []
        with self._lock:
            for name, values in self._counters.items():
                lines += _head(name, "counter")
                lines += [f"{name}{_labels(labels)} {value:.10g}" for labels, value in values.items()]
            for name, histograms in self._histograms.items():
                lines += _head(name, "histogram")
                for labels, (*counts, count, total) in histograms.items():
                    bounds = zip((*map(str, _BUCKETS), "+Inf"), (*counts, count), strict=True)
                    lines += [f"{name}_bucket{_labels((*labels, ('le', le)))} {n:.10g}" for le, n in bounds]
                    sums = {"sum": total, "count": count}
                    lines += [f"{name}_{suffix}{_labels(labels)} {n:.10g}" for suffix, n in sums.items()]
        for name, read in self._gauges.items():
            lines += [*_head(name, "gauge"), f"{name} {read():.10g}"]
        return "".join(f"{line}\n" for line in lines)


def _head(name: str, kind: str) -> list[str]:
    return [f"# HELP {name} {_HELP[name]}", f"# TYPE {name} {kind}"]


def _labels(labels: _Labels) -> str:
    escape = lambda value: value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return "{" + ",".join(f'{name}="{escape(value)}"' for name, value in labels) + "}" if labels else ""
