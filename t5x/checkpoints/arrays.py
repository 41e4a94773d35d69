"""The arrays of a checkpoint: the directory `state/`, written with TensorStore and readable by Orbax and other tools.

    _METADATA               JSON: the names of the arrays; shapes and dtypes of empty ones
    manifest.ocdbt, d/      an OCDBT database that indexes the chunks of all arrays
    ocdbt.process_<k>/      the chunks written by process k

Arrays are uncompressed zarr: trained weights do not compress, and both directions run at disk speed. Chunks are small
enough that any other sharding can read just its shards. Orbax itself would spend milliseconds of Python on every array,
which blocks the training that runs meanwhile.
"""

import collections
import contextlib
import json
import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from etils import epath
from jax.sharding import SingleDeviceSharding

from t5x.checkpoints import direct, faults, paths
from t5x.checkpoints import tree as trees
from t5x.checkpoints.formats.safety import DTYPES, check_expansion, check_shape
from t5x.checkpoints.formats.zarr_arrays import choose_chunks
from t5x.checkpoints.manifest import DamagedCheckpoint
from t5x.errors import UserError
from t5x.files.untrusted import open_inside, parse_json

METADATA = "_METADATA"
EMPTY = "empty_arrays"

_FILE_BYTES = 64 * 2**20  # files are hashed in parallel, so several are faster than one
_INLINE_BYTES = 1024  # chunks up to this size are stored inside OCDBT's own nodes
_READ_AHEAD_BYTES = 2 * 2**30
_MAX_METADATA_BYTES = 32 * 2**20
_BATCH_BYTES = 8 * 2**20  # a thread reads at least this much at once
_BLOCK_BYTES = 64 * 2**20  # memory is allocated in blocks of this size
_ALIGNMENT = 64
_CONTEXT = {"cache_pool#ocdbt": {"total_bytes_limit": 10**8}, "file_io_concurrency": {"limit": 128}}


# --- Writing


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
        parts = [(name, index, data) for name, leaf in stored.items() for index, data in _parts(leaf)]
        data = [part for _, _, part in parts]
        self._on_devices = _have_room(data)
        self._data = [part.copy() for part in data] if self._on_devices else _to_host(data)
        self._places = [(name, index) for name, index, _ in parts]
        self._names = list(stored)
        self._chunks = {name: choose_chunks(_part_shape(leaf), leaf.dtype.itemsize) for name, leaf in stored.items()}

    def write(self, directory: epath.Path) -> epath.Path:
        """Write the arrays into this process's own directory inside the existing `directory`, and release them."""
        mine = directory / f"ocdbt.process_{jax.process_index()}"
        base = {
            "driver": "ocdbt", "base": {"driver": "file", "path": f"{mine}/"},
            "config": {"max_inline_value_bytes": _INLINE_BYTES}, "target_data_file_size": _FILE_BYTES,
        }  # fmt: skip
        context, transaction = ts.Context(_CONTEXT), ts.Transaction(atomic=True)
        creates = jax.process_index() == 0  # process 0 creates the arrays; the others only write into them
        opening = []
        parts: dict[str, list[tuple[tuple[slice, ...], np.ndarray]]] = {name: [] for name in self._names}
        if self._on_devices:
            self._data = _to_host(self._data)
        for (name, index), part in zip(self._places, self._data, strict=True):
            parts[name].append((index, part))
        self._data = []
        for name in parts if creates else [name for name in parts if parts[name]]:
            options = {"create": True} if creates else {"open": True, "assume_metadata": True}
            spec = array_spec(base, name, self._chunks[name], self.shapes[name])
            opening.append((name, ts.open(spec, context=context, transaction=transaction, **options)))
        writing = []
        for name, future in opening:
            array = future.result()
            for index, data in parts.pop(name):
                writing.append(array[index].write(data, can_reference_source_data_indefinitely=True))
        for future in writing:
            future.copy.result()
        transaction.commit_async().result()
        return mine


def join(directory: epath.Path, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Merge what all processes wrote into `directory` into one database, and write its metadata."""
    context, transaction = ts.Context(_CONTEXT), ts.Transaction(atomic=True)
    base = {"driver": "file", "path": f"{directory}/"}
    whole = ts.KvStore.open({"driver": "ocdbt", "base": base}, context=context).result()
    for part in sorted(directory.glob("ocdbt.process_*")):
        spec = {"driver": "ocdbt", "base": {**base, "path": f"{part}/"}}
        part = ts.KvStore.open(spec, context=context).result()
        part.experimental_copy_range_to(whole.with_transaction(transaction)).result()
    transaction.commit_async().result()
    write_metadata(directory, shapes)
    _check_nothing_vanished(directory, shapes)


def write_metadata(directory: epath.Path, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Write the file that lists the arrays for Orbax and `read_shapes`."""
    tree = {}
    for name in (name for name, leaf in shapes.items() if _has_elements(leaf)):
        keys = tuple(name.split("/"))
        tree[str(keys)] = {
            "key_metadata": [{"key": key, "key_type": 2} for key in keys],
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
        }
    empty = {
        name: {"shape": list(leaf.shape), "dtype": leaf.dtype.name}
        for name, leaf in shapes.items()
        if not _has_elements(leaf)
    }
    content = {
        "tree_metadata": tree, "use_ocdbt": True, "use_zarr3": False, "store_array_data_equal_to_fill_value": True,
        "custom_metadata": {EMPTY: empty},
    }  # fmt: skip
    paths.write_file(directory / METADATA, json.dumps(content).encode())


def _check_nothing_vanished(directory: epath.Path, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Raise Vanished if files are gone: TensorStore recreates missing directories, which hides their removal."""
    try:
        found = read_shapes(directory)
        if missing := shapes.keys() - found.keys():
            raise ValueError(f"{min(missing)} is not there")
        if paths.tree_size(directory) < sum(map(_bytes_in_files, shapes.values())):
            raise ValueError("the files are too small for the arrays")
    except (ValueError, DamagedCheckpoint) as error:
        raise faults.Vanished(
            f"Files vanished from {directory} while it was being written ({faults.first_line(error)}). "
            "See what removes files there, and start again."
        ) from error


# --- Reading


class StoredArrays:
    """The arrays in a directory written by `join`. Opening them reads only metadata.

    Attributes:
      shapes: {name: shape and dtype}.
    """

    def __init__(self, directory: epath.Path):
        self._directory = directory
        with _metadata_errors(directory):
            names, empty = _read_metadata(directory)
            self._direct = direct.open_arrays(directory, {name: _stored_name(name) for name in names})
            self._others = _open(directory, [name for name in names if name not in self._direct])
            self.shapes = {name: self._stored_shape(name) for name in names} | empty
            check_expansion(directory, self.shapes.values(), paths.tree_size(directory))

    def read(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
        """Read the wanted arrays, and no others.

        Args:
          wanted: {name: leaf} with the stored shapes. An array with a sharding is placed on its devices, shard by
            shard; one without becomes a NumPy array. A dtype other than the stored one casts.
        """
        result = {name: _empty_array(leaf) for name, leaf in wanted.items() if not _has_elements(leaf)}
        memory, reading, ahead = _Memory(), collections.deque(), 0
        try:
            with ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="t5x-read") as pool:
                for names in self._batches([name for name in wanted if name not in result]):
                    reading.append(self._begin({name: wanted[name] for name in names}, memory, pool))
                    ahead += reading[-1].nbytes
                    while ahead > _READ_AHEAD_BYTES:
                        ahead -= reading[0].nbytes
                        result |= reading.popleft().finish()
                while reading:
                    result |= reading.popleft().finish()
        except ValueError as error:
            if not faults.tensorstore_status(error):
                raise
            raise DamagedCheckpoint(self._directory, faults.first_line(error)) from error
        return {name: result[name] for name in wanted}

    def _stored_shape(self, name: str) -> jax.ShapeDtypeStruct:
        if name in self._direct:
            return jax.ShapeDtypeStruct(self._direct[name].metadata.shape, self._direct[name].metadata.dtype)
        return jax.ShapeDtypeStruct(self._others[name].shape, _dtype(self._others[name]))

    def _batches(self, names: list[str]) -> Iterator[list[str]]:
        """Yield the names in the order of the arrays in the files, a few megabytes at a time."""
        place = {name: self._direct[name].place() if name in self._direct else () for name in names}
        batch, size = [], 0
        for name in sorted(names, key=place.__getitem__):
            batch.append(name)
            size += math.prod(self.shapes[name].shape) * self.shapes[name].dtype.itemsize
            if size >= _BATCH_BYTES:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _begin(
        self, wanted: Mapping[str, jax.ShapeDtypeStruct], memory: "_Memory", pool: ThreadPoolExecutor
    ) -> "_Batch":
        arrays = {name: _Parts(leaf, memory) for name, leaf in wanted.items()}
        pending, pieces = [], []
        for name, array in arrays.items():
            if name in self._direct:
                pieces += self._direct[name].pieces(array.parts)
                continue
            stored = ts.cast(self._others[name], ts.dtype(wanted[name].dtype))
            pending += [ts.array(part).write(stored[_slices(bounds)]) for bounds, part in array.parts.items()]
        return _Batch(arrays, [*pending, pool.submit(direct.read, self._directory, pieces)])


def _open(directory: epath.Path, names: list[str]) -> dict[str, ts.TensorStore]:
    context = ts.Context(_CONTEXT)
    file = {"driver": "file", "path": f"{directory}/"}
    base = {"driver": "ocdbt", "base": file, "cache_pool": "cache_pool#ocdbt"}
    options = {"fill_missing_data_reads": False, "recheck_cached_metadata": False, "recheck_cached_data": False}
    opening = {}
    for name in names:
        spec = {"driver": "zarr", "kvstore": {**base, "path": _stored_name(name)}, **options}
        opening[name] = ts.open(spec, open=True, read=True, context=context)
    return {name: future.result() for name, future in opening.items()}


def read_shapes(directory: epath.Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Return {name: shape and dtype} of every array in the directory."""
    return StoredArrays(directory).shapes


def read_names(directory: epath.Path) -> set[str]:
    """Return the names of all arrays in the directory without opening them."""
    with _metadata_errors(directory):
        names, empty = _read_metadata(directory)
        return {*names, *empty}


def _read_metadata(directory: epath.Path) -> tuple[list[str], dict[str, jax.ShapeDtypeStruct]]:
    """Return (names of the stored arrays, {name: shape and dtype} of the empty ones)."""
    with open_inside(directory, METADATA) as file:
        metadata = parse_json(file.read(_MAX_METADATA_BYTES + 1), max_bytes=_MAX_METADATA_BYTES)
    keys = [entry["key_metadata"] for entry in metadata["tree_metadata"].values()]
    names = ["/".join(str(key["key"]) for key in keys_of_one) for keys_of_one in keys]
    empty = {}
    for name, leaf in (metadata.get("custom_metadata") or {}).get(EMPTY, {}).items():
        shape = check_shape(leaf["shape"])
        if 0 not in shape:
            raise ValueError(f"{name[:200]} is listed as an array without elements, with the shape {list(shape)}")
        empty[name] = jax.ShapeDtypeStruct(shape, DTYPES[leaf["dtype"]])
    return names, empty


def read_empty_arrays(directory: epath.Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Return {name: shape and dtype} of the arrays without elements."""
    with _metadata_errors(directory):
        return _read_metadata(directory)[1]


@contextlib.contextmanager
def _metadata_errors(directory: epath.Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(directory, f"its metadata cannot be read: {faults.first_line(error)}") from error


class _Memory:
    """Memory for arrays, in huge pages.

    They fill in a fraction of the time, because the operating system clears small pages one by one. Arrays are aligned
    such that JAX on a CPU adopts them without a copy.
    """

    def __init__(self):
        self._block, self._used = np.empty(0, np.uint8), 0

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an uninitialized array."""
        begin, size = -(-self._used // _ALIGNMENT) * _ALIGNMENT, math.prod(shape) * dtype.itemsize
        if begin + size > self._block.size:
            pages = mmap.mmap(-1, max(size, _BLOCK_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                pages.madvise(mmap.MADV_HUGEPAGE)
            self._block, begin = np.frombuffer(pages, np.uint8), 0
        self._used = begin + size
        return self._block[begin : self._used].view(dtype).reshape(shape)


class _Parts:
    """Memory for the distinct shards of an array that this process needs."""

    def __init__(self, leaf: jax.ShapeDtypeStruct, memory: _Memory):
        self._leaf = leaf
        indices = [()] if leaf.sharding is None else leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
        bounds = dict.fromkeys(_bounds(index, leaf.shape) for index in indices)
        self.parts = {each: memory.take(tuple(end - begin for begin, end in each), leaf.dtype) for each in bounds}
        self.nbytes = sum(part.nbytes for part in self.parts.values())

    def assemble(self) -> Any:
        """Return the array in its sharding."""
        shape, sharding = self._leaf.shape, self._leaf.sharding
        if sharding is None:
            return self.parts[_bounds((), shape)]
        return jax.make_array_from_callback(shape, sharding, lambda index: self.parts[_bounds(index, shape)])


class _Batch:
    """Arrays that are being read."""

    def __init__(self, arrays: Mapping[str, _Parts], pending: list[Any]):
        self._arrays, self._pending = arrays, pending
        self.nbytes = sum(array.nbytes for array in arrays.values())

    def finish(self) -> dict[str, Any]:
        """Wait for the arrays and return them by name."""
        for future in self._pending:
            future.result()
        return {name: array.assemble() for name, array in self._arrays.items()}


# --- Parts and names


def _parts(leaf: jax.Array | np.ndarray) -> list[tuple[tuple[slice, ...], jax.Array | np.ndarray]]:
    """Return (index, data) of the shards that this process has to write."""
    if isinstance(leaf, jax.Array):
        return [(shard.index, shard.data) for shard in leaf.addressable_shards if shard.replica_id == 0]
    return [((), leaf)] if jax.process_index() == 0 else []


def _part_shape(leaf: jax.Array | np.ndarray) -> tuple[int, ...]:
    return leaf.sharding.shard_shape(leaf.shape) if isinstance(leaf, jax.Array) else leaf.shape


def _have_room(arrays: list[jax.Array | np.ndarray]) -> bool:
    """Return whether the devices, unless they are CPUs, could hold these arrays on top of their peak memory use."""
    needed: dict[jax.Device, int] = collections.defaultdict(int)
    for data in arrays:
        if isinstance(data, jax.Array):
            needed[data.device] += data.nbytes
    if any(device.platform == "cpu" for device in needed):
        return False
    stats = {device: device.memory_stats() or {} for device in needed}
    return all(
        1.1 * size < stats[device].get("bytes_limit", 0) - stats[device].get("peak_bytes_in_use", 0)
        for device, size in needed.items()
    )


def _to_host(arrays: list[jax.Array | np.ndarray]) -> list[np.ndarray]:
    """Return copies that nobody else writes to. All transfers start before the first is waited for."""
    begun = []
    for data in arrays:
        if isinstance(data, np.ndarray):
            data = np.array(data)
        elif data.device.platform == "gpu":  # the device can write to pinned memory directly
            data = jax.device_put(data, SingleDeviceSharding(data.device, memory_kind="pinned_host"))
        else:
            data.copy_to_host_async()
        begun.append(data)
    return [np.asarray(data) for data in begun]  # JAX does not donate a buffer that has a NumPy view


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return (begin, end) of every dimension; an index may omit the last ones."""
    slices = [*index, *[slice(None)] * (len(shape) - len(index))]
    return tuple(part.indices(size)[:2] for part, size in zip(slices, shape, strict=True))


def _slices(bounds: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(*pair) for pair in bounds)


def array_spec(base: Mapping[str, Any], name: str, chunks: tuple[int, ...], leaf: Any) -> dict[str, Any]:
    """Return the TensorStore spec that creates an array in a database.

    Args:
      base: spec of the database.
      leaf: anything with shape and dtype.
    """
    return {
        "driver": "zarr",
        "kvstore": {**base, "path": _stored_name(name)},
        "metadata": {"shape": list(leaf.shape), "chunks": list(chunks), "compressor": None},
        "dtype": ts.dtype(leaf.dtype).name,
        "store_data_equal_to_fill_value": True,
    }


def _stored_name(name: str) -> str:
    return name.replace("/", ".") + "/"


def _dtype(array: ts.TensorStore) -> np.dtype:
    return np.dtype(array.dtype.numpy_dtype)


def _empty_array(leaf: jax.ShapeDtypeStruct) -> Any:
    zeros = np.zeros(leaf.shape, leaf.dtype)
    if leaf.sharding is None:
        return zeros
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: zeros[index])


def _as_array(name: str, leaf: Any) -> jax.Array | np.ndarray:
    if isinstance(leaf, bool | int | float | np.generic):
        leaf = np.asarray(leaf)
    if not isinstance(leaf, jax.Array | np.ndarray) or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise UserError(
            f"{name}: a {type(leaf).__name__} of dtype {getattr(leaf, 'dtype', None)} cannot be saved in a checkpoint. "
            "Save arrays of numbers (of a random key: jax.random.key_data)."
        )
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OUSMm":
        raise UserError(f"{name}: an array of dtype {leaf.dtype} cannot be saved in a checkpoint; save numbers.")
    if isinstance(leaf, jax.Array) and leaf.is_fully_addressable and jax.process_count() > 1:
        return np.asarray(leaf)  # every process has its own copy
    return leaf


def _check_stored_names(leaves: Iterable[str]) -> None:
    """Raise a UserError if names clash: keys are joined with dots, so `a.b` would overwrite `a/b`."""
    seen: dict[str, str] = {}
    for name in leaves:
        other = seen.setdefault(_stored_name(name), name)
        if other != name:
            raise UserError(f"Parameters {other!r} and {name!r} cannot both be saved. Rename one of them.")


def _has_elements(leaf: jax.ShapeDtypeStruct) -> bool:
    return 0 not in leaf.shape


def _bytes_in_files(leaf: jax.ShapeDtypeStruct) -> int:
    """Return the least number of bytes that this array adds to the files."""
    size = math.prod(leaf.shape) * leaf.dtype.itemsize
    shards = len(leaf.sharding.device_set) if leaf.sharding is not None else 1
    return size if size > _INLINE_BYTES * shards else 0
