"""Metrics of the server, for Prometheus."""

import functools

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class ServerMetrics:
    """The metrics of one server, in a registry of its own: several servers in a process do not mix."""

    def __init__(self):
        disable_created_metrics()
        self._registry = CollectorRegistry()
        counter = functools.partial(Counter, registry=self._registry)
        gauge = functools.partial(Gauge, registry=self._registry)
        self.requests = counter("t5x_requests_total", "Answered requests by route and status.", ("route", "status"))
        self.request_seconds = Histogram(
            "t5x_request_seconds", "Time from the end of a request's headers to the end of its response.", ("route",),
            registry=self._registry, buckets=_BUCKETS,
        )  # fmt: skip
        self.requests_in_progress = gauge(
            "t5x_requests_in_progress", "Requests that have been accepted and not answered."
        )
        self.queued_rows = gauge("t5x_queued_rows", "Rows that wait for a batch.")
        self.batches = counter("t5x_batches_total", "Computed batches by kind.", ("kind",))
        self.batch_rows = counter("t5x_batch_rows_total", "Rows of the computed batches, without padding.", ("kind",))
        self.batch_seconds = counter(
            "t5x_batch_seconds_total", "Time spent on batches, compilation included.", ("kind",)
        )
        self.input_tokens = counter("t5x_input_tokens_total", "Input tokens of answered requests.")
        self.output_tokens = counter("t5x_output_tokens_total", "Generated tokens of answered requests.")
        self.reloads = counter("t5x_reloads_total", "Model reloads by model and result.", ("model", "result"))
        self.ready = gauge("t5x_ready", "Whether all models are loaded and warmed up.")

    def text(self) -> str:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry).decode()
