"""Pretraining and fine-tuning: `t5x train --gin_file=… --gin.MODEL_DIR=…`."""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

import jax

from t5x import checkpoints
from t5x import trainer as trainer_lib
from t5x._runtime.errors import UserError, check_at_least
from t5x.checkpoints.config import CheckpointConfig, RestoreCheckpointConfig, SaveCheckpointConfig
from t5x.checkpoints.model_description import sidecars
from t5x.configuration import gin_utils
from t5x.data import Evaluator
from t5x.data.dataset_config import DatasetConfig
from t5x.data.file_tasks import describe_data
from t5x.files.directory import open_directory
from t5x.files.mirror import local_files
from t5x.models import BaseTransformerModel
from t5x.network.flops import StepCost
from t5x.partitioning import PjitPartitioner, distributed
from t5x.telemetry import MetricWriter, ThroughputClock
from t5x.trainer.actions import Actions, ActionStop, BaseAction
from t5x.trainer.checks import ContentCheck, check_extensions, require_same_data, verify_matching_vocabs
from t5x.trainer.datasets import ExternalBatches, as_loader, get_dataset, get_training_eval_datasets, input_spec
from t5x.trainer.evaluation import Evaluation, InferenceEvaluation, TeacherForcedEvaluation
from t5x.trainer.metric_lines import MetricLines
from t5x.trainer.restore import OnChangedData, RunState, position_of_all, restore_or_init, resume_data
from t5x.trainer.signals import watch_for_preemption
from t5x.trainer.state_layout import StateLayout, TrainState, write_run_info

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
    total_steps: int | None,
    eval_steps: int | None = None,
    eval_period: int | None,
    train_eval_period: int | None = None,
    infer_eval_period: int | None = None,
    relative_steps: int | None = None,
    stats_period: int | None = None,
    random_seed: int | None = None,
    use_hardware_rng: bool = False,
    summarize_config_fn: Callable[..., None] | None = gin_utils.summarize_gin_config,
    inference_evaluator_cls: Callable[..., Any] = Evaluator,
    get_dataset_fn: Callable[..., Iterable[Any]] = get_dataset,
    concurrent_metrics: bool = True,
    actions: Mapping[str, Sequence[BaseAction]] | None = None,
    train_eval_get_dataset_fn: Callable[..., Mapping[str, Iterable[Any]]] = get_training_eval_datasets,
    run_eval_before_training: bool = False,
    train_state_initializer_cls: Callable[..., StateLayout] = StateLayout,
    use_orbax: bool = True,
    verify_matching_vocabs_fn: Callable[[DatasetConfig, BaseTransformerModel], None] | None = verify_matching_vocabs,
    gc_period: int | None = 0,
    on_changed_data: OnChangedData = "refuse",
) -> tuple[int, TrainState]:
    """Train `model` up to `total_steps`, resuming from MODEL_DIR's newest checkpoint if there is one.

    Args:
      model: the model to train.
      train_dataset_cfg: training data.
      train_eval_dataset_cfg: data for evaluation under teacher forcing; None skips it.
      infer_eval_dataset_cfg: data to decode and to score with the tasks' metrics; None skips it.
      checkpoint_cfg: when to save, and what to start from if MODEL_DIR has no checkpoint.
      partitioner: the mesh.
      trainer_cls: `trainer.Trainer` with its learning-rate schedule bound.
      model_dir: directory or URL of everything the run writes.
      total_steps: the model's step to end at, counted from its very first step; None only with `relative_steps`.
      eval_steps: number of batches of each teacher-forced evaluation; None uses every example.
      eval_period: steps between evaluations; 0 or None evaluates only at the end.
      train_eval_period, infer_eval_period: period of one kind of evaluation; `eval_period` if None.
      relative_steps: number of steps to train from where the run started; overrides `total_steps`.
      stats_period: steps between lines of metrics; None uses `eval_period`, at most 100.
      random_seed: seed of the initial parameters and of dropout; None is 0, so that every run is reproducible.
      use_hardware_rng: use the device's fast generator for dropout. Its values depend on the mesh and the compiler.
      summarize_config_fn: writes the configuration to MODEL_DIR.
      inference_evaluator_cls: computes the tasks' metrics.
      get_dataset_fn: creates the batches. To write your own, see `t5x.trainer.datasets`.
      concurrent_metrics: compute and write metrics while the next steps run, unless TRAIN actions wait for them.
      actions: {`TRAIN`, `TRAIN_EVAL` or `INFER_EVAL`: actions that may end the run}; see `t5x.trainer.actions`.
      train_eval_get_dataset_fn: creates the batches of teacher-forced evaluation.
      run_eval_before_training: evaluate once before the first step.
      train_state_initializer_cls: lays the state out over the mesh; see `utils.TrainStateInitializer`.
      use_orbax: False only logs a warning: `t5x convert --to native` writes T5X's other format.
      verify_matching_vocabs_fn: checks the vocabularies of data and model; None skips the check.
      gc_period: steps between runs of Python's garbage collector, which is then off otherwise; 0 or None: automatic.
      on_changed_data: what to do if a run is resumed and its data or preprocessing has changed: `refuse`, `continue` at
        the saved position, or `restart` the data.

    Returns:
      The last step and the state after it.

    Raises:
      Stopped: after SIGINT or SIGTERM, once the current step is finished and saved.
    """
    # --- The model directory and its lock -----------------------------------------------------------------------------
    clock = ThroughputClock()
    save_cfg, restore_cfg = checkpoint_cfg.save, checkpoint_cfg.restore
    _check(model_dir, total_steps, eval_steps, restore_cfg, use_orbax, on_changed_data)
    if total_steps is None and relative_steps is None:
        raise UserError("train.total_steps is None. Set it, or train.relative_steps.")
    check_extensions(model, trainer_cls)
    all_actions = Actions(actions)
    model_dir = checkpoints.location(model_dir)
    leader = distributed.is_leader()
    with (
        checkpoints.ModelDirLock(model_dir) as home,
        trainer_lib.StopRequest() as stop,
        watch_for_preemption(),
        local_files(model_dir, writes=leader, unread=_is_not_read, check=home.renew) as (files_dir, upload_files),
        _store(model_dir, files_dir, save_cfg, upload_files) as store,
        contextlib.ExitStack() as closing,
    ):
        store.remove_stale_tmp()

        # --- Random numbers -------------------------------------------------------------------------------------------
        seed = 0 if random_seed is None else random_seed
        log.debug("random seed: %d%s", seed, " (default)" if random_seed is None else "")
        init_rng, dropout_rng = jax.random.split(jax.random.key(seed))
        if use_hardware_rng:
            log.warning(
                "use_hardware_rng: dropout depends on mesh and compiler, so runs are reproducible on one machine only"
            )
            dropout_rng = jax.random.key(seed, impl="unsafe_rbg")

        # --- Devices and data -----------------------------------------------------------------------------------------
        log.info("devices: %s", _devices())
        log.info("mesh: %s", partitioner)
        for cfg in filter(None, (train_dataset_cfg, train_eval_dataset_cfg, infer_eval_dataset_cfg)):
            if verify_matching_vocabs_fn is not None:
                verify_matching_vocabs_fn(cfg, model)
        require_same_data(train_dataset_cfg, train_eval_dataset_cfg, infer_eval_dataset_cfg)
        batch_size = train_dataset_cfg.batch_size
        part = partitioner.get_data_layout(batch_size)
        batches = get_dataset_fn(train_dataset_cfg, part.shard_id, part.num_shards, model.FEATURE_CONVERTER_CLS)
        loader = as_loader(batches)
        if not isinstance(loader, ExternalBatches):
            closing.enter_context(loader)
        fingerprint = loader.start_fingerprint() if hasattr(loader, "start_fingerprint") else None
        content = ContentCheck(loader, fingerprint)

        # --- The model, laid out over the mesh ------------------------------------------------------------------------
        shapes, types = input_spec(model, train_dataset_cfg.task_feature_lengths, loader.peek)
        layout = train_state_initializer_cls(
            optimizer_def=model.optimizer_def, init_fn=model.get_initial_variables, input_shapes=shapes,
            input_types=types, partitioner=partitioner,
        )  # fmt: skip
        log.info("model: %s", _describe(model, layout))

        # --- Initial state: MODEL_DIR's own checkpoint, else the initial one, else from scratch -----------------------
        with clock.apart("timing/init_or_restore_seconds"):
            state, run = restore_or_init(store, restore_cfg, model, layout, init_rng)
        first_step = int(state.step)
        if run.data is not None:
            resume_data(loader, run.data, fingerprint, on_changed_data)
        if content.is_quick:
            content.require_same()
        all_actions.restore(run.actions)
        if relative_steps is not None:
            total_steps = run.first_step + relative_steps
        assert total_steps is not None  # checked at the start
        if total_steps < first_step:
            raise UserError(
                f"total_steps is {total_steps}, but the checkpoint is at step {first_step}. Raise TRAIN_STEPS, or set "
                "train.relative_steps to train that many steps from there."
            )

        # --- Metric writer and configuration --------------------------------------------------------------------------
        writer = None
        if leader:
            directory = os.path.join(files_dir, "train")
            writer = closing.enter_context(
                MetricWriter(directory, collection="train", purge_step=first_step, home=home)
            )

            describe = functools.partial(write_run_info, files_dir, layout, summarize_config_fn, writer, first_step)
            describe()
            writer.on_recreate = describe  # if MODEL_DIR is removed during the run
        data = describe_data(train_dataset_cfg.mixture_or_task_name, train_dataset_cfg.task_feature_lengths)
        files = sidecars(model, open_directory(files_dir).read_bytes("config.gin"), data)

        # --- Training, evaluation, saving -----------------------------------------------------------------------------
        trainer = trainer_cls(
            model=model, train_state=state, partitioner=partitioner, eval_names=[], summary_dir=files_dir,
            train_state_axes=layout.shardings, rng=dropout_rng,
        )  # fmt: skip
        del state  # its buffers are donated by the train step
        evaluations: dict[str, Evaluation] = {}
        if train_eval_dataset_cfg is not None:
            teacher_forced = TeacherForcedEvaluation(
                train_eval_dataset_cfg, train_eval_get_dataset_fn, layout, files_dir, eval_steps=eval_steps,
                start_step=first_step, home=home,
            )  # fmt: skip
            teacher_forced.check()
            evaluations["TRAIN_EVAL"] = teacher_forced
        if infer_eval_dataset_cfg is not None:
            evaluations["INFER_EVAL"] = InferenceEvaluation(
                infer_eval_dataset_cfg, inference_evaluator_cls, layout, files_dir
            )
        for evaluation in evaluations.values():
            closing.callback(evaluation.close)
            evaluation.drop_later(first_step)
        all_actions.check({"TRAIN": ["train"]} | {mode: evaluation.tasks for mode, evaluation in evaluations.items()})
        if store.best is not None:
            store.best.check(["train", *(group for evaluation in evaluations.values() for group in evaluation.groups)])
        if save_cfg is not None and save_cfg.state_transformation_fns:
            log.info("saving through utils.SaveCheckpointConfig.state_transformation_fns")
            save_cfg.tree_to_save(trainer.train_state.state_dict())  # fails now rather than at the first save
        times = trainer_lib.Timetable(
            total_steps=total_steps,
            stats_period=stats_period or max(1, min(eval_period or 100, 100)),
            eval_periods={
                "TRAIN_EVAL": eval_period if train_eval_period is None else train_eval_period,
                "INFER_EVAL": eval_period if infer_eval_period is None else infer_eval_period,
            },
            save_period=save_cfg.period if save_cfg else None,
            save_steps=(save_cfg.checkpoint_steps or ()) if save_cfg else (),
            gc_period=gc_period,
        )

        def evaluate(step: int, modes: Sequence[str]) -> ActionStop | None:
            ended = None
            for mode in (mode for mode in modes if mode in evaluations):
                try:
                    metrics = evaluations[mode].evaluate(trainer, step, before_batch=stop.check)
                except trainer_lib.Interrupted:
                    log.info("the evaluation of step %d was interrupted; it is repeated when the run resumes", step)
                    continue
                ended = all_actions.run(mode, trainer.train_state, metrics) or ended
            if store.best is not None:
                store.retire(step)
                if leader and not stop:
                    store.best.expect()
            return ended

        # The run may have been interrupted during an evaluation at the checkpoint's step. Actions saw it after the
        # save, so their state in the checkpoint does not include it.
        modes = []
        if first_step > run.first_step:
            due = [mode for mode in times.evaluations_due(first_step) if mode in evaluations]
            modes = [mode for mode in due if all_actions.has(mode) or not evaluations[mode].done(first_step)]
        elif run_eval_before_training:
            modes = list(times.eval_periods)
        ended = evaluate(first_step, modes) if modes else None
        last_step = first_step
        reason: ActionStop | str | None = ended
        if reason is None and run.ended is not None and all_actions.same_as(run.actions):
            reason = f"{run.ended} (change or remove train.actions to continue)"
        if reason is not None or first_step == total_steps:
            log.info("nothing to train: %s", reason or f"the checkpoint is already at step {first_step}")
        else:
            with clock.apart("timing/train_iter_warmup"):
                batch = loader.peek()
            with clock.apart("timing/compilation_seconds"):
                log.info("compiled the train step in %.1f s", trainer.compile_train(batch))
                distributed.barrier("compiled")  # collectives time out if a process is late
            devices = partitioner.mesh.devices.flatten().tolist()
            cost = StepCost.of(model.module, batch, rows=batch_size, devices=devices)
            log.log(logging.DEBUG if cost.peak is None else logging.INFO, "%s", cost)
            lines = MetricLines(
                writer.write_scalars if writer is not None else lambda step, metrics: None,
                before=run.metrics,
                cost=cost,
                concurrent=concurrent_metrics and not all_actions.has("TRAIN"),
            )
            closing.callback(lines.close)

            def save(step: int, position: Mapping[str, Any], ended: ActionStop | None) -> None:
                if writer is not None:
                    writer.flush()
                if save_cfg is None:
                    return
                patience = 5 if stop else None
                content.require_same(patience)
                data = position_of_all(position, fingerprint if leader else None, patience)
                ending = None if ended is None else str(ended)
                now = RunState(run.first_step, data, lines.unfinished(step), all_actions.state(), ending)
                tree = save_cfg.tree_to_save(trainer.train_state.state_dict())
                store.save(step, tree, sidecars=files | now.sidecars())

            last_step, ended = trainer_lib.run_loop(
                trainer, loader, times, first_step=first_step, batch_size=batch_size, lines=lines, clock=clock,
                save=save, evaluate=evaluate, actions=all_actions, stop=stop, show_progress=leader,
                counted_from=0 if relative_steps is None else run.first_step,
            )  # fmt: skip
            lines.wait()
        store.wait()
        if stop:
            outcome = "nothing to save" if save_cfg else "nothing is saved without utils.SaveCheckpointConfig"
            if last_step in store.steps():
                outcome = f"saved {store.path(last_step)}. The same command resumes from there"
            raise trainer_lib.Stopped(stop.signum, f"stopped after step {last_step}; {outcome}.")
        if ended is not None and not ended.worth_saving:
            steps = store.steps()
            newest = store.path(steps[-1]) if steps else "none"
            raise UserError(f"{ended}. Steps after the last checkpoint ({newest}) were not saved.")
        if ended is not None:
            log.info("%s", ended)
        return last_step, trainer.train_state


# --- Helpers ----------------------------------------------------------------------------------------------------------


def _check(
    model_dir: str,
    total_steps: int | None,
    eval_steps: int | None,
    restore_cfg: RestoreCheckpointConfig | None,
    use_orbax: bool,
    on_changed_data: str,
) -> None:
    if not model_dir:
        raise UserError("MODEL_DIR is empty. Set the directory of the run: --gin.MODEL_DIR=runs/my_run.")
    check_at_least(0, "train.", total_steps=total_steps)
    if eval_steps is not None and eval_steps < 1:
        raise UserError(f"train.eval_steps is {eval_steps}: it must be at least 1, or None for every example.")
    if on_changed_data not in (choices := get_args(OnChangedData)):
        raise UserError(f"train.on_changed_data is {on_changed_data!r}: it must be one of {', '.join(choices)}.")
    if not use_orbax:
        log.warning(
            "use_orbax=False is ignored: checkpoints are written with Orbax. `t5x convert --to native` writes T5X's "
            "other format."
        )
    if restore_cfg is not None and restore_cfg.path:
        restore_cfg.single_path()
        if restore_cfg.dtype not in (None, "float32"):
            raise UserError(
                f"utils.RestoreCheckpointConfig.dtype is {restore_cfg.dtype!r}, but parameters are trained in float32."
            )


def _is_not_read(name: str) -> bool:
    """Return whether a run that resumes does not read this file or directory of MODEL_DIR."""
    return name.startswith(("checkpoint_", "events.out.tfevents.", "."))


def _store(
    model_dir: str, files_dir: str, save_cfg: SaveCheckpointConfig | None, upload_files: Callable[[], None]
) -> checkpoints.CheckpointStore:
    if save_cfg is None:
        return checkpoints.CheckpointStore(model_dir)
    best = None if save_cfg.best is None else checkpoints.Ranking(save_cfg.best, files_dir)
    return checkpoints.CheckpointStore(model_dir, keep=save_cfg.keep_newest, best=best, before_publishing=upload_files)


def _devices() -> str:
    device = jax.devices()[0]
    return f"{jax.device_count()} x {device.device_kind} ({device.platform}), JAX {jax.__version__}"


def _describe(model: BaseTransformerModel, layout: StateLayout) -> str:
    dtype = getattr(getattr(model.module, "config", None), "dtype", None)
    activations = "" if dtype is None else f", activations in {dtype}"
    return f"{type(model.module).__name__} with {layout.num_params:,} parameters in float32{activations}"
