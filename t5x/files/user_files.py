"""Find and read local or remote files; errors say how to fix them."""

import difflib
import glob
import os
from io import BufferedReader

from t5x._runtime.errors import UserError
from t5x.files.remote import RemotePath, is_remote, mirrored
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


def open_binary(path: str | os.PathLike[str]) -> BufferedReader:
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
