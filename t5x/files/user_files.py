"""Find and read local or remote files, and lines of text in them. Errors carry the file and the position."""

import contextlib
import difflib
import glob
import gzip
import io
import json
import os
import select
import sys
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from t5x._runtime.errors import UserError
from t5x.files.remote import RemotePath, is_remote, mirrored
from t5x.files.storage_errors import explained
from t5x.files.untrusted import open_regular


def absolute_path(path: str) -> str:
    """Return a path that works from any directory; a remote one is returned unchanged."""
    return path if is_remote(path) else os.path.abspath(os.path.expanduser(path))


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Read a whole local or remote file."""
    path = mirrored(path)
    if is_remote(path):
        return RemotePath.parse(path).read_bytes()
    with open_binary(path) as file:
        return file.read()


def read_regular(path: str | os.PathLike[str], *, max_bytes: int = 2**30) -> bytes:
    """Read a whole local or remote file.

    Raises:
      UserError: it cannot be read or, if it is local, is larger than `max_bytes` or not a regular file (but a pipe).
    """
    path = mirrored(path)
    if is_remote(path):
        return read_bytes(path)
    try:
        with open_regular(os.path.expanduser(path)) as file:
            if (size := os.fstat(file.fileno()).st_size) > max_bytes:
                raise UserError(f"{path} has {size:,} bytes, more than such a file can have ({max_bytes:,}).")
            return file.read()
    except OSError as error:
        raise UserError(local_problem(path, error)) from error


def open_binary(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a local file for reading."""
    path = os.fspath(path)
    try:
        return open(os.path.expanduser(path), "rb")
    except OSError as error:
        raise UserError(local_problem(path, error)) from error


def exists(path: str) -> bool:
    """Return whether a local or remote path exists."""
    path = mirrored(path)
    return RemotePath.parse(path).info() is not None if is_remote(path) else os.path.exists(path)


def expand(pattern: str | os.PathLike[str]) -> list[str]:
    """Return the files that a path or a glob pattern matches, sorted; raise a UserError if there is none."""
    pattern = os.path.expanduser(mirrored(pattern))
    if is_remote(pattern):
        if not glob.has_magic(pattern):
            return [pattern]
        matches = RemotePath.parse(pattern).glob()
    elif os.path.isdir(pattern):
        raise UserError(f"{pattern} is a directory. Name the files in it, e.g. {os.path.join(pattern, '*.jsonl')}")
    elif os.path.exists(pattern):
        return [pattern]
    elif not glob.has_magic(pattern):
        raise UserError(local_problem(pattern, FileNotFoundError()))
    else:
        matches = sorted(path for path in glob.glob(pattern, recursive=True) if not os.path.isdir(path))
    if not matches:
        directory = os.path.dirname(pattern) or os.getcwd()
        name = os.path.basename(pattern)
        raise UserError(f"No file matches the pattern {name!r} in {directory}{_entries(directory)}")
    return matches


def local_problem(path: str, error: OSError) -> str:
    """Return the message for a local file that could not be opened."""
    if not isinstance(error, FileNotFoundError):
        return f"{path} cannot be read: {error.strerror or error}."
    directory, name = os.path.split(os.path.abspath(os.path.expanduser(path)))
    if not os.path.isdir(directory):
        return f"There is no file {path}: the directory {directory} does not exist."
    near = difflib.get_close_matches(name, os.listdir(directory), n=3)
    hint = f". Did you mean {' or '.join(near)}?" if near else _entries(directory)
    return f"There is no file {name} in {directory}{hint}"


def _entries(directory: str) -> str:
    if is_remote(directory) or glob.has_magic(directory):
        return "."
    if not os.path.isdir(directory):
        return ", which does not exist."
    names = sorted(os.listdir(directory))
    listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return f", which contains {listed}." if names else ", which is empty."


# --- Lines ------------------------------------------------------------------------------------------------------------

_BOM = b"\xef\xbb\xbf"

_Stream = io.BufferedReader | gzip.GzipFile


class TextLine(NamedTuple):
    """A line of a file.

    Attributes:
      where: its position for messages: `in.txt:3`.
      number: line number, from 1.
      raw: the unchanged line.
      offset: byte offset of `content` in the decompressed file.
    """

    where: str
    number: int
    raw: bytes
    offset: int

    @property
    def content(self) -> bytes:
        """The line without its end and, if it is the first, without a byte order mark."""
        return (self.raw.removeprefix(_BOM) if self.number == 1 else self.raw).rstrip(b"\r\n")

    def text(self) -> str:
        return decoded(self.content, self.where)


def read_lines(path: str, name: str | None = None, wait: float | None = None) -> Iterator[TextLine | None]:
    """Yield the lines of a local or remote file, or of standard input; gzip is decompressed.

    Args:
      path: the file; - is standard input.
      name: name of the file in messages; the default is the path.
      wait: yield None whenever no line has arrived for this many seconds, e.g. because a program or a person waits for
        the result of those before.
    """
    name = name or ("standard input" if path == "-" else path)
    with _open(path) as file:
        offset = number = 0
        try:
            for raw in file if wait is None else _arriving(file, wait):
                if raw is None:
                    yield None
                    continue
                number += 1
                skipped = len(_BOM) if number == 1 and raw.startswith(_BOM) else 0
                yield TextLine(f"{name}:{number}", number, raw, offset + skipped)
                offset += len(raw)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UserError(f"{name} is not a complete gzip file: {error}. Fetch it again.") from error
        except OSError as error:
            raise UserError(f"{name} cannot be read: {error.strerror or error}.") from error


def _arriving(file: _Stream, wait: float) -> Iterator[bytes | None]:
    """Yield lines as they arrive, and None when none has arrived for `wait` seconds."""
    descriptor: int | None = None
    with contextlib.suppress(OSError, AttributeError):
        descriptor = file.fileno()
    if descriptor is None or isinstance(file, gzip.GzipFile):
        yield from file
        return
    pending = file.read1()  # what `_is_gzip` has read; from here on the file's own buffer is empty
    while True:
        *lines, pending = pending.split(b"\n")
        yield from (line + b"\n" for line in lines)
        if not select.select([descriptor], [], [], wait)[0]:
            yield None
        block = os.read(descriptor, 1 << 16)
        if not block:
            break
        pending += block
    if pending:
        yield pending


def can_seek(path: str) -> bool:
    """Return whether lines can be read again at their offsets: a local file that is not compressed."""
    if is_remote(path) or not os.path.isfile(path):
        return False
    with open_binary(path) as file:
        return not _is_gzip(file)


def decoded(raw: bytes, where: str) -> str:
    """Decode a line, or an entire file, which must be UTF-8 without NUL bytes.

    Args:
      where: position for messages: `in.txt:3`.
    """
    if b"\0" in raw:
        raise UserError(
            f"{where} has a NUL byte at {_position(raw, raw.index(0))}, so it is not text. Remove it, or write it as "
            "\\u0000 in JSON."
        )
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: {not_utf8(raw, error)}") from error


def not_utf8(raw: bytes, error: UnicodeDecodeError) -> str:
    """Return the message for bytes that could not be decoded."""
    encoding = "utf-16" if b"\0" in raw else "latin1"
    return (
        f"byte {raw[error.start]:#04x} at {_position(raw, error.start)} is not UTF-8. Convert the file, e.g. iconv -f "
        f"{encoding} -t utf-8."
    )


def parsed(text: str, where: str) -> Any:
    """Parse JSON; raise a UserError naming `where` if it is invalid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        hint = " If it has one object per line, rename it to .jsonl." if "Extra data: line 2 " in str(error) else ""
        raise UserError(f"{where} is not JSON: {error}.{hint}") from error


def check_unicode(text: str, where: str) -> None:
    """Raise a UserError if the text has a lone surrogate, which a JSON escape can produce and no file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where} has half of a surrogate pair at character {error.start + 1}. Fix the escape \\u…."
        ) from error


def _position(raw: bytes, offset: int) -> str:
    line, column = raw.count(b"\n", 0, offset), offset - raw.rfind(b"\n", 0, offset)
    return f"line {line + 1}, column {column}" if line else f"column {column}"


@contextlib.contextmanager
def _open(path: str) -> Iterator[_Stream]:
    """Open a file and decompress its content."""
    if path == "-":
        yield _decompress(sys.stdin.buffer)
    elif is_remote(path):
        with explained(path), RemotePath.parse(path).open() as file:
            yield _decompress(file)
    elif os.path.isdir(path):
        raise UserError(f"{path} is a directory. Pass the path of a file.")
    else:
        with open_binary(path) as file:
            yield _decompress(file)


def _decompress(file: Any) -> _Stream:  # of any class: remote files only have the methods of one
    buffered: io.BufferedReader = file if hasattr(file, "peek") else io.BufferedReader(file)
    return gzip.GzipFile(fileobj=buffered) if _is_gzip(buffered) else buffered


def _is_gzip(file: io.BufferedReader) -> bool:
    return file.peek(2)[:2] == b"\x1f\x8b"
