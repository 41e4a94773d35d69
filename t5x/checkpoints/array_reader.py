"""Reads the arrays of a checkpoint, whoever wrote it, onto any devices.

`restore` reads a tree from the path of a checkpoint alone; `StoredArrays` reads its directory `state/`:

    _METADATA               JSON: the names of the arrays; shapes and dtypes of empty ones
    manifest.ocdbt, d/      an OCDBT database that indexes the chunks of all arrays
    ocdbt.process_<k>/      the chunks written by process k

Orbax and other tools can read it too. TensorStore reads the chunks of an object store. From a disk it takes four times
as long as necessary: it copies each chunk twice and opens each array separately. There, uncompressed chunks, the only
kind that we write, are read directly into the memory of the array.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import EllipsisType
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from etils import epath

from t5x._runtime.errors import UserError
from t5x.checkpoints import manifest, ocdbt, paths
from t5x.checkpoints import tree as trees
from t5x.checkpoints.formats import zarr_arrays
from t5x.checkpoints.formats.safety import DTYPES, MAX_METADATA_BYTES, Malformed, check_expansion, check_shape
from t5x.checkpoints.formats.source import LazyArray
from t5x.checkpoints.manifest import DamagedCheckpoint
from t5x.checkpoints.ocdbt import ByteRange
from t5x.checkpoints.paths import open_files
from t5x.files.remote import is_remote
from t5x.files.storage_errors import access_errors, first_line, tensorstore_status
from t5x.files.untrusted import open_inside, parse_json

log = logging.getLogger(__name__)

METADATA = "_METADATA"
EMPTY = "empty_arrays"

_READ_AHEAD_BYTES = 2 * 2**30
_BATCH_BYTES = 8 * 2**20  # a thread reads at least this much at once
_BLOCK_BYTES = 64 * 2**20  # memory is allocated in blocks of this size
_REMOTE_BATCHES = 16  # in flight
_ALIGNMENT = 64

Bounds = tuple[tuple[int, int], ...]  # (begin, end) in every dimension
Shards = Mapping[Bounds, np.ndarray]  # memory for the elements within the bounds


def stored_name(name: str) -> str:
    """Return the prefix of an array's keys in the database, as Orbax chooses it."""
    return name.replace("/", ".") + "/"


class StoredArrays:
    """The arrays in a directory `state/`. Opening them reads only metadata.

    Attributes:
      shapes: {name: shape and dtype}.
    """

    def __init__(self, directory: epath.PathLike):
        self._directory = directory
        with _metadata_errors(directory):
            names, empty = _read_metadata(directory)
            self._arrays = _open_arrays(directory, {name: stored_name(name) for name in names})
            self.shapes = {name: self._arrays[name].leaf for name in names} | empty
            files_bytes = sum(entry.size for entry in open_files(directory).list().values())
            check_expansion(directory, self.shapes.values(), files_bytes)

    def read(self, requested: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
        """Read the requested arrays, and no others.

        Args:
          requested: {name: leaf} with the stored shapes. An array with a sharding is placed on its devices, shard by
            shard; one without becomes a NumPy array. A dtype other than the stored one casts.
        """
        size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in requested.values())
        memory = _Memory(min(size, _BLOCK_BYTES))
        result = {name: _ArrayMemory(leaf, memory).assemble() for name, leaf in requested.items() if 0 in leaf.shape}
        reading: collections.deque[tuple[dict[str, _ArrayMemory], Future[None]]] = collections.deque()
        ahead = 0  # bytes of the batches in flight
        threads = _REMOTE_BATCHES if is_remote(self._directory) else min(8, os.cpu_count() or 1)
        with _read_errors(self._directory), ThreadPoolExecutor(threads, thread_name_prefix="t5x-read") as pool:
            for names in self._batches([name for name in requested if name not in result]):
                batch = {name: _ArrayMemory(requested[name], memory) for name in names}
                reading.append((batch, pool.submit(self._fill, batch)))
                ahead += sum(array.nbytes for array in batch.values())
                while ahead > _READ_AHEAD_BYTES:
                    ahead -= self._finish(reading, result)
            while reading:
                self._finish(reading, result)
        return {name: result[name] for name in requested}

    def _fill(self, batch: "Mapping[str, _ArrayMemory]") -> None:
        with _Files(self._directory) as files:
            begun = [self._arrays[name].begin_reading(array.shards, files) for name, array in batch.items()]
            for finish in begun:
                finish()

    @staticmethod
    def _finish(reading: collections.deque, result: dict[str, Any]) -> int:
        """Wait for the oldest batch and move its arrays to `result`; return its bytes."""
        batch, filled = reading.popleft()
        filled.result()
        result.update({name: array.assemble() for name, array in batch.items()})
        return sum(array.nbytes for array in batch.values())

    def lazy_arrays(self) -> dict[str, LazyArray]:
        """Return {name: array} of all arrays, each to be read on demand as a NumPy array."""

        def read(name: str) -> np.ndarray:
            return self.read({name: self.shapes[name]})[name]

        return {
            name: LazyArray(leaf.shape, leaf.dtype, functools.partial(read, name)) for name, leaf in self.shapes.items()
        }

    def _batches(self, names: list[str]) -> Iterator[list[str]]:
        """Yield the names in the order of the arrays in the files, a few megabytes at a time."""
        batch, size = [], 0
        for name in sorted(names, key=lambda name: self._arrays[name].place()):
            batch.append(name)
            size += math.prod(self.shapes[name].shape) * self.shapes[name].dtype.itemsize
            if size >= _BATCH_BYTES:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch


# --- Checkpoints


def restore(path: epath.PathLike, abstract_tree: Any = None, *, verify: bool = True) -> Any:
    """Read the tree of a checkpoint, or a part of it.

    Args:
      path: the checkpoint directory.
      abstract_tree: the tree to return, with jax.ShapeDtypeStruct leaves. A leaf with a sharding is read directly onto
        its devices, on any mesh; one without becomes a NumPy array. A dtype other than the stored one casts. Of the
        sections `target`, `state/step`, `state/param_states` and `flax_mutables`, those that the tree omits are not
        read (`{"target": …}` for inference); within a section, the arrays must match exactly. None reads everything,
        as nested dictionaries of NumPy arrays.
      verify: check all files against the manifest while reading. Pass False if that has just been done.

    Raises:
      DamagedCheckpoint: a file has changed since it was written.
      UserError: the tree does not fit; the message has a table of the differences.
    """
    if not verify:
        return _read(path, abstract_tree)
    verification = manifest.Verification(path)
    try:
        return _read(path, abstract_tree)
    finally:
        verification.finish()  # damage replaces any error above, which it may have caused


def _read(path: epath.PathLike, abstract_tree: Any) -> Any:
    stored = StoredArrays(_state_directory(path))
    if abstract_tree is None:
        return trees.nest(stored.read(stored.shapes))

    requested = {name: trees.as_struct(leaf) for name, leaf in trees.flatten(abstract_tree).items()}
    sections = {trees.section(name) for name in requested}
    relevant = {name: leaf for name, leaf in stored.shapes.items() if trees.section(name) in sections}
    if table := trees.difference_by_name(requested, relevant):
        raise UserError(f"{path} does not fit the model (expected: the model, found: the checkpoint): {table}")
    _log_casts(path, requested, stored.shapes)
    leaves = stored.read(requested)
    return jax.tree.unflatten(jax.tree.structure(abstract_tree), leaves.values())


def read_shapes(path: epath.PathLike) -> dict[str, Any]:
    """Return the tree of a checkpoint with jax.ShapeDtypeStruct leaves: `restore(path)` without the data."""
    return trees.nest(StoredArrays(_state_directory(path)).shapes)


def read_names(path: epath.PathLike) -> set[str]:
    """Return the names of all arrays of a checkpoint."""
    directory = _state_directory(path)
    with _metadata_errors(directory):
        names, empty = _read_metadata(directory)
        return {*names, *empty}


def _state_directory(path: epath.PathLike) -> str:
    """Return the directory of the arrays, after checking that the manifest is one of ours."""
    manifest.read(path)
    return f"{paths.location(path)}/{paths.STATE}"


def _log_casts(path: epath.PathLike, requested: Mapping[str, Any], shapes: Mapping[str, Any]) -> None:
    casts = sorted({(shapes[name].dtype.name, leaf.dtype.name) for name, leaf in requested.items()})
    for stored, asked in casts:
        if stored != asked:
            log.info("%s: casting %s arrays to %s", path, stored, asked)


# --- Metadata


def _read_metadata(directory: epath.PathLike) -> tuple[list[str], dict[str, jax.ShapeDtypeStruct]]:
    """Return (names of the stored arrays, {name: shape and dtype} of the empty ones)."""
    with open_files(directory).open(METADATA) as file:
        metadata = parse_json(file.read(MAX_METADATA_BYTES + 1), max_bytes=MAX_METADATA_BYTES)
    keys = [entry["key_metadata"] for entry in metadata["tree_metadata"].values()]
    names = ["/".join(str(key["key"]) for key in keys_of_one) for keys_of_one in keys]
    empty = {}
    for name, leaf in (metadata.get("custom_metadata") or {}).get(EMPTY, {}).items():
        shape = check_shape(leaf["shape"])
        if 0 not in shape:
            raise ValueError(f"{name[:200]} is listed as an array without elements, with the shape {list(shape)}")
        empty[name] = jax.ShapeDtypeStruct(shape, DTYPES[leaf["dtype"]])
    return names, empty


@contextlib.contextmanager
def _metadata_errors(directory: epath.PathLike) -> Iterator[None]:
    try:
        with access_errors(os.fspath(directory)):
            yield
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(directory, f"its metadata cannot be read: {first_line(error)}") from error


@contextlib.contextmanager
def _read_errors(directory: epath.PathLike) -> Iterator[None]:
    try:
        with access_errors(os.fspath(directory)):
            yield
    except ValueError as error:
        if not tensorstore_status(error):
            raise
        raise DamagedCheckpoint(directory, first_line(error)) from error


# --- Arrays in files


@dataclasses.dataclass(frozen=True)
class _ChunkedArray:
    """An array of uncompressed chunks.

    Attributes:
      prefix: prefix of its keys in the database.
      values: values of the whole database, by key.
    """

    directory: epath.PathLike
    prefix: str
    metadata: zarr_arrays.Metadata
    values: Mapping[str, bytes | ByteRange]

    @property
    def leaf(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.metadata.shape, self.metadata.dtype)

    def place(self) -> ByteRange:
        """Return the array's approximate position, to read neighbouring arrays together."""
        value = self.values.get(self.prefix + self.metadata.chunk_name((0,) * len(self.metadata.shape)))
        return value if isinstance(value, ByteRange) else ByteRange("", 0, 0)

    def begin_reading(self, shards: Shards, files: "_Files") -> Callable[[], None]:
        """Return a function that fills the shards. Each chunk is read once, however many shards overlap it."""
        return lambda: self._read_into(shards, files)

    def _read_into(self, shards: Shards, files: "_Files") -> None:
        chunks = self.metadata.chunks
        uses: dict[str, list[tuple[np.ndarray, tuple[slice, ...]]]] = {}  # (destination, elements of the chunk)
        for bounds, shard in shards.items():
            ranges = [range(begin // n, -(-end // n)) for (begin, end), n in zip(bounds, chunks, strict=True)]
            for index in itertools.product(*ranges):
                of_shard, of_chunk = [], []
                for i, n, (begin, end) in zip(index, chunks, bounds, strict=True):
                    low, high = max(begin, i * n), min(end, (i + 1) * n)
                    of_shard.append(slice(low - begin, high - begin))
                    of_chunk.append(slice(low - i * n, high - i * n))
                within: tuple[slice | EllipsisType, ...] = (*of_shard, ...)
                key = self.prefix + self.metadata.chunk_name(index)
                uses.setdefault(key, []).append((shard[within], tuple(of_chunk)))
        for key, destinations in uses.items():
            self._read_chunk(key, destinations, files)

    def _read_chunk(self, key: str, destinations: list[tuple[np.ndarray, tuple[slice, ...]]], files: "_Files") -> None:
        value, size = self.values.get(key), self.metadata.chunk_bytes
        if value is None:
            raise DamagedCheckpoint(self.directory, f"the chunk {key} is missing")
        actual = value.size if isinstance(value, ByteRange) else len(value)
        if actual != size:
            raise DamagedCheckpoint(self.directory, f"the chunk {key} has {actual} bytes instead of {size}")
        destination, _ = destinations[0]
        whole = len(destinations) == 1 and destination.nbytes == size and destination.dtype == self.metadata.dtype
        if isinstance(value, ByteRange) and whole and destination.flags.c_contiguous:
            files.read_into(value, destination.reshape(-1).view(np.uint8))
            return
        content = files.read(value) if isinstance(value, ByteRange) else np.frombuffer(value, np.uint8)
        chunk = content.view(self.metadata.dtype).reshape(self.metadata.chunks)
        for destination, elements in destinations:
            destination[...] = chunk[elements]


@dataclasses.dataclass(frozen=True)
class _TensorStoreArray:
    """An array in an object store, one of another kind, or one whose position TensorStore does not report."""

    array: ts.TensorStore

    @property
    def leaf(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.array.shape, self.array.dtype.numpy_dtype)

    def place(self) -> ByteRange:
        return ByteRange("", 0, 0)

    def begin_reading(self, shards: Shards, files: "_Files") -> Callable[[], None]:
        """Start to read; return a function that waits and fills the shards."""
        begun = [(shard, self.array[tuple(slice(*pair) for pair in bounds)].read()) for bounds, shard in shards.items()]

        def finish() -> None:
            for shard, read in begun:
                shard[...] = read.result()

        return finish


def _open_arrays(
    directory: epath.PathLike, prefixes: Mapping[str, str]
) -> Mapping[str, _ChunkedArray | _TensorStoreArray]:
    """Open arrays of the database in `directory`.

    Args:
      prefixes: {name: prefix of the array's keys}.
    """
    if is_remote(directory):
        return _open_with_tensorstore(directory, prefixes)
    try:
        values = ocdbt.locate(directory)
    except (AttributeError, KeyError, TypeError) as error:  # a TensorStore version with another output
        log.debug("The positions of the chunks of %s are unknown: %r", directory, error)
        values = {}
    opened: dict[str, _ChunkedArray | _TensorStoreArray] = {}
    with _Files(directory) as files:
        for name, prefix in prefixes.items():
            value = values.get(prefix + zarr_arrays.METADATA_FILE)
            if isinstance(value, ByteRange):
                value = files.read(value._replace(size=min(value.size, zarr_arrays.MAX_METADATA_BYTES + 1))).tobytes()
            with contextlib.suppress(Malformed):
                metadata = None if value is None else zarr_arrays.parse_metadata(value)
                if metadata is not None and metadata.codec is None and metadata.order == "C":
                    opened[name] = _ChunkedArray(directory, prefix, metadata, values)
    if others := {name: prefix for name, prefix in prefixes.items() if name not in opened}:
        log.warning(
            "%d of the %d arrays of %s cannot be read directly from their files. TensorStore reads them, which takes "
            "several times as long.", len(others), len(prefixes), directory,
        )  # fmt: skip
        opened |= _open_with_tensorstore(directory, others)
    return opened


def _open_with_tensorstore(directory: epath.PathLike, prefixes: Mapping[str, str]) -> dict[str, _TensorStoreArray]:
    opened = ocdbt.open_arrays(directory, prefixes.values())
    return {name: _TensorStoreArray(array) for name, array in zip(prefixes, opened, strict=True)}


class _Files(contextlib.ExitStack):
    """Open files of a directory."""

    def __init__(self, directory: epath.PathLike):
        super().__init__()
        self._directory = directory
        self._opened: dict[str, tuple[int, int]] = {}  # descriptor and size

    def read(self, place: ByteRange) -> np.ndarray:
        """Return the bytes at a place as a uint8 array."""
        content = np.empty(place.size, np.uint8)
        self.read_into(place, content)
        return content

    def read_into(self, place: ByteRange, memory: np.ndarray) -> None:
        """Fill `memory`, a uint8 array of the place's size."""
        try:
            if place.path not in self._opened:
                file = self.enter_context(open_inside(self._directory, place.path))
                self._opened[place.path] = file.fileno(), os.fstat(file.fileno()).st_size
            descriptor, size = self._opened[place.path]
            count = done = 0
            while done < place.size:
                if place.offset + place.size <= size:
                    count = os.preadv(descriptor, [memory[done:].data], place.offset + done)
                if count == 0:
                    raise DamagedCheckpoint(self._directory, f"{place.path} ends too early")
                done += count
        except OSError as error:
            reason = f"{place.path} cannot be read: {error.strerror}"
            raise DamagedCheckpoint(self._directory, reason) from error


# --- Memory


class _Memory:
    """Memory for arrays, in huge pages.

    They fill in a fraction of the time, because the operating system clears small pages one by one. Arrays are aligned
    such that JAX on a CPU adopts them without a copy.
    """

    def __init__(self, block_bytes: int):
        self._block_bytes = block_bytes
        self._block, self._used = np.empty(0, np.uint8), 0

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an uninitialized array."""
        begin, size = -(-self._used // _ALIGNMENT) * _ALIGNMENT, math.prod(shape) * dtype.itemsize
        if begin + size > self._block.size:
            pages = mmap.mmap(-1, max(size, self._block_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                pages.madvise(mmap.MADV_HUGEPAGE)
            self._block, begin = np.frombuffer(pages, np.uint8), 0
        self._used = begin + size
        return self._block[begin : self._used].view(dtype).reshape(shape)


class _ArrayMemory:
    """Memory for the distinct shards of an array that this process needs."""

    def __init__(self, leaf: jax.ShapeDtypeStruct, memory: _Memory):
        self._leaf = leaf
        indices = [()] if leaf.sharding is None else leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
        bounds = dict.fromkeys(_bounds(index, leaf.shape) for index in indices)
        self.shards = {each: memory.take(tuple(end - begin for begin, end in each), leaf.dtype) for each in bounds}
        self.nbytes = sum(shard.nbytes for shard in self.shards.values())

    def assemble(self) -> Any:
        """Return the array in its sharding."""
        shape, sharding = self._leaf.shape, self._leaf.sharding
        if sharding is None:
            return self.shards[_bounds((), shape)]
        return jax.make_array_from_callback(shape, sharding, lambda index: self.shards[_bounds(index, shape)])


def _bounds(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Bounds:
    """Return (begin, end) of every dimension; an index may omit the last ones."""
    index = index or ()
    slices = [*index, *[slice(None)] * (len(shape) - len(index))]
    return tuple(part.indices(size)[:2] for part, size in zip(slices, shape, strict=True))
