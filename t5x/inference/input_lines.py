"""The examples of a file: plain text, JSON lines, tables and Parquet, as `t5x train --data` reads them."""

import os
import stat
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from t5x._runtime.errors import UserError
from t5x.data.data_description import DataDescription, field_names, fill
from t5x.data.file_tasks import ENDINGS, TABLES, check_fields, ending_of, source_of
from t5x.data.sources import DataSource, TextLineDataSource
from t5x.data.sources.files import NoExamples
from t5x.files import user_files
from t5x.files.remote import is_remote
from t5x.telemetry import jsonl

SPLIT = "input"
_PAUSE = 0.05  # seconds


class Line(NamedTuple):
    """An example.

    Attributes:
      number: its number in the file; `Lines.where` turns it into a position for messages.
      raw: its content, to notice whether the file has changed.
      example: its fields.
      inputs: the text that the model reads.
      targets: the text to score.
    """

    number: int
    raw: bytes
    example: dict[str, Any]
    inputs: str = ""
    targets: str = ""


class Lines:
    """The examples of a file.

    Args:
      path: text, one input per line; .jsonl, objects with the fields of `data`, where empty lines are skipped; .tsv,
        .csv or .parquet; - is standard input, where lines that begin with { are objects and others are text.
      needs_targets: every example must have targets too.
      data: which fields are the inputs and targets.
      live: the result of each line is awaited: yield None when standard input pauses, and show a prompt if it is a
        terminal.
      source: reads a file of another format, whose split is SPLIT.

    Attributes:
      is_stream: whether it can be read only once.
    """

    def __init__(
        self,
        path: str,
        *,
        needs_targets: bool,
        data: DataDescription | None = None,
        live: bool = False,
        source: DataSource | None = None,
    ):
        self.path = path
        self.live = live and path == "-"
        self._needs_targets = needs_targets
        self._data = data or DataDescription()
        self._is_text = source is None and ending_of(path) not in ENDINGS
        files = {SPLIT: path}
        if ending_of(path) in ENDINGS - {".jsonl"} or path.endswith((".bz2", ".xz")) or is_remote(path):
            source = TextLineDataSource(files) if self._is_text else source or source_of(files, self._data.columns)
        self._source = source
        if source is not None:
            self.is_stream = False
            self._size = self._check_source(source)
            return
        try:
            mode = 0 if path == "-" else os.stat(path).st_mode
        except OSError as error:
            raise UserError(f"--input {path}: {user_files.local_problem(path, error)}") from error
        if stat.S_ISDIR(mode):
            raise UserError(f"--input {path} is a directory. Pass the path of a file.")
        self.is_stream = not stat.S_ISREG(mode)

    def count(self) -> int | None:
        """Return the number of examples and check them all; None for a stream, which is checked as it is read."""
        return None if self.is_stream else sum(1 for _ in self)

    def __iter__(self) -> Iterator[Line | None]:
        if self._source is None:
            yield from self._read_stream()
            return
        for index in range(self._size):
            example = self._source.example(SPLIT, index)
            raw = jsonl.encode(example)
            yield self._text_line(index, raw, example["text"]) if self._is_text else self._line(index, raw, example)

    def where(self, number: int) -> str:
        if self._source is not None:
            return self._source.location(SPLIT, number)
        return f"{'standard input' if self.path == '-' else self.path}:{number}"

    def _check_source(self, source: DataSource) -> int:
        """Check the fields of a file that is not read line by line. Return the number of its examples."""
        try:
            size = source.num_examples(SPLIT)
        except NoExamples as error:
            if ending_of(self.path) not in TABLES:
                return 0
            raise UserError(
                f"--input {self.path} has no rows, apart from a first line with the names of columns. Pass --columns "
                "A,B if that is an example."
            ) from error
        if not self._is_text:
            targets = field_names(self._data.targets) if self._needs_targets else []
            check_fields(source, SPLIT, field_names(self._data.inputs) + targets)
        return size

    def _read_stream(self) -> Iterator[Line | None]:
        prompt = self.live and sys.stdin.buffer.isatty()
        if prompt:
            print("Type an input and press Enter; Ctrl-D ends.\n> ", end="", file=sys.stderr, flush=True)
        for line in user_files.read_lines(self.path, wait=_PAUSE if self.live else None):
            if line is None:
                yield None
                if prompt:
                    print("> ", end="", file=sys.stderr, flush=True)
                continue
            text = line.text()
            if not self._is_text and not text.strip():
                continue
            if self._is_text and not (self.path == "-" and text.startswith("{")):
                yield self._text_line(line.number, line.raw, text)
                continue
            example = user_files.parsed(text, self.where(line.number))
            if not isinstance(example, dict):
                names = ", ".join(map(repr, field_names(self._data.inputs)))
                raise UserError(f"{self.where(line.number)} must be an object with {names}, got {text[:60]!r}.")
            yield self._line(line.number, line.raw, example)

    def _text_line(self, number: int, raw: bytes, text: str) -> Line:
        """Return a line of plain text, which is the only field of the inputs."""
        names = field_names(self._data.inputs)
        if len(names) > 1 or self._needs_targets:
            names += field_names(self._data.targets) if self._needs_targets else []
            raise UserError(
                f"{self.where(number)} is plain text, but the fields {', '.join(names)} are needed. Pass a .jsonl, "
                ".tsv, .csv or .parquet file, or JSON objects."
            )
        return self._line(number, raw, {names[0]: text})._replace(example={"inputs": text})

    def _line(self, number: int, raw: bytes, example: dict[str, Any]) -> Line:
        inputs = self._data.prefix + self._text(number, "inputs", example)
        return Line(number, raw, example, inputs, self._text(number, "targets", example) if self._needs_targets else "")

    def _text(self, number: int, name: str, example: dict[str, Any]) -> str:
        try:
            text = fill(getattr(self._data, name), example)
        except KeyError as error:
            raise UserError(
                f"{self.where(number)} has no field {error} (fields: {', '.join(example)}). Pass --{name} FIELD."
            ) from error
        except UserError as error:
            raise UserError(f"{self.where(number)}: {error}") from error
        user_files.check_unicode(text, f'{self.where(number)}: "{name}"')
        return text


def read_texts(path: str, option: str) -> list[str]:
    """Return the lines of a file. Empty lines are skipped.

    Args:
      option: the option that named the file, for messages.
    """
    if not os.path.exists(path):
        raise UserError(f"{option} {path}: {user_files.local_problem(path, FileNotFoundError())}")
    lines = user_files.read_lines(path, f"{option} {path}")
    texts = [text for line in lines if line is not None and (text := line.text())]
    if not texts:
        raise UserError(f"{option} {path} has no lines. Write one string per line.")
    return texts
