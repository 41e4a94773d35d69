"""Trainers: a state and the compiled functions that update and evaluate it."""

import abc
import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from t5x._runtime.errors import UserError
from t5x.metrics.accumulators import AveragePerStep, Metrics, compute, merge, set_step_metrics_num_steps
from t5x.models import BaseModel
from t5x.network import padding
from t5x.optimizers import applied_schedule
from t5x.optimizers.schedules import Schedule
from t5x.partitioning import BasePartitioner
from t5x.telemetry import MetricWriter
from t5x.trainer.step import WeightMetricsComputer, eval_step, train_with_lr
from t5x.trainer.train_state import TrainState


class MetricsManager:
    """Writes the metrics of `Trainer.train` and `eval` to a directory, on the first process only.

    `t5x train` has lines of its own.

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


class BaseTrainer(abc.ABC):
    """The state of a run; every step replaces it. Subclasses define `_partitioned_train_step` and `…_eval_step`.

    Args:
      model: the model to train.
      train_state: initial state.
      partitioner: the mesh.
      eval_names: names of the datasets of `eval`.
      summary_dir: directory for the metrics of `train` and `eval`; None writes none.
      train_state_axes: sharding of every array of the state.
      rng: key for dropout.

    Attributes:
      train_state: the state after the last step.
    """

    def __init__(
        self,
        model: BaseModel,
        train_state: TrainState,
        partitioner: BasePartitioner,
        eval_names: Sequence[str],
        summary_dir: str | None,
        train_state_axes: Any,
        rng: jax.Array,
    ):
        self._model = model
        self._partitioner = partitioner
        self._train_state_axes = train_state_axes
        self._base_rng = rng
        self._compiled_train_step: Callable[..., Any] | None = None
        self.train_state = train_state
        self.stop_training = False
        self.train_metrics_manager = MetricsManager("train", summary_dir)
        self.eval_metrics_managers = {name: MetricsManager(f"training_eval/{name}", summary_dir) for name in eval_names}

    @property
    @abc.abstractmethod
    def _partitioned_train_step(self) -> Callable[[TrainState, Any], tuple[TrainState, Metrics]]:
        """The compiled train step, (state, batch) -> (new state, metrics)."""

    @property
    @abc.abstractmethod
    def _partitioned_eval_step(self) -> Callable[[TrainState, Any], Metrics]:
        """The compiled evaluation step, (state, batch) -> metrics."""

    @property
    def model(self) -> BaseModel:
        return self._model

    def _get_step_rng(self, step: jax.Array) -> jax.Array:
        return jax.random.fold_in(self._base_rng, step)

    # -- one step ------------------------------------------------------------------------------------------------------

    def compile_train(self, batch: Mapping[str, np.ndarray]) -> float:
        """Compile the train step for batches of this shape. Return the seconds it took."""
        began = time.perf_counter()
        step = self._partitioned_train_step
        if hasattr(step, "lower"):
            self._compiled_train_step = self._partitioner.compile(
                step, self.train_state, self._partitioner.to_devices(batch)
            )
        return time.perf_counter() - began

    def compile_eval(self, batches: Mapping[str, Mapping[str, np.ndarray]]) -> None:  # noqa: B027
        """Do nothing: the evaluation step is compiled when it is first called for batches of a shape."""

    def step(self, batch: Mapping[str, np.ndarray]) -> Metrics:
        """Start one step. Return its metrics, which the devices may still be computing."""
        padding.check(self._model, batch)
        step = self._compiled_train_step or self._partitioned_train_step
        self.train_state, metrics = step(self.train_state, self._partitioner.to_devices(batch))
        return metrics

    def measure(self, batch: Mapping[str, np.ndarray]) -> Metrics:
        """Start an evaluation under teacher forcing. Return its metrics without waiting, like `step`."""
        padding.check(self._model, batch)
        return self._partitioned_eval_step(self.train_state, self._partitioner.to_devices(batch))

    # -- several steps, with T5X's interface ---------------------------------------------------------------------------

    def train(
        self, batch_iter: Iterator[Mapping[str, np.ndarray]], num_steps: int, start_step: int | None = None
    ) -> Future:
        """Take `num_steps` steps and write their metrics. `result()` of the returned future gives them as scalars."""
        self.train_metrics_manager.start_duration_timer()
        metrics = on_host([self.step(next(batch_iter)) for _ in range(num_steps)])
        step = num_steps + (int(self.train_state.step) - num_steps if start_step is None else start_step)
        return self.train_metrics_manager.write_metrics_summary(functools.reduce(merge, metrics), step, num_steps)

    def eval(self, batch_iters: Mapping[str, Iterable[Mapping[str, np.ndarray]]]) -> dict[str, Future]:
        """Evaluate datasets and write their metrics; see `train`."""
        summaries = {}
        for name, batches in batch_iters.items():
            manager = self.eval_metrics_managers[name]
            manager.start_duration_timer()
            metrics = on_host([self.measure(batch) for batch in batches])
            if not metrics:
                raise UserError(f"There is no batch of {name!r} to evaluate.")
            total = functools.reduce(merge, metrics)
            summaries[name] = manager.write_metrics_summary(total, int(self.train_state.step), len(metrics))
        return summaries

    def close(self) -> None:
        """Close the files of `train` and `eval`."""
        for manager in (self.train_metrics_manager, *self.eval_metrics_managers.values()):
            manager.close()


class Trainer(BaseTrainer):
    """The trainer of all models; see `BaseTrainer`.

    Args:
      learning_rate_fn: step -> learning rate. Optimizers, or parts of them, with their own rate ignore it.
      num_microbatches: number of microbatches per batch, to save memory; None, 0 or 1 uses the whole batch.
      weight_metrics_computer: adds metrics of every weight.

    Attributes:
      learning_rate_fn: the logged schedule; see `t5x.optimizers.applied_schedule`.
    """

    def __init__(
        self,
        model: BaseModel,
        train_state: TrainState,
        partitioner: BasePartitioner,
        eval_names: Sequence[str],
        summary_dir: str | None,
        train_state_axes: Any,
        rng: jax.Array,
        learning_rate_fn: Schedule,
        num_microbatches: int | None = None,
        weight_metrics_computer: WeightMetricsComputer | None = None,
    ):
        if num_microbatches is not None and num_microbatches < 0:
            raise UserError(f"trainer.Trainer.num_microbatches is {num_microbatches}: it must not be negative.")
        super().__init__(model, train_state, partitioner, eval_names, summary_dir, train_state_axes, rng)
        self._learning_rate_fn = learning_rate_fn
        self._num_microbatches = num_microbatches
        self._weight_metrics_computer = weight_metrics_computer
        self.learning_rate_fn = applied_schedule(
            getattr(train_state, "optimizer_def", None),  # a user's state may have none
            learning_rate_fn,
            train_state.param_states,
            train_state.step,
        )

    @functools.cached_property
    def _partitioned_train_step(self) -> Callable[[TrainState, Any], tuple[TrainState, Metrics]]:
        def train_step(train_state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
            step = train_state.step
            new_state, metrics = train_with_lr(
                train_state, batch, self._learning_rate_fn(step), self._get_step_rng(step), self._model,
                self._num_microbatches, self._weight_metrics_computer,
            )  # fmt: skip
            return new_state, metrics | {"learning_rate": AveragePerStep(total=self.learning_rate_fn(step))}

        axes, whole = self._train_state_axes, self._partitioner.replicated
        return self._partitioner.partition(
            train_step,
            in_axis_resources=(axes, self._partitioner.batch_sharding),
            out_axis_resources=(axes, whole),
            donate_argnums=(0,),
            large_matmuls=True,
        )

    @functools.cached_property
    def _partitioned_eval_step(self) -> Callable[[TrainState, Any], Metrics]:
        return self._partitioner.partition(
            functools.partial(eval_step, self._model),
            in_axis_resources=(self._train_state_axes, self._partitioner.batch_sharding),
            out_axis_resources=self._partitioner.replicated,
            large_matmuls=True,
        )


def summarize(metrics: Sequence[Metrics]) -> dict[str, float]:
    """Return the metrics of several steps combined."""
    return compute(functools.reduce(merge, on_host(metrics))) if metrics else {}


def on_host(metrics: Sequence[Metrics]) -> list[Metrics]:
    """Wait for the metrics of several steps. Return them as Python numbers, which neither overflow nor lose digits."""
    return jax.tree.map(lambda x: x.item() if x.ndim == 0 else x, jax.device_get(list(metrics)))


# T5X's names in annotations of trainers.
BaseTrainerConstructor = Callable[..., BaseTrainer]
LearningRateCallable = SummarizeMetricsCallable = Callable[..., Any]
PartitionedEvalCallable = PartitionedTrainCallable = Callable[..., Any]
MetricValueMapType = Mapping[str, float]
ArrayMapFuture = MetricValueMapFuture = TimeFuture = Future
merge_metrics = merge
