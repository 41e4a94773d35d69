"""JSON Lines files that stay readable if the writer is interrupted.

Every line is valid JSON: numbers that JSON lacks are the strings `"nan"`, `"inf"` and `"-inf"`, which `float()`
accepts. Whole files are replaced atomically, so that a reader sees the old or the new content.
"""

import contextlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from t5x._runtime.errors import UserError
from t5x.files.directory import split

logger = logging.getLogger(__name__)


def encode(record: Mapping[str, Any]) -> bytes:
    """Encode a record as one line of JSON with its newline.

    NumPy scalars and arrays become numbers and lists, bytes become strings; other unknown types become their `str()`.

        >>> encode({"step": 3, "loss": float("nan")})
        b'{"step": 3, "loss": "nan"}\\n'
    """
    return (json.dumps(_plain(record), ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "backslashreplace")


def read(path: str | os.PathLike[str]) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield the records of a local or remote file, each with its line. A missing file has none.

    An unterminated last line, as an interrupted writer leaves it, is skipped. So are lines that are not JSON objects,
    with a warning.
    """
    directory, name = split(path)
    with contextlib.suppress(FileNotFoundError), directory.open(name) as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                logger.info("%s:%d is incomplete; skipping it", path, number)
                return
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if isinstance(record, dict):
                yield record, line
            else:
                logger.warning("%s:%d is not a JSON object; skipping it", path, number)


def replace(path: str | os.PathLike[str], lines: Iterable[bytes]) -> None:
    """Write `lines` to a local or remote file, atomically and durably; see `t5x.files.directory`.

    Args:
      lines: may be read from `path` itself while it is replaced.

    Raises:
      UserError: the file cannot be written.
    """
    directory, name = split(path)
    try:
        with directory.new_file(name) as file:
            file.writelines(lines)
    except OSError as error:
        raise write_error(path, error) from error


def keep_records(path: str | os.PathLike[str], keep: Callable[[dict[str, Any]], bool]) -> None:
    """Drop the records of a file for which `keep` returns False. If there are none, the file is not touched."""
    if not all(keep(record) for record, _ in read(path)):
        replace(path, (line for record, line in read(path) if keep(record)))


def write_error(path: str | os.PathLike[str], error: OSError, fix: str | None = None) -> UserError:
    """Return the error to raise if `path` cannot be written; `fix` says what to do if it is not the usual."""
    fix = fix or "Free disk space, or fix the path or its permissions; then start again."
    return UserError(f"{os.fspath(path)} cannot be written: {error.strerror or error}. {fix}")


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return str(value)
