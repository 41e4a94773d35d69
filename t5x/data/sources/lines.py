"""Text files with one example per line (or per quoted multi-line record): text, JSON, TSV, CSV."""

import abc
import contextlib
import csv
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from t5x._runtime.errors import UserError, shorten
from t5x.data.sources.base import MalformedRecord
from t5x.data.sources.files import FileExamples, FilesDataSource, Patterns
from t5x.files.local_copies import LocalCopy, LocalFile
from t5x.files.user_files import not_utf8

_BOM = b"\xef\xbb\xbf"
_LINE_END = ord("\n")


class LineFile:
    """The lines of a file, indexed when opened with 8 bytes of memory per line. A byte order mark is skipped.

    Args:
      copy: the file.
      skip: number of lines to skip at the start.
      blank: skip lines that are empty or consist only of these characters; None skips none.
      quote: quote character; line ends inside quotes do not end the line, as in CSV.
    """

    def __init__(self, copy: LocalCopy, *, skip: int = 0, blank: bytes | None = None, quote: str | None = None):
        self.name = copy.name
        self._file = LocalFile(copy)
        self._blank = blank
        # A range between two offsets holds a line and the skipped blank lines after it.
        self._offsets = self._file.offsets(f"lines 2 {skip} {blank!r} {quote}", lambda: self._index(skip, quote))

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> bytes:
        """Return line `index`, without its line end."""
        start, end = self._offsets[index : index + 2].tolist()
        content = self._file.read(start, end)
        if self._blank is not None:
            return content.rstrip(self._blank + b"\n")
        return content.removesuffix(b"\n").removesuffix(b"\r")

    def line_number(self, index: int) -> int:
        """Return the number, from 1, of the line in the file where line `index` starts."""
        return 1 + self._count_line_ends(int(self._offsets[index]))

    def take_first(self) -> bytes:
        """Remove and return the first line."""
        first = self[0]
        self._offsets = self._offsets[1:]
        return first

    def _index(self, skip: int, quote: str | None) -> np.ndarray:
        """Return the offsets at which lines start, and the size of the file, int64 [lines + 1]."""
        file = self._file
        index: list[np.ndarray] = []
        base = quotes = 0  # start of the chunk; number of quotes so far, modulo 2
        start = len(_BOM) if file.read(0, min(len(_BOM), file.size)) == _BOM else 0
        for chunk in file.chunks():
            content = np.frombuffer(chunk, np.uint8)
            ends = np.flatnonzero(content == _LINE_END)
            if quote is not None:
                # Only the parity matters, which survives the overflow of 8 bits.
                inside = (quotes + np.cumsum(content == ord(quote), dtype=np.uint8)) & 1
                ends = ends[inside[ends] == 0]
                quotes = int(inside[-1])
            if ends.size:
                starts = np.concatenate([[start - base], ends[:-1] + 1])
                start = base + int(ends[-1]) + 1
                skipped = min(skip, ends.size)
                skip -= skipped
                starts, ends = starts[skipped:] + base, ends[skipped:] + base
                if self._blank is not None:
                    starts = starts[~self._are_blank(content, self._blank, base, starts, ends)]
                index.append(starts)
            base += len(chunk)
        if quotes:
            raise UserError(
                f"{self.name}: a quote {quote} in or after line {1 + self._count_line_ends(start)} is never closed. "
                "Close it. If quotes are ordinary characters, write the data as .tsv or .jsonl, or define a "
                "task that reads it with quote=None."
            )
        if start < file.size and not skip and not (self._blank and self._is_blank(start, file.size)):
            index.append(np.array([start]))
        return np.concatenate([*index, [file.size]]).astype(np.int64)

    def _count_line_ends(self, end: int) -> int:
        return sum(chunk.count(b"\n") for chunk in self._file.chunks(end))

    def _are_blank(
        self, content: np.ndarray, characters: bytes, base: int, starts: np.ndarray, ends: np.ndarray
    ) -> np.ndarray:
        """Return which lines between `starts` and `ends` are blank; `content` starts at `base` in the file."""
        blank = ends == starts
        # The first character rules out most lines; it is not available if the line started in an earlier chunk.
        first = content[np.maximum(starts - base, 0)]
        suspects = np.isin(first, np.frombuffer(characters, np.uint8)) | (starts < base)
        for index in np.flatnonzero(suspects & ~blank):
            blank[index] = self._is_blank(int(starts[index]), int(ends[index]))
        return blank

    def _is_blank(self, start: int, end: int) -> bool:
        first = self._file.read(start, min(start + 1, end))
        return not first.strip(self._blank) and not self._file.read(start, end).strip(self._blank)


_Parse = Callable[[str], dict[str, Any]]
_RETURNS = "lines end with carriage returns alone. Convert the file: tr '\\r' '\\n' < FILE > NEW_FILE."


class _LinesDataSource(FilesDataSource):
    blank: bytes | None = b"\r"
    quote: str | None = None

    def __init__(self, split_to_filepattern: Mapping[str, Patterns], skip_header_lines: int = 0):
        super().__init__(split_to_filepattern)
        self._skip = skip_header_lines

    def _open_file(self, copy: LocalCopy) -> FileExamples:
        lines = LineFile(copy, skip=self._skip, blank=self.blank, quote=self.quote)
        parse = self._parser(lines)  # may take the first line
        locate = lambda index: f"{lines.name}:{lines.line_number(index)}"
        return FileExamples(lines.name, len(lines), lambda index: parse(decoded(lines[index])), locate)

    @abc.abstractmethod
    def _parser(self, lines: LineFile) -> _Parse:
        """Return the function that parses a line of this file."""


class TextLineDataSource(_LinesDataSource):
    """Lines of text, each an example `{"text": line}`; empty lines are examples too.

    Args:
      split_to_filepattern: {split: a path, a glob pattern, or several}. Remote (gs://…) and compressed (.gz, .bz2, .xz)
        files are copied into the cache directory (T5X_CACHE_DIR) once.
      skip_header_lines: number of lines to skip at the start of each file.
      num_input_examples: accepted for seqio compatibility; the lines are counted.
    """

    blank = None

    def __init__(
        self,
        split_to_filepattern: Mapping[str, Patterns],
        skip_header_lines: int = 0,
        num_input_examples: Mapping[str, int] | None = None,
    ):
        super().__init__(split_to_filepattern, skip_header_lines)

    def _parser(self, lines: LineFile) -> _Parse:
        return _text


class JsonLinesDataSource(_LinesDataSource):
    """One JSON object per line; blank lines are skipped.

    Args:
      split_to_filepattern: as in `TextLineDataSource`.
      skip_header_lines: number of lines to skip at the start of each file.
    """

    blank = b" \t\r"

    def _parser(self, lines: LineFile) -> _Parse:
        return json_object


class TsvDataSource(_LinesDataSource):
    """Lines of tab-separated fields; every value is text, and empty lines are skipped.

    Args:
      split_to_filepattern: as in `TextLineDataSource`.
      columns: names of the fields; None takes them from the first line of each file. A first line that repeats these
        names is skipped.
      delimiter: separator of the fields.
      quote: None treats quotes as text; '"' reads quoted fields as CSV does, with delimiters and line ends inside.
      skip_header_lines: number of lines to skip at the start of each file (before the one with names, if any).
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

    def _parser(self, lines: LineFile) -> _Parse:
        if self._columns is not None or not len(lines):
            with contextlib.suppress(MalformedRecord):
                if len(lines) and tuple(self._split(decoded(lines[0]))) == self._columns:
                    lines.take_first()
            return functools.partial(self._fields, self._columns or ())
        where = f"{lines.name}:{lines.line_number(0)}"
        header = lines.take_first()
        returns = b"\r" in header
        if returns and self.quote is None:
            raise UserError(f"{where}: {_RETURNS}")
        try:
            names = tuple(self._split(decoded(header)))
        except MalformedRecord as error:
            raise UserError(f"{where}: {_RETURNS if returns else error}") from error
        if twice := [name for name in dict.fromkeys(names) if name and names.count(name) > 1]:
            raise UserError(f"{where}: several columns are named {', '.join(map(repr, twice))}. Rename them.")
        return functools.partial(self._fields, names)

    def _fields(self, names: tuple[str, ...], text: str) -> dict[str, str]:
        values = self._split(text)
        if len(values) != len(names):
            expected = f"{len(names)} fields ({', '.join(names)})"
            raise MalformedRecord(f"expected {expected}, got {len(values)}: {shorten(text)}")
        return dict(zip(names, values, strict=True))

    def _split(self, text: str) -> list[str]:
        if self.quote is None:
            return text.split(self._delimiter)
        csv.field_size_limit(max(csv.field_size_limit(), len(text)))
        try:
            return next(csv.reader([text], delimiter=self._delimiter, quotechar=self.quote, strict=True))
        except csv.Error as error:
            raise MalformedRecord(f"{error}: {shorten(text)}") from error


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


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object as an example."""
    try:
        example = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedRecord(f"not JSON: {error}: {shorten(text)}") from error
    if not isinstance(example, dict):
        raise MalformedRecord(f'expected a JSON object such as {{"inputs": …}}, got {shorten(text)}')
    return example


def _text(text: str) -> dict[str, str]:
    return {"text": text}


def decoded(content: bytes) -> str:
    """Decode UTF-8; raise MalformedRecord if it is invalid."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise MalformedRecord(not_utf8(content, error)) from error
