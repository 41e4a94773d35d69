"""Reads T5X's native checkpoints (see native.py for the layout), which are untrusted input."""

import hashlib
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from t5x.checkpoints import paths
from t5x.checkpoints.formats import lazy_msgpack, zarr_arrays
from t5x.checkpoints.formats.base import LazyArray, Source, check_expansion
from t5x.checkpoints.manifest import DamagedCheckpoint
from t5x.errors import UserError
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
