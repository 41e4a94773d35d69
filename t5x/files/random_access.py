"""Local files with random access, change detection and a stored index of offsets."""

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator

import numpy as np

from t5x._runtime.errors import UserError
from t5x.files import atomic, cache_directory
from t5x.files.disk_space import human_size
from t5x.files.local_copies import LocalCopy

logger = logging.getLogger(__name__)

CHUNK = 1 << 24
_MAX_OPEN_FILES = 256
_WORTH_KEEPING = 64 * 2**20  # minimum file size in bytes; indexing smaller files is fast
_open_files = 0
_lock = threading.Lock()


class LocalFile:
    """A file that must not change while it is in use; reading is thread-safe.

    It stays open, unless very many are open already; then it is opened for each read.

    Attributes:
      name: name for messages.
      size: size in bytes.
    """

    def __init__(self, copy: LocalCopy):
        self.name = copy.name
        self._copy = copy
        descriptor = self._open()
        status = os.fstat(descriptor)
        self.size = status.st_size
        self._stamp = status.st_size, status.st_mtime_ns
        self._descriptor = descriptor if _may_stay_open() else None
        if self._descriptor is None:
            os.close(descriptor)
        else:
            weakref.finalize(self, _close, descriptor)

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes from `start` to `end`; raise a UserError if the file has changed."""
        descriptor = self._open() if self._descriptor is None else self._descriptor
        try:
            content, size = b"", end - start
            while len(content) < size and (more := os.pread(descriptor, size - len(content), start + len(content))):
                content += more
            status = os.fstat(descriptor)
        finally:
            if self._descriptor is None:
                os.close(descriptor)
        if (status.st_size, status.st_mtime_ns) != self._stamp or len(content) != size:
            raise self._changed(status.st_size)
        return content

    def check(self) -> None:
        """Raise a UserError if the file has changed; for readers that do not use `read`."""
        try:
            status = os.stat(self._copy.path)
        except OSError as error:
            raise UserError(f"{self.name} can no longer be read: {error.strerror}.") from error
        if (status.st_size, status.st_mtime_ns) != self._stamp:
            raise self._changed(status.st_size)

    def chunks(self, end: int | None = None) -> Iterator[bytes]:
        """Yield the content up to `end` in chunks."""
        end = self.size if end is None else end
        for start in range(0, end, CHUNK):
            yield self.read(start, min(start + CHUNK, end))

    def offsets(self, kind: str, build: Callable[[], np.ndarray]) -> np.ndarray:
        """Return the offsets from `build()`, int64 [n + 1], ending with the size; a large file's are kept between runs.

        Args:
          kind: identifies how the offsets are built; another `build` needs another kind.
        """
        if self.size < _WORTH_KEEPING:
            return build()
        which, version = self._copy.path, f"{self._stamp} {kind}"
        name = f"{cache_directory.short_hash(which)}-{cache_directory.short_hash(version)}.npy"
        path = os.path.join(cache_directory.place("data/offsets"), name)
        if (kept := self._load(path)) is not None:
            return kept
        logger.info("%s: indexing its records (%s)", self.name, human_size(self.size))
        offsets = build()
        _save(path, offsets)
        return offsets

    def _load(self, path: str) -> np.ndarray | None:
        try:
            offsets = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
        except (OSError, ValueError, EOFError):
            return None
        fits = offsets.dtype == np.int64 and offsets.ndim == 1 and offsets.size and offsets[-1] == self.size
        return offsets if fits else None

    def _open(self) -> int:
        try:
            return os.open(self._copy.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise UserError(f"{self.name} cannot be read: {error.strerror}.") from error

    def _changed(self, size: int) -> UserError:
        how = f"from {self.size} to {size} bytes" if size != self.size else "but not in size"
        return UserError(
            f"{self.name} has changed while it was in use ({how}). Do not change the data of a run: restore the file, "
            "or start again."
        )


def _may_stay_open() -> bool:
    global _open_files
    with _lock:
        if _open_files >= _MAX_OPEN_FILES:
            return False
        _open_files += 1
        return True


def _close(descriptor: int) -> None:
    global _open_files
    os.close(descriptor)
    with _lock:
        _open_files -= 1


def _save(path: str, offsets: np.ndarray) -> None:
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with atomic.new_file(path) as file:
            np.save(file, offsets)
    except OSError as error:
        logger.info("The index is not kept for the next start: %s", error)
