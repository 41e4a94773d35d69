"""The cache directory (T5X_CACHE_DIR, or ~/.cache/t5x): copies of remote or compressed files, made once."""

import errno
import hashlib
import os
import threading
from collections.abc import Mapping
from typing import Any

from t5x.errors import UserError
from t5x.files import atomic
from t5x.files.disk_space import free_bytes, human_size
from t5x.files.remote import is_remote

# Fields with which fsspec drivers report that a file has changed; the first one present is used.
_TAGS = ("etag", "ETag", "md5Hash", "crc32c", "content_md5", "checksum", "blob_id", "mtime", "updated", "LastModified",
         "last_modified", "created")  # fmt: skip

_WORTH_SHOWING = 10**7  # bytes


def root() -> str:
    """Return T5X_CACHE_DIR, or `t5x` in the user's cache directory."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.environ.get("T5X_CACHE_DIR") or os.path.join(home, "t5x")


def place(name: str) -> str:
    """Return the path of the subdirectory `name` of the cache directory; it need not exist."""
    home = os.path.expanduser(root())
    if is_remote(home):
        raise UserError(f"The cache directory (T5X_CACHE_DIR) {home} is remote. Name a local directory.")
    return os.path.join(os.path.abspath(home), name)


def make(name: str) -> str:
    """Create and return `place(name)`."""
    directory = place(name)
    try:
        atomic.make_directories(directory)
    except OSError as error:
        raise UserError(
            f"The cache directory (T5X_CACHE_DIR) {directory} cannot be created: {error.strerror}. Choose another path."
        ) from error
    return directory


def version_tag(info: Mapping[str, Any]) -> str:
    """Return a tag that identifies the version of a remote file, from fsspec's info; "" if there is none."""
    return next((str(info[tag]) for tag in _TAGS if info.get(tag) is not None), "")


def short_hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:12]


def fault(home: str | os.PathLike[str], name: str, needed: int | None, error: OSError) -> UserError:
    """Return the error to raise when `name`, of `needed` bytes (None: unknown), could not be copied to `home`."""
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
    """A progress bar for copying `size` bytes, updated from any thread; small copies show none."""

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
