"""The two kinds of evaluation, by the tasks' metrics and under teacher forcing, for `t5x train` and `t5x eval`."""

import abc
import functools
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from t5x._runtime.errors import UserError
from t5x.data.dataset_config import DatasetConfig
from t5x.data.seqio_converters import make_converter
from t5x.data.tasks import Task, get_subtasks
from t5x.metrics.accumulators import Metrics
from t5x.models import BaseModel
from t5x.network.padding import MaskingVariants
from t5x.partitioning import distributed
from t5x.telemetry import MetricWriter, jsonl
from t5x.telemetry.metric_writer import METRICS_FILE, RunDirectory
from t5x.trainer.datasets import numpy_batches
from t5x.trainer.state_layout import StateLayout
from t5x.trainer.trainer import Trainer, summarize

log = logging.getLogger(__name__)

TaskMetrics = dict[str, dict[str, float]]

# T5X's names of directories and of groups of metrics.
INFERENCE, TRAINING = "inference_eval", "training_eval"
LONGEST_NAME = 113  # characters of a task's directory, as in T5X


class Evaluation(abc.ABC):
    """One kind of evaluation.

    Attributes:
      tasks: the tasks that it evaluates.
      groups: prefixes of the names of its metrics, e.g. `training_eval/<task>`.
    """

    def __init__(self, kind: str, directory: str, tasks: Sequence[str]):
        self.tasks = list(tasks)
        self.groups = [f"{kind}/{task}" for task in tasks]
        self._files = [metrics_file(directory, kind, task) for task in tasks]

    @abc.abstractmethod
    def evaluate(self, trainer: Trainer, step: int, before_batch: Callable[[], None]) -> TaskMetrics:
        """Evaluate the trainer's parameters and write the metrics. The result is the same in all processes.

        Args:
          before_batch: called before every batch; it may raise to abort the evaluation.
        """

    def drop_later(self, step: int) -> None:
        """Drop the metrics of later steps, written by an earlier run that this one repeats from here."""
        if distributed.is_leader():
            for path in self._files:
                jsonl.keep_records(path, lambda record: record.get("step", 0) <= step)

    def done(self, step: int) -> bool:
        """Return whether all files have the metrics of this step."""
        has_all = all(any(record.get("step") == step for record, _ in jsonl.read(path)) for path in self._files)
        return distributed.broadcast("evaluation done", has_all)

    def close(self) -> None:  # noqa: B027  (most have no open files)
        """Close the files."""


def metrics_file(directory: str, kind: str, task: str) -> str:
    """Return the file with the metrics of a task. `directory` is the one of the run."""
    if kind == INFERENCE:
        return os.path.join(directory, kind, f"{task}-metrics.jsonl")
    return os.path.join(directory, kind, task[:LONGEST_NAME], METRICS_FILE)


def tasks_with_metrics(cfg: DatasetConfig) -> list[Task]:
    return [task for task in get_subtasks(cfg.mixture_or_task()) if cfg.split in task.splits and task.metric_fns]


def _model_of(layout: StateLayout) -> BaseModel:
    if layout.model is None:
        raise UserError("train_state_initializer_cls has no model: create it with init_fn=model.get_initial_variables.")
    return layout.model


class InferenceEvaluation(Evaluation):
    """The tasks' metrics on decoded outputs or scores. The evaluator's loggers write them.

    Args:
      cfg: the data.
      evaluator_cls: `t5x.data.Evaluator`, or a function that takes its arguments.
      layout: the model, the mesh and the shardings.
      directory: directory of the run.
    """

    def __init__(self, cfg: DatasetConfig, evaluator_cls: Callable[..., Any], layout: StateLayout, directory: str):
        super().__init__(INFERENCE, directory, [task.name for task in tasks_with_metrics(cfg)])
        if cfg.runtime_preprocessors or not cfg.trim_output_features:
            raise UserError(
                "Evaluation by decoding supports neither runtime_preprocessors nor trim_output_features=False. Move "
                "the preprocessors into the task."
            )
        model = _model_of(layout)
        self._evaluator = evaluator_cls(
            mixture_or_task_name=cfg.mixture_or_task_name,
            feature_converter=make_converter(model.FEATURE_CONVERTER_CLS, pack=False),
            eval_split=cfg.split,
            use_cached=cfg.use_cached,
            seed=cfg.seed,
            sequence_length=cfg.task_feature_lengths,
            log_dir=os.path.join(directory, INFERENCE),
            batch_size=cfg.batch_size,
            **({"skip_bad_examples": True} if cfg.skip_bad_examples else {}),  # users' evaluators may not accept it
        )
        rng = jax.random.key(0)
        functions: dict[str, Callable[..., Any]] = {
            "predict_fn": functools.partial(model.predict_batch, rng=rng),
            "predict_with_aux_fn": functools.partial(model.predict_batch_with_aux, rng=rng),
            "score_fn": model.score_batch,
        }
        self._programs = {name: BatchProgram(fn, layout, cfg.batch_size) for name, fn in functions.items()}

    def evaluate(self, trainer: Trainer, step: int, before_batch: Callable[[], None]) -> TaskMetrics:
        def run(program: BatchProgram, batch: Mapping[str, np.ndarray]) -> Any:
            before_batch()
            return program(trainer.train_state.params, batch)

        results = self._evaluator.evaluate(
            step=step,
            **{name: functools.partial(run, program) for name, program in self._programs.items()},
            **({} if distributed.is_leader() else {"compute_metrics": False}),
        )
        results = distributed.broadcast("evaluation", results)
        for task, metrics in results.items():
            log.info("step %d, %s: %s", step, task, ", ".join(f"{k} {v:.4g}" for k, v in metrics.items()))
        return results


class BatchProgram:
    """A compiled function of (parameters, batch) for whole batches on the host.

    Each process computes its rows of a batch and receives the results of all rows.
    """

    def __init__(self, function: Callable[..., Any], layout: StateLayout, batch_size: int):
        self._model, self._partitioner = layout.model, layout.partitioner
        self._rows = self._partitioner.rows(batch_size)
        partition = functools.partial(
            self._partitioner.partition,
            in_axis_resources=(layout.shardings.params, self._partitioner.batch_sharding),
            out_axis_resources=self._partitioner.replicated,
            decodes=True,
        )
        self._program = MaskingVariants.of(function, partition)

    def __call__(self, params: Any, batch: Mapping[str, np.ndarray]) -> Any:
        mine = {name: array[self._rows.start : self._rows.stop] for name, array in batch.items()}
        compiled = self._program.chosen(self._model, batch)
        return jax.device_get(compiled(params, self._partitioner.to_devices(mine)))


class TeacherForcedEvaluation(Evaluation):
    """Loss and accuracy under teacher forcing, of every task of a mixture and of all together.

    Args:
      cfg: the data.
      get_datasets: see `t5x.trainer.datasets.get_training_eval_datasets`.
      layout: the model and the mesh.
      directory: directory of the run.
      eval_steps: maximum number of batches per task; None uses every example.
      start_step: the step at which a training run started or resumed: later metrics are overwritten. None: checkpoints
        are evaluated in any order, and the metrics of other steps are kept.
      home: MODEL_DIR, for the files of metrics.
    """

    def __init__(
        self,
        cfg: DatasetConfig,
        get_datasets: Callable[..., Mapping[str, Iterable[Any]]],
        layout: StateLayout,
        directory: str,
        *,
        eval_steps: int | None = None,
        start_step: int | None = None,
        home: RunDirectory | None = None,
    ):
        part = layout.partitioner.get_data_layout(cfg.batch_size)
        self._datasets = dict(
            get_datasets(
                cfg, shard_id=part.shard_id, num_shards=part.num_shards, eval_steps=eval_steps, model_dir=directory,
                feature_converter_cls=_model_of(layout).FEATURE_CONVERTER_CLS, start_step=start_step or 0,
            )
        )  # fmt: skip
        name = cfg.mixture_or_task().name
        self._together = name if len(self._datasets) > 1 and name not in self._datasets else None
        tasks = [task[:LONGEST_NAME] for task in (*self._datasets, self._together) if task is not None]
        super().__init__(TRAINING, directory, tasks)
        self._eval_steps, self._home = eval_steps, home
        self._in_training = start_step is not None
        self._writers: dict[str, MetricWriter] = {}

    def check(self) -> None:
        """Raise a UserError now, rather than at the first evaluation, if a task has no batch."""
        for task, batches in self._datasets.items():
            if next(iter(batches), None) is None:
                raise UserError(f"{task!r} cannot be evaluated: train_eval_get_dataset_fn returned no batch of it.")

    def evaluate(self, trainer: Trainer, step: int, before_batch: Callable[[], None]) -> TaskMetrics:
        measured: dict[str, list[Metrics]] = {}
        for task, batches in self._datasets.items():
            measured[task] = []
            for batch in itertools.islice(numpy_batches(batches), self._eval_steps):
                before_batch()
                measured[task].append(trainer.measure(batch))
        if self._together is not None:
            measured[self._together] = [metrics for of_task in measured.values() for metrics in of_task]
        results = {task[:LONGEST_NAME]: summarize(metrics) for task, metrics in measured.items()}
        for (task, metrics), file in zip(results.items(), self._files, strict=True):
            if distributed.is_leader():
                self._write(file, step, metrics)
            if {"loss_per_nonpadding_target_token", "accuracy"} <= metrics.keys():
                loss, accuracy = metrics["loss_per_nonpadding_target_token"], 100 * metrics["accuracy"]
                message = "step %d, %s, teacher forcing: loss %.4g per token, accuracy %.2f %%"
                log.info(message, step, task, loss, accuracy)
            else:  # metrics of a user's model
                shown = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
                log.info("step %d, %s: %s", step, task, shown)
        return results

    def _write(self, file: str, step: int, metrics: Mapping[str, float]) -> None:
        if file not in self._writers:
            purge_step = step - 1 if self._in_training else None  # this step may have been evaluated before
            self._writers[file] = MetricWriter(
                os.path.dirname(file), collection=TRAINING, purge_step=purge_step, home=self._home
            )
        self._writers[file].write_scalars(step, metrics, replace=not self._in_training)
        self._writers[file].flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
