"""Input files of `t5x infer --model`: plain text or JSON lines, read line by line."""

import os
import stat
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from t5x.errors import UserError
from t5x.files import text_lines, user_files

_PAUSE = 0.05  # seconds


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
      live: someone waits for the result of each line: yield None when standard input pauses, and show a prompt if it is
        a terminal.

    Attributes:
      is_stream: whether it can be read only once.
    """

    def __init__(self, path: str, *, needs_targets: bool, live: bool = False):
        self.path = path
        self.live = live and path == "-"
        self._needs_targets = needs_targets
        self._as_json = path.endswith(".jsonl")
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
        prompt = self.live and sys.stdin.buffer.isatty()
        if prompt:
            print("Type an input and press Enter; Ctrl-D ends.\n> ", end="", file=sys.stderr, flush=True)
        for line in text_lines.read_lines(self.path, wait=_PAUSE if self.live else None):
            if line is None:
                yield None
                if prompt:
                    print("> ", end="", file=sys.stderr, flush=True)
                continue
            text = line.text()
            if self._as_json and not text.strip():
                continue
            as_json = self._as_json or (self.path == "-" and text.startswith("{"))
            example = self._object(line.number, text) if as_json else {"inputs": text}
            if self._needs_targets:
                self._check_text(line.number, example, "targets")
            yield Line(line.number, line.raw, example)

    def where(self, number: int) -> str:
        return f"{'standard input' if self.path == '-' else self.path}:{number}"

    def _object(self, number: int, text: str) -> dict[str, Any]:
        example = text_lines.parsed(text, self.where(number))
        self._check_text(number, example if isinstance(example, dict) else {}, "inputs")
        return example

    def _check_text(self, number: int, example: dict[str, Any], field: str) -> None:
        text = example.get(field)
        if not isinstance(text, str):
            wanted = '"inputs" and "targets"' if self._needs_targets else '"inputs"'
            raise UserError(
                f'{self.where(number)}: "{field}" is missing or not a string. Pass a .jsonl file of objects with '
                f"{wanted}."
            )
        text_lines.check_unicode(text, f'{self.where(number)}: "{field}"')


def read_texts(path: str, option: str) -> list[str]:
    """Return the lines of a file. Empty lines are skipped.

    Args:
      option: the option that named the file, for messages.
    """
    if not os.path.exists(path):
        raise UserError(f"{option} {path}: {user_files.local_problem(path, FileNotFoundError())}")
    found = [text for line in text_lines.read_lines(path, f"{option} {path}") if (text := line.text())]
    if not found:
        raise UserError(f"{option} {path} has no lines. Write one string per line.")
    return found
