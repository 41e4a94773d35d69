"""Lines of files that may be remote, and compressed with gzip."""

import contextlib
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

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


def text_of(raw: bytes, where: str) -> str:
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: byte 0x{raw[error.start]:02x} at column {error.start + 1} is not UTF-8. Convert the file: iconv "
            "-f latin1 -t utf-8."
        ) from error
    if "\0" in text:
        raise UserError(f"{where} has a NUL byte at column {text.index(chr(0)) + 1}: this is no text. Take it out.")
    return text


def object_of(raw: bytes, where: str) -> dict[str, Any]:
    """The JSON object of a line."""
    try:
        found = json.loads(text_of(raw, where))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {error}.") from error
    if not isinstance(found, dict):
        raise UserError(f"{where} is not a JSON object: {raw[:60]!r}")
    return found


def id_in(record: dict[str, Any], names: Sequence[str], where: str) -> str | None:
    """The first of these fields that is there, as an id: a text, or a whole number."""
    for name in names:
        if (value := record.get(name)) is not None:
            if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
                raise UserError(f'{where}: "{name}" is {value!r}, where an id is needed.')
            check_unicode(str(value), f'{where}: "{name}"')
            return str(value)
    return None


def text_in(record: dict[str, Any], names: Sequence[str], where: str) -> str:
    """The first of these fields that is there, which must be a text."""
    for name in names:
        if (value := record.get(name)) is not None:
            if not isinstance(value, str):
                raise UserError(f'{where}: "{name}" is {str(value)[:60]!r}, where a text is needed.')
            check_unicode(value, f'{where}: "{name}"')
            return value
    raise UserError(
        f"{where} has no {' or '.join(names[:2])}: its fields are {', '.join(list(record)[:8]) or 'none at all'}."
    )


def check_unicode(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where} has half of a surrogate pair at character {error.start + 1}, which is no text. Mend the escape "
            "\\u…."
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
