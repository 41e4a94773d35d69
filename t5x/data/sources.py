"""Where examples come from: random access by (split, index).

Files are found by path or glob pattern and read by line. Of an uncompressed local file only the byte offset of each
line is held in memory; a .gz or remote file is read into memory once.
"""

import abc
import csv
import inspect
import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from t5x.data import files
from t5x.data.line_files import LineFile
from t5x.errors import UserError

logger = logging.getLogger(__name__)

Patterns = str | os.PathLike | Sequence[str | os.PathLike]
_MAX_OPEN_FILES = 256


class BadExample(UserError):
    """One example cannot be used; the message says which one and why."""


class DataSource(abc.ABC):
    """Examples by split and index. Examples handed out belong to the caller, who may change them."""

    @property
    @abc.abstractmethod
    def splits(self) -> tuple[str, ...]: ...

    @abc.abstractmethod
    def num_examples(self, split: str) -> int: ...

    @abc.abstractmethod
    def example(self, split: str, index: int) -> dict[str, Any]:
        """Example `index` (0 to num_examples - 1) of a split."""

    @abc.abstractmethod
    def location(self, split: str, index: int) -> str:
        """Where an example is, for messages: file:line where there is one."""

    def check_split(self, split: str) -> None:
        if split not in self.splits:
            raise UserError(f"There is no split {split!r}. There is {', '.join(map(repr, self.splits))}.")


class FunctionDataSource(DataSource):
    """Examples from a Python function.

        >>> source = FunctionDataSource(lambda split: [{"inputs": "2 + 2", "targets": "4"}], splits=("train",))
        >>> source.example("train", 0)
        {'inputs': '2 + 2', 'targets': '4'}

    Args:
      dataset_fn: `dataset_fn(split)` returns a sequence of dicts (anything with `len` and indexing). A parameter
        `shuffle_files` without default, as seqio asks for, gets False.
      splits: the splits it knows.
      num_input_examples: seqio's hint; the sequence itself is counted here.
    """

    def __init__(
        self,
        dataset_fn: Callable[..., Sequence[Mapping[str, Any]]],
        splits: Iterable[str],
        num_input_examples: Mapping[str, int] | None = None,
    ):
        self._function = dataset_fn
        self._splits = tuple(splits)
        self._sequences: dict[str, Sequence[Mapping[str, Any]]] = {}
        self._lock = threading.Lock()

    @property
    def splits(self) -> tuple[str, ...]:
        return self._splits

    def num_examples(self, split: str) -> int:
        return len(self._sequence(split))

    def example(self, split: str, index: int) -> dict[str, Any]:
        example = self._sequence(split)[index]
        if not isinstance(example, Mapping):
            raise BadExample(f"{self.location(split, index)} is a {type(example).__name__}; examples are dicts.")
        return dict(example)

    def location(self, split: str, index: int) -> str:
        return f"example {index} of {self._name}({split!r})"

    @property
    def _name(self) -> str:
        return getattr(self._function, "__qualname__", None) or repr(self._function)

    def _sequence(self, split: str) -> Sequence[Mapping[str, Any]]:
        with self._lock:
            if split not in self._sequences:
                self.check_split(split)
                self._sequences[split] = self._call(split)
            return self._sequences[split]

    def _call(self, split: str) -> Sequence[Mapping[str, Any]]:
        parameters = inspect.signature(self._function).parameters
        wanted = "shuffle_files" in parameters and parameters["shuffle_files"].default is inspect.Parameter.empty
        sequence = self._function(split, **({"shuffle_files": False} if wanted else {}))
        if not (hasattr(sequence, "__len__") and hasattr(sequence, "__getitem__")):
            raise UserError(
                f"{self._name}({split!r}) returned a {type(sequence).__name__}. Return a sequence of dicts, with len() "
                "and indexing, so that training can resume anywhere: e.g. list(...)."
            )
        if not len(sequence):
            raise UserError(f"{self._name}({split!r}) returned no examples.")
        return sequence


class _LineFilesSource(DataSource):
    """One example a line (or a record of lines) of text files."""

    skip_blank = True
    quote: str | None = None

    def __init__(self, split_to_filepattern: Mapping[str, Patterns], skip_header_lines: int = 0):
        if not isinstance(split_to_filepattern, Mapping) or not split_to_filepattern:
            raise UserError(
                f"{type(self).__name__} needs a mapping from split to file pattern, such as "
                f"{{'train': 'data/train*.jsonl'}}, not {split_to_filepattern!r}."
            )
        self._patterns = dict(split_to_filepattern)
        self._skip = skip_header_lines
        self._opened: dict[str, tuple[list[LineFile], np.ndarray]] = {}
        self._lock = threading.Lock()

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self._patterns)

    def num_examples(self, split: str) -> int:
        return int(self._files(split)[1][-1])

    def example(self, split: str, index: int) -> dict[str, Any]:
        file, line = self._find(split, index)
        content = file.line(line)
        try:
            return self._parse(content.decode(), file)
        except UnicodeDecodeError as error:
            raise BadExample(
                f"{self.location(split, index)}: byte {content[error.start]:#04x} at column {error.start + 1} is not "
                "UTF-8. Convert the file, e.g. iconv -f latin1 -t utf-8."
            ) from error
        except _Malformed as error:
            raise BadExample(f"{self.location(split, index)}: {error}") from error

    def location(self, split: str, index: int) -> str:
        file, line = self._find(split, index)
        return f"{file.path}:{file.line_number(line)}"

    @abc.abstractmethod
    def _parse(self, text: str, file: LineFile) -> dict[str, Any]: ...

    def _open(self, path: str, keep_open: bool) -> LineFile:
        return LineFile(path, keep_open, skip=self._skip, skip_blank=self.skip_blank, quote=self.quote)

    def _find(self, split: str, index: int) -> tuple[LineFile, int]:
        opened, ends = self._files(split)
        if not 0 <= index < ends[-1]:
            raise IndexError(f"example {index} of {ends[-1]} in split {split!r}")
        at = int(np.searchsorted(ends, index, side="right"))
        return opened[at], index - (int(ends[at - 1]) if at else 0)

    def _files(self, split: str) -> tuple[list[LineFile], np.ndarray]:
        with self._lock:
            if split not in self._opened:
                self.check_split(split)
                patterns = self._patterns[split]
                if isinstance(patterns, str | os.PathLike):
                    patterns = [patterns]
                paths = [path for pattern in patterns for path in files.expand(pattern)]
                opened = [self._open(path, len(paths) <= _MAX_OPEN_FILES) for path in paths]
                ends = np.cumsum([len(file) for file in opened])
                if not len(ends) or not ends[-1]:
                    raise UserError(f"Split {split!r} has no examples: {', '.join(paths[:5]) or patterns} is empty.")
                logger.info("Split %r: %d examples in %d file(s)", split, ends[-1], len(paths))
                self._opened[split] = opened, ends
            return self._opened[split]


class TextLineDataSource(_LineFilesSource):
    """Lines of text, each an example `{"text": line}`; empty lines are examples too.

    Args:
      split_to_filepattern: split to a path, a glob pattern, or several.
      skip_header_lines: lines to leave out at the beginning of each file.
    """

    skip_blank = False

    def _parse(self, text: str, file: LineFile) -> dict[str, Any]:
        return {"text": text}


class JsonLinesDataSource(_LineFilesSource):
    """One JSON object a line; empty lines are passed over. Arguments as in `TextLineDataSource`."""

    def _parse(self, text: str, file: LineFile) -> dict[str, Any]:
        try:
            example = json.loads(text)
        except ValueError as error:
            raise _Malformed(f"not JSON: {error}: {_excerpt(text)}") from error
        if not isinstance(example, dict):
            raise _Malformed(f"a JSON object such as {{\"inputs\": …}} is needed, not {_excerpt(text)}")
        return example


class TsvDataSource(_LineFilesSource):
    """Lines of fields, parted by tabs; every value is text, empty lines are passed over.

    Args:
      split_to_filepattern: split to a path, a glob pattern, or several.
      columns: names of the fields; None takes them from the first line of each file.
      delimiter: what parts the fields.
      quote: None takes quotes as they are; '"' reads fields in quotes as CSV does: delimiters and line ends inside
        them are text.
      skip_header_lines: lines to leave out at the beginning of each file (before the one with names, if any).
    """

    def __init__(
        self,
        split_to_filepattern: Mapping[str, Patterns],
        columns: Sequence[str] | None = None,
        delimiter: str = "\t",
        quote: str | None = None,
        skip_header_lines: int = 0,
    ):
        super().__init__(split_to_filepattern, skip_header_lines)
        self._columns = tuple(columns) if columns is not None else None
        self._delimiter = delimiter
        self.quote = quote
        self._names: dict[str, tuple[str, ...]] = {}

    def _open(self, path: str, keep_open: bool) -> LineFile:
        file = super()._open(path, keep_open)
        if self._columns is None:
            self._names[path] = tuple(self._split(file.take_first().decode(errors="replace"))) if len(file) else ()
        else:
            self._names[path] = self._columns
        return file

    def _split(self, text: str) -> list[str]:
        if self.quote is None:
            return text.split(self._delimiter)
        csv.field_size_limit(max(csv.field_size_limit(), len(text)))
        try:
            return next(csv.reader([text], delimiter=self._delimiter, quotechar=self.quote, strict=True))
        except csv.Error as error:
            raise _Malformed(f"{error}: {_excerpt(text)}") from error

    def _parse(self, text: str, file: LineFile) -> dict[str, Any]:
        names, values = self._names[file.path], self._split(text)
        if len(values) != len(names):
            raise _Malformed(
                f"{len(values)} fields where {len(names)} are expected ({', '.join(names)}): {_excerpt(text)}"
            )
        return dict(zip(names, values, strict=True))


class CsvDataSource(TsvDataSource):
    """`TsvDataSource` for comma-separated values, with fields in double quotes."""

    def __init__(
        self,
        split_to_filepattern: Mapping[str, Patterns],
        columns: Sequence[str] | None = None,
        delimiter: str = ",",
        quote: str | None = '"',
        skip_header_lines: int = 0,
    ):
        super().__init__(split_to_filepattern, columns, delimiter, quote, skip_header_lines)


class _Malformed(Exception):
    """What is wrong with a line, without where it is."""


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:80] + "…")
