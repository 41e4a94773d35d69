"""Finding and reading files, local or remote, with errors that say how to mend them."""

import difflib
import glob
import gzip
import os
import zlib

from t5x.errors import UserError

_DRIVERS = {"gs": "gcsfs", "s3": "s3fs", "az": "adlfs", "abfs": "adlfs", "hf": "huggingface_hub"}


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a URL such as gs://bucket/file."""
    return "://" in os.fspath(path)


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The whole content of a local or remote file."""
    path = os.fspath(path)
    if is_remote(path):
        return _remote(path, lambda remote: remote.read_bytes())
    try:
        with open(os.path.expanduser(path), "rb") as file:
            return file.read()
    except OSError as error:
        raise UserError(_local_problem(path, error)) from error


def read_gzip(path: str | os.PathLike[str]) -> bytes:
    """The decompressed content of a .gz file."""
    try:
        return gzip.decompress(read_bytes(path))
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(
            f"{os.fspath(path)} cannot be decompressed: {error}. It is damaged or no gzip file; "
            "fetch it again (`gzip -t FILE` tests it)."
        ) from error


def expand(pattern: str | os.PathLike[str]) -> list[str]:
    """The files that a path or a glob pattern names, sorted; a UserError where there is none."""
    pattern = os.path.expanduser(os.fspath(pattern))
    if is_remote(pattern):
        if not glob.has_magic(pattern):
            return [pattern]
        found = _remote_glob(pattern)
    elif os.path.isdir(pattern):
        raise UserError(f"{pattern} is a directory. Name the files in it, e.g. {os.path.join(pattern, '*.jsonl')}")
    elif os.path.exists(pattern):
        return [pattern]
    elif not glob.has_magic(pattern):
        raise UserError(_local_problem(pattern, FileNotFoundError()))
    else:
        found = sorted(path for path in glob.glob(pattern, recursive=True) if not os.path.isdir(path))
    if not found:
        directory = os.path.dirname(pattern) or os.getcwd()
        name = os.path.basename(pattern)
        raise UserError(f"No file matches the pattern {name!r} in {directory}{_entries(directory)}")
    return found


def _remote_glob(pattern: str) -> list[str]:
    scheme, rest = pattern.split("://", 1)
    parts = rest.split("/")
    first = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    root = f"{scheme}://{'/'.join(parts[:first])}"
    return _remote(root, lambda remote: sorted(map(str, remote.glob("/".join(parts[first:])))), named=pattern)


def _remote(path: str, action, named: str | None = None):
    """`action(epath.Path(path))`, with its failures as UserErrors that name the path."""
    from etils import epath

    named = named or path
    scheme = path.split("://", 1)[0]
    try:
        return action(epath.Path(path))
    except ImportError as error:
        package = _DRIVERS.get(scheme, f"the fsspec driver of {scheme}://")
        raise UserError(
            f"{named}: reading {scheme}:// needs the package {package} ({error}). "
            f"Install it (pip install {package}), or copy the file here and name the copy."
        ) from error
    except KeyError as error:
        raise UserError(
            f"{named}: {scheme}:// is not a kind of path that can be read. Copy the file here and name the copy."
        ) from error
    except FileNotFoundError as error:
        raise UserError(f"{named}: there is no such file.") from error
    except Exception as error:
        raise UserError(
            f"{named} could not be read ({type(error).__name__}: {error}). Check the network, the access rights and "
            "the name, or copy the file here and name the copy."
        ) from error


def _local_problem(path: str, error: OSError) -> str:
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
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return f", which holds {shown}." if names else ", which is empty."
