"""OCDBT databases: one writer, one reader. The only place where our own checkpoints use TensorStore.

An OCDBT database is a key-value store in a few large files, on a disk or in an object store; Orbax keeps the chunks of
all arrays in one. Values are written through TensorStore. For reading from a disk, `locate` reports the file and offset
of each value, so that large ones can be read directly into their destination.
"""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts
from etils import epath

from t5x.files.remote import tensorstore_spec
from t5x.files.storage_errors import tensorstore_status

INLINE_BYTES = 1024  # values up to this size are stored inside the database's own nodes

_FILE_BYTES = 64 * 2**20  # files are hashed in parallel, so several are faster than one
_RETRIES = {"max_retries": 9, "initial_delay": "1s", "max_delay": "32s"}  # three minutes in all
_CONTEXT = {
    "cache_pool#ocdbt": {"total_bytes_limit": 10**8}, "file_io_concurrency": {"limit": 128},
    "gcs_request_retries": _RETRIES, "s3_request_retries": _RETRIES,
}  # fmt: skip
_BYTE_RANGE = re.compile(r"value:([^:]*):([^:]*):([0-9]+):([0-9]+)")


class ByteRange(NamedTuple):
    """The position of a value: the path of a file inside the directory, and a byte range of it."""

    path: str
    offset: int
    size: int


class Writer:
    """Writes zarr arrays into the database in `directory`; they appear at `commit`, all at once."""

    def __init__(self, directory: epath.PathLike):
        self._database = {
            "driver": "ocdbt", "base": tensorstore_spec(directory),
            "config": {"max_inline_value_bytes": INLINE_BYTES}, "target_data_file_size": _FILE_BYTES,
        }  # fmt: skip
        self._context = ts.Context(_CONTEXT)
        self._begin()

    def _begin(self) -> None:
        self._transaction = ts.Transaction(atomic=True)
        self._opened: dict[str, ts.Future] = {}
        self._written: list[ts.Future] = []

    def open(self, key: str, leaf: Any, chunks: tuple[int, ...], *, create: bool = True) -> None:
        """Start to open an array for `write`.

        Args:
          key: prefix of the array's keys.
          leaf: anything with shape and dtype.
          chunks: shape of its chunks.
          create: False if another process creates the array in a database that will be merged with this one.
        """
        spec = {
            "driver": "zarr",
            "kvstore": {**self._database, "path": key},
            "metadata": {"shape": list(leaf.shape), "chunks": list(chunks), "compressor": None},
            "dtype": ts.dtype(leaf.dtype).name,
            "store_data_equal_to_fill_value": True,
        }
        self._opened[key] = ts.open(
            spec, context=self._context, transaction=self._transaction,
            create=create, open=not create, assume_metadata=not create,
        )  # fmt: skip

    def write(self, key: str, index: tuple[slice, ...], data: np.ndarray) -> None:
        """Start to write a part of an opened array. `data` must not change until `commit`."""
        array = self._opened[key].result()
        self._written.append(array[index].write(data, can_reference_source_data_indefinitely=True).copy)

    def commit(self) -> None:
        """Wait until everything is written, and make it visible. More arrays may follow."""
        for future in [*self._opened.values(), *self._written]:
            future.result()
        try:
            self._transaction.commit_async().result()
        except ValueError as error:
            # A server's answer to the commit got lost. TensorStore repeats it and finds the arrays already created, as
            # nobody else writes here; a commit is complete or absent.
            if tensorstore_status(error) != "ALREADY_EXISTS":
                raise
        self._begin()


def merge(directory: epath.PathLike, parts: Iterable[epath.PathLike]) -> None:
    """Merge databases in subdirectories of `directory` into one in `directory`, which refers to their files."""
    context, transaction = ts.Context(_CONTEXT), ts.Transaction(atomic=True)
    options = {"driver": "ocdbt", "config": {"max_inline_value_bytes": INLINE_BYTES}}
    whole, *others = [
        ts.KvStore.open({**options, "base": tensorstore_spec(path)}, context=context).result()
        for path in (directory, *parts)
    ]
    for other in others:
        other.experimental_copy_range_to(whole.with_transaction(transaction)).result()
    transaction.commit_async().result()


def locate(directory: epath.PathLike) -> dict[str, bytes | ByteRange]:
    """Return the values of a database by key: small ones themselves, the positions of others.

    Values that TensorStore describes in an unknown way are skipped.

    Raises:
      ValueError: the database cannot be read, or two of its nodes have the same child: they could form a cycle, or
        expand to more keys than fit in memory.
    """
    files = ts.KvStore.open(tensorstore_spec(directory)).result()
    newest = max(ts.ocdbt.dump(files).result()["versions"], key=lambda version: version["generation_number"])
    nodes = [("", newest["root"].get("location"))]
    values: dict[str, bytes | ByteRange] = {}
    seen: set[str] = set()
    while nodes:
        prefix, location = nodes.pop()
        if location in seen:
            raise ValueError(f"its database has two nodes with the child {location}")
        seen.add(location)
        for entry in ts.ocdbt.dump(files, location).result()["entries"] if location else ():
            if "location" in entry:
                nodes.append((prefix + entry["subtree_common_prefix"].decode(), entry["location"]))
            elif isinstance(value := entry.get("inline_value"), bytes):
                values[prefix + entry["key"].decode()] = value
            elif match := _BYTE_RANGE.fullmatch(entry.get("indirect_value", "")):
                values[prefix + entry["key"].decode()] = ByteRange(match[1] + match[2], int(match[3]), int(match[4]))
    return values


def open_arrays(directory: epath.PathLike, keys: Iterable[str]) -> list[ts.TensorStore]:
    """Open zarr arrays through TensorStore, for those that cannot be read from their files."""
    database = {"driver": "ocdbt", "base": tensorstore_spec(directory), "cache_pool": "cache_pool#ocdbt"}
    once = {"fill_missing_data_reads": False, "recheck_cached_metadata": False, "recheck_cached_data": False}
    context = ts.Context(_CONTEXT)
    opened = [
        ts.open({"driver": "zarr", "kvstore": {**database, "path": key}, **once}, open=True, read=True, context=context)
        for key in keys
    ]
    return [future.result() for future in opened]
