"""Pretraining and fine-tuning: `t5x train --gin_file=… --gin.MODEL_DIR=…`."""

import json
import logging
import os
from collections.abc import Callable
from typing import Any

import jax

from t5x import checkpoints, gin_utils
from t5x import trainer as trainer_lib
from t5x.checkpoints.config import CheckpointConfig, RestoreCheckpointConfig
from t5x.checkpoints.contents import check_same_model, sidecars
from t5x.data import Evaluator
from t5x.data.config import DatasetConfig
from t5x.data.loader import train_loader
from t5x.errors import UserError
from t5x.models import EncoderDecoderModel
from t5x.partitioning import PjitPartitioner
from t5x.telemetry import MetricWriter
from t5x.trainer.checks import verify_matching_vocabs
from t5x.trainer.evaluation import InferenceEvaluator, teacher_forced_batches
from t5x.trainer.state import StateLayout, TrainState

log = logging.getLogger(__name__)


def train(
    *,
    model: EncoderDecoderModel,
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
    model_dir = os.path.abspath(os.path.expanduser(model_dir))
    with (
        checkpoints.ModelDirLock(model_dir),
        checkpoints.CheckpointStore(model_dir, keep=save_cfg.keep if save_cfg else None) as store,
        trainer_lib.StopRequest() as stop,
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
        loader = train_loader(
            train_dataset_cfg,
            feature_converter=model.FEATURE_CONVERTER_CLS(pack=train_dataset_cfg.pack),
            rows=partitioner.rows(train_dataset_cfg.batch_size),
        )
        with loader:
            # --- The model, laid out over the mesh --------------------------------------------------------------------
            layout = StateLayout.of(model, partitioner, model.input_shapes(train_dataset_cfg.task_feature_lengths))
            log.info("model: %s", _describe(model, layout))

            # --- Where it starts: MODEL_DIR's own checkpoint, then the initial one, then scratch ----------------------
            state, data_state = _restore_or_init(store, restore_cfg, model, layout, init_rng)
            first_step = int(state.step)
            if data_state is not None:
                loader.restore(data_state)
            if relative_steps is not None:
                total_steps = first_step + relative_steps
            if total_steps < first_step:
                raise UserError(
                    f"total_steps is {total_steps}, but the checkpoint is at step {first_step}. Raise TRAIN_STEPS, or "
                    "use relative_steps to train a number of steps from there."
                )

            # --- What is written about it -----------------------------------------------------------------------------
            writer = MetricWriter(os.path.join(model_dir, "train"), collection="train", purge_step=first_step)
            if summarize_config_fn is not None:
                summarize_config_fn(model_dir, writer, first_step)
            _write_model_info(model_dir, layout)
            files = sidecars(model, _read_if_there(os.path.join(model_dir, "config.gin")))

            # --- Training, evaluation, saving -------------------------------------------------------------------------
            trainer = trainer_cls(
                model=model, train_state=state, partitioner=partitioner, layout=layout, rng=dropout_rng
            )
            del state  # the trainer's step gives its memory away
            evaluate = _Evaluations(
                trainer,
                train_eval_dataset_cfg,
                infer_eval_dataset_cfg,
                eval_steps,
                inference_evaluator_cls,
                model_dir,
                first_step,
            )

            def save(step: int) -> None:
                tree = trainer.state.tree()
                if save_cfg.dtype != "float32":
                    tree["target"] = jax.tree.map(lambda x: x.astype(save_cfg.dtype), tree["target"])
                position = json.dumps(loader.state()).encode()
                name = checkpoints.dataset_state_name(jax.process_index(), jax.process_count())
                store.save(step, tree, sidecars=files | {name: position})

            if run_eval_before_training:
                evaluate(first_step)
            last_step = first_step
            if first_step < total_steps:
                compile_seconds = trainer.compile(_peek(loader))
                log.info("compiled the train step in %.1f s", compile_seconds)
                times = trainer_lib.Timetable(
                    total_steps=total_steps,
                    stats_period=stats_period or max(1, min(eval_period or 100, 100)),
                    eval_period=eval_period,
                    save_period=save_cfg.period if save_cfg else None,
                    save_steps=(save_cfg.checkpoint_steps or ()) if save_cfg else (),
                )
                last_step = trainer_lib.run_loop(
                    trainer, loader, times, first_step=first_step, save=save if save_cfg else lambda step: None,
                    evaluate=evaluate, writer=writer, stop=stop,
                )  # fmt: skip
            else:
                log.info("the checkpoint is at step %d already: there is nothing to train", first_step)
            store.wait()
            writer.close()
        if stop:
            kept = f"saved {store.path(last_step)}" if last_step in store.steps() else "there was nothing to save"
            raise trainer_lib.Stopped(
                stop.signum, f"stopped after step {last_step}; {kept}. The same command goes on from there."
            )
        return last_step, trainer.state


# --- The parts --------------------------------------------------------------------------------------------------------


def _restore_or_init(
    store: checkpoints.CheckpointStore,
    restore_cfg: RestoreCheckpointConfig | None,
    model: EncoderDecoderModel,
    layout: StateLayout,
    init_rng: jax.Array,
) -> tuple[TrainState, dict[str, Any] | None]:
    """The state to start from and, if MODEL_DIR is resumed, the position in the data."""
    own, damaged = store.latest_whole()
    for path, reason in damaged:
        log.warning("checkpoint %s is damaged and passed over: %s", path, reason)
    if own is not None:
        check_same_model(own, model)
        log.info("resuming from %s: MODEL_DIR's newest whole checkpoint comes first", own)
        name = checkpoints.dataset_state_name(jax.process_index(), jax.process_count())
        position = json.loads(checkpoints.read_sidecar(own, name))
        return _restore(own, layout, verify=False), position  # it was verified just now
    if damaged:
        raise UserError(
            f"No checkpoint in {store.directory} is whole ({len(damaged)} damaged). Remove them to start anew."
        )
    if restore_cfg is not None and restore_cfg.path:
        path = checkpoints.resolve(restore_cfg.path)
        check_same_model(path, model)
        log.info("starting from %s: MODEL_DIR has no checkpoint yet, and this initial one was given", path)
        return _restore(path, layout, verify=True), None
    log.info("starting from scratch: MODEL_DIR has no checkpoint yet, and no initial one was given")
    return layout.init(init_rng), None


def _restore(path: Any, layout: StateLayout, *, verify: bool) -> TrainState:
    return TrainState.from_tree(checkpoints.restore(path, layout.abstract.tree(), verify=verify))


class _Evaluations:
    """Both kinds of evaluation of the trainer's current parameters, written where T5X writes them."""

    def __init__(
        self,
        trainer: trainer_lib.Trainer,
        train_eval_cfg: DatasetConfig | None,
        infer_eval_cfg: DatasetConfig | None,
        eval_steps: int | None,
        evaluator_cls: Callable[..., Any],
        model_dir: str,
        first_step: int,
    ):
        self._trainer = trainer
        self._train_eval_cfg, self._eval_steps = train_eval_cfg, eval_steps
        self._writer = None
        if train_eval_cfg is not None:
            name = train_eval_cfg.mixture_or_task().name[:113]
            directory = os.path.join(model_dir, "training_eval", name)
            self._writer = MetricWriter(directory, collection="training_eval", purge_step=first_step)
        self._inference = None
        if infer_eval_cfg is not None:
            self._inference = InferenceEvaluator(
                infer_eval_cfg, evaluator_cls, trainer.model, trainer.partitioner, trainer.layout.shardings.params,
                os.path.join(model_dir, "inference_eval"),
            )  # fmt: skip

    def __call__(self, step: int) -> None:
        trainer = self._trainer
        if self._writer is not None:
            batches = teacher_forced_batches(self._train_eval_cfg, trainer.model, trainer.partitioner, self._eval_steps)
            figures = trainer.evaluate(batches)
            self._writer.write_scalars(step, figures)
            self._writer.flush()
            loss, accuracy = figures["loss_per_nonpadding_target_token"], figures["accuracy"]
            log.info("step %d, held out: loss %.4g a token, token accuracy %.2f %%", step, loss, 100 * accuracy)
        if self._inference is not None:
            for task, metrics in self._inference.evaluate(trainer.state.params, step).items():
                log.info("step %d, %s: %s", step, task, ", ".join(f"{k} {v:.4g}" for k, v in metrics.items()))


def _peek(loader: Any) -> dict[str, Any]:
    """The next batch, which stays the next."""
    position = loader.state()
    batch = next(loader)
    loader.restore(position)
    return batch


def _devices() -> str:
    device = jax.devices()[0]
    return f"{jax.device_count()} x {device.device_kind} ({device.platform}), JAX {jax.__version__}"


def _describe(model: EncoderDecoderModel, layout: StateLayout) -> str:
    config = getattr(model.module, "config", None)
    dtype = f", activations {config.dtype} as T5Config.dtype says" if hasattr(config, "dtype") else ""
    return f"{type(model.module).__name__} with {layout.num_params:,} parameters in float32{dtype}"


def _write_model_info(model_dir: str, layout: StateLayout) -> None:
    shardings = layout.shardings
    lines = checkpoints.tree.parameter_table(
        layout.abstract.params, layout.axes, shardings.params, optimizer_state=layout.abstract.param_states,
        optimizer_axes=layout.state_axes, optimizer_specs=shardings.param_states,
    )  # fmt: skip
    with open(os.path.join(model_dir, "model-info.txt"), "w") as file:
        file.write("\n".join([f"Mesh: {layout.partitioner}", "", *lines]) + "\n")


def _read_if_there(path: str) -> bytes | None:
    if not os.path.exists(path):
        return None
    with open(path, "rb") as file:
        return file.read()


if __name__ == "__main__":
    from t5x import cli

    cli.main_of("train")
