"""Input files of `t5x infer --model`: plain text or JSON lines, read line by line."""

import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

from t5x.errors import UserError
from t5x.files import text_lines


class Line(NamedTuple):
    """An example.

    Attributes:
      number: line number in the file, from 1.
      raw: the unchanged line.
      example: its fields; `inputs` and, to score, `targets` are strings.
    """

    number: int
    raw: bytes
    example: dict[str, Any]


class Lines:
    """The examples of a file.

    Args:
      path: text, one input per line, or .jsonl, objects with `inputs`, where empty lines are skipped; - is standard
        input, where lines that begin with { are objects.
      needs_targets: every example must have `targets` too.

    Attributes:
      is_stream: whether it can be read only once.
    """

    def __init__(self, path: str, *, needs_targets: bool):
        self.path = path
        self._needs_targets = needs_targets
        self._as_json = path.endswith(".jsonl")
        try:
            self.is_stream = path == "-" or not stat.S_ISREG(os.stat(path).st_mode)
        except OSError as error:
            raise UserError(f"--input {path} cannot be read: {error.strerror or error}.") from error
        if path != "-" and os.path.isdir(path):
            raise UserError(f"--input {path} is a directory; name a file.")

    def count(self) -> int | None:
        """Return the number of examples and check them all; None for a stream, which is checked as it is read."""
        return None if self.is_stream else sum(1 for _ in self)

    def __iter__(self) -> Iterator[Line]:
        with self._open() as file:
            for number, raw in enumerate(file, start=1):
                text = _text(self.where(number), number, raw)
                if self._as_json and not text.strip():
                    continue
                as_json = self._as_json or (self.path == "-" and text.startswith("{"))
                example = self._object(number, text) if as_json else {"inputs": text}
                if self._needs_targets:
                    self._check_text(number, example, "targets")
                yield Line(number, raw, example)

    def where(self, number: int) -> str:
        return f"{'standard input' if self.path == '-' else self.path}:{number}"

    def _object(self, number: int, text: str) -> dict[str, Any]:
        example = text_lines.parsed(text, self.where(number))
        if not isinstance(example, dict):
            raise UserError(f'{self.where(number)} must be an object with a text "inputs".')
        self._check_text(number, example, "inputs")
        return example

    def _check_text(self, number: int, example: dict[str, Any], field: str) -> None:
        text = example.get(field)
        if not isinstance(text, str):
            if field == "inputs":
                raise UserError(f'{self.where(number)} must be an object with a text "inputs".')
            raise UserError(f'{self.where(number)} has no "targets" to score; give .jsonl with "inputs" and "targets".')
        text_lines.check_unicode(text, f'{self.where(number)}: "{field}"')

    @contextlib.contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        if self.path == "-":
            yield sys.stdin.buffer
            return
        try:
            file = open(self.path, "rb")  # noqa: SIM115
        except OSError as error:
            raise UserError(f"--input {self.path} cannot be read: {error.strerror or error}.") from error
        with file:
            yield file


def read_texts(path: str, option: str) -> list[str]:
    """Return the lines of a file. Empty lines are skipped.

    Args:
      option: the option that named the file, for messages.
    """
    try:
        with open(path, "rb") as file:
            found = [_text(f"{option} {path}:{number}", number, raw) for number, raw in enumerate(file, start=1)]
    except OSError as error:
        raise UserError(f"{option} {path} cannot be read: {error.strerror or error}.") from error
    if not any(found):
        raise UserError(f"{option} {path} has no line: give one text a line.")
    return [text for text in found if text]


def _text(where: str, number: int, raw: bytes) -> str:
    """Return a line without its line end, the first also without a byte order mark."""
    text = text_lines.decoded(raw, where).rstrip("\r\n")
    return text.removeprefix("\ufeff") if number == 1 else text
