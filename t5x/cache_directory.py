"""The cache directory (T5X_CACHE_DIR, or ~/.cache/t5x): copies of what is remote or compressed, made once."""

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from t5x import startup
from t5x.errors import UserError
from t5x.urls import is_remote

log = logging.getLogger(__name__)

# By which of these a driver of fsspec tells that a file has changed; the first that it gives counts.
_TAGS = ("etag", "ETag", "md5Hash", "crc32c", "content_md5", "checksum", "blob_id", "mtime", "updated", "LastModified",
         "last_modified", "created")  # fmt: skip

_WORTH_SHOWING = 10**7  # bytes


def place(name: str) -> str:
    """The path of the part `name` of the cache directory, which need not exist."""
    home = os.path.expanduser(startup.cache_directory())
    if is_remote(home):
        raise UserError(f"The cache directory (T5X_CACHE_DIR) {home} is remote. Name a local directory.")
    return os.path.join(os.path.abspath(home), name)


def make(name: str) -> str:
    """`place(name)`, created."""
    directory = place(name)
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"The cache directory (T5X_CACHE_DIR) {directory} cannot be created: {error.strerror}. Choose another path."
        ) from error
    return directory


def version_tag(info: Mapping[str, Any]) -> str:
    """What tells one version of a remote file from another, from what fsspec says of it; "" if nothing does."""
    return next((str(info[tag]) for tag in _TAGS if info.get(tag) is not None), "")


def short_hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:12]


@contextlib.contextmanager
def locked(path: str | os.PathLike[str], *, wait: bool = True) -> Iterator[None]:
    """Holds the kernel's lock of a file, which is made, or of a directory; a process that dies gives it back."""
    flags = os.O_RDONLY if os.path.isdir(path) else os.O_RDWR | os.O_CREAT
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise
            log.info("waiting for another process, which holds %s", path)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def free_bytes(directory: str | os.PathLike[str]) -> int | None:
    """Bytes that we may still write on the disk of `directory`; None where the file system does not tell."""
    disk = os.statvfs(directory)
    if not disk.f_blocks:
        return None
    return disk.f_frsize * (disk.f_bfree if os.geteuid() == 0 else disk.f_bavail)


def fault(home: str | os.PathLike[str], name: str, needed: int | None, error: OSError) -> UserError:
    """What to raise when `name`, of `needed` bytes (None: unknown), could not be copied to `home`."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            f"{name} could not be copied to {home}: {error.strerror or error}. Set T5X_CACHE_DIR to a directory that "
            "you may write to."
        )
    free = free_bytes(home)
    size = "" if needed is None else f"it has {human_size(needed)}, and "
    return UserError(
        f"{name} does not fit on the disk of {home}: {size}"
        f"{'too little is' if free is None else f'{human_size(free)} are'} free. Remove copies there that you no "
        "longer need, or set T5X_CACHE_DIR to a directory on a larger disk."
    )


class CopyProgress:
    """How much of `size` bytes has been copied, on the terminal, from any thread; nothing is shown of small copies."""

    def __init__(self, size: int):
        from t5x.telemetry import Progress

        self._progress = Progress(_megabytes(size), unit="MB", description="copy") if size > _WORTH_SHOWING else None
        self._done, self._lock = 0, threading.Lock()

    def advance(self, size: int) -> None:
        with self._lock:
            self._done += size
            if self._progress:
                self._progress.update(_megabytes(self._done))

    def __enter__(self) -> "CopyProgress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress:
            self._progress.close()


def _megabytes(size: int) -> int:
    return -(-size // 10**6)


def human_size(size: float) -> str:
    """
    >>> human_size(1234567)
    '1.2 MB'
    """
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
