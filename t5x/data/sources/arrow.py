"""Parquet files, and datasets saved by the package `datasets`; both are read with pyarrow."""

import bisect
import collections
import contextlib
import itertools
import json
import logging
import os
import posixpath
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from t5x._runtime.errors import UserError
from t5x._runtime.imports import import_extra
from t5x.data.sources.base import MalformedRecord
from t5x.data.sources.files import FileExamples, FilesDataSource, Patterns
from t5x.files import user_files
from t5x.files.disk_space import human_size
from t5x.files.local_copies import LocalCopy, LocalFile
from t5x.files.remote import is_remote
from t5x.files.storage_errors import first_line

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

    def _open_files(self, split: str, copies: Sequence[LocalCopy]) -> Sequence[FileExamples]:
        groups = _RowGroups()
        opened = [_ParquetFile(copy, self._columns, groups) for copy in copies]
        size = sum(file.decoded_size for file in opened)
        rows = max(file.largest_group for file in opened)
        if size > _CACHE_BYTES and rows > _SLOW_ROWS:
            logger.warning(
                "Split %r is slow to read in random order: it has %s, and one example decodes up to %d rows. Write it "
                "with smaller row groups: pyarrow.parquet.write_table(table, path, row_group_size=200).",
                split, human_size(size), rows,
            )  # fmt: skip
        return opened


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


class _ParquetFile(FileExamples):
    """The rows of one file.

    Args:
      groups: cache shared by the files of a split.

    Attributes:
      decoded_size: approximate size of all row groups in bytes.
      largest_group: number of rows of the largest row group.
    """

    def __init__(self, copy: LocalCopy, columns: list[str] | None, groups: _RowGroups):
        self._columns, self._groups = columns, groups
        self._file = LocalFile(copy)
        if not self._file.size:
            raise UserError(f"{copy.name} is empty.")
        parquet = _pyarrow("pyarrow.parquet")
        with _explained(f"{copy.name} is not a Parquet file, or is truncated"):
            self._parquet = parquet.ParquetFile(copy.path)
        names = self._parquet.schema_arrow.names
        if unknown := [column for column in columns or () if column not in names]:
            raise UserError(f"{copy.name} has no column {unknown[0]!r} (columns: {', '.join(names)}).")
        _check_distinct([name for name in names if columns is None or name in columns], copy.name)
        metadata = self._parquet.metadata
        row_groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        self._ends = list(itertools.accumulate(group.num_rows for group in row_groups))
        self.decoded_size = sum(group.total_byte_size for group in row_groups)
        self.largest_group = max((group.num_rows for group in row_groups), default=0)
        super().__init__(copy.name, self._ends[-1] if self._ends else 0, self._read_row)

    def _read_row(self, index: int) -> dict[str, Any]:
        group = bisect.bisect_right(self._ends, index)
        return _row(self._groups.get(self, group), index - (self._ends[group - 1] if group else 0))

    def read_group(self, group: int) -> "pyarrow.Table":
        self._file.check()
        with _explained(f"row group {group} cannot be read", MalformedRecord):
            return self._parquet.read_row_group(group, columns=self._columns, use_threads=False).combine_chunks()


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
        files = self._find_splits()
        if unknown := [split for split in splits or () if split not in files]:
            known = ", ".join(map(repr, files))
            raise UserError(f"{self._directory} has no split {unknown[0]!r} (splits: {known}).")
        super().__init__({split: files[split] for split in splits or files})

    def _find_splits(self) -> dict[str, str]:
        """Return the directory of each split."""
        if not is_remote(self._directory) and not os.path.isdir(self._directory):
            raise UserError(f"There is no directory {self._directory}. Pass one that `save_to_disk` wrote.")
        if (listed := self._read_json("dataset_dict.json")) is not None:
            splits = listed.get("splits")
            if not isinstance(splits, list) or not all(_is_file_name(split) for split in splits) or not splits:
                raise UserError(f"{self._directory}/dataset_dict.json lists no splits. Save the dataset again.")
            return {split: posixpath.join(self._directory, split) for split in splits}
        if (state := self._read_json("state.json")) is not None:
            return {str(state.get("_split") or "train"): self._directory}
        raise UserError(
            f"{self._directory} is not a dataset written by `save_to_disk` of the package datasets: it has neither "
            "dataset_dict.json nor state.json."
        )

    def _paths(self, split: str) -> list[str]:
        directory = str(self._patterns[split])
        state = self._read_json("state.json", directory)
        if state is None:
            raise UserError(f"{directory} has no state.json: the dataset is incomplete. Save it again.")
        if state.get("_indices_data_files"):
            raise UserError(f"{directory} is a selection of rows. Save `dataset.flatten_indices()` instead.")
        listed = state.get("_data_files")
        names = [entry.get("filename") for entry in listed] if isinstance(listed, list) else []
        if not names or not all(map(_is_file_name, names)):
            raise UserError(f"{directory}/state.json lists no data files in its directory. Save the dataset again.")
        return [posixpath.join(directory, name) for name in names]

    def _read_json(self, name: str, directory: str | None = None) -> dict[str, Any] | None:
        path = posixpath.join(directory or self._directory, name)
        if not user_files.exists(path):
            return None
        try:
            content = json.loads(user_files.read_bytes(path))
        except ValueError as error:
            raise UserError(f"{path} is not JSON: {error}. Save the dataset again.") from error
        return content if isinstance(content, dict) else {}

    def _open_file(self, copy: LocalCopy) -> FileExamples:
        """Memory-map the file, an Arrow stream."""
        file, pa = LocalFile(copy), _pyarrow()
        with _explained(f"{copy.name} is not an Arrow stream, or is truncated"):
            table = pa.ipc.open_stream(pa.memory_map(copy.path)).read_all()
        _check_distinct(table.schema.names, copy.name)

        def read(index: int) -> dict[str, Any]:
            file.check()
            return _row(table, index)

        return FileExamples(copy.name, table.num_rows, read)


def _check_distinct(columns: Sequence[str], file: str) -> None:
    """Raise a UserError if two columns have the same name, because it would be ambiguous."""
    for name, count in collections.Counter(columns).items():
        if count > 1:
            raise UserError(f"{file} has {count} columns named {name!r}. Rename them: pyarrow.Table.rename_columns.")


def _row(table: "pyarrow.Table", index: int) -> dict[str, Any]:
    row = {}
    for name, column in zip(table.schema.names, table.columns, strict=True):
        try:
            row[name] = _value(column[index])
        except (ValueError, OverflowError) as error:  # a duplicate struct field, a date out of range
            raise MalformedRecord(f"column {name!r} cannot be read ({first_line(error)}).") from error
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
    needs = "Parquet and Arrow files need a package: `pip install pyarrow`, or `pip install -e '.[parquet]'` in t5x"
    return import_extra(module, needs)


@contextlib.contextmanager
def _explained(problem: str, kind: type[Exception] = UserError) -> Iterator[None]:
    """Convert errors of pyarrow."""
    try:
        yield
    except (_pyarrow().ArrowException, OSError) as error:
        raise kind(f"{problem} ({first_line(error)}). Download or write the file again.") from error
