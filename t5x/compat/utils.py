"""T5X's `utils` for training scripts of users: datasets, checkpoints and steps, over our modules."""

# ruff: noqa: F401

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import flax.core
import flax.traverse_util
import gin
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.partitioning import AxisMetadata

from t5x import checkpoints
from t5x._runtime.errors import UserError
from t5x.checkpoints import get_local_data
from t5x.checkpoints.best import BEST_FILE
from t5x.checkpoints.config import CheckpointConfig, RestoreCheckpointConfig, SaveCheckpointConfig
from t5x.checkpoints.tree import parameter_table
from t5x.compat import checkpoint_utils
from t5x.configuration.gin_utils import run_main
from t5x.data import FeatureConverter
from t5x.data.dataset_config import DatasetConfig, import_task_module
from t5x.data.vocabularies import Vocabulary
from t5x.inference.t5x_api import get_infer_fn
from t5x.optimizers.schedules import create_learning_rate_scheduler
from t5x.partitioning import distributed
from t5x.trainer.checks import verify_matching_vocabs
from t5x.trainer.datasets import ExternalBatches, ShardInfo, get_dataset, get_training_eval_datasets, numpy_batches
from t5x.trainer.restore import open_for_all, restore_params, restore_state
from t5x.trainer.state_layout import StateLayout

log = logging.getLogger(__name__)

# --- Data -------------------------------------------------------------------------------------------------------------


def get_dataset_inner(
    cfg: DatasetConfig,
    shard_info: ShardInfo,
    feature_converter_cls: type[FeatureConverter],
    seed: int | None = None,
    num_epochs: int | None = None,
) -> Any:
    """Return the batches of a training run; see `get_dataset`."""
    if seed is not None:
        cfg.seed = seed
    return get_dataset(cfg, shard_info.index, shard_info.num_shards, feature_converter_cls, num_epochs)


def get_vocabulary(cfg: DatasetConfig) -> tuple[Vocabulary, Vocabulary]:
    """Return the vocabularies of the task's inputs and targets; of a task without inputs, twice that of the targets."""
    features = cfg.mixture_or_task().output_features
    targets = features["targets"].vocabulary
    return features["inputs"].vocabulary if "inputs" in features else targets, targets


def get_zeros_batch_like_spec(batch_spec: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Return zeros with the shapes and dtypes of a batch."""
    return {name: jnp.zeros(spec.shape, spec.dtype) for name, spec in batch_spec.items()}


def get_zeros_batch_like_dataset(dataset: Any, batch_size: int | None = None) -> dict[str, jax.Array]:
    """Return zeros like the batches of a dataset; `batch_size` replaces the number of rows."""
    if hasattr(dataset, "element_spec"):
        spec = {name: jax.ShapeDtypeStruct(x.shape, x.dtype.as_numpy_dtype) for name, x in dataset.element_spec.items()}
    else:
        batch = dataset.peek() if hasattr(dataset, "peek") else next(iter(dataset))
        spec = {name: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype) for name, x in batch.items()}
    if batch_size is not None:
        spec = {name: jax.ShapeDtypeStruct((batch_size, *x.shape[1:]), x.dtype) for name, x in spec.items()}
    return get_zeros_batch_like_spec(spec)


class ShardedDatasetIterator(ExternalBatches):
    """Batches on the devices of a mesh.

    Args:
      iterator: yields the rows of this process.
      partitioner: the mesh.
      global_shapes: ignored: the shapes of the global batch follow from the rows.
    """

    def __init__(self, iterator: Iterator[Mapping[str, Any]], partitioner: Any, global_shapes: Any):
        super().__init__(iterator)
        self._partitioner = partitioner

    def __next__(self) -> dict[str, Any]:
        return self._partitioner.to_devices(super().__next__())

    def get_next(self) -> dict[str, jax.Array]:
        return next(self)

    def reset(self) -> None:
        """Start again; for an iterator that can be iterated several times."""
        self._iterator, self._taken = numpy_batches(self._batches), 0

    def save(self, filename: str) -> None:
        """Write the position to a file."""
        Path(filename).write_text(str(self._taken))

    def load(self, filename: str) -> None:
        """Continue at the position in a file."""
        self.restore({"own": True, "batches": int(Path(filename).read_text())})


def prepare_train_iter(train_iter: Any, *, partitioner: Any, checkpoint_cfg: CheckpointConfig, data_layout: Any) -> Any:
    """Return the batches of a training run on the devices of a mesh."""
    batches = train_iter.as_numpy_iterator() if hasattr(train_iter, "as_numpy_iterator") else train_iter
    return ShardedDatasetIterator(batches, partitioner, None)


def import_module(module: str) -> ModuleType:
    """Import a module by its name, or a .py file; it may register tasks."""
    return import_task_module(module)


def round_vocab_size_to_multiple(vocabulary: Vocabulary, divisor: int = 128) -> int:
    """Return the size of a vocabulary, rounded up to a multiple of `divisor`."""
    return -(-vocabulary.vocab_size // divisor) * divisor


# --- The model --------------------------------------------------------------------------------------------------------


def flatten_dict_string_keys(x: Mapping[str, Any]) -> dict[str, Any]:
    """Return {path with slashes: leaf} of nested dictionaries; empty ones are kept."""
    return flax.traverse_util.flatten_dict(_unfrozen(x), keep_empty_nodes=True, sep="/")


def _unfrozen(x: Mapping[str, Any]) -> dict[str, Any]:
    return flax.core.unfreeze(x if isinstance(x, flax.core.FrozenDict) else dict(x))


def override_params_axes_names(
    model_variables: Mapping[str, Any], params_axes_names_override: Sequence[tuple[str, Sequence[str]]] = ()
) -> dict[str, Any]:
    """Return a network's variables with other logical axes.

    Args:
      params_axes_names_override: pairs of a regular expression that matches the whole path of a parameter, and its new
        axes. The first match wins.
    """
    variables = _unfrozen(model_variables)
    if "params_axes" not in variables:
        raise ValueError("The variables have no collection `params_axes`, so its names cannot be overridden.")
    flat = flax.traverse_util.flatten_dict(variables["params_axes"])
    for path, param in flax.traverse_util.flatten_dict(variables["params"]).items():
        name = "/".join(path)
        names = next((axes for pattern, axes in params_axes_names_override if re.fullmatch(pattern, name)), None)
        if names is None:
            continue
        if len(names) != param.ndim:
            raise ValueError(
                f"params_axes_names_override: {name} has {param.ndim} dimensions, but the axes are {tuple(names)}."
            )
        flat[*path[:-1], f"{path[-1]}_axes"] = AxisMetadata(names=tuple(names))
    return variables | {"params_axes": flax.traverse_util.unflatten_dict(flat)}


def log_model_info(log_file: str | None, full_train_state: Any, partitioner: Any) -> None:
    """Log the number of parameters, and write each with its shape and PartitionSpec to `log_file`."""
    count = sum(x.size for x in jax.tree.leaves(full_train_state.params))
    log.info("%d parameters", count)
    if log_file and jax.process_index() == 0:
        axes, specs = full_train_state.logical_axes(), partitioner.get_mesh_axes(full_train_state)
        with open(log_file, "w") as file:
            file.write("\n".join(parameter_table(full_train_state.params, axes, specs.params)) + "\n")


# --- Checkpoints ------------------------------------------------------------------------------------------------------


def get_first_valid_restore_config_and_paths(
    restore_cfgs: Sequence[RestoreCheckpointConfig],
) -> tuple[RestoreCheckpointConfig | None, list[str]]:
    """Return the first configuration that names an existing checkpoint, and the paths of its checkpoints."""
    for cfg in restore_cfgs:
        paths = [cfg.path] if isinstance(cfg.path, str) else list(cfg.path or ())
        paths = [path for path in paths if os.path.exists(path) or os.path.exists(f"{path}.index") or "://" in path]
        if cfg.mode == "all":
            steps = {path: checkpoints.all_steps(path) for path in paths}
            paths = [checkpoints.get_checkpoint_dir(path, step) for path in paths for step in steps[path]]
        elif cfg.mode == "latest":
            newest = [(path, checkpoints.latest_step(path)) for path in paths]
            paths = [path if step is None else checkpoints.get_checkpoint_dir(path, step) for path, step in newest]
        if paths:
            return cfg, paths
    return None, []


def get_fallback_state(
    restore_cfg: RestoreCheckpointConfig | None, init_fn: Callable[[jax.Array], Any], init_rng: jax.Array | None
) -> dict[str, Any] | None:
    """Return initial values for what a checkpoint lacks, if the configuration asks for them; else None."""
    if restore_cfg is None or not restore_cfg.fallback_to_scratch:
        return None
    if init_rng is None:
        raise ValueError("fallback_to_scratch needs a random key: pass init_rng")
    return init_fn(init_rng).state_dict()


def restore(
    checkpoint_manager: Any, paths: Sequence[str], restore_cfg: RestoreCheckpointConfig, fallback_state: Any = None
) -> Any:
    """Return the state of each path, or of the only one."""
    functions = restore_cfg.rules.state_transformation_fns
    states = [
        checkpoint_manager.restore(path=path, state_transformation_fns=functions, fallback_state=fallback_state)
        for path in paths
    ]
    return states[0] if len(states) == 1 else states


class LegacyCheckpointer:
    """Saves with one `Checkpointer` and restores with another."""

    def __init__(self, *, save_checkpointer: Any = None, restore_checkpointer: Any, strict: bool = False):
        self.save_checkpointer, self.restore_checkpointer = save_checkpointer, restore_checkpointer

    def save(self, path: str, item: Any, state_transformation_fns: Sequence[Any] = (), **_: Any) -> None:
        """Save a training state; its step decides the name."""
        if self.save_checkpointer is not None:
            self.save_checkpointer.save(item, state_transformation_fns)

    def restore(
        self,
        path: str,
        item: Any = None,
        state_transformation_fns: Sequence[Any] = (),
        fallback_state: Any = None,
        lazy_parameters: bool = False,
    ) -> Any:
        """Return the state of a checkpoint of any format."""
        return self.restore_checkpointer.restore(None, path, state_transformation_fns, fallback_state, lazy_parameters)

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def structure(self, path: str) -> Any:
        """Return the tree of a checkpoint, unread."""
        return checkpoints.load_t5x_checkpoint(path, lazy_parameters=True)

    metadata = structure

    def get_temporary_path(self, path: str) -> str:
        return f"{path}.tmp"

    async def create_temporary_path(self, path: str) -> str:
        return self.get_temporary_path(path)

    def synchronize_next_awaitable_signal_operation_id(self) -> None:
        """Do nothing: `save` waits."""


class LegacyCheckpointManager(checkpoints.OrbaxCheckpointManagerInterface):
    """Saves and restores the checkpoints of a run, as its configurations say.

    Args:
      save_cfg: None saves nothing.
      restore_cfg: rules for restoring.
      train_state_shape: a training state of shapes.
      partitioner: the mesh.
      ds_iter: see `checkpoints.Checkpointer`.
      model_dir: the directory of `checkpoint_<step>`.
    """

    def __init__(
        self,
        *,
        save_cfg: SaveCheckpointConfig | None = None,
        restore_cfg: RestoreCheckpointConfig | None = None,
        train_state_shape: Any,
        partitioner: Any,
        ds_iter: Any = None,
        model_dir: str | None = None,
    ):
        self._save_cfg, self._model_dir = save_cfg, model_dir
        options = _manager_options(save_cfg, restore_cfg)
        super().__init__(model_dir, train_state_shape, partitioner, ds_iter, **options)

    @property
    def _directory(self) -> str:
        if self._model_dir is None:
            raise UserError("LegacyCheckpointManager has no directory: pass model_dir.")
        return self._model_dir

    def best_step(self) -> int | None:
        """Return the step that MODEL_DIR/best.json names, or None."""
        path = Path(self._directory, BEST_FILE)
        return json.loads(path.read_text())["step"] if path.exists() else None

    def should_save(self, step: int) -> bool:
        """Return whether a step is due."""
        return self._save_cfg is not None and super().should_save(step)

    def save(
        self, train_state: Any, state_transformation_fns: Sequence[Any] = (), force: bool = True, **_: Any
    ) -> bool:
        """Save a state; return whether the run saves at all."""
        cfg = self._save_cfg
        return cfg is not None and super().save(
            train_state, state_transformation_fns or cfg.state_transformation_fns, force=True
        )

    def restore(  # type: ignore[override]  # T5X's signature
        self,
        paths: Sequence[str] | str | None = None,
        restore_cfg: RestoreCheckpointConfig | None = None,
        fallback_state: Any = None,
        **options: Any,
    ) -> Any:
        """Return the state of each path, or of the only one."""
        if paths is None or restore_cfg is None:
            step = paths if isinstance(paths, int) else None
            return super().restore(step=step, fallback_state=fallback_state, **options)
        return restore(super(), [paths] if isinstance(paths, str) else paths, restore_cfg, fallback_state)

    def delete(self, step: int) -> None:
        """Remove a checkpoint that is not pinned."""
        checkpoint_utils.remove_checkpoint_dir(checkpoints.get_checkpoint_dir(self._directory, step))

    def metadata(self, step: int | None = None) -> Any:
        """Return the tree of a checkpoint, unread."""
        return checkpoints.load_t5x_checkpoint(self._directory, step, lazy_parameters=True)

    item_metadata = metadata

    def metrics(self, step: int) -> None:
        """Return None: the metrics of a run are in its own files."""

    def is_saving_in_progress(self) -> bool:
        return False

    def reached_preemption(self, step: int) -> bool:
        return False

    def check_for_errors(self) -> None:
        """Do nothing: `save` raises its errors."""

    def reload(self) -> None:
        """Do nothing: directories are read at every call."""


def _manager_options(
    save_cfg: SaveCheckpointConfig | None, restore_cfg: RestoreCheckpointConfig | None
) -> dict[str, Any]:
    options = {"restore_dtype": None if restore_cfg is None else restore_cfg.dtype}
    if save_cfg is None:
        return options | {"period": None}
    saving = {name: getattr(save_cfg, name) for name in ("keep", "period", "checkpoint_steps")}
    return options | saving | {"save_dtype": save_cfg.dtype}


def create_orbax_checkpoint_manager(
    *,
    save_cfg: SaveCheckpointConfig | None = None,
    restore_cfg: RestoreCheckpointConfig | None = None,
    train_state: Any,
    partitioner: Any,
    ds_iter: Any = None,
    model_dir: str | None = None,
) -> checkpoints.OrbaxCheckpointManagerInterface:
    """Return a manager of the checkpoints in `model_dir`."""
    options = _manager_options(save_cfg, restore_cfg)
    return checkpoints.OrbaxCheckpointManagerInterface(model_dir, train_state, partitioner, ds_iter, **options)


def create_checkpoint_manager_and_restore(
    train_state_initializer: "TrainStateInitializer",
    partitioner: Any,
    restore_checkpoint_cfg: RestoreCheckpointConfig,
    restore_path: str | None,
    fallback_init_rng: jax.Array | None,
    save_checkpoint_cfg: SaveCheckpointConfig | None = None,
    model_dir: str | None = None,
    ds_iter: Any = None,
    use_orbax: bool = True,
) -> tuple[Any, Any]:
    """Return the state of a checkpoint, and a manager of the checkpoints in `model_dir`."""
    manager = LegacyCheckpointManager(
        save_cfg=save_checkpoint_cfg, restore_cfg=restore_checkpoint_cfg, partitioner=partitioner, ds_iter=ds_iter,
        train_state_shape=train_state_initializer.global_train_state_shape, model_dir=model_dir,
    )  # fmt: skip
    state = None
    if restore_path is not None:
        state = train_state_initializer.restored(restore_path, restore_checkpoint_cfg, fallback_init_rng)
    return state, manager


class TrainStateInitializer(StateLayout):
    """T5X's way to a training state: from a checkpoint, or from scratch. See `StateLayout` for the arguments."""

    def from_scratch(self, init_rng: jax.Array) -> Any:
        """Return fresh parameters and optimizer state."""
        return self.init(init_rng)

    def restored(self, path: str, cfg: RestoreCheckpointConfig, init_rng: jax.Array | None = None) -> Any:
        """Return the state of a checkpoint of any format, by the rules of its configuration."""
        model: Any = self.model  # None for an init_fn that is not a method of a model
        source, rng = open_for_all(path), jax.random.key(0) if init_rng is None else init_rng
        if self._optimizer_def is not None:
            return restore_state(source, cfg, model, self, rng)
        return self.state(source.step or 0, restore_params(source, model, self, cfg), {}, {})

    def from_checkpoints(
        self, restore_cfgs: Sequence[RestoreCheckpointConfig], ds_iter: Any = None, init_rng: jax.Array | None = None
    ) -> Iterator[tuple[Any, str]]:
        """Yield (state, path) of every checkpoint of the first configuration that has one."""
        cfg, paths = get_first_valid_restore_config_and_paths(restore_cfgs)
        if cfg is not None:
            for path in paths:
                yield self.restored(path, cfg, init_rng), path

    def from_checkpoint(
        self, ckpt_cfgs: Sequence[RestoreCheckpointConfig], *, ds_iter: Any = None, init_rng: jax.Array | None = None
    ) -> Any:
        """Return the state of the only checkpoint; None if there is none."""
        states = [state for state, _ in self.from_checkpoints(ckpt_cfgs, ds_iter, init_rng)]
        if len(states) > 1:
            raise ValueError(f"{len(states)} checkpoints match; use from_checkpoints")
        return states[0] if states else None

    def from_checkpoint_or_scratch(
        self, ckpt_cfgs: Sequence[RestoreCheckpointConfig], *, init_rng: jax.Array, ds_iter: Any = None
    ) -> Any:
        """Return the state of the only checkpoint, or a fresh one if there is none."""
        state = self.from_checkpoint(ckpt_cfgs, ds_iter=ds_iter, init_rng=init_rng)
        return self.from_scratch(init_rng) if state is None else state


# --- Steps and processes ----------------------------------------------------------------------------------------------


def find_first_checkpoint_step(
    checkpoint_steps_index: int, checkpoint_steps: Sequence[int], first_step: int, host_step: int
) -> int:
    """Return the index of the first of `checkpoint_steps` that is still ahead."""
    while checkpoint_steps_index < len(checkpoint_steps) and host_step >= checkpoint_steps[checkpoint_steps_index]:
        checkpoint_steps_index += 1
    return checkpoint_steps_index


def find_next_checkpoint_step(
    checkpoint_steps_index: int,
    inner_num_steps: int,
    is_checkpoint_step: bool,
    host_step: int,
    checkpoint_steps: Sequence[int],
    epoch_end_step: int,
    checkpoint_period: int,
    first_step: int,
) -> tuple[int, bool, int]:
    """Return (steps to take now, whether to save then, the next index), so that steps stop at a checkpoint step."""
    end = host_step + inner_num_steps
    if checkpoint_steps_index < len(checkpoint_steps) and checkpoint_steps[checkpoint_steps_index] <= end:
        inner_num_steps = checkpoint_steps[checkpoint_steps_index] - host_step
        return inner_num_steps, True, checkpoint_steps_index + 1
    is_due = is_checkpoint_step or (end - first_step) % checkpoint_period == 0 or end == epoch_end_step
    return inner_num_steps, is_due, checkpoint_steps_index


def multihost_assert_equal(input_tree: Any, fail_message: str = "") -> None:
    """Raise an error in every process if they do not have the same values."""
    values = jax.tree.map(lambda x: np.asarray(x).tolist(), input_tree)
    by_process = distributed.exchange("multihost_assert_equal", values)
    if any(value != by_process[0] for value in by_process):
        raise UserError(f"The processes have different values. {fail_message}".strip())


def sync_global_devices(name: str) -> None:
    """Wait until all processes are here."""
    distributed.barrier(name)


def set_hardware_rng_ops() -> None:
    """Use the device's fast random generator; its values depend on the mesh and the compiler."""
    jax.config.update("jax_default_prng_impl", "unsafe_rbg")


# T5X's names in annotations.
EvaluatorConstructor = GetDatasetCallable = GetEvalDatasetCallable = InferFnCallable = Callable[..., Any]
InferStepWithRngCallable = InferStepWithoutRngCallable = InitFnCallable = LearningRateCallable = Callable[..., Any]

# T5X's gin files may use these names without importing their module.
_NAMED = ("CheckpointManagerConstructor", "OrbaxCheckpointManagerInterface", "SaveBestCheckpointer")
for _name in _NAMED:
    gin.external_configurable(getattr(checkpoints, _name), module="t5x.checkpoints")
