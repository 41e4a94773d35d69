"""Local, uncompressed files to read from. What is remote or compressed is copied into the cache directory, once.

CACHE/data/                        CACHE is T5X_CACHE_DIR, or ~/.cache/t5x
  <place>-<version>/               another version of the source has another name
    source.json                    where it is from, and how long the copy is
    train.jsonl                    the copy, decompressed
  <place>-<version>.part/          being made
  <place>.lock                     one process makes it, others wait
  offsets/                         see local_files.py
"""

import bz2
import collections
import glob
import gzip
import io
import json
import logging
import lzma
import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from t5x import cache_directory
from t5x.data import files
from t5x.errors import UserError
from t5x.urls import explained, file_system, is_remote

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

logger = logging.getLogger(__name__)

_OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_FILES_AT_ONCE = 4
_PIECE = 8 * 2**20  # bytes of a request
_PIECES_AHEAD = 4


class LocalCopy(NamedTuple):
    """A file that can be read at random.

    Attributes:
      path: of the local file.
      name: the path that the user gave, for messages.
      version: changes when the file that the user named does.
    """

    path: str
    name: str
    version: str


def stage(paths: Sequence[str]) -> list[LocalCopy]:
    """The local forms of files: themselves, or copies in the cache directory that are made where there are none yet.

    Args:
      paths: local, or remote (whatever fsspec opens); those that end in .gz, .bz2 or .xz are decompressed.
    """
    with ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="t5x-staging") as pool:
        try:
            plans = list(pool.map(_plan, paths))
            copies = [plan for plan in plans if isinstance(plan, _Plan)]
            if missing := [plan for plan in copies if not plan.is_made()]:
                size = sum(plan.size for plan in missing)
                what = missing[0].name if len(missing) == 1 else f"{len(missing)} files ({missing[0].name}, …)"
                home = cache_directory.make("data")
                logger.info(
                    "%s: copying %s to %s (T5X_CACHE_DIR chooses the place)",
                    what,
                    cache_directory.human_size(size),
                    home,
                )
                with cache_directory.CopyProgress(size) as progress:
                    list(pool.map(lambda plan: _ensure(plan, progress), missing))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if copies:
        size = cache_directory.human_size(sum(os.path.getsize(plan.target) for plan in copies))
        where = copies[0].target if len(copies) == 1 else cache_directory.place("data")
        more = f" and {len(copies) - 1} more" if len(copies) > 1 else ""
        logger.info("%s%s: reading the copy, %s, in %s", copies[0].name, more, size, where)
    return [LocalCopy(plan.target, plan.name, plan.version) if isinstance(plan, _Plan) else plan for plan in plans]


def versions(paths: Sequence[str]) -> list[tuple[str, str]]:
    """(path, version) of files, without making copies; see `LocalCopy`."""
    with ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="t5x-staging") as pool:
        return [(plan.name, plan.version) for plan in pool.map(_plan, paths)]


class _Plan(NamedTuple):
    """A copy that is to be in the cache."""

    name: str
    source: str  # the same, absolute
    version: str
    size: int
    suffix: str  # of the compression, or ""
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

    def is_made(self) -> bool:
        try:
            with open(os.path.join(self.entry, "source.json")) as file:
                return json.load(file)["size"] == os.path.getsize(self.target)
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
        raise UserError(files.local_problem(path, error)) from error
    version = json.dumps([status.st_size, status.st_mtime_ns])
    if not suffix:
        return LocalCopy(local, path, version)
    return _Plan(path, local, version, status.st_size, suffix, None)


def _ensure(plan: _Plan, progress: cache_directory.CopyProgress) -> None:
    try:
        with cache_directory.locked(plan.lock):
            if not plan.is_made():  # else the process we waited for has made it
                _make(plan, progress)
    except OSError as error:
        raise cache_directory.fault(os.path.dirname(plan.lock), plan.name, None, error) from error


def _make(plan: _Plan, progress: cache_directory.CopyProgress) -> None:
    part = f"{plan.entry}.part"
    for other in glob.glob(f"{glob.escape(plan.entry.rsplit('-', 1)[0])}-*"):
        if other == plan.entry or other.endswith(".part"):  # nobody works on it: the lock is ours
            shutil.rmtree(other, ignore_errors=True)
        else:
            logger.info("%s is a copy of an earlier version of %s; rm -r frees it", other, plan.name)
    os.makedirs(part)
    try:
        target = os.path.join(part, os.path.basename(plan.target))
        with open(target, "wb") as file:
            for piece in _decompressed(plan, progress):
                file.write(piece)
            size = file.tell()
            file.flush()
            os.fsync(file.fileno())
        with open(os.path.join(part, "source.json"), "w") as file:
            json.dump({"source": plan.source, "version": plan.version, "size": size}, file)
        if _plan(plan.name).version != plan.version:
            raise UserError(f"{plan.name} was changed while it was being copied. Start again when its writer is done.")
        os.rename(part, plan.entry)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


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
    with files.open_binary(plan.source) as file:
        while piece := file.read(_PIECE):
            yield piece


def _remote_pieces(plan: _Plan) -> Iterator[bytes]:
    """The content of a remote file in order; a few requests run ahead."""
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
    """Pieces of bytes as a file."""

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
