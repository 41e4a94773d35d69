"""Local, uncompressed files to read from. Remote and compressed files are copied into the cache directory once.

CACHE/data/                        CACHE is T5X_CACHE_DIR, or ~/.cache/t5x
  <place>-<version>/               another version of the source has another name
    source.json                    its source; size, SHA-256 and stamp of the copy
    train.jsonl                    the copy, decompressed
  <place>-<version>.tmp-…/         unfinished
  <place>.lock                     one process copies, others wait
  offsets/                         see local_files.py

A process verifies a copy before its first use, and copies again if it has changed. Hashing takes 5 s/GB on a slow core,
so a process always hashes up to 2 GiB of copies, and beyond that only those whose stamp (inode, times of modification
and status change) differs from the one recorded with their SHA-256.
"""

import bz2
import collections
import contextlib
import glob
import gzip
import hashlib
import io
import json
import logging
import lzma
import os
import threading
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from t5x.errors import UserError
from t5x.files import atomic, cache_directory, locks, user_files
from t5x.files.digests import digest_of
from t5x.files.disk_space import human_size
from t5x.files.remote import explained, file_system, is_remote

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

logger = logging.getLogger(__name__)

_OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_FILES_AT_ONCE = 4
_PIECE = 8 * 2**20  # bytes per request
_PIECES_AHEAD = 4
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


def stage(paths: Sequence[str], *, verify: bool = True) -> list[LocalCopy]:
    """Return local files: the files themselves, or copies in the cache directory, which are made if needed.

    Args:
      paths: local or remote (anything that fsspec opens); .gz, .bz2 and .xz are decompressed.
      verify: False if another process of this run has verified the copies.
    """
    with ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="t5x-staging") as pool:
        try:
            plans = list(pool.map(_plan, paths))
            copies = [plan for plan in plans if isinstance(plan, _Plan)]
            made = pool.map(lambda plan: plan.is_made(verify=verify), copies)
            if missing := [plan for plan, is_made in zip(copies, made, strict=True) if not is_made]:
                size = sum(plan.size for plan in missing)
                what = missing[0].name if len(missing) == 1 else f"{len(missing)} files ({missing[0].name}, …)"
                home = cache_directory.make("data")
                logger.info(
                    "%s: copying %s to %s (T5X_CACHE_DIR chooses the place)",
                    what,
                    human_size(size),
                    home,
                )
                with cache_directory.CopyProgress(size) as progress:
                    list(pool.map(lambda plan: _ensure(plan, progress), missing))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if copies:
        size = human_size(sum(os.path.getsize(plan.target) for plan in copies))
        where = copies[0].target if len(copies) == 1 else cache_directory.place("data")
        more = f" and {len(copies) - 1} more" if len(copies) > 1 else ""
        logger.info("%s%s: reading the copy, %s, in %s", copies[0].name, more, size, where)
    return [LocalCopy(plan.target, plan.name, plan.version) if isinstance(plan, _Plan) else plan for plan in plans]


def versions(paths: Sequence[str]) -> list[tuple[str, str]]:
    """Return (path, version) of files, without making copies; see `LocalCopy`."""
    with ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="t5x-staging") as pool:
        return [(plan.name, plan.version) for plan in pool.map(_plan, paths)]


class _Plan(NamedTuple):
    """A copy that belongs in the cache."""

    name: str
    source: str  # absolute `name`
    version: str
    size: int
    suffix: str  # compression extension, or ""
    remote: "tuple[AbstractFileSystem, str] | None"

    @property
    def lock(self) -> str:
        return cache_directory.place(f"data/{cache_directory.short_hash(self.source)}.lock")

    @property
    def entry(self) -> str:
        return cache_directory.place(
            f"data/{cache_directory.short_hash(self.source)}-{cache_directory.short_hash(self.version)}"
        )

    @property
    def target(self) -> str:
        return os.path.join(self.entry, os.path.basename(self.source).removesuffix(self.suffix) or "data")

    def is_made(self, *, verify: bool = True) -> bool:
        """Return whether the copy exists and, with `verify`, is unchanged."""
        try:
            with open(os.path.join(self.entry, _RECORD)) as file:
                record = json.load(file)
            if record["size"] != os.path.getsize(self.target):
                return False
            return not verify or _is_unchanged(self, record)
        except (OSError, ValueError, KeyError, TypeError):
            return False


def _plan(path: str) -> _Plan | LocalCopy:
    suffix = next((suffix for suffix in _OPENERS if path.endswith(suffix)), "")
    if path.endswith((".zst", ".zstd", ".lz4", ".zip")):
        raise UserError(f"{path}: this compression is not read here. Decompress it, or compress it with gzip.")
    if is_remote(path):
        from fsspec.implementations.local import LocalFileSystem

        fs, inside = file_system(path)
        if not isinstance(fs, LocalFileSystem):
            with explained(path):
                fs.invalidate_cache()
                info = fs.info(inside)
            if info["type"] != "file" or not isinstance(info.get("size"), int):
                raise UserError(f"{path} is no file of a known size. Copy it here and name the copy.")
            version = json.dumps([info["size"], cache_directory.version_tag(info)])
            return _Plan(path, path, version, info["size"], suffix, (fs, inside))
        local = inside
    else:
        local = os.path.abspath(path)
    try:
        status = os.stat(local)
    except OSError as error:
        raise UserError(user_files.local_problem(path, error)) from error
    version = json.dumps([status.st_size, status.st_mtime_ns])
    if not suffix:
        return LocalCopy(local, path, version)
    return _Plan(path, local, version, status.st_size, suffix, None)


def _is_unchanged(plan: _Plan, record: dict[str, Any]) -> bool:
    """Verify a copy, unless this process has verified it with the same stamp."""
    global _hash_in_any_case
    stamp = _stamp(plan.target)
    if _verified.get(plan.target) == stamp:
        return True
    with _verification:
        must_hash = stamp != record["stamp"] or stamp[0] <= _hash_in_any_case
        _hash_in_any_case -= stamp[0] if must_hash else 0
    if must_hash and digest_of(plan.target)["sha256"] != record["sha256"]:
        return False
    if stamp != record["stamp"]:  # e.g. it was moved or restored
        with contextlib.suppress(OSError), atomic.new_file(os.path.join(plan.entry, _RECORD)) as file:
            file.write(json.dumps({**record, "stamp": stamp}).encode())
    _verified[plan.target] = stamp
    return True


def _stamp(path: str) -> list[int]:
    """Return numbers that change whenever the file changes, its size first."""
    status = os.stat(path)
    return [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]


def _ensure(plan: _Plan, progress: cache_directory.CopyProgress) -> None:
    try:
        with locks.locked(plan.lock):
            if not plan.is_made():  # another process may have made it while we waited
                _make(plan, progress)
    except OSError as error:
        raise cache_directory.fault(os.path.dirname(plan.lock), plan.name, None, error) from error


def _make(plan: _Plan, progress: cache_directory.CopyProgress) -> None:
    place = plan.entry.rsplit("-", 1)[0]
    atomic.remove_unfinished(f"{place}-")
    if os.path.lexists(plan.entry):
        logger.warning("%s: the copy in %s is not as it was written; it is made again", plan.name, plan.entry)
        atomic.remove_tree(plan.entry)
    for other in glob.glob(f"{glob.escape(place)}-*"):
        logger.info("%s is a copy of an earlier version of %s; rm -r frees it", other, plan.name)
    with atomic.new_directory(plan.entry) as part:
        target = os.path.join(part, os.path.basename(plan.target))
        digest = hashlib.sha256()
        with open(target, "wb") as file:
            for piece in _decompressed(plan, progress):
                file.write(piece)
                digest.update(piece)
        stamp = _stamp(target)
        record = {"source": plan.source, "version": plan.version, "size": stamp[0], "sha256": digest.hexdigest()}
        with open(os.path.join(part, _RECORD), "w") as file:
            json.dump({**record, "stamp": stamp}, file)
        if _plan(plan.name).version != plan.version:
            raise UserError(f"{plan.name} was changed while it was being copied. Start again when its writer is done.")
    _verified[plan.target] = stamp


def _decompressed(plan: _Plan, progress: cache_directory.CopyProgress) -> Iterator[bytes]:
    pieces = _counted(_remote_pieces(plan) if plan.remote else _local_pieces(plan), progress)
    if not plan.suffix:
        yield from pieces
        return
    try:
        with _OPENERS[plan.suffix](io.BufferedReader(_Stream(pieces), _PIECE)) as file:
            while piece := file.read(_PIECE):
                yield piece
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        if getattr(error, "errno", None) is not None:
            raise
        tool = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz"}[plan.suffix]
        raise UserError(
            f"{plan.name} cannot be decompressed: {error}. It is damaged or no {tool} file; fetch it again "
            f"(`{tool} -t FILE` tests it)."
        ) from error


def _counted(pieces: Iterator[bytes], progress: cache_directory.CopyProgress) -> Iterator[bytes]:
    for piece in pieces:
        progress.advance(len(piece))
        yield piece


def _local_pieces(plan: _Plan) -> Iterator[bytes]:
    with user_files.open_binary(plan.source) as file:
        while piece := file.read(_PIECE):
            yield piece


def _remote_pieces(plan: _Plan) -> Iterator[bytes]:
    """Yield the content of a remote file in order, with a few requests ahead."""
    fs, path = plan.remote

    def fetch(begin: int) -> bytes:
        end = min(begin + _PIECE, plan.size)
        with explained(plan.name):
            content = fs.cat_file(path, start=begin, end=end)
        if len(content) != end - begin:
            raise UserError(
                f"{plan.name}: {len(content)} bytes came instead of {end - begin}. The connection was cut, or the file "
                "has changed. Start again."
            )
        return content

    with ThreadPoolExecutor(_PIECES_AHEAD, thread_name_prefix="t5x-staging") as pool:
        waiting = collections.deque()
        try:
            for begin in range(0, plan.size, _PIECE):
                waiting.append(pool.submit(fetch, begin))
                if len(waiting) == _PIECES_AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


class _Stream(io.RawIOBase):
    """Chunks of bytes as a file."""

    def __init__(self, pieces: Iterator[bytes]):
        self._pieces = pieces
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        if not self._rest:
            self._rest = memoryview(next(self._pieces, b""))
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size
