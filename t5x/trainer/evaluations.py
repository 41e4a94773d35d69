"""Both kinds of evaluation during a training run, written to the same files as T5X's."""

import abc
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from t5x.data.dataset_config import DatasetConfig
from t5x.data.tasks import get_subtasks
from t5x.errors import UserError
from t5x.metrics.accumulators import Metrics
from t5x.partitioning import distributed
from t5x.telemetry import MetricWriter, jsonl
from t5x.telemetry.writer import METRICS_FILE, Home
from t5x.trainer.datasets import ShardInfo, numpy_batches
from t5x.trainer.evaluation import InferenceEvaluator
from t5x.trainer.signals import StopRequest
from t5x.trainer.trainer import Trainer, summarize

log = logging.getLogger(__name__)

Figures = dict[str, dict[str, float]]

_LONGEST_NAME = 113  # characters of a metric directory, as in T5X


class _Interrupted(Exception):
    """Raised when the run is asked to stop during an evaluation."""


class Evaluation(abc.ABC):
    """One kind of evaluation of the trainer's current parameters.

    Attributes:
      groups: prefixes of the names of its metrics, e.g. `training_eval/<task>`.
      tasks: the tasks that it evaluates.
    """

    def __init__(self, directory: str, stop: StopRequest, first_step: int):
        self.tasks: list[str] = []
        self._directory, self._stop, self._first_step = directory, stop, first_step
        self._files: list[str] = []

    @property
    def groups(self) -> list[str]:
        return [f"{os.path.basename(self._directory)}/{task}" for task in self.tasks]

    def __call__(self, step: int) -> Figures | None:
        """Return {task: {metric: value}}, identical in all processes, or None if a stop interrupted it."""
        try:
            return self._evaluate(step)
        except _Interrupted:
            log.info("the evaluation of step %d was cut off; it is done when the run goes on", step)
            return None

    def done(self, step: int) -> bool:
        """Return whether all files have the metrics of this step."""
        there = all(any(record.get("step") == step for record, _ in jsonl.read(path)) for path in self._files)
        return distributed.broadcast("evaluation done", there)

    @abc.abstractmethod
    def _evaluate(self, step: int) -> Figures:
        """Evaluate and write the metrics."""

    def _check_stop(self) -> None:
        """Raise _Interrupted if the run is to stop. All processes call it before the same batch."""
        if self._stop.here():
            raise _Interrupted


class TrainingEvaluation(Evaluation):
    """Loss and accuracy under teacher forcing, of every task of a mixture and of all together.

    Args:
      get_datasets: see `t5x.trainer.datasets.get_training_eval_datasets`.
      home: MODEL_DIR, for the files of metrics.
    """

    def __init__(
        self,
        cfg: DatasetConfig,
        get_datasets: Callable[..., Mapping[str, Iterable[Any]]],
        eval_steps: int | None,
        trainer: Trainer,
        model_dir: str,
        stop: StopRequest,
        home: Home | None = None,
    ):
        first_step = int(trainer.state.step)
        super().__init__(os.path.join(model_dir, "training_eval"), stop, first_step)
        self._home = home
        self._trainer, self._eval_steps = trainer, eval_steps
        shard = ShardInfo.of(trainer.partitioner.rows(cfg.batch_size), cfg.batch_size)
        converter_cls = trainer.model.FEATURE_CONVERTER_CLS
        self._datasets = dict(
            get_datasets(
                cfg, shard_id=shard.index, num_shards=shard.num_shards, eval_steps=eval_steps,
                feature_converter_cls=converter_cls, model_dir=model_dir, start_step=first_step,
            )
        )  # fmt: skip
        for task, batches in self._datasets.items():
            if next(iter(batches), None) is None:  # fail now, not at the first evaluation
                raise UserError(
                    f"There is nothing to evaluate of {task!r}: train_eval_get_dataset_fn gave no batch of it."
                )
        name = cfg.mixture_or_task().name
        self._together = name if len(self._datasets) > 1 and name not in self._datasets else None
        self.tasks = [task[:_LONGEST_NAME] for task in (*self._datasets, self._together) if task is not None]
        self._writers: dict[str, MetricWriter] = {}
        if distributed.is_leader():
            self._files = [os.path.join(self._directory, task, METRICS_FILE) for task in self.tasks]
            for path in self._files:
                _drop_later(path, first_step)

    def _open(self, step: int) -> None:
        """Open the metric files and drop lines of this step, which is evaluated again."""
        if distributed.is_leader() and not self._writers:
            for task in self.tasks:
                directory = os.path.join(self._directory, task)
                self._writers[task] = MetricWriter(
                    directory, collection="training_eval", purge_step=step - 1, home=self._home
                )

    def _evaluate(self, step: int) -> Figures:
        measured = {task: self._measure(batches) for task, batches in self._datasets.items()}
        if self._together is not None:
            measured[self._together] = [metrics for found in measured.values() for metrics in found]
        results = {task[:_LONGEST_NAME]: summarize(found) for task, found in measured.items()}
        self._open(step)
        for task, figures in results.items():
            if task in self._writers:
                self._writers[task].write_scalars(step, figures)
                self._writers[task].flush()
            loss, accuracy = figures["loss_per_nonpadding_target_token"], figures["accuracy"]
            whose = "" if len(results) == 1 else f" of {task}"
            log.info(
                "step %d, held out%s: loss %.4g a token, token accuracy %.2f %%", step, whose, loss, 100 * accuracy
            )
        return results

    def _measure(self, batches: Iterable[Any]) -> list[Metrics]:
        measured = []
        for batch in itertools.islice(numpy_batches(batches), self._eval_steps):
            self._check_stop()
            measured.append(self._trainer.measure(batch))
        return measured

    def __enter__(self) -> "TrainingEvaluation":
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._writers.values():
            writer.close()


class InferenceEvaluation(Evaluation):
    """The tasks' metrics on decoded outputs.

    Args:
      evaluator_cls: see `InferenceEvaluator`.
    """

    def __init__(
        self,
        cfg: DatasetConfig,
        evaluator_cls: Callable[..., Any],
        trainer: Trainer,
        model_dir: str,
        stop: StopRequest,
    ):
        super().__init__(os.path.join(model_dir, "inference_eval"), stop, int(trainer.state.step))
        self._trainer = trainer
        self._evaluator = InferenceEvaluator(
            cfg, evaluator_cls, trainer.model, trainer.partitioner, trainer.layout.shardings.params, self._directory
        )
        for task in get_subtasks(cfg.mixture_or_task()):
            if cfg.split in task.splits and task.metric_fns:
                self.tasks.append(task.name)
                if distributed.is_leader():
                    self._files.append(os.path.join(self._directory, f"{task.name}-metrics.jsonl"))
                    _drop_later(self._files[-1], self._first_step)

    def _evaluate(self, step: int) -> Figures:
        results = self._evaluator.evaluate(self._trainer.state.params, step, before_batch=self._check_stop)
        for task, metrics in results.items():
            log.info("step %d, %s: %s", step, task, ", ".join(f"{k} {v:.4g}" for k, v in metrics.items()))
        return results


def _drop_later(path: str, step: int) -> None:
    """Drop the lines of later steps, written by an earlier run that this one repeats from here."""
    if any(record.get("step", 0) > step for record, _ in jsonl.read(path)):
        jsonl.replace(path, (line for record, line in jsonl.read(path) if record.get("step", 0) <= step))
