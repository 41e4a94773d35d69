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

import numpy as np
from etils import epath
from flax.serialization import msgpack_serialize

from t5x._runtime.errors import UserError
from t5x.checkpoints import paths, tree
from t5x.checkpoints.formats import lazy_msgpack, zarr_arrays
from t5x.checkpoints.formats.safety import DTYPES, check_expansion, check_files
from t5x.checkpoints.formats.source import LazyArray, Source
from t5x.checkpoints.manifest import DamagedCheckpoint
from t5x.files.untrusted import open_inside

FILE = "checkpoint"
PLACEHOLDER = "PLACEHOLDER://"  # leaves of early Orbax checkpoints, whose msgpack file has the same name
TENSORFLOW_STATE = b"model_checkpoint_path"  # how TensorFlow's file of that name begins
SECTIONS = ("target", "state", "flax_mutables")

_VERSION = 3
_CHECKSUM = "checkpoint.sha256"
_STEP = "state/step"
_KVSTORES = ("file", "gfile", "gcs")  # paths in all of these are relative to the checkpoint
_SPEC_KEYS = {"driver", "kvstore", "metadata"}
_MAX_INLINE_BYTES = 64 * 2**20
_MAX_FILE_NAME = 255

_logger = logging.getLogger(__name__)


# --- Reading


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
            file_bytes = os.fstat(file.fileno()).st_size
            if file.read(len(TENSORFLOW_STATE)) == TENSORFLOW_STATE:
                raise UserError(f"{directory} is a TensorFlow checkpoint, not a native T5X one. Give its model.ckpt-N.")
        if name == FILE:
            _verify_checksum(directory)
        content = lazy_msgpack.read_tree(directory, name)
    except OSError as error:
        raise DamagedCheckpoint(directory, f"{name} cannot be read: {error.strerror}") from error
    leaves = lazy_msgpack.flatten(_optimizer(content, directory / name), lambda node: node.keys() >= _SPEC_KEYS)
    stored = {
        name: _array_directory(name, leaf, directory)
        for name, leaf in leaves.items()
        if not isinstance(leaf, LazyArray)
    }
    try:
        file_bytes += sum(check_files(directory, place) for place in set(stored.values()))
    except OSError as error:
        missing = os.path.relpath(error.filename, directory)
        raise DamagedCheckpoint(directory, f"array {missing} cannot be read: {error.strerror}") from error
    opened = zarr_arrays.open_arrays(directory, stored, file_bytes=file_bytes)
    for name, array in opened.items():
        _check_stated(name, leaves[name], array, directory)
    arrays = {name: opened.get(name, leaf) for name, leaf in leaves.items()}
    check_expansion(directory, arrays.values(), file_bytes)
    return Source(f"native T5X (version {_VERSION})", os.fspath(path), read_step(directory, arrays.get(_STEP)), arrays)


def read_step(path: epath.PathLike, step: LazyArray | None, name: str = _STEP) -> int | None:
    """Return the validated training step in the array `name`; None if there is none."""
    if step is None:
        return None
    if step.size != 1 or step.dtype.kind not in "iu":
        raise DamagedCheckpoint(path, f"{name} is {step.dtype} {list(step.shape)}, not one integer")
    return check_step(path, int(step.read().item()))


def check_step(directory: epath.PathLike, step: int) -> int:
    """Return `step`; raise DamagedCheckpoint unless it fits T5X's int32 step counter."""
    if not 0 <= step < 2**31:
        raise DamagedCheckpoint(directory, f"its step is {step}, which is not between 0 and 2**31 - 1")
    return step


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
    if not os.path.lexists(directory / _CHECKSUM):
        return
    with open_inside(directory, _CHECKSUM) as file:
        line = file.read(200)
    with open_inside(directory, FILE) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if line != _checksum_line(digest):
        raise DamagedCheckpoint(directory, f"{FILE} or {_CHECKSUM} has changed (SHA-256)")


def _checksum_line(digest: str) -> bytes:
    return f"{digest}  {FILE}\n".encode()


def _optimizer(content: Mapping[str, Any], file: epath.Path) -> dict[str, Any]:
    """Check the version; return the content of `optimizer`."""
    version, optimizer = content.get("version"), content.get("optimizer")
    if version is None:
        raise UserError(
            f"{file} states no version, so it is a plain Flax or an early Orbax checkpoint. Native T5X checkpoints of "
            f"version {_VERSION} and Orbax checkpoints of T5X can be read."
        )
    if version != _VERSION:
        raise UserError(
            f"{file} is a T5X checkpoint of version {str(version)[:20]}; only version {_VERSION} can be read. Restore "
            "it with the T5X version that wrote it, and save it with a newer one."
        )
    if not isinstance(optimizer, dict) or not set(optimizer) <= set(SECTIONS):
        raise DamagedCheckpoint(file.parent, f"`optimizer` in {file.name} has other keys than {', '.join(SECTIONS)}")
    return optimizer


def _array_directory(name: str, spec: Any, directory: epath.Path) -> str:
    """Return the directory of the array of a TensorStore spec, relative to the checkpoint."""
    if isinstance(spec, str) and spec.startswith(PLACEHOLDER):
        raise UserError(f"{directory} is an early Orbax checkpoint, not a native T5X one. Read it as Orbax.")
    if not isinstance(spec, dict):
        raise DamagedCheckpoint(directory, f"{name} is a {type(spec).__name__}, not an array")
    kvstore = spec["kvstore"]
    if spec["driver"] != "zarr" or not isinstance(kvstore, dict) or kvstore.get("driver") not in _KVSTORES:
        raise DamagedCheckpoint(directory, f"array {name} is not zarr in a store of kind {', '.join(_KVSTORES)}")
    relative = kvstore.get("path", spec.get("path"))
    if not isinstance(relative, str) or not paths.is_plain_relative(relative.removesuffix("/")):
        raise DamagedCheckpoint(directory, f"array {name} is at {str(relative)[:200]!r}, not a path inside it")
    return relative.removesuffix("/")


def _check_stated(name: str, spec: Mapping[str, Any], array: LazyArray, directory: epath.Path) -> None:
    """Raise DamagedCheckpoint unless the array has the shape and dtype that the msgpack file states."""
    dtype, metadata = spec.get("dtype"), spec["metadata"]
    shape = metadata.get("shape") if isinstance(metadata, dict) else None
    if dtype != array.dtype.name or not isinstance(shape, list) or tuple(shape) != array.shape:
        actual, stated = f"{array.dtype} {list(array.shape)}", f"{dtype} {shape}"[:200]
        raise DamagedCheckpoint(directory, f"array {name} is {actual}, but {FILE} states {stated}")


# --- Writing


def write_native(path: epath.PathLike, step: int, arrays: Iterable[tuple[str, np.ndarray]]) -> None:
    """Write a native T5X checkpoint of version 3.

        source = read_orbax("run/checkpoint_1000")
        write_native("checkpoint_1000", 1000, ((name, lazy.read()) for name, lazy in source.arrays.items()))

    Args:
      path: the directory to create, which T5X calls checkpoint_<step>. It appears when it is complete.
      step: the training step.
      arrays: (T5X's name, array): `target/…`, `state/param_states/…`, `flax_mutables/…`, and optionally `state/step`,
        which must equal `step`. They are consumed one at a time and not kept.

    Raises:
      UserError: the path exists, an array cannot be stored, or the disk is full. Nothing is left behind.
    """
    step = operator.index(step)
    if not 0 <= step < 2**31:
        raise UserError(f"Step {step} cannot be written: T5X stores it as an int32.")
    with paths.new_checkpoint(path) as directory:
        leaves: dict[str, Any] = {}
        for name, array in arrays:
            _write(directory, step, name, array, leaves)
            del array  # before the next one is read
        _write_msgpack(directory, step, tree.nest(leaves))
    _logger.info("wrote %s, a native T5X checkpoint of step %d", path, step)


def _write(directory: epath.Path, step: int, name: str, array: np.ndarray, leaves: dict[str, Any]) -> None:
    """Write one array, and add its entry in the msgpack file to `leaves`: itself, or the spec of its directory."""
    stored_name = name.replace("/", ".")
    section, *keys = name.split("/")
    if section not in SECTIONS or not keys or not paths.is_plain_relative(name) or len(stored_name) > _MAX_FILE_NAME:
        raise UserError(f"{name!r} is not a name of T5X's arrays, which start with {', '.join(SECTIONS)}.")
    if array.dtype not in DTYPES.values():
        raise UserError(f"{name} has dtype {array.dtype}, which cannot be written. Cast it first.")
    if name == _STEP:
        if array.size != 1 or array.item() != step:
            raise UserError(f"{_STEP} is {array}, but the checkpoint is written for step {step}.")
        return
    parents = {"/".join(name.split("/")[:depth]) for depth in range(1, len(keys) + 1)}
    clash = name in leaves or not parents.isdisjoint(leaves) or any(other.startswith(f"{name}/") for other in leaves)
    if clash or os.path.lexists(directory / stored_name):
        raise UserError(f"{name}: another array has this name, or a name that is stored as the same. Rename one.")
    if _is_inline(section, keys[-1], array):
        leaves[name] = np.asarray(array)
    else:
        leaves[name] = {
            "driver": "zarr",
            "dtype": array.dtype.name,
            "kvstore": {"driver": "file", "path": stored_name + "/"},
            "metadata": zarr_arrays.write_array(directory, stored_name, array),
        }


def _is_inline(section: str, key: str, array: np.ndarray) -> bool:
    """Return whether T5X stores the array in the msgpack file: it does so if it is never partitioned."""
    if array.size == 0:
        return True
    small = array.shape in ((), (1,)) or key in ("v_row", "v_col")
    return section != "target" and small and array.nbytes <= _MAX_INLINE_BYTES


def _write_msgpack(directory: epath.Path, step: int, sections: Mapping[str, Any]) -> None:
    state = {"param_states": {}, **sections.get("state", {}), "step": np.asarray(step, np.int32)}
    optimizer = {"state": state, "target": sections.get("target", {})}
    if "flax_mutables" in sections:
        optimizer["flax_mutables"] = sections["flax_mutables"]
    content = msgpack_serialize({"version": _VERSION, "optimizer": optimizer}, in_place=True)
    paths.write_file(directory / _CHECKSUM, _checksum_line(hashlib.sha256(content).hexdigest()))
    paths.write_file(directory / FILE, content)
