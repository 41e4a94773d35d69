"""Evaluation of a model on the tasks of a mixture, and loggers for the results, under seqio's names."""

import abc
import collections
import contextlib
import dataclasses
import inspect
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from t5x._runtime.errors import UserError
from t5x.data.dataset_config import DatasetConfig
from t5x.data.feature_converters import FeatureConverter
from t5x.data.loader import Batch, EvalBatch, eval_batches, measure_lengths
from t5x.data.pipeline import Example, name_of
from t5x.data.tasks import Mixture, Task, get_subtasks, tasks_with_split
from t5x.telemetry import EventFile, jsonl

logger = logging.getLogger(__name__)

PredictFn = Callable[[Batch], np.ndarray]
PredictWithAuxFn = Callable[[Batch], tuple[np.ndarray, Mapping[str, np.ndarray]]]

_METRIC_ARGUMENTS = (
    ("targets", "predictions"),
    ("targets", "scores"),
    ("targets", "predictions", "aux_values"),
)


class Logger(abc.ABC):
    """Destination of evaluation results. Subclass it and name the class in `Evaluator.logger_cls`.

    Args:
      output_dir: directory for its files.
    """

    def __init__(self, output_dir: str):
        self.output_dir = os.fspath(output_dir)

    @abc.abstractmethod
    def __call__(
        self,
        task_name: str,
        step: int,
        metrics: Mapping[str, float],
        dataset: Sequence[Example],
        inferences: Mapping[str, Any],
        targets: Sequence[Any],
    ) -> None:
        """Log one evaluation of one task.

        Args:
          task_name: the task.
          step: training step of the model.
          metrics: {name: value}.
          dataset: the examples, with the task's features.
          inferences: "prediction" and "score", each with one value per example, and "aux_value": {name: one value per
            example}; only those that were computed.
          targets: the postprocessed target of each example.
        """


class PyLoggingLogger(Logger):
    """Writes metrics to the program's log.

    Args:
      output_dir: not used.
      level: log level.
    """

    def __init__(self, output_dir: str, level: int = logging.INFO):
        super().__init__(output_dir)
        self._level = level

    def __call__(self, task_name, step, metrics, dataset, inferences, targets) -> None:
        for name, value in metrics.items():
            logger.log(self._level, "%s/%s at step %d: %.3f", task_name, name, step, value)


class TensorBoardLogger(Logger):
    """Writes metrics as `eval/<metric>` to `<output_dir>/<task>/events.out.tfevents.*`."""

    def __init__(self, output_dir: str):
        super().__init__(output_dir)
        self._files: dict[str, EventFile] = {}

    def __call__(self, task_name, step, metrics, dataset, inferences, targets) -> None:
        directory = os.path.join(self.output_dir, task_name)
        try:
            if task_name not in self._files:
                os.makedirs(directory, exist_ok=True)
                self._files[task_name] = EventFile(directory)
            self._files[task_name].write_scalars(step, {f"eval/{name}": value for name, value in metrics.items()})
            self._files[task_name].flush()
        except OSError as error:
            raise jsonl.write_error(directory, error) from error


class JSONLogger(Logger):
    """Writes metrics and results as JSON Lines. An interrupted evaluation leaves no partial file.

    `<output_dir>/<task>-metrics.jsonl` has one line per step, `{"step": 1000, "exact_match": 93.2}`; evaluating a step
    again replaces its line. `<output_dir>/<task>-<step>.jsonl` has one line per example: `input` (its features, without
    token ids whose text is present), `target`, and whichever of `prediction`, `score` and `aux_<name>` were computed.
    Non-finite numbers are strings: "nan", "inf", "-inf".

    Args:
      output_dir: directory for the files.
      write_n_results: number of examples to write; None writes all, 0 writes no file.
    """

    def __init__(self, output_dir: str, write_n_results: int | None = None):
        super().__init__(output_dir)
        self._write_n_results = write_n_results

    def __call__(self, task_name, step, metrics, dataset, inferences, targets) -> None:
        stem = os.path.join(self.output_dir, task_name)
        try:
            os.makedirs(os.path.dirname(stem), exist_ok=True)
        except OSError as error:
            raise jsonl.write_error(self.output_dir, error) from error
        metrics_file = f"{stem}-metrics.jsonl"
        other_steps = [line for record, line in jsonl.read(metrics_file) if record.get("step") != step]
        jsonl.replace(metrics_file, [*other_steps, jsonl.encode({"step": step, **metrics})])
        count = len(dataset) if self._write_n_results is None else min(self._write_n_results, len(dataset))
        if count:
            results = (_result(dataset[i], targets[i], inferences, i) for i in range(count))
            jsonl.replace(f"{stem}-{step:06d}.jsonl", map(jsonl.encode, results))


def _result(example: Example, target: Any, inferences: Mapping[str, Any], index: int) -> dict[str, Any]:
    fields = {name: value for name, value in example.items() if f"{name}_pretokenized" not in example}
    result = {"input": fields, "target": target}
    result |= {kind: inferences[kind][index] for kind in ("prediction", "score") if kind in inferences}
    return result | {f"aux_{name}": values[index] for name, values in inferences.get("aux_value", {}).items()}


@dataclasses.dataclass(frozen=True)
class _Metric:
    """A metric function of a task and the arguments it takes."""

    name: str
    function: Callable[..., Mapping[str, Any]]
    arguments: tuple[str, ...]

    @classmethod
    def of(cls, task: Task, function: Callable[..., Mapping[str, Any]]) -> "_Metric":
        name = f"The metric function {name_of(function)} of task {task.name!r}"
        signature = inspect.signature(function)
        for arguments in _METRIC_ARGUMENTS:
            with contextlib.suppress(TypeError):
                signature.bind(**dict.fromkeys(arguments))
                return cls(name, function, arguments)
        allowed = ", ".join(f"({', '.join(arguments)})" for arguments in _METRIC_ARGUMENTS)
        raise UserError(
            f"{name} has the parameters ({', '.join(signature.parameters)}). They must be one of {allowed}."
        )

    def compute(self, values: Mapping[str, Any]) -> dict[str, float]:
        """Return {name: number}; `values` has every argument."""
        try:
            metrics = self.function(**{argument: values[argument] for argument in self.arguments})
        except Exception as error:
            raise UserError(f"{self.name} failed: {_summary(error)}") from error
        if not isinstance(metrics, Mapping):
            raise UserError(f"{self.name} returned {metrics!r}; it must return {{name: number}}.")
        return {str(name): self._number(name, value) for name, value in metrics.items()}

    def _number(self, name: str, value: Any) -> float:
        try:
            return float(np.asarray(value).item())
        except (TypeError, ValueError) as error:
            raise UserError(f"{self.name} returned {name!r}: {value!r}, which is not one number.") from error


class Evaluator:
    """Runs a model on the evaluation split of every task of a mixture and computes the tasks' metrics.

    Predictions are decoded with the target feature's vocabulary, predictions and targets are postprocessed with the
    task's postprocess_fn, and its metric functions get all of them at once. Each example is evaluated once, in order.

    Args:
      mixture_or_task_name: registered name, or the task or mixture itself.
      feature_converter: makes the model's features.
      eval_split: split to evaluate; tasks without it are skipped, and at least one must have it.
      use_cached: as in `DatasetConfig`.
      seed: seed of the order, with `shuffle`, and of random preprocessors.
      sequence_length: {task feature: length}; None uses the longest example of all tasks, rounded up.
      num_examples: number of examples per task; None uses all.
      shuffle: with `num_examples`, sample from the whole split instead of its beginning.
      logger_cls: classes (or functions) that take `output_dir` and return a `Logger`.
      log_dir: `output_dir` of the loggers.
      use_memory_cache: keep the batches between evaluations; False prepares them each time.
      async_compute_metrics: accepted for seqio compatibility; metrics are computed before `evaluate` returns.
      target_field_name: the feature that the model predicts.
      batch_size: rows of a batch; rows of zeros fill the last one.
      skip_bad_examples: as in `DatasetConfig`.
    """

    def __init__(
        self,
        mixture_or_task_name: str | Task | Mixture,
        feature_converter: FeatureConverter,
        eval_split: str = "validation",
        use_cached: bool = False,
        seed: int | None = 42,
        sequence_length: Mapping[str, int] | None = None,
        num_examples: int | None = None,
        shuffle: bool = False,
        logger_cls: Sequence[Callable[..., Logger]] = (),
        log_dir: str | os.PathLike[str] | None = None,
        use_memory_cache: bool = True,
        async_compute_metrics: bool = True,
        target_field_name: str = "targets",
        batch_size: int = 32,
        skip_bad_examples: bool = False,
    ):
        if logger_cls and log_dir is None:
            raise UserError("The loggers in Evaluator.logger_cls need a directory. Set Evaluator.log_dir.")
        self._converter = feature_converter
        self._num_examples = num_examples
        self._target = target_field_name
        self._cfg = DatasetConfig(
            mixture_or_task_name,
            task_feature_lengths=None,
            split=eval_split,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            use_cached=use_cached,
            skip_bad_examples=skip_bad_examples,
        )
        self._loggers = [make(output_dir=os.fspath(log_dir)) for make in logger_cls if log_dir is not None]
        self._tasks = _tasks_to_evaluate(self._cfg.mixture_or_task(), eval_split)
        self._metrics = {task.name: [_Metric.of(task, fn) for fn in task.metric_fns] for task in self._tasks}
        for task in self._tasks:
            if target_field_name not in task.output_features:
                raise UserError(
                    f"Task {task.name!r} has no feature {target_field_name!r} to predict; it has "
                    f"{', '.join(task.output_features)}. Set Evaluator.target_field_name."
                )
        self._lengths = dict(sequence_length) if sequence_length is not None else self._measure()
        batches = {task.name: self._batches(task, self._lengths) for task in self._tasks}
        self._cache = {name: list(of_task) for name, of_task in batches.items()} if use_memory_cache else {}

    @property
    def eval_tasks(self) -> list[Task]:
        """The tasks that have the split and metrics."""
        return list(self._tasks)

    @property
    def model_feature_shapes(self) -> dict[str, tuple[int, ...]]:
        """{model feature: shape} of one row of the batches."""
        return {name: (length,) for name, length in self._converter.get_model_feature_lengths(self._lengths).items()}

    def evaluate(
        self,
        *,
        step: int,
        predict_fn: PredictFn | None = None,
        score_fn: PredictFn | None = None,
        predict_with_aux_fn: PredictWithAuxFn | None = None,
        compute_metrics: bool = True,
    ) -> dict[str, dict[str, float]]:
        """Evaluate all tasks and call the loggers.

        The functions take batches {model feature: int32 [batch_size, length]}; only those that the metrics need are
        called.

        Args:
          step: training step of the model, for the loggers.
          predict_fn: returns token ids [batch_size, length].
          score_fn: returns scores [batch_size].
          predict_with_aux_fn: returns token ids and {name: [batch_size, …]}.
          compute_metrics: False only runs the model, for processes whose results are not used.

        Returns:
          {task: {metric: value}}, empty with `compute_metrics=False`.
        """
        step = int(step)
        results = {}
        for task in self._tasks:
            metrics = self._metrics[task.name]
            batches = self._cache.get(task.name) or self._batches(task, self._lengths)
            examples, raw = _run_model(task.name, metrics, batches, predict_fn, score_fn, predict_with_aux_fn)
            if not compute_metrics:
                continue
            targets = [self._target_of(task, example) for example in examples]
            inferences = self._postprocess(task, examples, raw)
            values = {f"{kind}s": value for kind, value in inferences.items()}  # the names of arguments of metrics
            results[task.name] = computed = _compute(task.name, metrics, values | {"targets": targets})
            for write in self._loggers:
                write(
                    task_name=task.name,
                    step=step,
                    metrics=computed,
                    dataset=examples,
                    inferences=inferences,
                    targets=targets,
                )
        return results

    def _batches(self, task: Task, lengths: Mapping[str, int] | None) -> Iterable[EvalBatch]:
        cfg = dataclasses.replace(self._cfg, mixture_or_task_name=task, task_feature_lengths=lengths)
        return eval_batches(cfg, feature_converter=self._converter, num_examples=self._num_examples)

    def _measure(self) -> dict[str, int]:
        """Return lengths that fit every example of every task, so that the model is compiled once."""
        features = self._converter.task_features(self._tasks[0].output_features)
        batches = [batch for task in self._tasks for batch in self._batches(task, None)]
        examples = [example for batch in batches for example in batch.examples]
        return measure_lengths(examples, features) if examples else dict.fromkeys(features, 1)

    def _target_of(self, task: Task, example: Example) -> Any:
        text = example.get(f"{self._target}_pretokenized")
        if text is None:
            text = task.output_features[self._target].vocabulary.decode(example[self._target])
        return _postprocessed(task, text, example, is_target=True)

    def _postprocess(self, task: Task, examples: Sequence[Example], raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return `raw` with token ids replaced by what the metrics compare."""
        if "prediction" not in raw:
            return dict(raw)
        vocabulary = task.output_features[self._target].vocabulary

        def decode(ids: np.ndarray) -> Any:
            return vocabulary.decode(ids) if ids.ndim == 1 else [decode(row) for row in ids]

        pairs = zip(raw["prediction"], examples, strict=True)
        predictions = [_postprocessed(task, decode(ids), example, is_target=False) for ids, example in pairs]
        return {**raw, "prediction": predictions}


def _tasks_to_evaluate(mixture_or_task: Task | Mixture, split: str) -> list[Task]:
    with_split = tasks_with_split(mixture_or_task, split, "infer_eval")
    for task in get_subtasks(mixture_or_task):
        if task not in with_split:
            logger.warning("Task %s is not evaluated: it has no split %r", task.name, split)
        elif not task.metric_fns:
            logger.warning("Task %s is not evaluated: it has no metric_fns", task.name)
    return [task for task in with_split if task.metric_fns]


def _run_model(
    task_name: str,
    metrics: Sequence[_Metric],
    batches: Iterable[EvalBatch],
    predict_fn: PredictFn | None,
    score_fn: PredictFn | None,
    predict_with_aux_fn: PredictWithAuxFn | None,
) -> tuple[list[Example], dict[str, Any]]:
    """Call what the metrics need for all batches.

    Returns:
      The examples and, aligned with them, "prediction" and "score": [value, …] and "aux_value": {name: [value, …]}.
    """
    needed = {argument for metric in metrics for argument in metric.arguments}
    with_aux = "aux_values" in needed or ("predictions" in needed and predict_fn is None)
    missing = None
    if with_aux and predict_with_aux_fn is None:
        missing = "predict_with_aux_fn" if "aux_values" in needed else "predict_fn"
    elif "scores" in needed and score_fn is None:
        missing = "score_fn"
    if missing:
        raise UserError(f"The metrics of task {task_name!r} need {missing}. Pass it to evaluate().")
    predict = predict_with_aux_fn if with_aux or predict_fn is None else lambda batch: (predict_fn(batch), {})
    examples: list[Example] = []
    kinds = {"predictions": "prediction", "scores": "score"}
    collected: dict[str, Any] = {kind: [] for argument, kind in kinds.items() if argument in needed}
    aux: dict[str, list[Any]] = collections.defaultdict(list)
    for batch, mask, batch_examples in batches:
        examples += batch_examples
        if predict is not None and "predictions" in needed:  # also by every metric that needs aux_values
            predictions, aux_values = predict(batch)
            collected["prediction"] += _true_rows("prediction", predictions, mask)
            for name, values in aux_values.items():
                aux[name] += _true_rows(name, values, mask)
        if score_fn is not None and "scores" in needed:
            collected["score"] += map(float, _true_rows("score", score_fn(batch), mask))
    return examples, collected | ({"aux_value": dict(aux)} if with_aux else {})


def _true_rows(name: str, output: Any, mask: np.ndarray) -> list[Any]:
    rows = np.asarray(output)
    if rows.ndim == 0 or len(rows) != len(mask):
        raise ValueError(f"The model returned {name!r} of shape {rows.shape} for a batch of {len(mask)} rows.")
    return list(rows[mask])


def _compute(task_name: str, metrics: Sequence[_Metric], values: Mapping[str, Any]) -> dict[str, float]:
    averages: dict[str, float] = {}
    for metric in metrics:
        computed = metric.compute(values)
        if twice := averages.keys() & computed.keys():
            raise UserError(f"Two metric functions of task {task_name!r} return {sorted(twice)}; names must differ.")
        averages |= computed
    return averages


def _postprocessed(task: Task, decoded: Any, example: Example, *, is_target: bool) -> Any:
    try:
        return task.postprocess_fn(decoded, example=example, is_target=is_target)
    except Exception as error:
        what = "target" if is_target else "prediction"
        raise UserError(
            f"postprocess_fn of task {task.name!r} failed on the {what} {decoded!r}: {_summary(error)}"
        ) from error


def _summary(error: Exception) -> str:
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
