"""Offline evaluation of one or all checkpoints: `t5x eval`."""

import contextlib
import copy
import dataclasses
import functools
import itertools
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from t5x import checkpoints, gin_utils
from t5x.checkpoints.config import RestoreCheckpointConfig
from t5x.checkpoints.formats import open_checkpoint
from t5x.checkpoints.paths import step_of
from t5x.data import Evaluator
from t5x.data.dataset_config import DatasetConfig
from t5x.data.loader import eval_batches
from t5x.data.tasks import Task, get_subtasks
from t5x.errors import UserError
from t5x.files.remote import is_remote
from t5x.metrics import translation
from t5x.models import BaseTransformerModel
from t5x.partitioning import PjitPartitioner, distributed
from t5x.telemetry import EventFile, Progress, jsonl
from t5x.telemetry.writer import METRICS_FILE
from t5x.trainer import Trainer
from t5x.trainer.checks import require_same_data, verify_matching_vocabs
from t5x.trainer.datasets import ShardInfo, get_training_eval_datasets, numpy_batches
from t5x.trainer.evaluation import InferenceEvaluator
from t5x.trainer.model_info import write_model_info
from t5x.trainer.restore import open_for_all, restore_params
from t5x.trainer.state import StateLayout, TrainState
from t5x.trainer.trainer import summarize

log = logging.getLogger(__name__)

Results = dict[int, dict[str, dict[str, float]]]

INFERENCE, TRAINING = "inference_eval", "training_eval"

_INDEX = re.compile(r"-(\d+)\.index$")
_LONGEST_NAME = 113  # characters of a metric directory, as in T5X
_SIGNATURES = {translation.bleu: translation.bleu_signature, translation.chrf: translation.chrf_signature}


def evaluate(
    *,
    model: BaseTransformerModel,
    dataset_cfg: DatasetConfig,
    restore_checkpoint_cfg: RestoreCheckpointConfig,
    partitioner: PjitPartitioner,
    output_dir: str,
    inference_evaluator_cls: Callable[..., Any] = Evaluator,
    training_evaluator_cls: Callable[..., Trainer] | None = None,
    summarize_config_fn: Callable[..., None] | None = gin_utils.summarize_gin_config,
    train_state_initializer_cls: Callable[..., StateLayout] = StateLayout.of,
    train_eval_get_dataset_fn: Callable[..., Mapping[str, Iterable[Any]]] = get_training_eval_datasets,
    fallback_init_rng: int | None = None,
    use_orbax: bool = True,
) -> Results:
    """Score checkpoints of any format with the metrics of a task, or of each task of a mixture.

    With several checkpoints (`restore_checkpoint_cfg.mode = "all"`, or a list of paths), the finished ones are listed
    in `<output_dir>/eval.<task>.ckpt` and skipped when the command is run again. For a MODEL_DIR in a list of paths,
    its newest checkpoint is listed; a newer one is evaluated.

    Args:
      restore_checkpoint_cfg: which checkpoints to restore, and how.
      inference_evaluator_cls: computes the tasks' metrics from decoded outputs or scores.
      training_evaluator_cls: `trainer.Trainer`, to add the metrics of training under teacher forcing, over every
        example; they are written to `<output_dir>/training_eval/<task>`.
      train_state_initializer_cls: lays the model out over the mesh, from (model, partitioner, input shapes).
      train_eval_get_dataset_fn: makes the batches for `training_evaluator_cls`.
      fallback_init_rng: seed of the initial values of parameters that are not restored; None is 0.
      use_orbax: accepted for compatibility with T5X; every checkpoint format is read.

    Returns:
      {step: {task: {metric: value}}}. Metrics under teacher forcing are under `training_eval/<task>`. For checkpoints
      that were skipped, these are the metrics written earlier.
    """
    # --- Tasks, checkpoints and earlier results -----------------------------------------------------------------------
    if not use_orbax:
        log.info("use_orbax=False: the format of a checkpoint is found by itself")
    verify_matching_vocabs(dataset_cfg, model)
    require_same_data(dataset_cfg)
    scored = _tasks_with_metrics(dataset_cfg)
    if not scored and training_evaluator_cls is None:
        raise UserError(
            f"{dataset_cfg.mixture_or_task().name!r} has no metrics, so that there is nothing to score it with. Give "
            "the task metric_fns, or measure the loss: evaluate.training_evaluator_cls = @trainer.Trainer."
        )
    output_dir = str(checkpoints.make_directory(output_dir, "EVAL_OUTPUT_DIR"))
    done = _Done(os.path.join(output_dir, f"eval.{dataset_cfg.mixture_or_task().name}.ckpt"))
    paths = distributed.decide("eval/checkpoints", lambda: _checkpoints(restore_checkpoint_cfg))
    noted = len(paths) > 1 or restore_checkpoint_cfg.mode == "all"
    before = distributed.decide("eval/done", lambda: done.among(paths)) if noted else {}
    if noted:
        again = f" ({done.path} lists them: remove it to evaluate them again)" if before else ""
        log.info("%d checkpoint(s), %d evaluated before%s", len(paths), len(before), again)
    steps = {step: path for path, step in before.items()}

    # --- The model, without an optimizer ------------------------------------------------------------------------------
    model = copy.copy(model)
    model.optimizer_def = None
    layout = train_state_initializer_cls(model, partitioner, model.input_shapes({"inputs": 1, "targets": 1}))
    if distributed.is_leader():
        if summarize_config_fn is not None:
            summarize_config_fn(output_dir, None, 0)
        write_model_info(output_dir, layout)
    inference = training = None
    if len(before) < len(paths):
        if scored:
            inference = InferenceEvaluator(
                dataset_cfg, inference_evaluator_cls, model, partitioner, layout.shardings.params,
                os.path.join(output_dir, INFERENCE),
            )  # fmt: skip
            if distributed.is_leader():
                _say_signatures(scored, dataset_cfg, model)
        if training_evaluator_cls is not None:
            training = _TeacherForced(
                dataset_cfg, train_eval_get_dataset_fn, training_evaluator_cls, layout, output_dir
            )

    # --- Evaluate the checkpoints; the model is compiled once ---------------------------------------------------------
    results: Results = {}
    for path in paths:
        if path in before:
            continue
        if restore_checkpoint_cfg.mode == "all" and distributed.decide("eval/gone", lambda p=path: _is_gone(p)):
            log.warning("%s is no longer there: it is passed over", path)
            continue
        source = open_for_all(path)
        step = source.step or 0
        if noted and distributed.decide("eval/done one", lambda p=source.path: bool(done.among([p]))):
            log.info("%s was evaluated before", source.path)
            steps[step] = source.path
            continue
        log.info("evaluating %s (%s), step %d", source.path, source.format, step)
        if step in steps:
            raise _second_of_step(source.path, step, steps[step])
        params = restore_params(source, model, layout, restore_checkpoint_cfg, fallback_init_rng)
        found = {}
        with _progress(step) as before_batch:
            if inference is not None:
                found |= inference.evaluate(params, step, before_batch=before_batch)
            if training is not None:
                figures = training.evaluate(TrainState(layout.step_array(step), params, {}), step, before_batch)
                found |= {f"{TRAINING}/{task}": measured for task, measured in figures.items()}
        del params
        results[step], steps[step] = found, source.path
        for task, metrics in found.items():
            log.info("step %d, %s: %s", step, task, ", ".join(f"{k} {v:.4g}" for k, v in metrics.items()))
        if noted and distributed.is_leader():
            done.add(source.path)
    earlier = distributed.decide(
        "eval/earlier", lambda: _written(output_dir, dataset_cfg, [step for step in steps if step not in results])
    )
    return dict(sorted([*((int(step), found) for step, found in earlier.items()), *results.items()]))


# --- Checkpoints to evaluate ------------------------------------------------------------------------------------------


def _checkpoints(cfg: RestoreCheckpointConfig) -> list[str]:
    """Return the checkpoints, and MODEL_DIRs that stand for their newest one.

    Raises:
      UserError: two checkpoints have the same step, so their results would be written to the same files.
    """
    given = [cfg.path] if isinstance(cfg.path, str) else list(cfg.path)
    if not given:
        raise UserError("utils.RestoreCheckpointConfig.path is empty: give a checkpoint to evaluate, or a MODEL_DIR.")
    given = [path if is_remote(path) else str(checkpoints.local_path(path)) for path in given]
    paths = given if cfg.mode != "all" else [checkpoint for path in given for checkpoint in _all_in(path)]
    of_step: dict[int, str] = {}
    for path in paths:
        step = step_of(path)
        if step is not None and of_step.setdefault(step, path) != path:
            raise _second_of_step(path, step, of_step[step])
    return list(dict.fromkeys(paths))


def _second_of_step(path: str, step: int, other: str) -> UserError:
    return UserError(
        f"{path} is the second checkpoint of step {step}, after {other}: its results would take the place of the first "
        "one's. Evaluate it with another EVAL_OUTPUT_DIR."
    )


def _all_in(path: str) -> list[str]:
    """Return a directory's checkpoints by step: checkpoint_<step>, or Mesh TensorFlow's model.ckpt-<step>."""
    store = checkpoints.CheckpointStore(path)
    if steps := store.steps():
        return [str(store.path(step)) for step in steps]
    indices = [(int(match[1]), file) for file in store.directory.glob("*.index") if (match := _INDEX.search(file.name))]
    if indices:
        return [str(file).removesuffix(".index") for _, file in sorted(indices)]
    if not store.directory.is_dir() or not any(store.directory.iterdir()):
        raise UserError(f"There is no checkpoint in {path} to evaluate.")
    return [str(store.directory)]


def _step_in(path: str) -> int:
    """Return the step of a checkpoint that was evaluated before and may have been deleted."""
    step = step_of(path)
    if step is None and not _is_gone(path):
        step = open_checkpoint(path, verify=False).step
    return step or 0


def _is_gone(path: str) -> bool:
    """Return whether a checkpoint was deleted since it was listed, e.g. by a running trainer."""
    return not os.path.exists(path) and not os.path.exists(f"{path}.index")


class _Done:
    """The file that lists the evaluated checkpoints, one path per line."""

    def __init__(self, path: str):
        self.path = path

    def among(self, paths: Sequence[str]) -> dict[str, int]:
        """Return {path: step} of those of `paths` that are listed."""
        noted = set(self._lines())
        return {path: _step_in(path) for path in paths if path in noted}

    def add(self, path: str) -> None:
        jsonl.replace(self.path, [f"{line}\n".encode() for line in (*self._lines(), path)])

    def _lines(self) -> list[str]:
        if not os.path.exists(self.path):
            return []
        with open(self.path) as file:
            return [line for line in file.read().split("\n") if line]


# --- Metrics ----------------------------------------------------------------------------------------------------------


def _tasks_with_metrics(cfg: DatasetConfig) -> list[Task]:
    return [task for task in get_subtasks(cfg.mixture_or_task()) if cfg.split in task.splits and task.metric_fns]


class _TeacherForced:
    """Training metrics over every example of each task, and of all tasks together.

    Args:
      get_datasets: see `t5x.trainer.datasets.get_training_eval_datasets`.
      trainer_cls: `Trainer`, or a function that takes its arguments.
    """

    def __init__(
        self,
        cfg: DatasetConfig,
        get_datasets: Callable[..., Mapping[str, Iterable[Any]]],
        trainer_cls: Callable[..., Trainer],
        layout: StateLayout,
        output_dir: str,
    ):
        partitioner, model = layout.partitioner, layout.model
        shard = ShardInfo.of(partitioner.rows(cfg.batch_size), cfg.batch_size)
        self._datasets = get_datasets(
            cfg, shard_id=shard.index, num_shards=shard.num_shards, eval_steps=None,
            feature_converter_cls=model.FEATURE_CONVERTER_CLS, model_dir=output_dir, start_step=0,
        )  # fmt: skip
        name = cfg.mixture_or_task().name
        self._together = name if len(self._datasets) > 1 and name not in self._datasets else None
        self._make_trainer = functools.partial(
            trainer_cls, model=model, partitioner=partitioner, layout=layout, rng=jax.random.key(0),
            learning_rate_fn=lambda step: 0.0,
        )  # fmt: skip
        self._trainer: Trainer | None = None
        self._directory = os.path.join(output_dir, TRAINING)
        self._events: dict[str, EventFile] = {}

    def evaluate(self, state: TrainState, step: int, before_batch: Callable[[], None]) -> dict[str, dict[str, float]]:
        if self._trainer is None:
            self._trainer = self._make_trainer(train_state=state)
        self._trainer.state = state
        measured = {}
        for task, batches in self._datasets.items():
            measured[task] = []
            for batch in numpy_batches(batches):
                before_batch()
                measured[task].append(self._trainer.measure(batch))
        if self._together is not None:
            measured[self._together] = [metrics for found in measured.values() for metrics in found]
        results = {task[:_LONGEST_NAME]: summarize(found) for task, found in measured.items()}
        if distributed.is_leader():
            for task, figures in results.items():
                self._write(task, step, figures)
        return results

    def _write(self, task: str, step: int, figures: Mapping[str, float]) -> None:
        directory = os.path.join(self._directory, task)
        path = os.path.join(directory, METRICS_FILE)
        try:
            if task not in self._events:
                os.makedirs(directory, exist_ok=True)
                self._events[task] = EventFile(directory)
            self._events[task].write_scalars(step, figures)
            self._events[task].flush()
        except OSError as error:
            raise jsonl.write_error(directory, error) from error
        other_steps = [line for record, line in jsonl.read(path) if record.get("step") != step]
        jsonl.replace(path, [*other_steps, jsonl.encode({"step": step, **figures})])


def _written(output_dir: str, cfg: DatasetConfig, steps: Sequence[int]) -> Results:
    """Return the results of these steps that earlier runs wrote."""
    found = cfg.mixture_or_task()
    names = dict.fromkeys([*(task.name for task in get_subtasks(found)), found.name])
    files = {name: os.path.join(INFERENCE, f"{name}-metrics.jsonl") for name in names}
    short = [name[:_LONGEST_NAME] for name in names]
    files |= {f"{TRAINING}/{name}": os.path.join(TRAINING, name, METRICS_FILE) for name in short}
    results: Results = {}
    for name, file in files.items():
        for record, _ in jsonl.read(os.path.join(output_dir, file)):
            if (step := record.pop("step", None)) in steps:
                results.setdefault(step, {})[name] = {metric: float(value) for metric, value in record.items()}
    return results


def _say_signatures(tasks: Sequence[Task], cfg: DatasetConfig, model: BaseTransformerModel) -> None:
    """Log sacreBLEU's signatures of BLEU and chrF. References are counted in the first example."""
    for task in tasks:
        for metric in task.metric_fns:
            signature = _SIGNATURES.get(getattr(metric, "func", metric))
            if signature is None:
                continue
            converter = model.FEATURE_CONVERTER_CLS(pack=False)
            of_task = dataclasses.replace(cfg, mixture_or_task_name=task, module=None, shuffle=False)
            (example,) = next(eval_batches(of_task, feature_converter=converter, num_examples=1)).examples
            target = task.postprocess_fn(example.get("targets_pretokenized", ""), example=example, is_target=True)
            references = len(target) if isinstance(target, list | tuple) else 1
            name = getattr(metric, "func", metric).__name__
            log.info("%s of %s: %s", name, task.name, signature(references, **getattr(metric, "keywords", {})))


@contextlib.contextmanager
def _progress(step: int) -> Iterator[Callable[[], None]]:
    """Yield a callback that advances the progress bar by a batch."""
    if not distributed.is_leader():
        yield lambda: None
        return
    batches = itertools.count(1)
    with Progress(None, unit="batch", description=f"evaluate step {step}") as progress:
        yield lambda: progress.update(next(batches))


if __name__ == "__main__":
    from t5x import cli

    cli.main_of("eval")
