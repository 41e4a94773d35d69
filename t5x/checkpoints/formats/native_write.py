"""Writes T5X's native checkpoints (see native.py for the layout), one array at a time."""

import hashlib
import logging
import operator
import os
from collections.abc import Iterable, Mapping
from typing import Any

import msgpack
import numpy as np
from etils import epath

from t5x.checkpoints import paths
from t5x.checkpoints.formats import lazy_msgpack, zarr_arrays
from t5x.checkpoints.formats.native_read import CHECKSUM, FILE, SECTIONS, STEP, VERSION, checksum_line
from t5x.errors import UserError
from t5x.files import atomic
from t5x.files.system_errors import first_line

_MAX_INLINE_BYTES = 64 * 2**20
_MAX_FILE_NAME = 255

_logger = logging.getLogger(__name__)


def write_native(
    path: epath.PathLike,
    step: int,
    arrays: Iterable[tuple[str, np.ndarray]],
    *,
    dtype: str | np.dtype | None = None,
) -> None:
    """Write a native T5X checkpoint of version 3.

        source = read_orbax("run/checkpoint_1000")
        write_native("checkpoint_1000", 1000, ((name, lazy.read()) for name, lazy in source.arrays.items()))

    Args:
      path: the directory to create, which T5X calls checkpoint_<step>. It appears when it is complete.
      step: the training step.
      arrays: (T5X's name, array): `target/…`, `state/param_states/…`, `flax_mutables/…`, and optionally `state/step`,
        which must equal `step`. They are consumed one at a time and not kept.
      dtype: float32 or bfloat16, to cast the floating-point arrays of `target`; None keeps theirs.

    Raises:
      UserError: the path exists, an array cannot be stored, or the disk is full. Nothing is left behind.
    """
    path = paths.local_path(path)
    step = operator.index(step)
    if not 0 <= step < 2**31:
        raise UserError(f"Step {step} cannot be written: T5X keeps it in an int32.")
    cast = _cast_dtype(dtype)
    _check_free(path)
    try:
        with atomic.new_directory(path) as temporary:
            temporary = epath.Path(temporary)
            tree: dict[str, Any] = {section: {} for section in SECTIONS}
            for name, array in arrays:
                _write(temporary, step, name, array, cast, tree)
                del array  # before the next one is read
            _write_msgpack(temporary, step, tree)
    except OSError as error:
        raise UserError(
            f"{path} could not be written: {first_line(error)}. What was written of it has been removed. "
            "See that the disk has space and that you may write there, or choose another place."
        ) from error
    _logger.info("%s: written as a native T5X checkpoint of step %d", path, step)


def _cast_dtype(dtype: str | np.dtype | None) -> np.dtype | None:
    if dtype is None:
        return None
    try:
        cast = np.dtype(dtype)
    except TypeError:
        cast = None
    if cast not in (lazy_msgpack.DTYPES["float32"], lazy_msgpack.DTYPES["bfloat16"]):
        raise UserError(f"dtype={dtype}: a native checkpoint is written in float32, bfloat16, or None (as it is).")
    return cast


def _check_free(path: epath.Path) -> None:
    if os.path.lexists(path):
        raise UserError(f"{path} exists already and is not overwritten. Choose another path, or move it away.")


def _write(
    directory: epath.Path, step: int, name: str, array: np.ndarray, cast: np.dtype | None, tree: dict[str, Any]
) -> None:
    """Write one array, and add its entry in the msgpack file to `tree`: itself, or the spec of its directory."""
    stored_name = name.replace("/", ".")
    section, *keys = name.split("/")
    if section not in SECTIONS or not keys or not paths.is_plain_relative(name) or len(stored_name) > _MAX_FILE_NAME:
        raise UserError(f"{name!r} is not the name of an array that T5X keeps: those start with {', '.join(SECTIONS)}.")
    if array.dtype not in lazy_msgpack.DTYPES.values():
        raise UserError(f"{name}: arrays of dtype {array.dtype} cannot be written; cast it first.")
    if name == STEP:
        if array.size != 1 or array.item() != step:
            raise UserError(f"{STEP} is {array}, but the checkpoint is to be written for step {step}.")
        return
    parent = tree[section]
    for key in keys[:-1]:
        parent = parent.setdefault(key, {})
        if _is_leaf(parent):
            break
    if _is_leaf(parent) or keys[-1] in parent or os.path.lexists(directory / stored_name):
        raise UserError(f"{name}: another array has this name, or a name that is stored as the same. Rename one.")
    if cast is not None and section == "target" and (array.dtype.kind == "f" or array.dtype.name == "bfloat16"):
        array = array.astype(cast, copy=False)
    if _is_inline(section, keys[-1], array):
        parent[keys[-1]] = msgpack.ExtType(lazy_msgpack.ARRAY, _pack_array(array))
    else:
        parent[keys[-1]] = _Spec(
            driver="zarr",
            dtype=array.dtype.name,
            kvstore={"driver": "file", "path": stored_name + "/"},
            metadata=zarr_arrays.write_array(directory, stored_name, array),
        )


class _Spec(dict):
    """A TensorStore spec: a leaf of the tree although it is a dictionary."""


def _is_leaf(node: Any) -> bool:
    return isinstance(node, _Spec | msgpack.ExtType)


def _is_inline(section: str, key: str, array: np.ndarray) -> bool:
    """Return whether T5X stores the array in the msgpack file: it does so if it is never partitioned."""
    if array.size == 0:
        return True
    small = array.shape in ((), (1,)) or key in ("v_row", "v_col")
    return section != "target" and small and array.nbytes <= _MAX_INLINE_BYTES


def _pack_array(array: np.ndarray) -> bytes:
    return msgpack.packb((array.shape, array.dtype.name, array.tobytes()))


def _write_msgpack(directory: epath.Path, step: int, tree: Mapping[str, Any]) -> None:
    state = {
        "param_states": {},
        **tree["state"],
        "step": msgpack.ExtType(lazy_msgpack.ARRAY, _pack_array(np.asarray(step, np.int32))),
    }
    optimizer = {"state": state, "target": tree["target"]}
    if tree["flax_mutables"]:
        optimizer["flax_mutables"] = tree["flax_mutables"]
    content = msgpack.packb({"version": VERSION, "optimizer": optimizer})
    paths.write_file(directory / CHECKSUM, checksum_line(hashlib.sha256(content).hexdigest()))
    paths.write_file(directory / FILE, content)
