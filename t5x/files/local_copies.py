"""Local, uncompressed files to read from. Remote and compressed files are copied into the cache directory once.

CACHE/data/<source>-<version>/     see cache_directory.py
  source.json                      the source; size, SHA-256 and stamp of the copy
  train.jsonl                      the copy, decompressed
CACHE/data/offsets/                see random_access.py

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
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, NamedTuple

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
_CHUNK = 2**20  # bytes that are decompressed at once
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
                while chunk := content.read(_CHUNK):
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
