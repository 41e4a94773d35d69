"""Atomic and durable writes: a path has its old content or the new one, even after a kill or a power cut.

The content is written to a temporary beside its destination and flushed to the disk; then it is renamed, and the
directory is flushed. The temporary of `NAME` is `NAME.tmp-<pid>-<host>-<random>`. It is created with O_EXCL and
O_NOFOLLOW: files or links of other users are never opened, and only what was created here is removed.

The writer of a temporary file holds a lock on it. A temporary file whose lock is free was therefore left by a process
that died; the first write in a directory removes those of its host. (On some network file systems, locks are not
visible to other hosts.)
"""

import contextlib
import errno
import functools
import glob
import hashlib
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Container, Iterator
from typing import BinaryIO

from t5x.files import locks

_HOST = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
_NAME = r".+\.tmp-[0-9]+-{host}-[0-9a-f]{{8}}"

Path = str | os.PathLike[str]


def unique_name(path: Path, purpose: str = "tmp") -> str:
    """Return a new name beside `path`."""
    return f"{os.fspath(path)}.{purpose}-{os.getpid()}-{_HOST}-{secrets.token_hex(4)}"


def is_temporary(path: Path) -> bool:
    """Return whether the name is one that `unique_name` makes for temporaries, on any host."""
    return re.fullmatch(_NAME.format(host="[0-9a-f]{8}"), os.path.basename(os.fspath(path))) is not None


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a binary file that becomes `path` when the block ends without an error.

        with new_file("results.txt") as file:
            file.write(b"…")

    A writer that takes a path may write to `file.name`.
    """
    directory = os.path.dirname(os.path.abspath(path))
    _remove_stale_once(directory)
    file = _create(path)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        sync(directory)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(file.name)
        raise


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[str]:
    """Yield the path of an empty directory that becomes `path` when the block ends without an error.

    Raises:
      FileExistsError: `path` exists at the end of the block.
    """
    temporary = unique_name(path)
    make_directories(os.path.dirname(temporary))
    os.mkdir(temporary)
    try:
        yield temporary
        sync_tree(temporary)
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(path))
        rename(temporary, path)
    finally:
        remove_tree(temporary)


def rename(source: Path, destination: Path) -> None:
    """Rename, durably. The source must have been flushed before."""
    os.rename(source, destination)
    sync(os.path.dirname(os.path.abspath(destination)))


def make_directories(path: Path) -> None:
    """Create a directory and its parents, durably."""
    path = above = os.path.abspath(path)
    missing = []
    while not os.path.isdir(above):
        missing.append(above := os.path.dirname(above))
    os.makedirs(path, exist_ok=True)
    for parent in missing:
        with contextlib.suppress(PermissionError):  # writable but not readable, so it cannot be flushed
            sync(parent)


def sync(path: Path) -> None:
    """Flush one file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path, *, flushed: Container[str] = ()) -> None:
    """Flush a directory and everything below it to the disk.

    Args:
      flushed: files, relative to `directory`, that have been flushed already.
    """
    for parent, _, names in os.walk(directory, topdown=False):
        for path in (os.path.join(parent, name) for name in names):
            if os.path.relpath(path, directory) not in flushed:
                sync(path)
        sync(parent)


def remove_tree(directory: Path, *, quiet_rounds: int = 1) -> bool:
    """Remove a directory, if it exists. Return whether it is gone.

    Threads that still write to it may recreate it: it counts as gone after `quiet_rounds` checks 20 ms apart.
    """
    quiet = 0
    for _ in range(100):
        shutil.rmtree(directory, ignore_errors=True)
        quiet = 0 if os.path.lexists(directory) else quiet + 1
        if quiet == quiet_rounds:
            return True
        time.sleep(0.02)
    return False


def remove_unfinished(prefix: Path) -> None:
    """Remove the temporary directories of paths that begin with `prefix`. The caller must hold their writers' lock."""
    for path in glob.glob(f"{glob.escape(os.fspath(prefix))}*"):
        if is_temporary(path):
            remove_tree(path)


def remove_stale(directory: Path) -> None:
    """Remove the temporary files that dead processes of this host left in a directory."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        own_temporary = re.compile(_NAME.format(host=_HOST))
        for entry in entries:
            if own_temporary.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError), open(entry.path, "r+b", opener=_open) as file:
                    if locks.try_lock(file.fileno()):
                        os.unlink(entry.path)


_remove_stale_once = functools.cache(remove_stale)


def _create(path: Path) -> BinaryIO:
    while True:
        name = unique_name(path)
        try:
            file = open(name, "xb", opener=_open)  # noqa: SIM115
        except FileExistsError:
            continue
        try:
            is_owned = locks.try_lock(file.fileno()) and os.path.lexists(name)  # otherwise `remove_stale` was faster
        except OSError:
            is_owned = True  # without locks on this file system, nothing is removed as stale either
        if is_owned:
            return file
        file.close()


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
