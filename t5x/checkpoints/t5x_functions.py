"""T5X's functions for checkpoints of a directory, over our readers."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t5x.checkpoints import paths, tree
from t5x.checkpoints.best import BestRule, Ranking
from t5x.checkpoints.formats import LazyArray, open_checkpoint
from t5x.checkpoints.paths import open_files
from t5x.checkpoints.store import CheckpointStore
from t5x.errors import UserError

_STEP = "state/step"


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
        arrays[_STEP] = LazyArray((), np.dtype(np.int32), lambda: np.asarray(source.step, np.int32))
    if restore_dtype is not None:
        arrays = {
            name: x.astype(restore_dtype) if name.startswith("target/") and jnp.issubdtype(x.dtype, jnp.floating) else x
            for name, x in arrays.items()
        }
    state = tree.nest(arrays)
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
