"""Offline evaluation of one checkpoint or of all: `t5x eval`."""

import itertools
import logging
import os
import re
from collections.abc import Callable
from typing import Any

from t5x import checkpoints, gin_utils
from t5x.checkpoints.config import RestoreCheckpointConfig
from t5x.checkpoints.formats import open_checkpoint
from t5x.data import Evaluator
from t5x.data.config import DatasetConfig
from t5x.errors import UserError
from t5x.models import BaseTransformerModel
from t5x.partitioning import PjitPartitioner
from t5x.telemetry import Progress
from t5x.trainer.checks import verify_matching_vocabs
from t5x.trainer.evaluation import InferenceEvaluator
from t5x.trainer.restore import restore_params
from t5x.trainer.state import StateLayout

log = logging.getLogger(__name__)

_INDEX = re.compile(r"-(\d+)\.index$")


def evaluate(
    *,
    model: BaseTransformerModel,
    dataset_cfg: DatasetConfig,
    restore_checkpoint_cfg: RestoreCheckpointConfig,
    partitioner: PjitPartitioner,
    output_dir: str,
    inference_evaluator_cls: Callable[..., Any] = Evaluator,
    summarize_config_fn: Callable[..., None] | None = gin_utils.summarize_gin_config,
    fallback_init_rng: int | None = None,
) -> dict[int, dict[str, dict[str, float]]]:
    """Scores checkpoints, of any format, with the metrics of a task.

    With `restore_checkpoint_cfg.mode = "all"` every checkpoint of a directory is scored; those done are noted in
    `<output_dir>/eval.<task>.ckpt` and passed over when it is started again.

    Args:
      restore_checkpoint_cfg: which checkpoints, and by which rules they are restored.
      fallback_init_rng: seed of the initial values of parameters that those rules leave out; None is 0.

    Returns:
      {step: {task: {metric: value}}} of the checkpoints scored now; the evaluator's loggers wrote them too.
    """
    verify_matching_vocabs(dataset_cfg, model)
    output_dir = str(checkpoints.make_directory(output_dir, "EVAL_OUTPUT_DIR"))
    if summarize_config_fn is not None:
        summarize_config_fn(output_dir, None, 0)
    layout = StateLayout.of(model, partitioner, model.input_shapes({"inputs": 1, "targets": 1}))
    evaluator = InferenceEvaluator(
        dataset_cfg, inference_evaluator_cls, model, partitioner, layout.shardings.params,
        os.path.join(output_dir, "inference_eval"),
    )  # fmt: skip
    results = {}
    done_file = os.path.join(output_dir, f"eval.{dataset_cfg.mixture_or_task().name}.ckpt")
    for path in _checkpoints(restore_checkpoint_cfg, done_file):
        source = open_checkpoint(path)
        step = source.step or 0
        log.info("evaluating %s (%s), step %d", source.path, source.format, step)
        if step in results:
            raise UserError(
                f"{source.path} is the second checkpoint of step {step}: its results would take the place of the "
                "first one's. Evaluate it with another EVAL_OUTPUT_DIR."
            )
        params = restore_params(source, model, layout, restore_checkpoint_cfg, fallback_init_rng)
        with Progress(None, unit=" batches", description=f"evaluate step {step}") as progress:
            batches = itertools.count(1)
            results[step] = evaluator.evaluate(
                params, step, before_batch=lambda p=progress, b=batches: p.update(next(b))
            )
        del params
        for task, metrics in results[step].items():
            log.info("step %d, %s: %s", step, task, ", ".join(f"{k} {v:.4g}" for k, v in metrics.items()))
        if restore_checkpoint_cfg.mode == "all":
            with open(done_file, "a") as file:
                file.write(f"{path}\n")
    return results


def _checkpoints(cfg: RestoreCheckpointConfig, done_file: str) -> list[str]:
    paths = [cfg.path] if isinstance(cfg.path, str) else list(cfg.path)
    if cfg.mode != "all":
        return paths
    found = [checkpoint for path in paths for checkpoint in _all_in(path)]
    done = set()
    if os.path.exists(done_file):
        with open(done_file) as file:
            done = set(file.read().split("\n"))
    log.info("%d checkpoint(s), %d evaluated before", len(found), len(done.intersection(found)))
    return [path for path in found if path not in done]


def _all_in(path: str) -> list[str]:
    """The checkpoints of a directory by their steps: checkpoint_<step>, or Mesh TensorFlow's model.ckpt-<step>."""
    store = checkpoints.CheckpointStore(path)
    if steps := store.steps():
        return [str(store.path(step)) for step in steps]
    indices = [(int(match[1]), file) for file in store.directory.glob("*.index") if (match := _INDEX.search(file.name))]
    if indices:
        return [str(file).removesuffix(".index") for _, file in sorted(indices)]
    if not store.directory.is_dir() or not any(store.directory.iterdir()):
        raise UserError(f"There is no checkpoint in {path} to evaluate.")
    return [str(store.directory)]


if __name__ == "__main__":
    from t5x import cli

    cli.main_of("eval")
