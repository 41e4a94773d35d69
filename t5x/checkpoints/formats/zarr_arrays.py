"""Zarr (version 2) directories, which T5X and older Orbax put beside a checkpoint's msgpack file.

Uncompressed, gzip and zlib chunks are decoded here, because TensorStore does not verify their checksums; zstd and blosc
go through TensorStore. Symbolic links are not followed. A missing chunk is an error unless the array states a fill
value: by default, TensorStore omits chunks equal to it. Callers bound the size of such arrays with
`base.check_expansion`.
"""

import dataclasses
import functools
import itertools
import json
import math
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from etils import epath

from t5x.checkpoints import paths
from t5x.checkpoints.formats.safety import DTYPES, check_chunk_shape, check_shape
from t5x.checkpoints.formats.source import LazyArray
from t5x.checkpoints.manifest import DamagedCheckpoint
from t5x.files.system_errors import first_line
from t5x.files.untrusted import open_inside, parse_json

METADATA_FILE = ".zarray"
COMPRESSOR = {"id": "gzip", "level": 1}  # written by us and by T5X

_MAX_CHUNK_BYTES = 64 * 2**20
_MAX_METADATA_BYTES = 2**20
_MAX_CHUNKS = 10_000_000
_THREADS = min(4, os.cpu_count() or 1)
_NAME_OF_DTYPE = {
    dtype: "bfloat16" if name == "bfloat16" else np.dtype(dtype).newbyteorder("<").str for name, dtype in DTYPES.items()
}
_DTYPE_OF_NAME = {name: dtype for dtype, name in _NAME_OF_DTYPE.items()}
# Maximum compression ratios. They bound what a small file can make us allocate.
_MAX_RATIO = {None: 1, "gzip": 1100, "zlib": 1100, "zstd": 2**16, "blosc": 2**16}


@dataclasses.dataclass(frozen=True)
class Metadata:
    """The content of an array's .zarray file."""

    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[int, ...]
    compressor: Mapping[str, Any] | None
    order: str = "C"
    separator: str = "."
    fill_value: Any = None

    @property
    def codec(self) -> str | None:
        return None if self.compressor is None else self.compressor["id"]

    @property
    def chunk_bytes(self) -> int:
        return math.prod(self.chunks) * self.dtype.itemsize

    @property
    def max_file_bytes(self) -> int:
        """Maximum size of a chunk's file: incompressible data grows a little."""
        return self.chunk_bytes + self.chunk_bytes // 8 + 1024

    def to_json(self) -> dict[str, Any]:
        return {
            "chunks": list(self.chunks),
            "compressor": self.compressor,
            "dimension_separator": self.separator,
            "dtype": _NAME_OF_DTYPE[self.dtype],
            "fill_value": self.fill_value,
            "filters": None,
            "order": self.order,
            "shape": list(self.shape),
            "zarr_format": 2,
        }

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of chunks along each dimension."""
        return tuple(-(-size // chunk) for size, chunk in zip(self.shape, self.chunks, strict=True))

    def grid(self) -> Iterator[tuple[int, ...]]:
        return itertools.product(*map(range, self.counts))

    def chunk_name(self, index: tuple[int, ...]) -> str:
        return self.separator.join(map(str, index)) or "0"

    def chunk_index(self, name: str) -> tuple[int, ...] | None:
        """Invert `chunk_name`; return None if no chunk of this array has that name."""
        parts = name.split(self.separator) if self.shape else ()
        if not all(part.isascii() and part.isdecimal() for part in parts) or len(parts) != len(self.shape):
            return None
        index = tuple(map(int, parts))
        known = self.chunk_name(index) == name and all(i < n for i, n in zip(index, self.counts, strict=True))
        return index if known else None

    def slices(self, index: tuple[int, ...]) -> tuple[slice, ...]:
        edges = zip(index, self.chunks, self.shape, strict=True)
        return tuple(slice(i * chunk, min((i + 1) * chunk, size)) for i, chunk, size in edges)


class Malformed(Exception):
    """An array is invalid. The message says why."""


# --- Reading


def open_array(directory: epath.PathLike, name: str, stated: Mapping[str, Any] | None = None) -> LazyArray:
    """Return the array in the directory `name` of a checkpoint. Reads only metadata.

    Args:
      directory: directory of the checkpoint.
      name: path relative to it.
      stated: what the checkpoint itself states about the array: `dtype` (such as `float32`) and `metadata` with
        `shape`, `chunks` and `compressor`. Shape and dtype must match the array. If the array's own metadata file is
        missing, this is used instead.

    Raises:
      DamagedCheckpoint: the array is missing, outside the checkpoint, or not as stated.
    """
    if not paths.is_plain_relative(name):
        raise DamagedCheckpoint(directory, f"it names the array {name[:200]!r}, which is not a path inside it")
    try:
        own = _read_metadata(directory, name)
        expected = None if stated is None else _stated_metadata(stated, complete=own is None)
        if own is None and expected is None:
            raise Malformed(f"has no {METADATA_FILE}, which alone says its shape")
        if own is not None and expected is not None and (own.shape, own.dtype) != (expected.shape, expected.dtype):
            raise Malformed(
                f"is {own.dtype} {list(own.shape)}, while the checkpoint says {expected.dtype} {list(expected.shape)}"
            )
        metadata = own or expected
        if math.prod(metadata.counts) > _MAX_CHUNKS:
            raise Malformed(f"says it has more than {_MAX_CHUNKS} chunks")
    except Malformed as error:
        raise DamagedCheckpoint(directory, f"the array {name} {error}") from None
    return LazyArray(metadata.shape, metadata.dtype, lambda: _read(directory, name, metadata))


def _read_metadata(directory: epath.PathLike, name: str) -> Metadata | None:
    """Return the content of .zarray, or None if the array has none."""
    try:
        with open_inside(directory, f"{name}/{METADATA_FILE}") as file:
            content = file.read(_MAX_METADATA_BYTES + 1)
    except FileNotFoundError:
        if os.path.isdir(os.path.join(directory, name)):
            return None
        raise Malformed("is missing") from None
    except OSError as error:
        raise Malformed(f"cannot be opened: {error.strerror}") from error
    return parse_metadata(content)


def parse_metadata(content: bytes) -> Metadata:
    """Parse the content of a .zarray file; raise Malformed if it is not supported."""
    try:
        data = parse_json(content, max_bytes=_MAX_METADATA_BYTES)
    except ValueError:
        raise Malformed(f"has a {METADATA_FILE} that is not JSON") from None
    if not isinstance(data, dict) or data.get("zarr_format") != 2 or data.get("filters") is not None:
        raise Malformed(f"has a {METADATA_FILE} that is not of zarr version 2 without filters")
    if not isinstance(data.get("dtype"), str) or data["dtype"] not in _DTYPE_OF_NAME:
        raise Malformed(f"has the dtype {str(data.get('dtype'))[:40]!r}; known: {', '.join(_DTYPE_OF_NAME)}")
    order, separator, fill_value = data.get("order"), data.get("dimension_separator", "."), data.get("fill_value")
    if order not in ("C", "F") or separator not in (".", "/") or isinstance(fill_value, list | dict):
        raise Malformed(f"has a {METADATA_FILE} with an unknown order, dimension_separator or fill_value")
    metadata = _checked(data, _DTYPE_OF_NAME[data["dtype"]], complete=True)
    return dataclasses.replace(metadata, order=order, separator=separator, fill_value=fill_value)


def _stated_metadata(stated: Mapping[str, Any], *, complete: bool) -> Metadata:
    """Return what the checkpoint states about an array; chunks and compressor only if `complete`."""
    data, dtype = stated.get("metadata"), stated.get("dtype")
    if not isinstance(data, dict):
        raise Malformed("has metadata that is not a dictionary")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise Malformed(f"is said to have the dtype {str(dtype)[:40]!r}; known: {', '.join(DTYPES)}")
    return _checked(data, DTYPES[dtype], complete=complete)


def _checked(data: Mapping[str, Any], dtype: np.dtype, *, complete: bool) -> Metadata:
    try:
        shape = check_shape(data.get("shape"))
        if not complete:
            return Metadata(shape, dtype, tuple(max(1, n) for n in shape), None)
        chunks, compressor = check_shape(data.get("chunks")), data["compressor"]
    except ValueError as error:
        raise Malformed(f"has metadata of which {error}") from None
    except KeyError:
        raise Malformed("does not say how it is compressed") from None
    if len(chunks) != len(shape) or 0 in chunks:
        raise Malformed(f"has chunks {list(chunks)}, which do not divide the shape {list(shape)}")
    try:
        check_chunk_shape(shape, chunks, dtype.itemsize)
    except ValueError as error:
        raise Malformed(f"cannot be read: {error}") from None
    codec = compressor.get("id", "") if isinstance(compressor, dict) else None
    if codec not in list(_MAX_RATIO) or (codec is None) != (compressor is None):
        raise Malformed(f"has the compressor {str(compressor)[:80]}; known: gzip, zlib, zstd, blosc and none")
    return Metadata(shape, dtype, chunks, compressor)


def _read(directory: epath.PathLike, name: str, metadata: Metadata) -> np.ndarray:
    try:
        stored = _find_chunks(os.path.join(directory, name), metadata)
        if metadata.codec in ("zstd", "blosc"):
            read_chunk = _reader_of_tensorstore(os.path.join(directory, name), metadata)
        else:
            read_chunk = functools.partial(_read_chunk, directory, name, metadata)
        result = _empty(metadata)

        def read(index: tuple[int, ...]) -> None:
            part = result[(*metadata.slices(index), ...)]
            part[...] = read_chunk(index)

        _for_each(read, stored)
        return result
    except Malformed as error:
        raise DamagedCheckpoint(directory, f"the array {name} {error}") from None
    except OSError as error:
        raise DamagedCheckpoint(directory, f"the array {name} cannot be read: {error.strerror}") from error
    except MemoryError:
        size = paths.human_size(math.prod(metadata.shape) * metadata.dtype.itemsize)
        raise DamagedCheckpoint(directory, f"the array {name} says it has {size}, more than fits in memory") from None


def _find_chunks(path: str, metadata: Metadata) -> list[tuple[int, ...]]:
    """Return the indices of the stored chunks. All must exist unless there is a fill value for the others."""
    files = dict(paths.walk(path))
    for name, status in files.items():
        if not stat.S_ISREG(status.st_mode):
            raise Malformed(f"has a file {name} that is not a regular file")
    # Search the files rather than the grid: an array that is all fill value may have millions of chunks.
    stored = {name: index for name in files if (index := metadata.chunk_index(name)) is not None}
    if metadata.fill_value is None and len(stored) < math.prod(metadata.counts):
        missing = next(name for index in metadata.grid() if (name := metadata.chunk_name(index)) not in stored)
        raise Malformed(f"lacks its chunk {missing}")
    for name in stored:
        if files[name].st_size > metadata.max_file_bytes:
            raise Malformed(
                f"has a chunk {name} of {files[name].st_size} bytes; it stands for {metadata.chunk_bytes} bytes"
            )
        if metadata.chunk_bytes > max(files[name].st_size, 1) * _MAX_RATIO[metadata.codec]:
            raise Malformed(
                f"has a chunk {name} of {files[name].st_size} bytes; that cannot be the {metadata.chunk_bytes} bytes "
                "it stands for"
            )
    return list(stored.values())


def _empty(metadata: Metadata) -> np.ndarray:
    """Return an array filled with the fill value, or uninitialized without one."""
    result = np.empty(metadata.shape, metadata.dtype)
    if metadata.fill_value is not None:
        try:
            result[...] = np.asarray(float(metadata.fill_value)).astype(metadata.dtype)
        except (ValueError, OverflowError):
            raise Malformed(f"has the fill value {str(metadata.fill_value)[:40]!r}, which is not a number") from None
    return result


def _read_chunk(directory: epath.PathLike, name: str, metadata: Metadata, index: tuple[int, ...]) -> np.ndarray:
    """Return a chunk, cropped to the array."""
    chunk_name = metadata.chunk_name(index)
    with open_inside(directory, f"{name}/{chunk_name}") as file:
        content = file.read(metadata.max_file_bytes)
    if metadata.codec is not None:
        content = _decompress(content, metadata.chunk_bytes, chunk_name)
    if len(content) != metadata.chunk_bytes:
        raise Malformed(f"has a chunk {chunk_name} of another size than {metadata.chunk_bytes} bytes")
    chunk = np.frombuffer(content, np.uint8).view(metadata.dtype).reshape(metadata.chunks, order=metadata.order)
    return chunk[tuple(slice(part.stop - part.start) for part in metadata.slices(index))]


def _decompress(content: bytes, size: int, chunk_name: str) -> bytes:
    """Return the `size` bytes in a gzip or zlib stream, with its checksum verified."""
    stream = zlib.decompressobj(wbits=47)
    try:
        result = stream.decompress(content, size + 1)
    except zlib.error as error:
        raise Malformed(f"has a corrupt chunk {chunk_name}: {error}") from None
    if not stream.eof or stream.unused_data:
        raise Malformed(f"has a chunk {chunk_name} that is cut off or of another size than {size} bytes")
    return result


def _reader_of_tensorstore(path: str, metadata: Metadata) -> Callable[[tuple[int, ...]], np.ndarray]:
    """Return a function that reads a chunk. It is called only for stored chunks: missing ones are slow too."""
    import tensorstore

    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": path + "/"},
        "metadata": metadata.to_json(),
        "assume_metadata": True,
        "open": True,
    }

    def explained(function: Callable[[], Any]) -> Any:
        try:
            return function()
        except (ValueError, RuntimeError, NotImplementedError) as error:
            raise Malformed(f"cannot be decoded: {first_line(error)}") from error

    array = explained(lambda: tensorstore.open(spec, read=True).result())
    return lambda index: explained(lambda: array[metadata.slices(index)].read().result())


# --- Writing


def write_array(directory: epath.PathLike, name: str, array: np.ndarray) -> dict[str, Any]:
    """Write the array as the zarr directory `name`, a few chunks at a time.

    Returns:
      its metadata for a TensorStore spec: chunks, compressor and shape.
    """
    metadata = Metadata(array.shape, array.dtype, choose_chunks(array.shape, array.dtype.itemsize), COMPRESSOR)
    path = os.path.join(directory, name)
    paths.write_file(os.path.join(path, METADATA_FILE), json.dumps(metadata.to_json(), separators=(",", ":")).encode())

    def write(index: tuple[int, ...]) -> None:
        content = np.ascontiguousarray(array[metadata.slices(index)]).reshape(-1).view(np.uint8)
        # Weights hardly compress (8%, at a twentieth of the speed): gzip is used only for its checksum.
        stream = zlib.compressobj(0, wbits=31)
        with open(os.path.join(path, metadata.chunk_name(index)), "xb") as file:
            file.write(stream.compress(content))
            file.write(stream.flush())

    _for_each(write, list(metadata.grid()))
    return {"chunks": list(metadata.chunks), "compressor": COMPRESSOR, "shape": list(metadata.shape)}


def choose_chunks(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the chunk shape by T5X's rule: while above 64 MiB, reduce the largest dimension to its next divisor.

    >>> choose_chunks((32128, 4096), 4)
    (4016, 4096)
    """
    chunks = [max(1, n) for n in shape]
    while math.prod(chunks) * itemsize > _MAX_CHUNK_BYTES:
        largest = chunks.index(max(chunks))
        size = shape[largest]
        chunks[largest] = next(n for n in range(chunks[largest] - 1, 0, -1) if size % n == 0)
    return tuple(chunks)


def _for_each(function: Callable[[Any], None], items: Iterable[Any]) -> None:
    """Call the function for all items, a few at a time. The compression libraries release the interpreter lock."""
    items = list(items)
    if len(items) < 2:
        for item in items:
            function(item)
        return
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="t5x-zarr") as pool:
        for _ in pool.map(function, items):
            pass
