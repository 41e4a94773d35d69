"""Parquet files, and datasets saved by the package `datasets`; both are read with pyarrow."""

import bisect
import collections
import json
import logging
import os
import posixpath
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from t5x.data.sources.base import Malformed, optional_package
from t5x.data.sources.files import FilesDataSource, Patterns, record_location
from t5x.errors import UserError
from t5x.files import user_files
from t5x.files.disk_space import human_size
from t5x.files.local_copies import LocalCopy
from t5x.files.random_access import LocalFile
from t5x.files.remote import is_remote

if TYPE_CHECKING:
    import pyarrow

logger = logging.getLogger(__name__)

_CACHE_BYTES = 512 * 2**20  # limit for cached row groups, decoded
_SLOW_ROWS = 500  # rows per group above which a warning is logged


class ParquetDataSource(FilesDataSource):
    """The rows of Parquet files: {column: value}; lists of numbers are arrays.

    Reading a row decodes its whole row group. The most recently used groups are kept in memory (512 MB), so much larger
    files are read fast only if their row groups are small.

    Args:
      split_to_filepattern: as in `TextLineDataSource`.
      columns: columns to read; None reads all.
    """

    def __init__(self, split_to_filepattern: Mapping[str, Patterns], columns: Sequence[str] | None = None):
        super().__init__(split_to_filepattern)
        self._columns = list(columns) if columns is not None else None

    def _open(self, split: str) -> Any:
        opened = super()._open(split)
        groups = _RowGroups()
        for file in opened.files:
            file.groups = groups
        size = sum(file.decoded_size for file in opened.files)
        rows = max(file.largest_group for file in opened.files)
        if size > _CACHE_BYTES and rows > _SLOW_ROWS:
            logger.warning(
                "Split %r is slow to read in random order: it has %s, and for one example up to %d rows are decoded. "
                "Write it with smaller row groups: pyarrow.parquet.write_table(table, path, row_group_size=200).",
                split, human_size(size), rows,
            )  # fmt: skip
        return opened

    def _open_file(self, copy: LocalCopy) -> "_ParquetFile":
        return _ParquetFile(copy, self._columns)


class _RowGroups:
    """A cache of the most recently used row groups of all files of a split."""

    def __init__(self):
        self._tables: collections.OrderedDict[tuple[str, int], pyarrow.Table] = collections.OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def get(self, file: "_ParquetFile", group: int) -> "pyarrow.Table":
        key = file.name, group
        with self._lock:
            if key not in self._tables:
                self._tables[key] = table = file.read_group(group)
                self._size += table.nbytes
                while self._size > _CACHE_BYTES and len(self._tables) > 1:
                    self._size -= self._tables.popitem(last=False)[1].nbytes
            self._tables.move_to_end(key)
            return self._tables[key]


class _ParquetFile:
    """The rows of one file.

    Attributes:
      groups: cache shared by the files of a split.
      decoded_size: approximate size of all row groups in bytes.
      largest_group: number of rows of the largest row group.
    """

    def __init__(self, copy: LocalCopy, columns: list[str] | None):
        self.name = copy.name
        self.groups = _RowGroups()
        self._columns = columns
        self._file = LocalFile(copy)
        if not self._file.size:
            raise UserError(f"{copy.name} is empty.")
        parquet = _pyarrow("pyarrow.parquet")
        try:
            self._parquet = parquet.ParquetFile(copy.path)
        except (_pyarrow().ArrowException, OSError) as error:
            raise UserError(
                f"{copy.name} is no Parquet file, or is cut short ({_first_line(error)}). Fetch it again."
            ) from error
        names = self._parquet.schema_arrow.names
        if unknown := [column for column in columns or () if column not in names]:
            raise UserError(f"{copy.name} has no column {unknown[0]!r}. Its columns are {', '.join(names)}.")
        _check_distinct([name for name in names if columns is None or name in columns], copy.name)
        metadata = self._parquet.metadata
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        self._ends = np.cumsum([group.num_rows for group in groups], dtype=np.int64)
        self.decoded_size = sum(group.total_byte_size for group in groups)
        self.largest_group = max((group.num_rows for group in groups), default=0)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        group = int(np.searchsorted(self._ends, index, side="right"))
        begin = int(self._ends[group - 1]) if group else 0
        return _row(self.groups.get(self, group), index - begin)

    def location(self, index: int) -> str:
        return record_location(self.name, index)

    def read_group(self, group: int) -> "pyarrow.Table":
        self._file.check()
        try:
            table = self._parquet.read_row_group(group, columns=self._columns, use_threads=False)
        except (_pyarrow().ArrowException, OSError) as error:
            raise Malformed(
                f"row group {group} cannot be read ({_first_line(error)}). Fetch the file again."
            ) from error
        return table.combine_chunks()


class HuggingFaceDataSource(FilesDataSource):
    """A dataset saved by the package `datasets` (`save_to_disk`); the package itself is not needed.

        datasets.load_dataset("glue", "mrpc").save_to_disk("mrpc")
        HuggingFaceDataSource("mrpc")

    Its Arrow files are memory-mapped. Examples are {column: value}; lists of numbers are arrays.

    Args:
      directory: directory of a DatasetDict, with its splits, or of a Dataset, whose split is the one it was made from,
        or "train". May be remote.
      splits: splits to use; None uses all.
    """

    places = (*FilesDataSource.places, "_directory")

    def __init__(self, directory: str | os.PathLike, splits: Sequence[str] | None = None):
        self._directory = os.fspath(directory) if is_remote(directory) else os.path.expanduser(os.fspath(directory))
        found = self._find_splits()
        if unknown := [split for split in splits or () if split not in found]:
            raise UserError(f"{self._directory} has no split {unknown[0]!r}. It has {', '.join(map(repr, found))}.")
        super().__init__({split: found[split] for split in splits or found})

    def _find_splits(self) -> dict[str, str]:
        """Return the directory of each split."""
        if not is_remote(self._directory) and not os.path.isdir(self._directory):
            raise UserError(f"There is no directory {self._directory}. Name one that `save_to_disk` has written.")
        if (listed := self._read_json("dataset_dict.json")) is not None:
            splits = listed.get("splits")
            if not isinstance(splits, list) or not all(_is_file_name(split) for split in splits) or not splits:
                raise UserError(f"{self._directory}/dataset_dict.json lists no splits. Save the data set again.")
            return {split: posixpath.join(self._directory, split) for split in splits}
        if (state := self._read_json("state.json")) is not None:
            return {str(state.get("_split") or "train"): self._directory}
        raise UserError(
            f"{self._directory} is no data set that `save_to_disk` of the package datasets has written: it has neither "
            "dataset_dict.json nor state.json."
        )

    def _paths(self, split: str) -> list[str]:
        directory = self._patterns[split]
        state = self._read_json("state.json", directory)
        if state is None:
            raise UserError(f"{directory} has no state.json: the data set is not whole. Save it again.")
        if state.get("_indices_data_files"):
            raise UserError(f"{directory} is a selection of other rows. Save `dataset.flatten_indices()` instead.")
        listed = state.get("_data_files")
        names = [entry.get("filename") for entry in listed] if isinstance(listed, list) else []
        if not names or not all(map(_is_file_name, names)):
            raise UserError(f"{directory}/state.json names no files of its own. Save the data set again.")
        return [posixpath.join(directory, name) for name in names]

    def _read_json(self, name: str, directory: str | None = None) -> dict[str, Any] | None:
        path = posixpath.join(directory or self._directory, name)
        if not user_files.exists(path):
            return None
        try:
            content = json.loads(user_files.read_bytes(path))
        except ValueError as error:
            raise UserError(f"{path} is not JSON: {error}. Save the data set again.") from error
        return content if isinstance(content, dict) else {}

    def _open_file(self, copy: LocalCopy) -> "_ArrowFile":
        return _ArrowFile(copy)


class _ArrowFile:
    """The rows of a memory-mapped Arrow stream."""

    def __init__(self, copy: LocalCopy):
        self.name = copy.name
        self._file = LocalFile(copy)
        pa = _pyarrow()
        try:
            stream = pa.ipc.open_stream(pa.memory_map(copy.path))
            self._batches = list(stream)
        except (pa.ArrowException, OSError) as error:
            raise UserError(
                f"{copy.name} is no Arrow stream, or is cut short ({_first_line(error)}). Fetch or save it again."
            ) from error
        _check_distinct(stream.schema.names, copy.name)
        self._ends = np.cumsum([batch.num_rows for batch in self._batches], dtype=np.int64).tolist()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        self._file.check()
        at = bisect.bisect_right(self._ends, index)
        return _row(self._batches[at], index - (self._ends[at - 1] if at else 0))

    def location(self, index: int) -> str:
        return record_location(self.name, index)


def _check_distinct(columns: Sequence[str], file: str) -> None:
    """Raise a UserError if two columns have the same name, because it would be ambiguous."""
    for name, count in collections.Counter(columns).items():
        if count > 1:
            raise UserError(
                f"{file} has {count} columns named {name!r}. Write it again with distinct names: "
                "pyarrow.Table.rename_columns."
            )


def _row(table: "pyarrow.Table | pyarrow.RecordBatch", index: int) -> dict[str, Any]:
    row = {}
    for name, column in zip(table.schema.names, table.columns, strict=True):
        try:
            row[name] = _value(column[index])
        except (ValueError, OverflowError) as error:  # a duplicate struct field, a date out of range
            raise Malformed(f"column {name!r} cannot be read ({_first_line(error)}).") from error
    return row


def _value(scalar: "pyarrow.Scalar") -> Any:
    """Return a Python value; lists of numbers are arrays with their own memory."""
    import pyarrow

    if isinstance(scalar, pyarrow.ListScalar):
        values = scalar.values
        if isinstance(values, pyarrow.lib.IntegerArray | pyarrow.lib.FloatingPointArray) and not values.null_count:
            return np.array(values)
    return scalar.as_py()


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name


def _pyarrow(module: str = "pyarrow") -> Any:
    return optional_package(module, "pyarrow", "Reading Parquet and Arrow files", extra="parquet")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
