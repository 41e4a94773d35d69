"""Zarr arrays, in directories beside a checkpoint's metadata or in an OCDBT database. TensorStore reads them.

Files are untrusted. TensorStore follows links, reads whole files and aborts the process if memory runs out, so callers
check the files (`safety.check_files`) before opening arrays, and the total size (`safety.check_expansion`) before
reading them. A missing chunk is an error unless the array states a fill value: by default, TensorStore omits chunks
that are equal to it.
"""

import dataclasses
import functools
import itertools
import json
import math
import os
import re
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorstore
from etils import epath

from t5x.checkpoints import paths
from t5x.checkpoints.formats.safety import DTYPES, Malformed, check_chunk_shape, check_shape
from t5x.checkpoints.formats.source import LazyArray
from t5x.checkpoints.manifest import DamagedCheckpoint
from t5x.files.storage_errors import first_line
from t5x.files.untrusted import open_inside, parse_json

METADATA_FILE = ".zarray"
COMPRESSOR = {"id": "gzip", "level": 1}  # written by us and by T5X

_MAX_CHUNK_BYTES = 64 * 2**20
MAX_METADATA_BYTES = 2**20
_MAX_CHUNKS = 100_000  # in total, more if the files are large: TensorStore is slow even for missing ones
_BYTES_PER_CHUNK = 1000
_WRITERS = min(4, os.cpu_count() or 1)
_NAME_OF_DTYPE = {
    dtype: "bfloat16" if name == "bfloat16" else np.dtype(dtype).newbyteorder("<").str for name, dtype in DTYPES.items()
}
_DTYPE_OF_NAME = {name: dtype for dtype, name in _NAME_OF_DTYPE.items()}


# --- Reading


def open_arrays(
    directory: epath.Path,
    stored: Mapping[str, str],
    *,
    file_bytes: int,
    driver: str = "zarr",
    ocdbt: bool = False,
    every_chunk: bool = False,
) -> dict[str, LazyArray]:
    """Open the arrays of a checkpoint. Reads only metadata.

    Args:
      directory: directory of the checkpoint. Its files have been checked.
      stored: {name of an array: its directory inside the checkpoint, or its prefix in the database}.
      file_bytes: total size of the checkpoint's files.
      driver: `zarr` or `zarr3`.
      ocdbt: whether the arrays are in an OCDBT database.
      every_chunk: whether chunks may not be missing even if there is a fill value.

    Raises:
      DamagedCheckpoint: an array is missing, or its metadata is invalid.
    """
    context = tensorstore.Context()

    def open_array(path: str) -> tensorstore.Future:
        kvstore: dict[str, Any] = {"driver": "file", "path": f"{directory}/" if ocdbt else f"{directory}/{path}/"}
        if ocdbt:
            kvstore = {"driver": "ocdbt", "base": kvstore, "path": f"{path}/"}
        return tensorstore.open({"driver": driver, "kvstore": kvstore}, read=True, open=True, context=context)

    opening = {name: open_array(path) for name, path in stored.items()}
    arrays, chunks = {}, 0
    for name, future in opening.items():
        array = _wait(directory, name, future)
        chunk = array.chunk_layout.write_chunk.shape or ()  # None for zero-dimensional arrays
        if array.dtype.name not in DTYPES:
            raise DamagedCheckpoint(
                directory, f"array {name} has dtype {array.dtype.name}; supported: {', '.join(DTYPES)}"
            )
        dtype = DTYPES[array.dtype.name]
        try:
            shape = check_shape(list(array.shape))
            check_chunk_shape(shape, chunk, dtype.itemsize)
        except ValueError as error:
            raise DamagedCheckpoint(directory, f"array {name}: {error}") from None
        chunks += math.prod(-(-size // side) for size, side in zip(shape, chunk, strict=True))
        if chunks > _MAX_CHUNKS + file_bytes // _BYTES_PER_CHUNK:
            raise DamagedCheckpoint(directory, f"array {name}: its files cannot hold the {chunks} chunks it claims")
        chunk_bytes = math.prod(chunk) * dtype.itemsize
        if not ocdbt:
            _check_chunk_files(directory, stored[name], chunk_bytes)
        complete = every_chunk or array.fill_value is None
        compressor = array.codec.to_json().get("compressor") if driver == "zarr" and not ocdbt else None
        gzip_path = stored[name] if (compressor or {}).get("id") == "gzip" else None
        reader = functools.partial(_read, directory, name, array, complete, gzip_path, chunk_bytes)
        arrays[name] = LazyArray(shape, dtype, reader)
    return arrays


def _read(
    directory: epath.Path,
    name: str,
    array: tensorstore.TensorStore,
    complete: bool,
    gzip_path: str | None,
    chunk_bytes: int,
) -> np.ndarray:
    if complete and not _wait(directory, name, array.storage_statistics(query_fully_stored=True)).fully_stored:
        raise DamagedCheckpoint(directory, f"array {name}: chunks are missing")
    if gzip_path is not None:
        try:
            _check_gzip_ends(directory, gzip_path, chunk_bytes)
        except OSError as error:
            raise DamagedCheckpoint(directory, f"array {name} cannot be read: {error.strerror}") from error
    return _wait(directory, name, array.read())


def _wait(directory: epath.Path, name: str, future: tensorstore.Future) -> Any:
    try:
        return future.result()
    except (ValueError, RuntimeError, NotImplementedError, OSError, MemoryError) as error:
        raise DamagedCheckpoint(directory, f"array {name} cannot be read: {first_line(error)}") from error


def _check_chunk_files(directory: epath.Path, stored: str, chunk_bytes: int) -> None:
    """Check file sizes: TensorStore reads whole chunk files. A shard's index may be larger than the shard itself."""
    for name, status in paths.walk(directory / stored):
        if status.st_size > 8 * chunk_bytes + 2**20:
            raise DamagedCheckpoint(
                directory, f"{stored}/{name} has {status.st_size} bytes, too many for a chunk of {chunk_bytes} bytes"
            )


def _check_gzip_ends(directory: epath.Path, stored: str, chunk_bytes: int) -> None:
    """Raise DamagedCheckpoint if a chunk is cut off in its checksum, which TensorStore would then not verify.

    The checksum is followed by the number of uncompressed bytes.
    """
    for name, status in paths.walk(directory / stored):
        if re.fullmatch(r"[0-9./]+", name):
            with open_inside(directory, f"{stored}/{name}") as file:
                file.seek(max(0, status.st_size - 4))
                if int.from_bytes(file.read(4), "little") != chunk_bytes % 2**32:
                    raise DamagedCheckpoint(directory, f"chunk {stored}/{name} is truncated or has another size")


# --- Metadata


@dataclasses.dataclass(frozen=True)
class Metadata:
    """The content of an array's .zarray file."""

    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[int, ...]
    codec: str | None
    order: str = "C"
    separator: str = "."

    @property
    def chunk_bytes(self) -> int:
        return math.prod(self.chunks) * self.dtype.itemsize

    def chunk_name(self, index: tuple[int, ...]) -> str:
        return self.separator.join(map(str, index)) or "0"


def parse_metadata(content: bytes) -> Metadata:
    """Parse the content of a .zarray file; raise Malformed if it is invalid or not supported."""
    try:
        data = parse_json(content, max_bytes=MAX_METADATA_BYTES)
        if data["zarr_format"] != 2 or data["filters"] is not None:
            raise ValueError("it is not zarr version 2 without filters")
        dtype, shape, chunks = _DTYPE_OF_NAME[data["dtype"]], check_shape(data["shape"]), check_shape(data["chunks"])
        order, separator = data["order"], data.get("dimension_separator", ".")
        if len(chunks) != len(shape) or 0 in chunks or order not in ("C", "F") or separator not in (".", "/"):
            raise ValueError("its chunks, order or dimension_separator are invalid")
        check_chunk_shape(shape, chunks, dtype.itemsize)
        codec = None if data["compressor"] is None else str(data["compressor"]["id"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Malformed(f"{METADATA_FILE} is invalid: {error!r}") from None
    return Metadata(shape, dtype, chunks, codec, order, separator)


# --- Writing


def write_array(directory: epath.PathLike, name: str, array: np.ndarray) -> dict[str, Any]:
    """Write the array as the zarr directory `name`, a few chunks at a time.

    Returns:
      its metadata for a TensorStore spec: chunks, compressor and shape.
    """
    chunks = choose_chunks(array.shape, array.dtype.itemsize)
    stated = {"chunks": list(chunks), "compressor": COMPRESSOR, "shape": list(array.shape)}
    metadata = stated | {
        "dimension_separator": ".",
        "dtype": _NAME_OF_DTYPE[array.dtype],
        "fill_value": None,
        "filters": None,
        "order": "C",
        "zarr_format": 2,
    }
    path = os.path.join(directory, name)
    content = json.dumps(metadata, sort_keys=True, separators=(",", ":")).encode()
    paths.write_file(os.path.join(path, METADATA_FILE), content)

    def write_chunk(index: tuple[int, ...]) -> None:
        slices = tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, chunks, strict=True))
        content = np.ascontiguousarray(array[slices]).reshape(-1).view(np.uint8).data
        # Weights hardly compress (8%, at a twentieth of the speed): gzip is used only for its checksum.
        stream = zlib.compressobj(0, wbits=31)
        with open(os.path.join(path, ".".join(map(str, index)) or "0"), "xb") as file:
            file.write(stream.compress(content))
            file.write(stream.flush())

    grid = itertools.product(*(range(size // n) for size, n in zip(array.shape, chunks, strict=True)))
    with ThreadPoolExecutor(_WRITERS, thread_name_prefix="t5x-zarr") as pool:  # zlib releases the interpreter lock
        list(pool.map(write_chunk, grid))
    return stated


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
