"""Offline evaluation of one checkpoint or of all: `t5x eval`."""

import itertools
import logging
import os
from collections.abc import Callable
from typing import Any

from t5x import checkpoints, gin_utils
from t5x.checkpoints.config import RestoreCheckpointConfig
from t5x.checkpoints.contents import check_same_model
from t5x.data import Evaluator
from t5x.data.config import DatasetConfig
from t5x.errors import UserError
from t5x.infer import restore_verified
from t5x.models import EncoderDecoderModel
from t5x.partitioning import PjitPartitioner
from t5x.telemetry import Progress
from t5x.trainer.checks import verify_matching_vocabs
from t5x.trainer.evaluation import InferenceEvaluator
from t5x.trainer.state import StateLayout

log = logging.getLogger(__name__)


def evaluate(
    *,
    model: EncoderDecoderModel,
    dataset_cfg: DatasetConfig,
    restore_checkpoint_cfg: RestoreCheckpointConfig,
    partitioner: PjitPartitioner,
    output_dir: str,
    inference_evaluator_cls: Callable[..., Any] = Evaluator,
    summarize_config_fn: Callable[..., None] | None = gin_utils.summarize_gin_config,
) -> dict[int, dict[str, dict[str, float]]]:
    """Scores checkpoints with the metrics of a task.

    With `restore_checkpoint_cfg.mode = "all"` every checkpoint of a MODEL_DIR is scored; those done are noted in
    `<output_dir>/eval.<task>.ckpt` and passed over when it is started again.

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
        log.info("evaluating %s", path)
        if restore_checkpoint_cfg.mode == "all":
            checkpoints.verify(path)
        check_same_model(path, model, same_classes=False)
        step = int(checkpoints.restore(path, {"state": {"step": layout.abstract.step}}, verify=False)["state"]["step"])
        params = restore_verified(path, model, partitioner, restore_checkpoint_cfg.dtype)
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
        return [str(checkpoints.resolve_verified(path)) for path in paths]
    stores = [checkpoints.CheckpointStore(directory) for directory in paths]
    found = [str(store.path(step)) for store in stores for step in store.steps()]
    if not found:
        raise UserError(f"There is no checkpoint in {', '.join(paths)} to evaluate.")
    done = set()
    if os.path.exists(done_file):
        with open(done_file) as file:
            done = set(file.read().split("\n"))
    log.info("%d checkpoint(s), %d evaluated before", len(found), len(done.intersection(found)))
    return [path for path in found if path not in done]


if __name__ == "__main__":
    from t5x import cli

    cli.main_of("eval")
