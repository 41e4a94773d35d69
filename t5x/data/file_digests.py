"""Hashes of the content of data files, which detect changes regardless of paths and file times.

Files up to 64 MB are always hashed in full, and larger ones if all files of a split total at most 8 GB. Otherwise a
larger file is hashed by its size and 64 evenly spaced blocks of 64 kB. Digests are kept in the cache directory
(T5X_CACHE_DIR/data/digests) until the file changes, so that they are computed once.
"""

import contextlib
import functools
import hashlib
import json
import os
import time
from collections.abc import Sequence
from typing import Any, BinaryIO

from t5x.errors import UserError
from t5x.files import atomic, cache_directory
from t5x.files.local_copies import LocalCopy

_ALWAYS_WHOLE = 64 * 2**20
_ALL_WHOLE = 8 * 2**30
_BLOCKS, _BLOCK = 64, 64 * 2**10
_WORTH_KEEPING = 2**20
_LISTED = 256
_blake2b = functools.partial(hashlib.blake2b, digest_size=16)
_SETTLED = 2 * 10**9  # nanoseconds after which a new write gets a new time on any file system


def hash_data_files(copies: Sequence[LocalCopy]) -> list[list[Any]]:
    """Return [name, size, digest] of each file; one entry for all if there are very many."""
    sizes = [os.path.getsize(copy.path) for copy in copies]
    all_whole = sum(sizes) <= _ALL_WHOLE
    described: list[list[Any]] = [
        [os.path.basename(copy.name), size, _digest(copy.path, whole=all_whole or size <= _ALWAYS_WHOLE)]
        for copy, size in zip(copies, sizes, strict=True)
    ]
    if len(described) <= _LISTED:
        return described
    joined = _blake2b("".join(digest for _, _, digest in described).encode()).hexdigest()
    return [[f"{described[0][0]} and {len(described) - 1} more", sum(sizes), joined]]


def _digest(path: str, whole: bool) -> str:
    """Return the digest of a file's content, from the cache directory if known."""
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        # Writing changes the ctime, even if the mtime is reset.
        stamp = [path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, whole]
        keep = status.st_size >= _WORTH_KEEPING and time.time_ns() - status.st_ctime_ns > _SETTLED
        if keep and (saved := _load(stamp)) is not None:
            return saved
        digest = hashlib.file_digest(file, _blake2b) if whole else _sampled(file, status.st_size)
    if keep:
        _save(stamp, digest.hexdigest())
    return digest.hexdigest()


def _sampled(file: BinaryIO, size: int) -> Any:
    digest = _blake2b(str(size).encode())
    for number in range(_BLOCKS):
        file.seek(number * (size - _BLOCK) // (_BLOCKS - 1))
        digest.update(file.read(_BLOCK))
    return digest


def _record_path(stamp: list[Any]) -> str:
    return os.path.join(cache_directory.place("data/digests"), f"{cache_directory.short_hash(stamp[0])}.json")


def _load(stamp: list[Any]) -> str | None:
    try:
        with open(_record_path(stamp)) as file:
            record = json.load(file)
        return record["digest"] if record["stamp"] == stamp and isinstance(record["digest"], str) else None
    except (OSError, UserError, ValueError, KeyError, TypeError):
        return None


def _save(stamp: list[Any], digest: str) -> None:
    with contextlib.suppress(OSError, UserError):  # it will be computed again
        path = _record_path(stamp)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with atomic.new_file(path) as file:
            file.write(json.dumps({"stamp": stamp, "digest": digest}).encode())
