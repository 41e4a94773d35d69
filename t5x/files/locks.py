"""Kernel locks (`flock`). They are released when a process dies, so a kill leaves no lock behind.

A lock belongs to the open file, which a forked child would share and keep open after its parent has died. So children
close the descriptors of all locks.
"""

import contextlib
import errno
import fcntl
import logging
import os
from collections.abc import Iterator

log = logging.getLogger(__name__)

_held: set[int] = set()


def _close_in_child() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


def acquire(path: str | os.PathLike[str], *, wait: bool = False) -> int:
    """Lock a file, which is created if missing, or an existing directory.

    Args:
      path: a symbolic link in place of a lock file is refused.
      wait: wait for the process that holds the lock, and log that.

    Returns:
      The descriptor, for `release`.

    Raises:
      BlockingIOError: another process holds the lock, and `wait` is False.
    """
    flags = os.O_RDONLY if os.path.isdir(path) else os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    while True:
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
        try:
            if not try_lock(descriptor):
                if not wait:
                    raise BlockingIOError(errno.EWOULDBLOCK, "another process holds the lock", os.fspath(path))
                log.info("waiting for another process, which holds %s", path)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if is_at(descriptor, path):  # otherwise its holder removed it before releasing it
                _held.add(descriptor)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def release(descriptor: int | None) -> None:
    """Release a lock. Does nothing if it was released before, or is None."""
    if descriptor in _held:
        _held.remove(descriptor)
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: str | os.PathLike[str], *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a file or directory during the block; see `acquire`."""
    descriptor = acquire(path, wait=wait)
    try:
        yield
    finally:
        release(descriptor)


def try_lock(descriptor: int) -> bool:
    """Lock an open file until it is closed. Return False if another process holds the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_held(descriptor: int | None) -> bool:
    """Return whether this process holds the lock that `acquire` returned."""
    return descriptor in _held


def is_held_elsewhere(path: str | os.PathLike[str]) -> bool:
    """Return whether another process currently holds the lock of a file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        if not any(os.path.sameopenfile(descriptor, own) for own in _held):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


def is_at(descriptor: int, path: str | os.PathLike[str]) -> bool:
    """Return whether the open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
