"""Writes the arrays of a checkpoint into its directory `state/`; see array_reader.py for its files.

Arrays are uncompressed zarr: trained weights do not compress, and both directions run at disk speed. Chunks are small
enough that any other sharding can read just its shards. Orbax itself would spend milliseconds of Python on every array,
which blocks the training that runs meanwhile.
"""

import collections
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import SingleDeviceSharding

from t5x._runtime.errors import UserError
from t5x.checkpoints import ocdbt
from t5x.checkpoints import tree as trees
from t5x.checkpoints.array_reader import EMPTY, METADATA, StoredArrays, stored_name
from t5x.checkpoints.formats.zarr_arrays import choose_chunks
from t5x.checkpoints.manifest import DamagedCheckpoint
from t5x.checkpoints.paths import open_files
from t5x.files.remote import is_remote
from t5x.files.storage_errors import first_line

_COMMITTED = "commit_success.txt"  # without it, Orbax takes a directory in GCS for unfinished
_COMMIT_BYTES = 64 * 2**20  # each commit is slow and leaves an old version of the index behind


class VanishedFiles(UserError):
    """Files were removed while they were being written. The next save may succeed."""


class HostArrays:
    """A copy of this process's shards of a tree. The device buffers may be donated afterwards.

    If the devices have room, the copy is made there at once and moved to the host while training continues. Otherwise
    it is made in host memory before the constructor returns.

    Each shard is written by the process that holds its first replica. What is not a global jax.Array is written by
    process 0.

    Args:
      tree: nested dictionaries of jax.Array, NumPy arrays and plain numbers.
    """

    def __init__(self, tree: Any):
        leaves = {name: _as_array(name, leaf) for name, leaf in trees.flatten(tree).items()}
        _check_stored_names(leaves)
        self.shapes = {name: trees.as_struct(leaf) for name, leaf in leaves.items()}
        stored = {name: leaf for name, leaf in leaves.items() if leaf.size}
        if not stored:
            raise UserError("A checkpoint needs at least one array with elements; the tree has none.")
        shards = [(name, index, data) for name, leaf in stored.items() for index, data in _shards(leaf)]
        data = [shard for _, _, shard in shards]
        self._on_devices = _have_room(data)
        self._data = [_copied(shard) for shard in data] if self._on_devices else _to_host(data)
        self._shard_indices = [(name, index) for name, index, _ in shards]
        self._chunks = {name: choose_chunks(_shard_shape(leaf), leaf.dtype.itemsize) for name, leaf in stored.items()}

    def write(self, directory: epath.PathLike) -> str:
        """Write the arrays into this process's own directory inside `directory`, and release them; return its name."""
        mine = f"ocdbt.process_{jax.process_index()}"
        writer = ocdbt.Writer(f"{directory}/{mine}")
        data, self._data = self._data, []
        if self._on_devices:
            data = _to_host(data)
        creates = jax.process_index() == 0  # process 0 creates the arrays; the others only write into them
        for name in self._chunks if creates else dict.fromkeys(name for name, _ in self._shard_indices):
            writer.open(stored_name(name), self.shapes[name], self._chunks[name], create=creates)
        for (name, index), shard in zip(self._shard_indices, data, strict=True):
            writer.write(stored_name(name), index, shard)
        writer.commit()
        return mine


def write_one_by_one(directory: epath.PathLike, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """Write (name, array) pairs, which need not fit in memory together, into `directory`."""
    writer, shapes, pending = ocdbt.Writer(directory), {}, 0
    for name, array in tensors:
        shapes[name] = trees.as_struct(array)
        if array.size:
            writer.open(stored_name(name), array, choose_chunks(array.shape, array.dtype.itemsize))
            writer.write(stored_name(name), (), array)
            pending += array.nbytes
        if pending >= _COMMIT_BYTES:
            writer.commit()
            pending = 0
        del array  # before the next one is read
    writer.commit()
    _complete(directory, shapes)


def join(directory: epath.PathLike, parts: Iterable[str], shapes: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Merge what all processes wrote into the `parts` of `directory` into one database, and write its metadata."""
    ocdbt.merge(directory, [f"{directory}/{part}" for part in sorted(parts)])
    _complete(directory, shapes)


def _complete(directory: epath.PathLike, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Write the file that lists the arrays for Orbax and `read_shapes`; check that nothing has vanished.

    TensorStore recreates missing directories, which hides their removal.
    """
    tree = {}
    for name in (name for name, leaf in shapes.items() if 0 not in leaf.shape):
        keys = tuple(name.split("/"))
        tree[str(keys)] = {
            "key_metadata": [{"key": key, "key_type": 2} for key in keys],
            # For a jax.Array, Orbax also demands a sharding.
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
    empty = {
        name: {"shape": list(leaf.shape), "dtype": leaf.dtype.name} for name, leaf in shapes.items() if 0 in leaf.shape
    }
    content = {
        "tree_metadata": tree, "use_ocdbt": True, "use_zarr3": False, "store_array_data_equal_to_fill_value": True,
        "custom_metadata": {EMPTY: empty},
    }  # fmt: skip
    files = open_files(directory)
    files.create(METADATA, json.dumps(content).encode())
    if is_remote(directory):
        files.create(_COMMITTED, b"")
    try:
        if missing := shapes.keys() - StoredArrays(directory).shapes.keys():
            raise ValueError(f"{min(missing)} is missing")
        if sum(entry.size for entry in files.list().values()) < sum(map(_bytes_in_files, shapes.values())):
            raise ValueError("the files are too small for the arrays")
    except (ValueError, DamagedCheckpoint) as error:
        raise VanishedFiles(
            f"Files vanished from {directory} while it was being written ({first_line(error)}). Find out what removes "
            "files there, and start again."
        ) from error


def _shards(leaf: jax.Array | np.ndarray) -> list[tuple[tuple[slice, ...], jax.Array | np.ndarray]]:
    """Return (index, data) of the shards that this process has to write."""
    if isinstance(leaf, jax.Array):
        return [(shard.index, shard.data) for shard in leaf.addressable_shards if shard.replica_id == 0]
    return [((), leaf)] if jax.process_index() == 0 else []


def _shard_shape(leaf: jax.Array | np.ndarray) -> tuple[int, ...]:
    return leaf.sharding.shard_shape(leaf.shape) if isinstance(leaf, jax.Array) else leaf.shape


def _have_room(arrays: list[jax.Array | np.ndarray]) -> bool:
    """Return whether the arrays are on devices, not CPUs, that could hold them on top of their peak memory use."""
    needed: dict[jax.Device, int] = collections.defaultdict(int)
    for data in arrays:
        if isinstance(data, jax.Array):
            needed[data.device] += data.nbytes
    if not needed or any(device.platform == "cpu" for device in needed):
        return False
    stats = {device: device.memory_stats() or {} for device in needed}
    return all(
        1.1 * size < stats[device].get("bytes_limit", 0) - stats[device].get("peak_bytes_in_use", 0)
        for device, size in needed.items()
    )


def _copied(data: jax.Array | np.ndarray) -> Any:
    """Return a copy in the same memory. JAX would read a NumPy array later and reduce 64 bits to 32."""
    return np.array(data) if isinstance(data, np.ndarray) else _copied_on_device(data)


# Thousands of arrays: compiled, a copy takes a quarter of the Python time of `Array.copy`.
_copied_on_device = jax.jit(jnp.copy)


def _to_host(arrays: Sequence[jax.Array | np.ndarray]) -> list[np.ndarray]:
    """Return copies that nobody else writes to. All transfers start before the first is waited for."""
    copies = list(arrays)
    on_gpus: dict[jax.Device, list[int]] = collections.defaultdict(list)
    for i, data in enumerate(arrays):
        if isinstance(data, np.ndarray):
            copies[i] = np.array(data)
        elif isinstance(device := data.device, jax.Device) and device.platform == "gpu":
            on_gpus[device].append(i)
        else:
            data.copy_to_host_async()
    for device, numbers in on_gpus.items():  # one call, because each takes Python time that training steps need
        pinned = SingleDeviceSharding(device, memory_kind="pinned_host")  # a GPU can write to it directly
        for i, data in zip(numbers, jax.device_put([arrays[i] for i in numbers], pinned), strict=True):
            copies[i] = data
    return [np.asarray(data) for data in copies]  # JAX does not donate a buffer that has a NumPy view


def _as_array(name: str, leaf: Any) -> jax.Array | np.ndarray:
    if isinstance(leaf, bool | int | float | np.generic):
        leaf = np.asarray(leaf)
    dtype = getattr(leaf, "dtype", None)
    if (
        not isinstance(leaf, jax.Array | np.ndarray)
        or jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
        or np.dtype(dtype).kind in "OUSMm"
    ):
        raise UserError(
            f"{name}: a {type(leaf).__name__} of dtype {dtype} cannot be saved in a checkpoint. Save arrays of numbers "
            "(of a random key: jax.random.key_data)."
        )
    if isinstance(leaf, jax.Array) and leaf.is_fully_addressable and jax.process_count() > 1:
        return np.asarray(leaf)  # every process has its own copy
    return leaf


def _check_stored_names(leaves: Iterable[str]) -> None:
    """Raise a UserError if names clash: keys are joined with dots, so `a.b` would overwrite `a/b`."""
    seen: dict[str, str] = {}
    for name in leaves:
        other = seen.setdefault(stored_name(name), name)
        if other != name:
            raise UserError(f"Parameters {other!r} and {name!r} cannot both be saved. Rename one of them.")


def _bytes_in_files(leaf: jax.ShapeDtypeStruct) -> int:
    """Return the least number of bytes that this array adds to the files."""
    size = math.prod(leaf.shape) * leaf.dtype.itemsize
    shards = len(leaf.sharding.device_set) if leaf.sharding is not None else 1
    return size if size > ocdbt.INLINE_BYTES * shards else 0
