"""Offline evaluation of one or all checkpoints: `t5x eval`."""

import dataclasses
import functools
import itertools
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from etils import epath

from t5x import checkpoints
from t5x._runtime.errors import TemporaryError, UserError
from t5x.checkpoints import names
from t5x.checkpoints.config import RestoreCheckpointConfig
from t5x.checkpoints.formats import Source, open_checkpoint
from t5x.checkpoints.paths import step_of
from t5x.configuration import gin_utils
from t5x.configuration.ignored_parameters import log_ignored
from t5x.data import Evaluator
from t5x.data.dataset_config import DatasetConfig
from t5x.data.loader import eval_batches
from t5x.data.tasks import Task, get_subtasks
from t5x.files import user_files
from t5x.files.directory import make_directory
from t5x.files.mirror import local_files
from t5x.files.remote import is_remote
from t5x.metrics import bleu_rouge
from t5x.models import BaseTransformerModel
from t5x.partitioning import PjitPartitioner, distributed
from t5x.telemetry import Progress, jsonl
from t5x.trainer import Trainer
from t5x.trainer.checks import require_same_data, verify_matching_vocabs
from t5x.trainer.datasets import get_training_eval_datasets
from t5x.trainer.evaluation import (
    INFERENCE,
    LONGEST_NAME,
    TRAINING,
    Evaluation,
    InferenceEvaluation,
    TeacherForcedEvaluation,
    metrics_file,
    tasks_with_metrics,
)
from t5x.trainer.restore import open_for_all, restore_params, without_optimizer
from t5x.trainer.state_layout import StateLayout, write_run_info

log = logging.getLogger(__name__)

Results = dict[int, dict[str, dict[str, float]]]

_POLL_SECONDS = 5.0
_INDEX = re.compile(r"-(\d+)\.index$")
_SIGNATURES: dict[Callable[..., Any], Callable[..., str]] = {
    bleu_rouge.bleu: bleu_rouge.bleu_signature,
    bleu_rouge.chrf: bleu_rouge.chrf_signature,
}


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
    train_state_initializer_cls: Callable[..., StateLayout] = StateLayout,
    train_eval_get_dataset_fn: Callable[..., Mapping[str, Iterable[Any]]] = get_training_eval_datasets,
    fallback_init_rng: int | None = None,
    use_orbax: bool = True,
    wait_until_step: int | None = None,
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
      train_state_initializer_cls: lays the model out over the mesh; see `utils.TrainStateInitializer`.
      train_eval_get_dataset_fn: makes the batches for `training_evaluator_cls`.
      fallback_init_rng: seed of the initial values of parameters that are not restored; None is 0.
      use_orbax: accepted for compatibility with T5X; every checkpoint format is read.
      wait_until_step: follow a run: with mode "all", also evaluate checkpoints that are saved later, until one of this
        step or a later one.

    Returns:
      {step: {task: {metric: value}}}. Metrics under teacher forcing are under `training_eval/<task>`. For checkpoints
      that were skipped, these are the metrics written earlier.
    """
    # --- Tasks, checkpoints and earlier results -----------------------------------------------------------------------
    if not use_orbax:
        log_ignored("eval.evaluate", {"use_orbax": use_orbax})
    verify_matching_vocabs(dataset_cfg, model)
    require_same_data(dataset_cfg)
    name, scored = dataset_cfg.mixture_or_task().name, tasks_with_metrics(dataset_cfg)
    if not scored and training_evaluator_cls is None:
        raise UserError(
            f"{name!r} has no metrics. Give the task metric_fns, or measure the loss: "
            "evaluate.training_evaluator_cls = @trainer.Trainer."
        )
    output_dir = make_directory(output_dir, "EVAL_OUTPUT_DIR")
    with local_files(output_dir, writes=distributed.is_leader(), unread=_is_not_read) as (directory, upload):
        done_file = os.path.join(directory, f"eval.{name}.ckpt")
        follows = wait_until_step is not None
        if follows and restore_checkpoint_cfg.mode != "all":
            raise UserError(
                "evaluate.wait_until_step follows the checkpoints of a run: set utils.RestoreCheckpointConfig.mode to "
                f"'all' (it is {restore_checkpoint_cfg.mode!r})."
            )
        paths = distributed.decide(
            "eval/checkpoints", lambda: _checkpoints(restore_checkpoint_cfg, may_be_none=follows)
        )
        resumable = len(paths) > 1 or restore_checkpoint_cfg.mode == "all"
        before = distributed.decide("eval/done", lambda: _evaluated(done_file, paths)) if resumable else {}
        if resumable:
            listed = os.path.join(output_dir, os.path.basename(done_file))
            hint = f" (listed in {listed}; delete it to evaluate them again)" if before else ""
            log.info("%d checkpoint(s), %d evaluated before%s", len(paths), len(before), hint)
        steps = {step: path for path, step in before.items()}

        # --- The model, without an optimizer --------------------------------------------------------------------------
        model, layout = without_optimizer(model, dataset_cfg, partitioner, train_state_initializer_cls)
        if distributed.is_leader():
            write_run_info(directory, layout, summarize_config_fn)
        evaluations: dict[str, Evaluation] = {}
        if len(before) < len(paths) or follows:
            if scored:
                evaluations[INFERENCE] = InferenceEvaluation(dataset_cfg, inference_evaluator_cls, layout, directory)
                if distributed.is_leader():
                    _log_signatures(scored, dataset_cfg, model)
            if training_evaluator_cls is not None:
                evaluations[TRAINING] = TeacherForcedEvaluation(
                    dataset_cfg, train_eval_get_dataset_fn, layout, directory
                )

        # --- Evaluate the checkpoints; the model is compiled once -----------------------------------------------------
        results: Results = {}
        trainer = None
        if wait_until_step is not None:
            paths = _follow(restore_checkpoint_cfg, paths, wait_until_step)
        for path in paths:
            if path in before:
                continue
            is_gone = functools.partial(_is_gone, path)
            if restore_checkpoint_cfg.mode == "all" and distributed.decide("eval/gone", is_gone):
                log.warning("skipping %s: it was deleted", path)
                continue
            source = open_for_all(path)
            path, step = _location(path, source), source.step or 0
            step_if_done = functools.partial(_evaluated, done_file, [path])
            if resumable and distributed.decide("eval/done one", step_if_done):
                log.info("%s was evaluated before", path)
                steps[step] = path
                continue
            log.info("evaluating %s (%s), step %d", path, source.format, step)
            if step in steps:
                raise _second_of_step(path, step, steps[step])
            try:
                params = restore_params(source, model, layout, restore_checkpoint_cfg, fallback_init_rng)
            except (OSError, UserError) as error:
                if restore_checkpoint_cfg.mode == "all" and _is_gone(path):
                    raise TemporaryError(
                        f"{path} was deleted while it was read. Run the same command again: it resumes."
                    ) from error
                raise
            state = layout.state(step, params, {}, {})
            if trainer is None:
                trainer = (training_evaluator_cls or Trainer)(
                    model=model, train_state=state, partitioner=partitioner, eval_names=[], summary_dir=directory,
                    train_state_axes=layout.shardings, rng=jax.random.key(0), learning_rate_fn=lambda step: 0.0,
                )  # fmt: skip
            trainer.train_state = state
            results[step], steps[step] = {}, path
            with Progress(
                None, unit="batch", description=f"evaluate step {step}", disable=not distributed.is_leader()
            ) as progress:
                for kind, evaluation in evaluations.items():
                    for task, metrics in evaluation.evaluate(trainer, step, progress.advance).items():
                        results[step][_result_name(kind, task)] = metrics
            del params, state
            trainer.train_state = None  # frees the memory for the next checkpoint
            upload()
            if resumable and distributed.is_leader():
                jsonl.replace(done_file, [f"{line}\n".encode() for line in (*_lines(done_file), path)])
                upload()  # after the metrics of the checkpoint
        for evaluation in evaluations.values():
            evaluation.close()
        skipped = [step for step in steps if step not in results]
        earlier = distributed.decide("eval/earlier", lambda: _read_results(directory, dataset_cfg, skipped))
        return dict(sorted([*((int(step), metrics) for step, metrics in earlier.items()), *results.items()]))


# --- Checkpoints to evaluate ------------------------------------------------------------------------------------------


def _checkpoints(cfg: RestoreCheckpointConfig, *, may_be_none: bool = False) -> list[str]:
    """Return the checkpoints, and MODEL_DIRs that stand for their newest one.

    Args:
      may_be_none: return only finished checkpoints of runs, of which there may be none yet.

    Raises:
      UserError: two checkpoints have the same step, so their results would be written to the same files.
    """
    paths = [cfg.path] if isinstance(cfg.path, str) else list(cfg.path or ())
    if not paths:
        raise UserError("utils.RestoreCheckpointConfig.path is empty: give a checkpoint or a MODEL_DIR to evaluate.")
    paths = [names.resolve(path) for path in paths]
    if cfg.mode == "all":
        list_all = _saved_in if may_be_none else _all_in
        paths = [checkpoint for path in paths for checkpoint in list_all(path)]
    of_step: dict[int, str] = {}
    for path in paths:
        step = step_of(path)
        if step is not None and of_step.setdefault(step, path) != path:
            raise _second_of_step(path, step, of_step[step])
    return list(dict.fromkeys(paths))


def _second_of_step(path: str, step: int, first: str) -> UserError:
    return UserError(
        f"{path} and {first} both have step {step}: their results would be written to the same files. Evaluate one of "
        "them with another EVAL_OUTPUT_DIR."
    )


def wait_for_checkpoint(model_dir: str) -> None:
    """Wait until a run has saved a checkpoint."""
    while not distributed.decide("eval/first checkpoint", lambda: bool(_saved_in(model_dir))):
        log.info("waiting for a checkpoint in %s", model_dir)
        time.sleep(_POLL_SECONDS)


def _follow(cfg: RestoreCheckpointConfig, paths: Sequence[str], last_step: int) -> Iterator[str]:
    """Yield the checkpoints, and those that a run saves later, until one of the last step."""
    seen: set[str] = set()
    while True:
        new = [path for path in paths if path not in seen]
        yield from new
        seen.update(new)
        if any((step := step_of(path)) is not None and step >= last_step for path in seen):
            return
        if new or not paths:
            log.info("waiting for checkpoints of %s, until step %d", cfg.path, last_step)
        time.sleep(_POLL_SECONDS)
        paths = distributed.decide("eval/new checkpoints", lambda: _checkpoints(cfg, may_be_none=True))


def _saved_in(path: str) -> list[str]:
    """Return the finished checkpoints of a run, by step."""
    store = checkpoints.CheckpointStore(path)
    return [str(store.path(step)) for step in store.steps()]


def _all_in(path: str) -> list[str]:
    """Return a directory's checkpoints by step: checkpoint_<step>, or Mesh TensorFlow's model.ckpt-<step>."""
    if saved := _saved_in(path):
        return saved
    if is_remote(path):
        return [path]
    directory = epath.Path(checkpoints.location(path))
    indices = [(int(match[1]), file) for file in directory.glob("*.index") if (match := _INDEX.search(file.name))]
    if indices:
        return [str(file).removesuffix(".index") for _, file in sorted(indices)]
    if not directory.is_dir() or not any(directory.iterdir()):
        raise UserError(f"There is no checkpoint in {path}.")
    return [str(directory)]


def _location(path: str, source: Source) -> str:
    """Return where a checkpoint is. The local copy of a remote one may be elsewhere next time."""
    if not is_remote(path):
        return source.path
    name = os.path.basename(source.path)
    return path if os.path.basename(path) == name else f"{path}/{name}"


def _step_in(path: str) -> int:
    """Return the step of a checkpoint that was evaluated before and may have been deleted."""
    step = step_of(path)
    if step is None and not _is_gone(path):
        step = open_checkpoint(path, verify=False).step
    return step or 0


def _is_gone(path: str) -> bool:
    """Return whether a checkpoint was deleted since it was listed, e.g. by a running trainer."""
    return not user_files.exists(path) and not user_files.exists(f"{path}.index")


def _evaluated(done_file: str, paths: Sequence[str]) -> dict[str, int]:
    """Return {path: step} of those of `paths` that the file lists as evaluated."""
    listed = set(_lines(done_file))
    return {path: _step_in(path) for path in paths if path in listed}


def _lines(path: str) -> list[str]:
    if not os.path.exists(path):
        return []
    with open(path) as file:
        return [line for line in file.read().split("\n") if line]


# --- Metrics ----------------------------------------------------------------------------------------------------------


def _is_not_read(name: str) -> bool:
    """Return whether an evaluation that resumes does not read this file of a remote EVAL_OUTPUT_DIR."""
    return name.startswith("events.out.tfevents.") or re.search(r"-\d{6,}\.jsonl$", name) is not None


def _result_name(kind: str, task: str) -> str:
    return task if kind == INFERENCE else f"{TRAINING}/{task[:LONGEST_NAME]}"


def _read_results(output_dir: str, cfg: DatasetConfig, steps: Sequence[int]) -> Results:
    """Return the results of these steps that earlier runs wrote."""
    task_or_mixture = cfg.mixture_or_task()
    names = dict.fromkeys([*(task.name for task in get_subtasks(task_or_mixture)), task_or_mixture.name])
    results: Results = {}
    for kind, name in itertools.product((INFERENCE, TRAINING), names):
        for record, _ in jsonl.read(metrics_file(output_dir, kind, name)):
            if (step := record.pop("step", None)) in steps:
                metrics = {metric: float(value) for metric, value in record.items()}
                results.setdefault(step, {})[_result_name(kind, name)] = metrics
    return results


def _log_signatures(tasks: Sequence[Task], cfg: DatasetConfig, model: BaseTransformerModel) -> None:
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
