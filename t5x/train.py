"""Pretraining and fine-tuning: `t5x train --gin_file=… --gin.MODEL_DIR=…`."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax

from t5x import checkpoints, gin_utils
from t5x import trainer as trainer_lib
from t5x.checkpoints.config import CheckpointConfig, RestoreCheckpointConfig, SaveCheckpointConfig
from t5x.checkpoints.contents import sidecars
from t5x.data import Evaluator
from t5x.data.config import DatasetConfig
from t5x.data.loader import train_loader
from t5x.data.tasks import get_subtasks
from t5x.errors import UserError
from t5x.models import BaseTransformerModel
from t5x.partitioning import PjitPartitioner
from t5x.telemetry import MetricWriter, jsonl
from t5x.telemetry.writer import METRICS_FILE
from t5x.trainer.checks import verify_matching_vocabs
from t5x.trainer.evaluation import InferenceEvaluator, teacher_forced_batches
from t5x.trainer.restore import Run, restore_or_init
from t5x.trainer.state import StateLayout, TrainState

log = logging.getLogger(__name__)


def train(
    *,
    model: BaseTransformerModel,
    train_dataset_cfg: DatasetConfig,
    train_eval_dataset_cfg: DatasetConfig | None,
    infer_eval_dataset_cfg: DatasetConfig | None,
    checkpoint_cfg: CheckpointConfig,
    partitioner: PjitPartitioner,
    trainer_cls: Callable[..., trainer_lib.Trainer] = trainer_lib.Trainer,
    model_dir: str,
    total_steps: int,
    eval_steps: int | None = None,
    eval_period: int,
    relative_steps: int | None = None,
    stats_period: int | None = None,
    random_seed: int | None = None,
    use_hardware_rng: bool = False,
    summarize_config_fn: Callable[..., None] | None = gin_utils.summarize_gin_config,
    inference_evaluator_cls: Callable[..., Any] = Evaluator,
    run_eval_before_training: bool = False,
) -> tuple[int, TrainState]:
    """Trains `model` up to `total_steps`, from wherever MODEL_DIR left off.

    Args:
      train_dataset_cfg: what is trained on.
      train_eval_dataset_cfg: measured under teacher forcing at every evaluation; None leaves that out.
      infer_eval_dataset_cfg: decoded and scored with the task's metrics at every evaluation; None leaves that out.
      checkpoint_cfg: when to save, and what to start from where MODEL_DIR has no checkpoint.
      trainer_cls: `trainer.Trainer` with its learning-rate schedule bound.
      model_dir: everything the run writes is here.
      total_steps: the model's step to end at, counted from its very first.
      eval_steps: batches of each teacher-forced evaluation; None takes every example.
      eval_period: steps between evaluations; 0 evaluates only at the end.
      relative_steps: train so many steps from where the run starts, whatever `total_steps` says.
      stats_period: steps between lines of metrics; None takes the evaluation period, at most 100.
      random_seed: of initial values and dropout; None is 0, so that every run can be repeated.
      use_hardware_rng: the device's fast generator for dropout. It depends on the mesh and the compiler.
      summarize_config_fn: writes the configuration into MODEL_DIR.
      run_eval_before_training: evaluate once at the start.

    Returns:
      (the step reached, the state there).

    Raises:
      Stopped: after SIGINT or SIGTERM, once the step was finished and saved.
    """
    # --- The directory, and who owns it -------------------------------------------------------------------------------
    save_cfg, restore_cfg = checkpoint_cfg.save, checkpoint_cfg.restore
    _check(model_dir, total_steps, eval_steps, restore_cfg)
    model_dir = str(checkpoints.local_path(model_dir))
    with (
        checkpoints.ModelDirLock(model_dir),
        _store(model_dir, save_cfg) as store,
        trainer_lib.StopRequest() as stop,
        contextlib.ExitStack() as closing,
    ):
        store.remove_stale_tmp()

        # --- Random numbers -------------------------------------------------------------------------------------------
        seed = 0 if random_seed is None else random_seed
        log.info("random seed: %d%s", seed, " (none was given)" if random_seed is None else "")
        init_rng, dropout_rng = jax.random.split(jax.random.key(seed))
        if use_hardware_rng:
            log.warning(
                "use_hardware_rng: dropout depends on the mesh and the compiler; a run is exact on one machine only"
            )
            dropout_rng = jax.random.key(seed, impl="unsafe_rbg")

        # --- Devices and data -----------------------------------------------------------------------------------------
        log.info("devices: %s", _devices())
        log.info("mesh: %s", partitioner)
        for cfg in filter(None, (train_dataset_cfg, train_eval_dataset_cfg, infer_eval_dataset_cfg)):
            verify_matching_vocabs(cfg, model)
        loader = closing.enter_context(
            train_loader(
                train_dataset_cfg,
                feature_converter=model.FEATURE_CONVERTER_CLS(pack=train_dataset_cfg.pack),
                rows=partitioner.rows(train_dataset_cfg.batch_size),
            )
        )
        # --- The model, laid out over the mesh --------------------------------------------------------------------
        layout = StateLayout.of(model, partitioner, model.input_shapes(train_dataset_cfg.task_feature_lengths))
        log.info("model: %s", _describe(model, layout))

        # --- Where it starts: MODEL_DIR's own checkpoint, then the initial one, then scratch ----------------------
        state, run = restore_or_init(store, restore_cfg, model, layout, init_rng)
        first_step = int(state.step)
        if run.data is not None:
            loader.restore(run.data)
        if relative_steps is not None:
            total_steps = run.first_step + relative_steps
        if total_steps < first_step:
            raise UserError(
                f"total_steps is {total_steps}, but the checkpoint is at step {first_step}. Raise TRAIN_STEPS, or "
                "use relative_steps to train a number of steps from there."
            )

        # --- What is written about it -----------------------------------------------------------------------------
        writer = closing.enter_context(
            MetricWriter(os.path.join(model_dir, "train"), collection="train", purge_step=first_step)
        )
        if summarize_config_fn is not None:
            summarize_config_fn(model_dir, writer, first_step)
        _write_model_info(model_dir, layout)
        files = sidecars(model, _read_if_there(os.path.join(model_dir, "config.gin")))

        # --- Training, evaluation, saving -------------------------------------------------------------------------
        trainer = trainer_cls(model=model, train_state=state, partitioner=partitioner, layout=layout, rng=dropout_rng)
        del state  # the trainer's step gives its memory away
        evaluations = closing.enter_context(
            _Evaluations(
                trainer, train_eval_dataset_cfg, infer_eval_dataset_cfg, eval_steps, inference_evaluator_cls,
                model_dir, stop,
            )
        )  # fmt: skip
        window = trainer_lib.Window(run.metrics)
        if save_cfg is not None and save_cfg.state_transformation_fns:
            log.info("what is saved passes through utils.SaveCheckpointConfig.state_transformation_fns first")
            save_cfg.tree_to_save(trainer.state.tree())  # what is wrong with it is told now, not at the first save
        if store.best is not None:
            store.best.check(["train", *evaluations.groups])

        def save(step: int) -> None:
            if save_cfg is None:
                return
            position = Run(run.first_step, loader.state(), window.to_json())
            store.save(step, save_cfg.tree_to_save(trainer.state.tree()), sidecars=files | position.sidecars())

        def evaluate(step: int) -> None:
            evaluations(step)
            if store.best is not None:
                store.retire(step)
                if not stop:
                    store.best.expect()

        times = trainer_lib.Timetable(
            total_steps=total_steps,
            stats_period=stats_period or max(1, min(eval_period or 100, 100)),
            eval_period=eval_period,
            save_period=save_cfg.period if save_cfg else None,
            save_steps=(save_cfg.checkpoint_steps or ()) if save_cfg else (),
        )
        # An evaluation that fell due at the checkpoint may have been cut off with the run.
        cut_off = first_step > run.first_step and times.eval_due(first_step) and not evaluations.done(first_step)
        if run_eval_before_training or cut_off:
            evaluate(first_step)
        last_step = first_step
        if first_step < total_steps:
            log.info("compiled the train step in %.1f s", trainer.compile(_peek(loader)))
            last_step = trainer_lib.run_loop(
                trainer, loader, times, first_step=first_step, window=window, save=save, evaluate=evaluate,
                writer=writer, stop=stop,
            )  # fmt: skip
        else:
            log.info("the checkpoint is at step %d already: there is nothing to train", first_step)
        store.wait()
        if stop:
            kept = f"saved {store.path(last_step)}" if last_step in store.steps() else "there was nothing to save"
            raise trainer_lib.Stopped(
                stop.signum, f"stopped after step {last_step}; {kept}. The same command goes on from there."
            )
        return last_step, trainer.state


# --- The parts --------------------------------------------------------------------------------------------------------


def _check(
    model_dir: str, total_steps: int, eval_steps: int | None, restore_cfg: RestoreCheckpointConfig | None
) -> None:
    if not model_dir:
        raise UserError("MODEL_DIR is empty: give the directory of the run, --gin.MODEL_DIR=runs/my_run.")
    if total_steps < 0:
        raise UserError(f"train.total_steps is {total_steps}: it must be at least 0.")
    if eval_steps is not None and eval_steps < 1:
        raise UserError(f"train.eval_steps is {eval_steps}: it must be at least 1, or None for every example.")
    if restore_cfg is not None and restore_cfg.path:
        if not isinstance(restore_cfg.path, str) or restore_cfg.mode == "all":
            raise UserError(
                "Training starts from one checkpoint: utils.RestoreCheckpointConfig.path must be one path, "
                "and mode 'specific' or 'latest'."
            )
        if restore_cfg.dtype not in (None, "float32"):
            raise UserError(
                f"utils.RestoreCheckpointConfig.dtype is {restore_cfg.dtype!r}, but parameters are trained in float32."
            )


class _EvaluationStopped(Exception):
    """The run was asked to stop in the middle of an evaluation."""


class _Evaluations:
    """Both kinds of evaluation of the trainer's current parameters, written where T5X writes them.

    Attributes:
      groups: what the names of their metrics begin with: `training_eval/<task>`, `inference_eval/<task>`.
    """

    def __init__(
        self,
        trainer: trainer_lib.Trainer,
        train_eval_cfg: DatasetConfig | None,
        infer_eval_cfg: DatasetConfig | None,
        eval_steps: int | None,
        evaluator_cls: Callable[..., Any],
        model_dir: str,
        stop: trainer_lib.StopRequest,
    ):
        self._trainer, self._stop = trainer, stop
        self._train_eval_cfg, self._eval_steps = train_eval_cfg, eval_steps
        self.groups: list[str] = []
        self._files: list[str] = []
        self._writer = None
        if train_eval_cfg is not None:
            self.groups.append(f"training_eval/{train_eval_cfg.mixture_or_task().name[:113]}")
            directory = os.path.join(model_dir, self.groups[0])
            next(self._batches())  # what is wrong with this data is told now, not after the first period
            self._writer = MetricWriter(directory, collection="training_eval", purge_step=int(trainer.state.step))
            self._files.append(os.path.join(directory, METRICS_FILE))
        self._inference = None
        if infer_eval_cfg is not None:
            directory = os.path.join(model_dir, "inference_eval")
            self._inference = InferenceEvaluator(
                infer_eval_cfg,
                evaluator_cls,
                trainer.model,
                trainer.partitioner,
                trainer.layout.shardings.params,
                directory,
            )
            for task in get_subtasks(infer_eval_cfg.mixture_or_task()):
                if infer_eval_cfg.split in task.splits and task.metric_fns:
                    self.groups.append(f"inference_eval/{task.name}")
                    self._files.append(os.path.join(directory, f"{task.name}-metrics.jsonl"))
                    _drop_later(self._files[-1], int(trainer.state.step))

    def __call__(self, step: int) -> None:
        try:
            self._evaluate(step)
        except _EvaluationStopped:
            log.info("the evaluation of step %d was cut off; it is done when the run goes on", step)

    def done(self, step: int) -> bool:
        """Whether the evaluation of this step is in all its files."""
        return all(any(record.get("step") == step for record, _ in jsonl.read(path)) for path in self._files)

    def _evaluate(self, step: int) -> None:
        trainer = self._trainer
        if self._writer is not None:
            figures = trainer.evaluate(batch for batch in self._batches() if not self._interrupted())
            self._writer.write_scalars(step, figures)
            self._writer.flush()
            loss, accuracy = figures["loss_per_nonpadding_target_token"], figures["accuracy"]
            log.info("step %d, held out: loss %.4g a token, token accuracy %.2f %%", step, loss, 100 * accuracy)
        if self._inference is not None:
            results = self._inference.evaluate(trainer.state.params, step, before_batch=self._interrupted)
            for task, metrics in results.items():
                log.info("step %d, %s: %s", step, task, ", ".join(f"{k} {v:.4g}" for k, v in metrics.items()))

    def _batches(self) -> Iterator[Any]:
        trainer = self._trainer
        return teacher_forced_batches(self._train_eval_cfg, trainer.model, trainer.partitioner, self._eval_steps)

    def _interrupted(self) -> bool:
        if self._stop:
            raise _EvaluationStopped
        return False

    def __enter__(self) -> "_Evaluations":
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()


def _store(model_dir: str, save_cfg: SaveCheckpointConfig | None) -> checkpoints.CheckpointStore:
    if save_cfg is None:
        return checkpoints.CheckpointStore(model_dir)
    best = None if save_cfg.best is None else checkpoints.Ranking(save_cfg.best, model_dir)
    return checkpoints.CheckpointStore(model_dir, keep=save_cfg.keep_newest, best=best)


def _drop_later(path: str, step: int) -> None:
    """Drops the lines of later steps: the run that wrote them went on from here, as this one does."""
    if any(record.get("step", 0) > step for record, _ in jsonl.read(path)):
        jsonl.replace(path, (line for record, line in jsonl.read(path) if record.get("step", 0) <= step))


def _peek(loader: Any) -> dict[str, Any]:
    """The next batch, which stays the next."""
    position = loader.state()
    batch = next(loader)
    loader.restore(position)
    return batch


def _devices() -> str:
    device = jax.devices()[0]
    return f"{jax.device_count()} x {device.device_kind} ({device.platform}), JAX {jax.__version__}"


def _describe(model: BaseTransformerModel, layout: StateLayout) -> str:
    config = getattr(model.module, "config", None)
    dtype = f", activations {config.dtype} as its configuration says" if hasattr(config, "dtype") else ""
    return f"{type(model.module).__name__} with {layout.num_params:,} parameters in float32{dtype}"


def _write_model_info(model_dir: str, layout: StateLayout) -> None:
    shardings = layout.shardings
    lines = checkpoints.tree.parameter_table(
        layout.abstract.params, layout.axes, shardings.params, optimizer_state=layout.abstract.param_states,
        optimizer_axes=layout.state_axes, optimizer_specs=shardings.param_states,
    )  # fmt: skip
    text = "\n".join([f"Mesh: {layout.partitioner}", "", *lines]) + "\n"
    jsonl.replace(os.path.join(model_dir, "model-info.txt"), [text.encode()])


def _read_if_there(path: str) -> bytes | None:
    if not os.path.exists(path):
        return None
    with open(path, "rb") as file:
        return file.read()


if __name__ == "__main__":
    from t5x import cli

    cli.main_of("train")
