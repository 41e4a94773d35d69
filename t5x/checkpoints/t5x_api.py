"""T5X's classes that save and restore a training state, over `CheckpointStore` and `transfer`."""

import base64
import dataclasses
import functools
import inspect
import json
import os
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from t5x._runtime.errors import UserError
from t5x._runtime.imports import import_extra
from t5x.checkpoints import paths, transfer, tree
from t5x.checkpoints.best import BestRule, Ranking
from t5x.checkpoints.formats import LazyArray, open_checkpoint
from t5x.checkpoints.manifest import read_file
from t5x.checkpoints.paths import open_files
from t5x.checkpoints.store import CheckpointStore
from t5x.checkpoints.transfer import RestoreRules


def load_t5x_checkpoint(
    path: str,
    step: int | None = None,
    state_transformation_fns: Sequence[Callable[..., Any]] = (),
    remap: bool = True,
    restore_dtype: Any = None,
    lazy_parameters: bool = False,
) -> dict[str, Any]:
    """Load a checkpoint without a model.

    Args:
      path: a checkpoint of any format that t5x reads, or a directory of them.
      step: which one of the directory; None is the newest.
      state_transformation_fns: functions `(state_dict, None) -> state_dict` to apply, in order.
      remap: no effect; every format is returned under the same names.
      restore_dtype: dtype of the parameters; None keeps the stored one.
      lazy_parameters: leave the arrays unread: `.get()` reads one.

    Returns:
      {"target": parameters, "state": {"step", "param_states"}} of NumPy arrays.
    """
    source = open_checkpoint(path if step is None else get_checkpoint_dir(path, step))
    arrays: dict[str, Any] = dict(source.arrays)
    if source.step is not None:
        arrays["state/step"] = LazyArray.from_array(np.asarray(source.step, np.int32))
    state = tree.nest(arrays)
    if restore_dtype is not None:
        state["target"] = _cast(state["target"], restore_dtype)
    for function in state_transformation_fns:
        state = function(state, None)
    return state if lazy_parameters else read_arrays(state)


def all_steps(checkpoints_dir: str) -> list[int]:
    """Return the steps of the checkpoints in a directory, ascending."""
    return CheckpointStore(checkpoints_dir).steps()


def latest_step(checkpoints_dir: str) -> int | None:
    """Return the newest step, or None if there is no checkpoint."""
    return max(all_steps(checkpoints_dir), default=None)


def all_dataset_checkpoint_steps(checkpoints_dir: str) -> list[int]:
    """Return the steps whose checkpoints have the position in the data."""

    def has_position(step: int) -> bool:
        return open_files(get_checkpoint_dir(checkpoints_dir, step)).exists(paths.DATASET_STATE)

    return [step for step in all_steps(checkpoints_dir) if has_position(step)]


def get_checkpoint_prefix(prefix: str = "checkpoint") -> str:
    return f"{prefix}_"


def get_checkpoint_dir(checkpoints_dir: str, step: int, step_format_fixed_length: int | None = None) -> str:
    """Return the path of a step's checkpoint; `step_format_fixed_length` pads the step with zeros."""
    return os.path.join(checkpoints_dir, get_checkpoint_prefix() + str(step).zfill(step_format_fixed_length or 0))


def get_step_from_checkpoint_dir(checkpoints_dir: str) -> tuple[str, int]:
    """Return the directory and the step of a path `directory/checkpoint_<step>`."""
    parent, name = os.path.split(checkpoints_dir.rstrip("/"))
    prefix = get_checkpoint_prefix()
    if not name.startswith(prefix) or not name.removeprefix(prefix).isdigit():
        raise ValueError(f"{checkpoints_dir} does not end with {prefix}<step>")
    return parent, int(name.removeprefix(prefix))


def find_checkpoint(path: str, step: int | None = None) -> str:
    """Return the path of a checkpoint: of this step in a directory, its newest one, or the path itself.

    For T5X's native format, this is the path of the file `checkpoint`; for others, of the directory.
    """
    if os.path.isfile(path):
        return path
    if step is not None:
        path = get_checkpoint_dir(path, step)
    elif (newest := latest_step(path)) is not None:
        path = get_checkpoint_dir(path, newest)
    file = os.path.join(path, "checkpoint")
    if os.path.isfile(file):
        return file
    if not os.path.exists(path) and not os.path.exists(f"{path}.index"):
        raise ValueError(f"there is no checkpoint at {path}")
    return path


def populate_metrics_for_steps(checkpoints_dir: str, metric_name: str, steps: Collection[int]) -> dict[int, float]:
    """Return {step: value} of a metric such as `training_eval/<task>/accuracy`, for those of the steps that have it."""
    values = Ranking(BestRule(metric_name), checkpoints_dir).values() or {}
    return {step: value for step, value in values.items() if step in set(steps)}


def get_local_data(x: Any) -> Any:
    """Return the data of an array that this process holds, on the host."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return x.addressable_data(0)
    return jax.device_get(x)


def fake_param_info(maybe_tspec: Any) -> Any:
    """Return the shape and dtype of a stored array's description; None for anything else."""
    if isinstance(maybe_tspec, Mapping) and {"metadata", "dtype"} <= maybe_tspec.keys():
        return jax.ShapeDtypeStruct(tuple(maybe_tspec["metadata"]["shape"]), np.dtype(maybe_tspec["dtype"]))
    if hasattr(maybe_tspec, "shape") and hasattr(maybe_tspec, "dtype"):
        return tree.as_struct(maybe_tspec)
    return None


def register_ts_spec_for_serialization() -> None:
    """Do nothing: specs are read without Flax."""


def transform_to_save(state: Any, functions: Sequence[Callable[..., Any]]) -> Any:
    """Return a state after the `state_transformation_fns` of a save, which may also return parameter infos."""
    for function in functions:
        state = function(state, jax.tree.map(tree.as_struct, state))
        state = state[0] if isinstance(state, tuple) else state
        if not isinstance(state, Mapping):
            raise UserError(
                f"A function of state_transformation_fns returned {type(state).__name__}, not a dictionary."
            )
    return state


def read_arrays(state: Any) -> Any:
    """Return a state with the arrays of its LazyArrays."""
    return jax.tree.map(lambda x: x.get() if isinstance(x, LazyArray) else x, state)


RestoreStateTransformationFn = SaveStateTransformationFn = Callable[..., Any]
CheckpointerConstructor = Callable[..., "Checkpointer"]


@dataclasses.dataclass(eq=False, repr=False)
class Checkpointer:
    """Saves and restores a training state.

    In gin files, `utils.SaveCheckpointConfig.checkpointer_cls` may name this class; runs save in the same way.

    Args:
      train_state: a state of the same structure, of arrays or shapes.
      partitioner: the mesh, see `t5x.partitioning`.
      checkpoints_dir: the directory of `checkpoint_<step>`.
      dataset_iterator: an iterator of tf.data, or an object with `state()` and `restore(state)`; its position is saved
        and restored as well.
      keep: number of checkpoints to keep; None keeps all.
      save_dtype: dtype of the stored parameters.
      restore_dtype: dtype of restored parameters; None keeps the stored one.
      keep_dataset_checkpoints: accepted for compatibility with T5X; every checkpoint keeps its data position.
    """

    train_state: Any = None
    partitioner: Any = None
    checkpoints_dir: str | None = None
    dataset_iterator: Any = None
    _: dataclasses.KW_ONLY
    keep: int | None = None
    save_dtype: DTypeLike = jnp.float32
    restore_dtype: DTypeLike | None = None
    keep_dataset_checkpoints: int | None = None

    def __post_init__(self):
        # T5X's names, which subclasses use.
        self._train_state, self._partitioner, self._save_dtype = self.train_state, self.partitioner, self.save_dtype
        self._dataset_iterator = None if self.dataset_iterator is None else _with_state(self.dataset_iterator)

    @property
    def _directory(self) -> str:
        if self.checkpoints_dir is None:
            raise UserError(f"{type(self).__name__} has no directory. Pass that of its checkpoints.")
        return self.checkpoints_dir

    @property
    def _store(self) -> CheckpointStore:
        return CheckpointStore(self._directory, keep=self.keep)

    def all_steps(self) -> list[int]:
        """Return the steps of the checkpoints, ascending."""
        return self._store.steps()

    def all_dataset_checkpoint_steps(self) -> list[int]:
        return all_dataset_checkpoint_steps(self._directory)

    def latest_step(self) -> int | None:
        """Return the newest step, or None."""
        return max(self.all_steps(), default=None)

    def save(
        self, train_state: Any, state_transformation_fns: Sequence[Callable[..., Any]] = (), *, concurrent_gb: int = 128
    ) -> bool | None:
        """Save a state as `checkpoint_<step>`; return when it is complete. A step that exists is skipped."""
        state = read_arrays(train_state.state_dict())
        state = transform_to_save(state, state_transformation_fns)
        state["target"] = _cast(state["target"], self._save_dtype)
        sidecars = {}
        if self._dataset_iterator is not None:
            sidecars = {paths.DATASET_STATE: json.dumps(self._dataset_iterator.state()).encode()}
        with self._store as store:
            store.save(int(jax.device_get(state["state"]["step"])), state, sidecars=sidecars)
        return None

    def restore(
        self,
        step: int | None = None,
        path: str | None = None,
        state_transformation_fns: Sequence[Callable[..., Any]] = (),
        fallback_state: Any = None,
        lazy_parameters: bool = False,
    ) -> Any:
        """Return the state of a checkpoint, on its devices.

        Args:
          step: which checkpoint of the directory; None is the newest.
          path: a checkpoint elsewhere, of any format.
          state_transformation_fns: functions `(state_dict, target_state_dict, *, is_resuming) -> state_dict`.
          fallback_state: a `state_dict` with the arrays that the checkpoint lacks.
          lazy_parameters: return LazyArrays, whose `get` returns the array; it has been read before.
        """
        if path is None:
            step = self.latest_step() if step is None else step
            if step is None:
                raise ValueError(f"there is no checkpoint in {self.checkpoints_dir}")
            path = str(self._store.path(step))
        elif step is not None:
            path = get_checkpoint_dir(path, step)
        if self._dataset_iterator is not None:
            self._dataset_iterator.restore(json.loads(read_file(path, paths.DATASET_STATE)))
        rules = RestoreRules(state_transformation_fns=tuple(state_transformation_fns))
        state = self._restore(path, rules, fallback_state)
        return jax.tree.map(lambda x: LazyArray(x.shape, x.dtype, lambda: x), state) if lazy_parameters else state

    def _restore(self, path: str, rules: RestoreRules, fallback_state: Any = None) -> Any:
        shapes, specs = self._train_state.replace(flax_mutables={}), self._partitioner.get_mesh_axes(self._train_state)
        mesh_axes = specs.replace(flax_mutables={}).state_dict()

        def place(x: Any, spec: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._partitioner.sharding_of(spec))

        source, abstract = open_checkpoint(path), jax.tree.map(place, shapes.state_dict(), mesh_axes)
        if self.restore_dtype is not None:
            abstract["target"] = _cast(abstract["target"], self.restore_dtype)
        else:
            stored = {name: array.dtype for name, array in source.arrays.items()}
            flat = tree.flatten({"target": abstract["target"]})
            as_stored = {name: x.update(dtype=stored.get(name, x.dtype)) for name, x in flat.items()}
            abstract["target"] = tree.nest(as_stored)["target"]
        initial = None
        if fallback_state is not None:
            flat = tree.flatten(fallback_state)

            def initial(names: Collection[str]) -> dict[str, jax.Array]:
                return {name: jnp.asarray(flat[name]) for name in names if name in flat}

            rules = RestoreRules(fallback_to_scratch=True, state_transformation_fns=rules.state_transformation_fns)
        axes = jax.tree.map(lambda _: None, abstract)
        return self._train_state.restore_state(transfer.restore(source, abstract, axes, rules=rules, initial=initial))

    def restore_from_tf_checkpoint(self, path_or_dir: str, strict: bool = True, translator: Any = None) -> Any:
        """Return the state of a Mesh TensorFlow checkpoint; `strict=False` ignores variables that the model lacks."""
        if translator is not None:
            raise UserError("translator is not supported: rename variables with state_transformation_fns of restore.")
        return self._restore(path_or_dir, RestoreRules(strict=strict))

    def convert_from_tf_checkpoint(
        self,
        path_or_dir: str,
        *,
        state_transformation_fns: Sequence[Callable[..., Any]] = (),
        concurrent_gb: int = 16,
        translator: Any = None,
    ) -> None:
        """Save a Mesh TensorFlow checkpoint as one of ours."""
        self.save(self.restore_from_tf_checkpoint(path_or_dir, translator=translator), state_transformation_fns)


@dataclasses.dataclass(eq=False, repr=False)
class SaveBestCheckpointer(Checkpointer):
    """A `Checkpointer` that keeps the best `keep` checkpoints by a metric, and the newest.

        utils.SaveCheckpointConfig.checkpointer_cls = @checkpoints.SaveBestCheckpointer

    Args:
      metric_name_to_monitor: `train/<metric>`, `training_eval/<task>/<metric>` or `inference_eval/<task>/<metric>`.
      metric_mode: `max` or `min`.
      keep_checkpoints_without_metrics: whether to keep checkpoints whose step has no value.
      force_keep_period: also keep checkpoints whose step is a multiple of this.
      train_state, …: see `Checkpointer`.
    """

    _: dataclasses.KW_ONLY
    metric_name_to_monitor: str | None = "train/accuracy"
    metric_mode: Literal["max", "min"] = "max"
    keep_checkpoints_without_metrics: bool = True
    force_keep_period: int | None = None

    @property
    def _store(self) -> CheckpointStore:
        if (rule := self.rule(self.keep)) is None:
            return super()._store
        newest = None if self.keep is None else 1
        return CheckpointStore(self._directory, keep=newest, best=Ranking(rule, self._directory))

    @classmethod
    def of(cls, maker: Any) -> "SaveBestCheckpointer | None":
        """Return `maker()` if it makes an instance of this class, via gin or functools.partial; else None."""
        inner = maker
        while inner is not None and not inspect.isclass(inner):
            inner = inner.func if isinstance(inner, functools.partial) else getattr(inner, "__wrapped__", None)
        return maker() if inner is not None and issubclass(inner, cls) else None

    def rule(self, keep: int | None) -> BestRule | None:
        """Return which checkpoints to keep besides the newest; `keep` is the number of best ones."""
        name, mode = self.metric_name_to_monitor, self.metric_mode
        if name is None:
            return None
        return BestRule(name, mode, keep, self.keep_checkpoints_without_metrics, self.force_keep_period)


class OrbaxCheckpointManagerInterface(SaveBestCheckpointer):
    """T5X's manager of the checkpoints of a run: a checkpointer that also knows when to save.

    Args:
      directory: the directory of `checkpoint_<step>`.
      period: steps between checkpoints; None saves whenever it is asked to.
      checkpoint_steps: additional steps to save at.
      metric_name_to_monitor, metric_mode, …: as in `SaveBestCheckpointer`; None keeps the newest checkpoints.
      train_state, …: see `Checkpointer`.
    """

    def __init__(
        self,
        directory: str | None = None,
        train_state: Any = None,
        partitioner: Any = None,
        dataset_iterator: Any = None,
        save_dtype: DTypeLike | None = None,
        restore_dtype: DTypeLike | None = None,
        keep: int | None = None,
        period: int | None = 1,
        checkpoint_steps: Sequence[int] | None = None,
        keep_dataset_checkpoints: int | None = None,
        force_keep_period: int | None = None,
        metric_name_to_monitor: str | None = None,
        metric_mode: Literal["max", "min"] = "max",
        keep_checkpoints_without_metrics: bool = True,
    ):
        self._period, self._steps = period, checkpoint_steps or ()
        super().__init__(
            train_state, partitioner, directory, dataset_iterator, keep=keep, restore_dtype=restore_dtype,
            save_dtype=jnp.float32 if save_dtype is None else save_dtype, metric_mode=metric_mode,
            metric_name_to_monitor=metric_name_to_monitor, force_keep_period=force_keep_period,
            keep_checkpoints_without_metrics=keep_checkpoints_without_metrics,
        )  # fmt: skip

    def all_steps(self, read: bool = False) -> list[int]:
        return super().all_steps()

    def should_save(self, step: int) -> bool:
        """Return whether a step is due."""
        return step in self._steps or not self._period or step % self._period == 0

    def save(
        self,
        train_state: Any,
        state_transformation_fns: Sequence[Callable[..., Any]] = (),
        force: bool = False,
        *,
        concurrent_gb: int = 128,
    ) -> bool:
        """Save a state if its step is due, or with `force`; return whether it was."""
        if not force and not self.should_save(int(jax.device_get(train_state.step))):
            return False
        super().save(train_state, state_transformation_fns)
        return True

    def wait_until_finished(self) -> None:
        """Return at once: `save` waits."""

    def close(self) -> None:
        """Do nothing: no file stays open."""


@dataclasses.dataclass
class DatasetArgs:
    """The argument of `DatasetCheckpointHandler`: see `dataset_iterator` of `Checkpointer`."""

    item: Any = None


class DatasetCheckpointHandler:
    """Writes the position in the data to a file of a checkpoint, with the methods of Orbax's handlers.

    Args:
      checkpoint_filename: name of the file.
      should_write_dataset_ckpt: whether this process writes it.
    """

    def __init__(self, checkpoint_filename: str, should_write_dataset_ckpt: bool):
        self._name, self._writes = checkpoint_filename, should_write_dataset_ckpt

    def save(self, directory: Any, item: Any = None, args: DatasetArgs | None = None) -> None:
        """Write the position of `item`."""
        item = item if args is None else args.item
        if self._writes and item is not None:
            with open(os.path.join(directory, self._name), "w") as file:
                json.dump(_with_state(item).state(), file)

    def restore(self, directory: Any, item: Any = None, args: DatasetArgs | None = None) -> Any:
        """Move `item` to the stored position and return it."""
        item = item if args is None else args.item
        with open(os.path.join(directory, self._name)) as file:
            _with_state(item).restore(json.load(file))
        return item

    def metadata(self, directory: Any) -> None:
        """Return None: the file has no description."""

    def finalize(self, directory: Any) -> None:
        """Do nothing: the file is complete."""

    def close(self) -> None:
        """Do nothing: no file stays open."""

    @classmethod
    def typestr(cls) -> str:
        return f"{cls.__module__}.{cls.__qualname__}"


class CheckpointManagerConstructor:
    """Accepted because T5X's gin files name it; runs save by themselves."""


class _TfDataIterator:
    """The position of a tf.data iterator, as the files of a TensorFlow checkpoint: {name: Base64}."""

    def __init__(self, iterator: Any):
        needs = "A dataset_iterator without state() must be one of tf.data: `pip install tensorflow`"
        self._checkpoint = import_extra("tensorflow", needs).train.Checkpoint(ds=iterator)

    def state(self) -> dict[str, str]:
        with tempfile.TemporaryDirectory() as directory:
            self._checkpoint.write(os.path.join(directory, "ds"))
            return {file.name: base64.b64encode(file.read_bytes()).decode() for file in Path(directory).iterdir()}

    def restore(self, state: dict[str, str]) -> None:
        with tempfile.TemporaryDirectory() as directory:
            for name, content in state.items():
                Path(directory, os.path.basename(name)).write_bytes(base64.b64decode(content))
            self._checkpoint.read(os.path.join(directory, "ds")).assert_consumed()


def _with_state(iterator: Any) -> Any:
    return iterator if hasattr(iterator, "state") else _TfDataIterator(iterator)


def _cast(params: Any, dtype: Any) -> Any:
    """Return parameters with their floats in another dtype."""

    def cast(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype == dtype:
            return x
        return x.update(dtype=jnp.dtype(dtype)) if isinstance(x, jax.ShapeDtypeStruct) else x.astype(dtype)

    return jax.tree.map(cast, params)
