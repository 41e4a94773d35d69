"""A directory at a URL: `RemoteDirectory`, one of the two implementations of `directory.Directory`.

CACHE/uploads/upload-…/    files that are being written, before they are uploaded
"""

import base64
import contextlib
import dataclasses
import errno
import glob
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, BinaryIO

from t5x.files import atomic, cache_directory, locks
from t5x.files.downloads import download
from t5x.files.local import LOCK_FILE, FileEntry
from t5x.files.remote import RemotePath, run_concurrently
from t5x.files.untrusted import is_plain_relative

_PROBE = ".t5x-write-test"


class RemoteDirectory:
    """A prefix of an object store, or a directory of another remote file system."""

    def __init__(self, remote: RemotePath):
        self._remote = remote

    def __str__(self) -> str:
        return self._remote.url

    def __truediv__(self, name: str) -> "RemoteDirectory":
        return RemoteDirectory(self._remote / name)

    def path(self, name: str) -> str:
        return f"{self}/{name}"

    def make(self) -> None:
        """Do nothing: object stores have no directories."""

    def check_writable(self) -> None:
        probe = dataclasses.replace(self._remote / _PROBE, url=str(self))  # messages name the directory
        probe.write_bytes(b"")
        probe.remove()

    # --- Reading

    def names(self) -> set[str]:
        return set(self._fresh().children())

    def list(self, prefix: str = "") -> dict[str, FileEntry]:
        entries = (self._fresh() / prefix).descendants()
        return {
            f"{prefix}/{name}" if prefix else name: FileEntry(info["size"], md5=_md5(info))
            for name, info in entries.items()
            if info["type"] == "file"
        }

    def exists(self, name: str = "") -> bool:
        return self._info(name) is not None if name else bool(self.names())

    def is_directory(self, name: str) -> bool:
        info = self._info(name)
        return info is not None and info["type"] == "directory"

    def open(self, name: str) -> BinaryIO:
        if not is_plain_relative(name):
            raise OSError(0, "not a path inside the directory", name)
        if (info := self._info(name)) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path(name))
        return (self._remote / name).file(info).open()

    def read_bytes(self, name: str) -> bytes | None:
        return (self._remote / name).read_bytes_if_exists()

    def hash(self, name: str, algorithm: str = "sha256", *, flush: bool = False) -> tuple[int, str]:
        size, digest = 0, hashlib.new(algorithm)
        with contextlib.closing(self.open(name)) as file:
            while content := file.read(2**23):
                digest.update(content)
                size += len(content)
        return size, digest.hexdigest()

    def reports_md5(self, empty: str) -> bool:
        info = self._info(empty)
        return info is not None and _md5(info) == hashlib.md5(b"", usedforsecurity=False).hexdigest()

    def is_intact(self, name: str, digest: Mapping[str, Any]) -> bool:
        info = self._info(name)
        return info is not None and info["size"] == digest.get("size")

    @contextlib.contextmanager
    def reading(self, *names: str) -> Iterator[str]:
        infos = self._fresh().children()
        with self._scratch() as scratch:
            files = {
                os.path.join(scratch, name): (self._remote / name).file(infos[name]) for name in names if name in infos
            }
            download(files, lambda count: None)
            yield scratch

    def _fresh(self) -> RemotePath:
        """Return the path, to be looked up again: drivers keep listings."""
        self._remote.fs.invalidate_cache()
        return self._remote

    def _info(self, name: str) -> dict[str, Any] | None:
        return (self._fresh() / name).info()

    # --- Writing

    @contextlib.contextmanager
    def new_file(self, name: str) -> Iterator[BinaryIO]:
        with self.writing(name) as path, open(path, "xb") as file:
            yield file

    def write_bytes(self, name: str, data: bytes) -> None:
        (self._remote / name).write_bytes(data)

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[str]:
        with self._scratch() as scratch:
            yield os.path.join(scratch, name)
            written = [os.path.join(parent, file) for parent, _, files in os.walk(scratch) for file in files]
            for path in sorted(written, key=lambda path: path == os.path.join(scratch, name)):  # `name` is last
                (self._remote / os.path.relpath(path, scratch)).upload(path)

    create = write_bytes

    def flush(self, name: str = "", *, flushed: Container[str] = ()) -> None:
        """Do nothing: an object is durable once it is written."""

    def remove(self, *names: str) -> None:
        run_concurrently(lambda name: (self._remote / name).remove(), [(name,) for name in names])

    def remove_temporaries(self) -> None:
        """Do nothing: remote directories have no temporary files."""

    def remove_itself(self) -> None:
        """Do nothing: object stores have no directories."""

    @contextlib.contextmanager
    def locked(self) -> Iterator[Callable[[], None]]:
        from t5x.files.lease import Lease  # imports TensorStore, which takes a while

        with Lease.acquire(self.path(LOCK_FILE), str(self)) as lease:
            yield lease.check

    @contextlib.contextmanager
    def _scratch(self) -> Iterator[str]:
        with upload_directory() as scratch:
            try:
                yield scratch
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise cache_directory.copy_error(scratch, str(self), error) from error
                raise


@contextlib.contextmanager
def upload_directory() -> Iterator[str]:
    """Yield a fresh directory in the cache for files that are uploaded; remove those of killed processes."""
    home = cache_directory.make("uploads")
    with contextlib.ExitStack() as held:
        with locks.locked(os.path.join(home, "upload.lock")):
            for stale in glob.glob(os.path.join(glob.escape(home), "upload-*")):
                with contextlib.suppress(BlockingIOError), locks.locked(stale, wait=False):
                    atomic.remove_tree(stale)
            directory = held.enter_context(tempfile.TemporaryDirectory(prefix="upload-", dir=home))
            held.enter_context(locks.locked(directory))
        yield directory


def _md5(info: Mapping[str, Any]) -> str:
    """Return the MD5 in the description of a file: `md5Hash` of GCS, or `ETag` of S3, unless the file is encrypted."""
    if encoded := info.get("md5Hash"):
        return base64.b64decode(encoded).hex()
    etag = str(info.get("ETag", "")).strip('"')
    return etag if re.fullmatch("[0-9a-f]{32}", etag) else ""
