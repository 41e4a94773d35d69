"""Local files that are read at random: noticed when they change, with an index of offsets that is kept."""

import contextlib
import logging
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator

import numpy as np

from t5x import cache_directory
from t5x.data.staging import LocalCopy
from t5x.errors import UserError

logger = logging.getLogger(__name__)

CHUNK = 1 << 24
_MAX_OPEN_FILES = 256
_WORTH_KEEPING = 64 * 2**20  # bytes of a file whose offsets are kept; smaller ones are indexed in no time
_open_files = 0
_lock = threading.Lock()


class LocalFile:
    """A file that must not change while it is in use; reading is safe from any thread.

    It stays open, unless very many are open already; then it is opened for each read.

    Attributes:
      name: for messages.
      size: in bytes.
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
        """The bytes from `start` to `end`; a UserError if the file is no longer what it was."""
        descriptor = self._open() if self._descriptor is None else self._descriptor
        try:
            content = os.pread(descriptor, end - start, start)
            while len(content) < end - start and (
                more := os.pread(descriptor, end - start - len(content), len(content) + start)
            ):
                content += more
            status = os.fstat(descriptor)
        finally:
            if self._descriptor is None:
                os.close(descriptor)
        if (status.st_size, status.st_mtime_ns) != self._stamp or len(content) != end - start:
            raise self._changed(status.st_size)
        return content

    def check(self) -> None:
        """A UserError if the file has changed; for readers that do not read it through `read`."""
        try:
            status = os.stat(self._copy.path)
        except OSError as error:
            raise UserError(f"{self.name} can no longer be read: {error.strerror}.") from error
        if (status.st_size, status.st_mtime_ns) != self._stamp:
            raise self._changed(status.st_size)

    def chunks(self, end: int | None = None) -> Iterator[bytes]:
        """The content up to `end`, a piece at a time."""
        end = self.size if end is None else end
        for start in range(0, end, CHUNK):
            yield self.read(start, min(start + CHUNK, end))

    def offsets(self, kind: str, build: Callable[[], np.ndarray]) -> np.ndarray:
        """`build()`: offsets, int64 [n + 1], the last one the size; those of a large file are kept between runs.

        Args:
          kind: names what the offsets are of; another way to build them needs another one.
        """
        if self.size < _WORTH_KEEPING:
            return build()
        which, version = self._copy.path, f"{self._stamp} {kind}"
        name = f"{cache_directory.short_hash(which)}-{cache_directory.short_hash(version)}.npy"
        path = os.path.join(cache_directory.place("data/offsets"), name)
        if (kept := self._load(path)) is not None:
            return kept
        logger.info("%s: looking for its records (%s)", self.name, cache_directory.human_size(self.size))
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
            f"{self.name} has changed while it was in use ({how}). Do not change data under a run: put it back, or "
            "start again."
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
        with tempfile.NamedTemporaryFile(dir=os.path.dirname(path), suffix=".part", delete=False) as file:
            try:
                np.save(file, offsets)
                file.flush()
                os.replace(file.name, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(file.name)
                raise
    except OSError as error:
        logger.info("The offsets are not kept for the next start: %s", error)
