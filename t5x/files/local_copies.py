"""Local, uncompressed files to read from. Remote and compressed files are copied into the cache directory once.

CACHE/data/<source>-<version>/     see cache_directory.py
  source.json                      the source; size, SHA-256 and stamp of the copy
  train.jsonl                      the copy, decompressed
CACHE/data/offsets/                see `LocalFile.offsets`

A process verifies a copy before its first use, and copies again if it has changed. Hashing takes 5 s/GB on a slow core,
so a process always hashes up to 2 GiB of copies, and beyond that only those whose stamp (inode, times of modification
and status change) differs from the one recorded with their SHA-256.
"""

import bz2
import contextlib
import functools
import gzip
import json
import logging
import lzma
import os
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from t5x._runtime.errors import UserError
from t5x.files import atomic, cache_directory, user_files
from t5x.files.cache_directory import CacheEntry
from t5x.files.digests import digest_of
from t5x.files.disk_space import human_size
from t5x.files.local import Advance, Progress
from t5x.files.remote import RemoteFile, RemotePath, as_local, download

log = logging.getLogger(__name__)

_Open = Callable[[BinaryIO], gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile]
_COMPRESSIONS: dict[str, tuple[_Open, str]] = {
    ".gz": (gzip.open, "gzip"),
    ".bz2": (bz2.open, "bzip2"),
    ".xz": (lzma.open, "xz"),
}
_FILES_AT_ONCE = 4
_DECOMPRESSED_BYTES = 2**20  # at once
_RECORD = "source.json"

_hash_in_any_case = 2 * 2**30  # bytes that this process may still hash even if their stamps match
_verification = threading.Lock()
_verified: dict[str, list[int]] = {}  # stamps of copies verified by this process


class LocalCopy(NamedTuple):
    """A file with random access.

    Attributes:
      path: path of the local file.
      name: the path that the user gave, for messages.
      version: changes when the user's file changes.
    """

    path: str
    name: str
    version: str


def stage(paths: Sequence[str], progress: Progress, *, verify: bool = True) -> list[LocalCopy]:
    """Return local files: the files themselves, or copies in the cache directory, which are made if needed.

    Args:
      paths: local or remote (anything that fsspec opens); .gz, .bz2 and .xz are decompressed.
      progress: shows the progress of copying that many bytes, as `telemetry.copy_progress` does.
      verify: False if another process of this run has verified the copies.
    """
    with ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="t5x-staging") as pool:
        files = list(pool.map(_resolve, paths))
        copies = [file for file in files if isinstance(file, _CopiedFile)]
        complete = pool.map(lambda file: file.is_complete(verify=verify), copies)
        if missing := [file for file, is_complete in zip(copies, complete, strict=True) if not is_complete]:
            size, home = sum(file.size for file in missing), cache_directory.make("data")
            log.info("%s: copying %s to %s (set T5X_CACHE_DIR to change it)", _names(missing), human_size(size), home)
            with progress(size) as advance:
                list(pool.map(lambda file: file.make(advance), missing))
    if copies:
        total = human_size(sum(os.path.getsize(file.target) for file in copies))
        log.info("%s: reading the copy, %s, in %s", _names(copies), total, os.path.dirname(copies[0].target))
    return [file if isinstance(file, LocalCopy) else LocalCopy(file.target, file.name, file.version) for file in files]


def versions(paths: Sequence[str]) -> list[tuple[str, str]]:
    """Return (path, version) of files, without making copies; see `LocalCopy`."""
    with ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="t5x-staging") as pool:
        return [(file.name, file.version) for file in pool.map(_resolve, paths)]


class _CopiedFile(NamedTuple):
    """A remote or compressed file, and its copy in the cache directory, which may not exist yet."""

    name: str
    source: str | RemoteFile  # absolute `name`, if local
    version: str
    size: int
    suffix: str  # compression extension, or ""

    @property
    def entry(self) -> CacheEntry:
        return CacheEntry("data", self.name if isinstance(self.source, RemoteFile) else self.source, self.version)

    @property
    def target(self) -> str:
        return os.path.join(self.entry.path, os.path.basename(self.entry.source).removesuffix(self.suffix) or "data")

    def is_complete(self, *, verify: bool = True) -> bool:
        """Return whether the copy exists and, with `verify`, is unchanged."""
        try:
            with open(os.path.join(self.entry.path, _RECORD)) as file:
                record = json.load(file)
            if record["size"] != os.path.getsize(self.target):
                return False
            return not verify or self._is_unchanged(record)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def make(self, advance: Advance) -> None:
        fill = functools.partial(self._fill, advance=advance)
        self.entry.make(self.is_complete, fill, lambda: _resolve(self.name).version, resumable=False)

    def _fill(self, directory: str, *, advance: Advance) -> None:
        target = os.path.join(directory, os.path.basename(self.target))
        if isinstance(self.source, RemoteFile):
            fetched = target + self.suffix
            download({fetched: self.source}, advance)
            if self.suffix:
                self._decompress(fetched, target, lambda count: None)
                os.unlink(fetched)
        else:
            self._decompress(self.source, target, advance)
        stamp = _stamp(target)
        record = {"source": self.entry.source, "version": self.version, **digest_of(target), "stamp": stamp}
        with open(os.path.join(directory, _RECORD), "w") as file:
            json.dump(record, file)
        _verified[self.target] = stamp

    def _decompress(self, source: str, target: str, advance: Advance) -> None:
        open_compressed, tool = _COMPRESSIONS[self.suffix]
        try:
            with open(source, "rb") as raw, open_compressed(raw) as content, open(target, "wb") as file:
                done = 0
                while chunk := content.read(_DECOMPRESSED_BYTES):
                    file.write(chunk)
                    done, before = raw.tell(), done
                    advance(done - before)
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            if getattr(error, "errno", None) is not None:
                raise
            raise UserError(
                f"{self.name} cannot be decompressed: {error}. It is damaged or not a {tool} file; fetch it again "
                f"(`{tool} -t FILE` tests it)."
            ) from error

    def _is_unchanged(self, record: dict[str, Any]) -> bool:
        """Verify the copy, unless this process has verified it with the same stamp."""
        global _hash_in_any_case
        stamp = _stamp(self.target)
        if _verified.get(self.target) == stamp:
            return True
        with _verification:
            must_hash = stamp != record["stamp"] or stamp[0] <= _hash_in_any_case
            _hash_in_any_case -= stamp[0] if must_hash else 0
        if must_hash and digest_of(self.target)["sha256"] != record["sha256"]:
            return False
        if stamp != record["stamp"]:  # e.g. it was moved or restored
            with contextlib.suppress(OSError), atomic.new_file(os.path.join(self.entry.path, _RECORD)) as file:
                file.write(json.dumps({**record, "stamp": stamp}).encode())
        _verified[self.target] = stamp
        return True


def _resolve(path: str) -> _CopiedFile | LocalCopy:
    suffix = next((suffix for suffix in _COMPRESSIONS if path.endswith(suffix)), "")
    if path.endswith((".zst", ".zstd", ".lz4", ".zip")):
        raise UserError(f"{path}: this compression is not supported. Decompress it, or compress it with gzip.")
    if (local := as_local(path)) is None:
        file = RemotePath.parse(path).file()
        return _CopiedFile(path, file, json.dumps([file.size, file.version]), file.size, suffix)
    local = os.path.abspath(local)
    try:
        status = os.stat(local)
    except OSError as error:
        raise UserError(user_files.local_problem(path, error)) from error
    version = json.dumps([status.st_size, status.st_mtime_ns])
    return _CopiedFile(path, local, version, status.st_size, suffix) if suffix else LocalCopy(local, path, version)


def _names(files: Sequence[_CopiedFile]) -> str:
    return files[0].name if len(files) == 1 else f"{files[0].name} and {len(files) - 1} more"


def _stamp(path: str) -> list[int]:
    """Return numbers that change whenever the file changes, its size first."""
    status = os.stat(path)
    return [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]


# --- Random access ----------------------------------------------------------------------------------------------------

CHUNK = 1 << 24
_WORTH_KEEPING = 64 * 2**20  # minimum file size in bytes; indexing smaller files is fast
_MAX_OPEN_FILES = 256  # about: threads may exceed it by a few
# Without a lock: the garbage collector may close a file while its thread opens another.
_open_descriptors: set[int] = set()


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
        self._descriptor = descriptor if len(_open_descriptors) < _MAX_OPEN_FILES else None
        if self._descriptor is None:
            os.close(descriptor)
        else:
            _open_descriptors.add(descriptor)
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
        log.info("%s: indexing its records (%s)", self.name, human_size(self.size))
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


def _close(descriptor: int) -> None:
    _open_descriptors.discard(descriptor)
    os.close(descriptor)


def _save(path: str, offsets: np.ndarray) -> None:
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with atomic.new_file(path) as file:
            np.save(file, offsets)
    except OSError as error:
        log.info("The index is not kept for the next start: %s", error)
