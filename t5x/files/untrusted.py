"""Open and parse files of checkpoints, model directories and caches, which may come from anywhere."""

import json
import os
import stat
from collections.abc import Callable
from io import BufferedReader
from typing import Any

MAX_JSON_BYTES = 16 * 2**20
_MAX_JSON_DEPTH = 64


def is_plain_relative(name: str) -> bool:
    """Return whether `name` is a relative path of ordinary parts separated by `/`, which cannot leave its directory."""
    return all(part not in ("", ".", "..") and part.isprintable() and "\\" not in part for part in name.split("/"))


def open_regular(path: str | os.PathLike[str], flags: int = 0, *, dir_fd: int | None = None) -> BufferedReader:
    """Open a regular file for reading.

    Args:
      flags: added to those of `os.open`, such as O_NOFOLLOW.
      dir_fd: see `os.open`.

    Raises:
      OSError: it is a pipe, a device, a directory or the like, or cannot be opened.
    """
    # Non-blocking, because opening a pipe would wait for a writer; it has no effect on regular files.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags, dir_fd=dir_fd)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "not a regular file", os.fspath(path))
    return os.fdopen(descriptor, "rb")


def open_inside(directory: str | os.PathLike[str], name: str) -> BufferedReader:
    """Open a regular file below `directory`; OSError if any part of the relative path `name` is a symbolic link."""
    if not is_plain_relative(name):
        raise OSError(0, "not a path inside the directory", name)
    *parents, last = name.split("/")
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for parent in parents:
            below = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        return open_regular(last, os.O_NOFOLLOW, dir_fd=descriptor)
    finally:
        os.close(descriptor)


def parse_json(
    content: bytes | str, *, max_bytes: int = MAX_JSON_BYTES, object_pairs_hook: Callable[[list], Any] | None = None
) -> Any:
    """Parse JSON. The result can be traversed, printed and written recursively.

    Args:
      object_pairs_hook: see `json.loads`.

    Raises:
      ValueError: it is not JSON, larger than `max_bytes`, or nested more than 64 deep.
    """
    if len(content) > max_bytes:
        raise ValueError(f"it has more than {max_bytes:,} bytes")
    too_deep = ValueError(f"it is nested more than {_MAX_JSON_DEPTH} deep")
    try:
        value = json.loads(content, object_pairs_hook=object_pairs_hook)
    except RecursionError:
        raise too_deep from None
    level = [value]
    for _ in range(_MAX_JSON_DEPTH + 1):
        containers = [node for node in level if isinstance(node, dict | list)]
        if not containers:
            return value
        level = [child for node in containers for child in (node.values() if isinstance(node, dict) else node)]
    raise too_deep
