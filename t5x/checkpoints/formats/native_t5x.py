"""T5X's native checkpoints, version 3: the format of all published T5X models.

    checkpoint_<step>/
      checkpoint                msgpack: {"version": 3, "optimizer": {"target": …, "state": {"step", "param_states"}}};
                                a leaf is an array, or a TensorStore spec that names a directory beside this file
      target.a.b.kernel/        a zarr array: .zarray and gzip-compressed chunks
      state.param_states.…/     the same for large optimizer state
      checkpoint.sha256         written by us in the format of `sha256sum`, verified if it exists; T5X ignores it

The gzip chunks have checksums, the msgpack file does not; hence the last file. Files are untrusted input.
"""

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
from t5x.checkpoints.formats.safety import DTYPES, check_expansion
from t5x.checkpoints.formats.source import LazyArray, Source
from t5x.checkpoints.manifest import DamagedCheckpoint
from t5x.errors import UserError
from t5x.files import atomic
from t5x.files.system_errors import first_line
from t5x.files.untrusted import open_inside

VERSION = 3
FILE = "checkpoint"
CHECKSUM = "checkpoint.sha256"
STEP = "state/step"
PLACEHOLDER = "PLACEHOLDER://"  # leaves of early Orbax checkpoints, whose msgpack file has the same name

_KVSTORES = ("file", "gfile", "gcs")  # paths in all of these are relative to the checkpoint
_SPEC_KEYS = {"driver", "kvstore", "metadata"}
SECTIONS = ("target", "state", "flax_mutables")
_TENSORFLOW = b"model_checkpoint_path"
_MAX_INLINE_BYTES = 64 * 2**20
_MAX_FILE_NAME = 255

_logger = logging.getLogger(__name__)


def read_native(path: epath.PathLike) -> Source:
    """Open a native T5X checkpoint. Reads only metadata; `source.arrays[name].read()` reads an array.

    Args:
      path: the directory checkpoint_<step>, or its msgpack file.

    Raises:
      DamagedCheckpoint: it is incomplete, or points outside itself.
      UserError: it is not a native checkpoint of version 3.
    """
    directory, name = _locate(path)
    try:
        with open_inside(directory, name) as file:
            start = file.read(len(_TENSORFLOW))
        if start == _TENSORFLOW:
            raise UserError(f"{directory} is a TensorFlow checkpoint, not a native T5X one. Read it as such.")
        if name == FILE:
            _verify_checksum(directory)
        content = lazy_msgpack.read_tree(directory, name)
    except OSError as error:
        raise DamagedCheckpoint(directory, f"{name} cannot be read: {error.strerror}") from error
    arrays: dict[str, LazyArray] = {}
    stored = {name}
    for section, node in _optimizer(content, directory, name).items():
        _collect(section, node, directory, arrays, stored)
    check_expansion(directory, arrays.values(), sum(_file_bytes(directory / part) for part in stored))
    return Source(f"native T5X (version {VERSION})", os.fspath(path), training_step(directory, arrays), arrays)


def training_step(directory: epath.PathLike, arrays: Mapping[str, LazyArray]) -> int | None:
    """Return the validated number in `state/step`, or None if there is none."""
    if STEP not in arrays:
        return None
    step = arrays[STEP]
    if step.size != 1 or step.dtype.kind not in "iu":
        raise DamagedCheckpoint(directory, f"{STEP} is {step.dtype} {list(step.shape)}, not one integer")
    return check_step(directory, int(step.read().item()))


def check_step(directory: epath.PathLike, step: int) -> int:
    """Return `step`; raise DamagedCheckpoint unless it fits T5X's int32 step counter."""
    if not 0 <= step < 2**31:
        raise DamagedCheckpoint(directory, f"its step is {step}, which is not between 0 and 2**31 - 1")
    return step


def number(value: int | float) -> LazyArray:
    """Return a plain number of a msgpack file as a zero-dimensional array."""
    array = np.asarray(value, np.int32 if type(value) is int and -(2**31) <= value < 2**31 else None)
    return LazyArray((), array.dtype, array.copy)


def _locate(path: epath.PathLike) -> tuple[epath.Path, str]:
    """Return the directory and name of the msgpack file."""
    local = paths.local_path(path)
    if local.is_dir():
        if not os.path.lexists(local / FILE):
            raise UserError(f"{local} is not a native T5X checkpoint: it has no file {FILE!r}. Check the path.")
        return local, FILE
    if not local.exists():
        raise UserError(f"There is no checkpoint at {local}. Check the path.")
    local = epath.Path(os.path.realpath(local))  # a link given by the user may point anywhere
    return local.parent, local.name


def _verify_checksum(directory: epath.Path) -> None:
    if not os.path.lexists(directory / CHECKSUM):
        return
    with open_inside(directory, CHECKSUM) as file:
        line = file.read(200)
    with open_inside(directory, FILE) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if line != checksum_line(digest):
        raise DamagedCheckpoint(directory, f"{FILE} or {CHECKSUM} has changed (SHA-256)")


def checksum_line(digest: str) -> bytes:
    """Return the content of checkpoint.sha256."""
    return f"{digest}  {FILE}\n".encode()


def _optimizer(content: Mapping[str, Any], directory: epath.Path, name: str) -> dict[str, Any]:
    """Check the version; return the content of `optimizer`."""
    version = content.get("version")
    if version is None:
        raise UserError(
            f"{directory / name} states no version: it is a plain Flax checkpoint, or an early Orbax one, and not a "
            "native one of T5X. Of T5X's own, read those of version 3, or Orbax ones."
        )
    if version != VERSION:
        raise UserError(
            f"{directory / name} is a T5X checkpoint of version {str(version)[:20]}; only version {VERSION} is read "
            "here (version 2 kept bfloat16 as integers). Restore and save it with a T5X of that time first."
        )
    optimizer = content.get("optimizer")
    if not isinstance(optimizer, dict) or not set(optimizer) <= set(SECTIONS):
        raise DamagedCheckpoint(directory, f"{name} does not have {', '.join(SECTIONS)} under `optimizer`")
    return optimizer


def _collect(name: str, node: Any, directory: epath.Path, arrays: dict[str, LazyArray], stored: set[str]) -> None:
    """Add the arrays at and below `node` to `arrays`, and the directories they are stored in to `stored`."""
    if isinstance(node, LazyArray):
        arrays[name] = node
    elif isinstance(node, dict) and node.keys() >= _SPEC_KEYS:
        place = _array_directory(name, node, directory)
        arrays[name] = zarr_arrays.open_array(directory, place, node)
        stored.add(place)
    elif isinstance(node, dict):
        for key, child in node.items():
            _collect(f"{name}/{key}", child, directory, arrays, stored)
    elif isinstance(node, str) and node.startswith(PLACEHOLDER):
        raise UserError(f"{directory} is an early Orbax checkpoint, not a native T5X one. Read it as Orbax.")
    elif isinstance(node, int | float):
        arrays[name] = number(node)
    elif node is not None:
        raise DamagedCheckpoint(directory, f"{name} is a {type(node).__name__}, not an array")


def _file_bytes(path: epath.Path) -> int:
    return paths.tree_size(path) if path.is_dir() else os.path.getsize(path)


def _array_directory(name: str, spec: Mapping[str, Any], directory: epath.Path) -> str:
    """Return the directory of the array of a TensorStore spec, relative to the checkpoint."""
    kvstore = spec["kvstore"]
    if spec["driver"] != "zarr" or not isinstance(kvstore, dict) or kvstore.get("driver") not in _KVSTORES:
        raise DamagedCheckpoint(
            directory, f"the array {name} is not zarr in a store of one of the kinds {', '.join(_KVSTORES)}"
        )
    relative = kvstore.get("path", spec.get("path"))
    if not isinstance(relative, str):
        raise DamagedCheckpoint(directory, f"the array {name} does not say in which directory it lies")
    return relative.removesuffix("/")


# --- Writing


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
    if cast not in (DTYPES["float32"], DTYPES["bfloat16"]):
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
    if array.dtype not in DTYPES.values():
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
