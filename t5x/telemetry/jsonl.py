"""JSON Lines files that stay readable whatever happens to the writer.

A line is valid JSON always: what JSON has no number for is written as a string, `"nan"`, `"inf"` or `"-inf"`, which
`float()` takes back. Whole files are replaced atomically, so that a reader finds the old or the new content.
"""

import contextlib
import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from t5x.errors import UserError

logger = logging.getLogger(__name__)


def encode(record: Mapping[str, Any]) -> bytes:
    """One line of JSON, with its line end.

    Numpy scalars and arrays become numbers and lists, bytes become text; anything else that JSON does not know is
    written as its `str()`.

        >>> encode({"step": 3, "loss": float("nan")})
        b'{"step": 3, "loss": "nan"}\\n'
    """
    return (json.dumps(_plain(record), ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "backslashreplace")


def read(path: str | os.PathLike[str]) -> Iterator[tuple[dict[str, Any], bytes]]:
    """The records of a file, each with its line. A missing file has none.

    A last line without its end, which a killed writer leaves behind, is passed over; so are, with a warning, lines
    that are not JSON objects.
    """
    if not os.path.exists(path):
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                logger.info("%s:%d is half written; it is dropped", path, number)
                return
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if isinstance(record, dict):
                yield record, line
            else:
                logger.warning("%s:%d is not a JSON object; it is dropped", path, number)


def replace(path: str | os.PathLike[str], lines: Iterable[bytes]) -> None:
    """Writes `lines` to `path` so that it holds all of them or, if this is interrupted, what it held before.

    `lines` may be read from `path` itself while it is replaced.
    """
    with whole_or_nothing(path) as temporary, open(temporary, "wb") as file:
        file.writelines(lines)


@contextlib.contextmanager
def whole_or_nothing(path: str | os.PathLike[str]) -> Iterator[str]:
    """A temporary path whose file, if one is written, becomes `path` where the block ends without an error.

    That lasts, also through a power cut. Interrupted before, `path` is what it was.
    """
    path = os.fspath(path)
    temporary = f"{path}.tmp"
    try:
        yield temporary
        if os.path.exists(temporary):
            _sync(temporary)
            os.replace(temporary, path)
            _sync(os.path.dirname(path) or ".")
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise write_error(path, error) from error
        raise


def write_error(path: str | os.PathLike[str], error: OSError, mend: str | None = None) -> UserError:
    """The error to raise when `path` cannot be written.

    Args:
      mend: what to do about it; None is the usual.
    """
    usual = "Free disk space or mend the path or its permissions, then start again."
    return UserError(f"{os.fspath(path)} cannot be written: {error.strerror or error}. {mend or usual}")


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    elif isinstance(value, np.ndarray):
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
