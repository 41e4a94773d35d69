"""The arrays of a checkpoint: the directory `state/`, which Orbax and other tools can read, written with TensorStore.

    _METADATA               JSON: the names of the arrays; shapes and dtypes of those without elements
    manifest.ocdbt, d/      an OCDBT database that names the chunks of all arrays
    ocdbt.process_<k>/      what process k wrote: its part of the chunks

Arrays are zarr, uncompressed (trained weights do not compress, and both directions run at the speed of the disk), in
chunks small enough that any other sharding can read just its part. Orbax itself would spend milliseconds of Python on
every array, holding up the training that goes on meanwhile.
"""

import collections
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from etils import epath
from jax.sharding import SingleDeviceSharding

from t5x.checkpoints import faults, paths
from t5x.checkpoints import tree as trees
from t5x.checkpoints.formats.zarr_arrays import choose_chunks
from t5x.checkpoints.manifest import DamagedCheckpoint
from t5x.errors import UserError

METADATA = "_METADATA"
EMPTY = "empty_arrays"

_FILE_BYTES = 64 * 2**20  # files are hashed in parallel, so several of them are better than one
_INLINE_BYTES = 1024  # chunks up to this size lie inside OCDBT's own nodes
_READ_AHEAD_BYTES = 2 * 2**30
_CONTEXT = {"cache_pool#ocdbt": {"total_bytes_limit": 10**8}, "file_io_concurrency": {"limit": 128}}


# --- Writing


class HostArrays:
    """What this process has to write of a tree, copied to the host: the device buffers may be donated afterwards.

    Of an array over several devices, each part is written by the process that holds its first copy; what is no global
    jax.Array is written by process 0.

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
        on_host = _to_host([data for _, _, data in parts])
        self._parts: dict[str, list[tuple[tuple[slice, ...], np.ndarray]]] = {name: [] for name in stored}
        for (name, index, _), data in zip(parts, on_host, strict=True):
            self._parts[name].append((index, data))
        self._chunks = {name: choose_chunks(_part_shape(leaf), leaf.dtype.itemsize) for name, leaf in stored.items()}

    def write(self, directory: epath.Path) -> epath.Path:
        """Writes them into a directory of this process, inside the existing `directory`, and forgets them."""
        mine = directory / f"ocdbt.process_{jax.process_index()}"
        base = {
            "driver": "ocdbt", "base": {"driver": "file", "path": f"{mine}/"},
            "config": {"max_inline_value_bytes": _INLINE_BYTES}, "target_data_file_size": _FILE_BYTES,
        }  # fmt: skip
        context, transaction = ts.Context(_CONTEXT), ts.Transaction(atomic=True)
        creates = jax.process_index() == 0  # it says what arrays there are; the others only write into them
        opening = []
        parts, self._parts = self._parts, {}
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
    """Makes one database of what all processes wrote into `directory`, and says in it what arrays there are."""
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
    """The file by which Orbax, and `read_shapes`, know what is there."""
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
    """TensorStore makes missing directories anew, so the removal of some half-way can go unnoticed."""
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
    """The arrays in a directory, as `join` left it. Only metadata is read to open them.

    Attributes:
      shapes: shape and dtype of each, by name.
    """

    def __init__(self, directory: epath.Path):
        self._directory = directory
        context = ts.Context(_CONTEXT)
        file = {"driver": "file", "path": f"{directory}/"}
        base = {"driver": "ocdbt", "base": file, "cache_pool": "cache_pool#ocdbt"}
        options = {"fill_missing_data_reads": False, "recheck_cached_metadata": False, "recheck_cached_data": False}
        try:
            metadata = json.loads((directory / METADATA).read_bytes())
            opening = {}
            for entry in metadata["tree_metadata"].values():
                name = "/".join(str(key["key"]) for key in entry["key_metadata"])
                spec = {"driver": "zarr", "kvstore": {**base, "path": _stored_name(name)}, **options}
                opening[name] = ts.open(spec, open=True, read=True, context=context)
            self._stored = {name: future.result() for name, future in opening.items()}
            self.shapes = {
                name: jax.ShapeDtypeStruct(array.shape, _dtype(array)) for name, array in self._stored.items()
            }
            for name, leaf in (metadata.get("custom_metadata") or {}).get(EMPTY, {}).items():
                self.shapes[name] = jax.ShapeDtypeStruct(tuple(leaf["shape"]), jax.numpy.dtype(leaf["dtype"]))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DamagedCheckpoint(directory, f"its metadata cannot be read: {faults.first_line(error)}") from error

    def read(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
        """Reads the wanted arrays, and only these.

        Args:
          wanted: by name, with the shape stored. An array with a sharding arrives on its devices, shard by shard; one
            without arrives as a NumPy array. A dtype other than the stored one casts.
        """
        result = {name: _empty_array(leaf) for name, leaf in wanted.items() if not _has_elements(leaf)}
        reading: collections.deque[_Read] = collections.deque()
        ahead = 0
        try:
            for name in [name for name in wanted if name not in result]:
                reading.append(_Read(name, self._stored[name], wanted[name]))
                ahead += reading[-1].nbytes
                while ahead > _READ_AHEAD_BYTES:
                    one = reading.popleft()
                    result[one.name] = one.finish()
                    ahead -= one.nbytes
            result |= {one.name: one.finish() for one in reading}
        except ValueError as error:
            if not faults.tensorstore_status(error):
                raise
            raise DamagedCheckpoint(self._directory, faults.first_line(error)) from error
        return {name: result[name] for name in wanted}


def read_shapes(directory: epath.Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every array in the directory, by name."""
    return StoredArrays(directory).shapes


class _Read:
    """An array on its way from the disk: each part that this process wants is read once."""

    def __init__(self, name: str, array: ts.TensorStore, leaf: jax.ShapeDtypeStruct):
        self.name, self._leaf = name, leaf
        if _dtype(array) != leaf.dtype:
            array = ts.cast(array, ts.dtype(leaf.dtype))
        indices = [()] if leaf.sharding is None else leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
        parts = {bounds: array[_slices(bounds)] for bounds in {_bounds(index, leaf.shape) for index in indices}}
        self._futures = {bounds: part.read(order="C") for bounds, part in parts.items()}
        self.nbytes = sum(part.size for part in parts.values()) * leaf.dtype.itemsize

    def finish(self) -> Any:
        """The array, where it was wanted; waits for it."""
        shape, sharding = self._leaf.shape, self._leaf.sharding
        parts = {bounds: np.asarray(future.result()) for bounds, future in self._futures.items()}
        if sharding is None:
            return parts[_bounds((), shape)]
        return jax.make_array_from_callback(shape, sharding, lambda index: parts[_bounds(index, shape)])


# --- Parts and names


def _parts(leaf: jax.Array | np.ndarray) -> list[tuple[tuple[slice, ...], jax.Array | np.ndarray]]:
    """(index, data) of what this process has to write of an array."""
    if isinstance(leaf, jax.Array):
        return [(shard.index, shard.data) for shard in leaf.addressable_shards if shard.replica_id == 0]
    return [((), leaf)] if jax.process_index() == 0 else []


def _part_shape(leaf: jax.Array | np.ndarray) -> tuple[int, ...]:
    return leaf.sharding.shard_shape(leaf.shape) if isinstance(leaf, jax.Array) else leaf.shape


def _to_host(arrays: list[jax.Array | np.ndarray]) -> list[np.ndarray]:
    """The data in memory that nobody else writes to. All copies are begun before the first is waited for."""
    begun = []
    for data in arrays:
        if isinstance(data, np.ndarray):
            data = np.array(data)
        elif data.device.platform == "gpu":  # the device can write to pinned memory directly
            data = jax.device_put(data, SingleDeviceSharding(data.device, memory_kind="pinned_host"))
        else:
            data.copy_to_host_async()
        begun.append(data)
    return [np.asarray(data) for data in begun]  # JAX gives no buffer away that is looked at


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """(begin, end) in every dimension; an index may leave the last ones out."""
    slices = [*index, *[slice(None)] * (len(shape) - len(index))]
    return tuple(part.indices(size)[:2] for part, size in zip(slices, shape, strict=True))


def _slices(bounds: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(*pair) for pair in bounds)


def array_spec(base: Mapping[str, Any], name: str, chunks: tuple[int, ...], leaf: Any) -> dict[str, Any]:
    """What TensorStore has to know to make an array in a database.

    Args:
      base: of the database.
      leaf: has shape and dtype.
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
        return np.asarray(leaf)  # every process has one of its own
    return leaf


def _check_stored_names(leaves: Iterable[str]) -> None:
    """Keys are joined with dots, so `a.b` beside `a/b` would overwrite each other."""
    seen: dict[str, str] = {}
    for name in leaves:
        other = seen.setdefault(_stored_name(name), name)
        if other != name:
            raise UserError(f"Parameters {other!r} and {name!r} cannot both be saved. Rename one of them.")


def _has_elements(leaf: jax.ShapeDtypeStruct) -> bool:
    return 0 not in leaf.shape


def _bytes_in_files(leaf: jax.ShapeDtypeStruct) -> int:
    """How many bytes this array adds to the files at least."""
    size = math.prod(leaf.shape) * leaf.dtype.itemsize
    shards = len(leaf.sharding.device_set) if leaf.sharding is not None else 1
    return size if size > _INLINE_BYTES * shards else 0
