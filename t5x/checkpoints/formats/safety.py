"""Checks on untrusted checkpoints: links that lead out of them, irregular files, arrays larger than their files."""

import math
import os
import stat
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np
from etils import epath

from t5x.checkpoints import paths
from t5x.checkpoints.manifest import DamagedCheckpoint

DTYPES = {
    name: np.dtype(name)
    for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
        "float16", "float32", "float64",
    )
} | {"bfloat16": np.dtype(ml_dtypes.bfloat16)}  # fmt: skip

_MAX_RANK = 32
_MAX_DIMENSION = 2**48
_MAX_ELEMENTS = 2**56
# Arrays are larger than their files due to compression, and to omitted chunks that equal the fill value: float32 arrays
# of bfloat16 values by a factor of 2.3, and a fresh Adam state, all zeros, by another 3.
_MAX_EXPANSION = 8
_ALWAYS_ALLOWED_BYTES = 64 * 2**20
MAX_METADATA_BYTES = 32 * 2**20
_MAX_FILE_BYTES = {
    "_METADATA": MAX_METADATA_BYTES,
    "manifest.ocdbt": MAX_METADATA_BYTES,
    ".zarray": 2**18,
    "zarr.json": 2**18,
}


class Malformed(Exception):
    """The bytes violate their format. The message says how; the caller adds the path."""


def check_links(directory: str, names: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise DamagedCheckpoint if one of the files is a link to something outside the `allowed` directories.

    Args:
      directory: directory of the files.
      names: names of files in it; missing ones are ignored.
      allowed: absolute paths with links resolved.
    """
    roots = [os.path.join(root, "") for root in allowed]
    for name in sorted(names):
        path = os.path.join(directory, name)
        if os.path.islink(path) and not os.path.realpath(path).startswith(tuple(roots)):
            raise DamagedCheckpoint(
                directory, f"{name} is a symbolic link that leads out of it. If the file belongs there, copy it"
            )


def check_files(directory: epath.PathLike, inside: str = "") -> int:
    """Return the total bytes of the files below `directory`/`inside`, before TensorStore opens any of them.

    Raises:
      DamagedCheckpoint: something is a link or another irregular file, which TensorStore would follow, or metadata is
        too large: TensorStore reads it whole, and aborts the process if memory runs out.
      OSError: the directory cannot be listed.
    """
    if inside and not paths.is_plain_relative(inside):
        raise DamagedCheckpoint(directory, f"it names {inside[:200]!r}, which is not a path inside it")
    root = os.path.join(directory, inside)
    if os.path.realpath(root) != os.path.normpath(os.path.join(os.path.realpath(directory), inside)):
        raise DamagedCheckpoint(directory, f"{inside} is a symbolic link")
    size = 0
    for name, status in paths.walk(root):
        if not stat.S_ISREG(status.st_mode):
            raise DamagedCheckpoint(directory, f"{os.path.join(inside, name)} is not a regular file")
        if status.st_size > _MAX_FILE_BYTES.get(os.path.basename(name), math.inf):
            raise DamagedCheckpoint(
                directory, f"{os.path.join(inside, name)} has {status.st_size} bytes, too many for metadata"
            )
        size += status.st_size
    return size


def check_expansion(path: epath.PathLike, arrays: Iterable[Any], file_bytes: int) -> None:
    """Raise DamagedCheckpoint if arrays are far larger than the files that hold them.

    A few kilobytes of metadata can claim any number of gigabytes. This bounds what reading them allocates.

    Args:
      arrays: all arrays of a checkpoint: anything with `shape` and `dtype`.
      file_bytes: total size of the files that store them.
    """
    claimed = sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)
    if claimed > _MAX_EXPANSION * file_bytes + _ALWAYS_ALLOWED_BYTES:
        raise DamagedCheckpoint(
            path,
            f"its metadata claims arrays of {paths.human_size(claimed)}, which its files of "
            f"{paths.human_size(file_bytes)} cannot hold",
        )


def check_chunk_shape(shape: tuple[int, ...], chunk: tuple[int, ...], itemsize: int) -> None:
    """Raise ValueError if a chunk, which is decoded in one piece, is far larger than its array."""
    if math.prod(chunk) * itemsize > math.prod(shape) * itemsize + _ALWAYS_ALLOWED_BYTES:
        raise ValueError(f"chunks {list(chunk)} are larger than the array, {list(shape)}")


def check_shape(shape: Any) -> tuple[int, ...]:
    """Return `shape` as a tuple; raise ValueError unless it is a list of sizes that an array can have."""
    valid = isinstance(shape, list | tuple) and len(shape) <= _MAX_RANK
    valid = valid and all(type(n) is int and 0 <= n <= _MAX_DIMENSION for n in shape)
    # NumPy refuses too many elements even if a dimension is 0.
    if not valid or math.prod(n or 1 for n in shape) > _MAX_ELEMENTS:
        raise ValueError(f"{str(shape)[:80]} is not the shape of an array")
    return tuple(shape)
