"""The models of a server by name, and its metrics. A reload replaces a model while the old one answers requests."""

import functools
import logging
import threading
import time
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from t5x._runtime.errors import UserError
from t5x.apps.serving.batched_model import BatchedModel, BatchShape
from t5x.apps.serving.batching import Batcher, BatchRow
from t5x.apps.serving.security import ApiError
from t5x.apps.serving.settings import ServerSettings
from t5x.checkpoints import names
from t5x.checkpoints.store import CheckpointStore
from t5x.inference.generation import Decoding
from t5x.inference.loaded import load

log = logging.getLogger(__name__)

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


class ServedModels:
    """The models of a server.

    Args:
      directories: {name: a checkpoint, or a MODEL_DIR}. Their checkpoints are opened at once; `load` reads parameters.

    Attributes:
      is_ready: whether all models are loaded and warmed up.
    """

    def __init__(
        self, directories: Mapping[str, str], settings: ServerSettings, batcher: Batcher, metrics: ServerMetrics
    ):
        self.is_ready = False
        self._directories = dict(directories)
        self._settings = settings
        self._metrics = metrics
        self._model_class = functools.partial(BatchedModel, batcher=batcher, settings=settings)
        self._models = {name: self._open(name) for name in directories}
        self._reloading = threading.Lock()

    def __iter__(self) -> Iterator[str]:
        return iter(self._directories)

    def get(self, name: str | None) -> tuple[str, BatchedModel]:
        """Return the name and model that a request asks for; the first if it names none.

        Raises:
          ApiError: there is no such model.
        """
        name = next(iter(self._models)) if name is None else name
        if name not in self._models:
            message = f"There is no model {name[:100]!r}. Models: {', '.join(self._models)}."
            raise ApiError(404, message, "not_found_error")
        return name, self._models[name]

    def load(self) -> None:
        """Read the parameters of all models, and compile what requests will need first."""
        for name, model in self._models.items():
            self._prepare(name, model)
        self.is_ready = True

    def reload(self, only: str | None = None) -> None:
        """Load a model (None: all) again, and replace it if it could be loaded."""
        with self._reloading:
            for name in [only] if only else self:
                try:
                    model = self._open(name)
                    self._prepare(name, model)
                except Exception as error:
                    log.error("%s was not reloaded, and the old one is used: %s", name, error)
                    self._metrics.reloads.labels(name, "error").inc()
                    continue
                self._models[name] = model
                self._metrics.reloads.labels(name, "ok").inc()
                log.info("%s was reloaded: step %s", name, model.source.step)
                del model

    def watch(self, period: float, stop: threading.Event) -> None:
        """Reload a model whenever its MODEL_DIR has a newer checkpoint, until `stop` is set."""
        seen = {name: model.source.step for name, model in self._models.items() if model.source.step is not None}
        while not stop.wait(period):
            for name in seen:
                step = self._newest_step(name)
                if step is not None and step > seen[name]:
                    seen[name] = step
                    self.reload(name)

    def _newest_step(self, name: str) -> int | None:
        try:
            return CheckpointStore(names.resolve(self._directories[name])).newest_step()
        except (OSError, UserError) as error:
            log.warning("cannot look for a newer checkpoint of %s: %s", name, error)
            return None

    def _open(self, name: str) -> BatchedModel:
        settings = self._settings
        model = load(
            self._directories[name],
            vocabulary=settings.vocabulary,
            dtype=settings.dtype,
            model_class=self._model_class,
        )
        assert isinstance(model, BatchedModel)
        return model

    def _prepare(self, name: str, model: BatchedModel) -> None:
        began = time.monotonic()
        kinds = self._settings.warm_up or _probable_kinds(model)
        shapes = [shape for kind in kinds for shape in self._shapes(model, kind)]
        for shape in shapes:
            values = {"max_length": 1, "seed": 0} if shape.kind == "generate" else {}
            # Not in the batcher's thread, which answers requests with the old model meanwhile.
            model.compute(shape, [BatchRow(shape, {"inputs": [1], "targets": [1] * shape.targets}, values)])
        log.info("%s is ready: %d program(s) in %.1f s", name, len(shapes), time.monotonic() - began)

    def _shapes(self, model: BatchedModel, kind: str) -> list[BatchShape]:
        decoding = Decoding() if kind == "generate" else None
        targets = {
            "generate": model.output_bucket(1), "score": 16, "embed": 1,
            "rank": len(model.reranker.labels) if kind == "rank" else 0,
        }[kind]  # fmt: skip
        return [BatchShape(kind, length, targets, decoding) for length in model.input_lengths()]


def _probable_kinds(model: BatchedModel) -> tuple[str, ...]:
    """Return the likely use of a model, judged by its checkpoint."""
    try:
        return ("generate",) if model.reranker.why.endswith("the default") else ("rank",)
    except UserError:  # e.g. a vocabulary without the labels
        return ("generate",)
