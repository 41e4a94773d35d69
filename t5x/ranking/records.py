"""Lines of files that may be remote, and compressed with gzip."""

import contextlib
import gzip
import io
import os
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

from t5x import texts
from t5x.data.files import open_binary
from t5x.errors import UserError
from t5x.urls import explained, file_system, is_remote

_BOM = b"\xef\xbb\xbf"


class Line(NamedTuple):
    """A line that is not blank.

    Attributes:
      number: in its file, from 1.
      offset: of its first byte, in the content.
      raw: without its end.
    """

    number: int
    offset: int
    raw: bytes


def lines(path: str) -> Iterator[Line]:
    """The lines of a file."""
    with _opened(path) as file:
        offset = 0
        try:
            for number, raw in enumerate(file, start=1):
                start, offset = offset, offset + len(raw)
                if number == 1 and raw.startswith(_BOM):
                    raw, start = raw[len(_BOM) :], start + len(_BOM)
                raw = raw.rstrip(b"\r\n")
                if raw and not raw.isspace():
                    yield Line(number, start, raw)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UserError(f"{path} is not a whole gzip file: {error}.") from error
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error


def can_seek(path: str) -> bool:
    """Whether lines can be read again at their offsets: a local file that is not compressed."""
    if is_remote(path) or not os.path.isfile(path):
        return False
    with open_binary(path) as file:
        return not _is_gzip(file)


def object_of(raw: bytes, where: str) -> dict[str, Any]:
    """The JSON object of a line."""
    found = texts.parsed(texts.decoded(raw, where), where)
    if not isinstance(found, dict):
        raise UserError(f"{where} is not a JSON object: {raw[:60]!r}")
    return found


def id_in(record: dict[str, Any], names: Sequence[str], where: str) -> str | None:
    """The first of these fields that is there, as an id: a text, or a whole number."""
    for name in names:
        if (value := record.get(name)) is not None:
            if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
                raise UserError(f'{where}: "{name}" is {value!r}, where an id is needed.')
            texts.check_unicode(str(value), f'{where}: "{name}"')
            return str(value)
    return None


def text_in(record: dict[str, Any], names: Sequence[str], where: str) -> str:
    """The first of these fields that is there, which must be a text."""
    for name in names:
        if (value := record.get(name)) is not None:
            if not isinstance(value, str):
                raise UserError(f'{where}: "{name}" is {str(value)[:60]!r}, where a text is needed.')
            texts.check_unicode(value, f'{where}: "{name}"')
            return value
    raise UserError(
        f"{where} has no {' or '.join(names[:2])}: its fields are {', '.join(list(record)[:8]) or 'none at all'}."
    )


@contextlib.contextmanager
def copying(name: str) -> Iterator[None]:
    """Around what writes a temporary copy of a file: where there is no room for it, that is told."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"A copy of {name} cannot be written to {tempfile.gettempdir()}: {error.strerror or error}. Free disk "
            "space there, or name another place: TMPDIR=…"
        ) from error


@contextlib.contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    """The content of a file, decompressed."""
    if is_remote(path):
        remote, name = file_system(path)
        with explained(path), remote.open(name, "rb") as file:
            yield _content(file)
    else:
        if os.path.isdir(path):
            raise UserError(f"{path} is a directory; name a file.")
        with open_binary(path) as file:
            yield _content(file)


def _content(file: BinaryIO) -> BinaryIO:
    buffered = file if hasattr(file, "peek") else io.BufferedReader(file)
    return gzip.GzipFile(fileobj=buffered) if _is_gzip(buffered) else buffered


def _is_gzip(file: Any) -> bool:
    return file.peek(2)[:2] == b"\x1f\x8b"
