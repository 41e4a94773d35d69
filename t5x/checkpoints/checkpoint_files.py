"""The files of a checkpoint, at a local path or a URL. They are untrusted: nothing outside the directory is opened."""

import base64
import contextlib
import errno
import functools
import hashlib
import os
import re
import stat
from collections.abc import Mapping
from io import BufferedReader
from typing import Any, NamedTuple

from t5x.checkpoints import paths
from t5x.files.remote import RemotePath, is_remote
from t5x.files.untrusted import is_plain_relative, open_inside


class Entry(NamedTuple):
    """A file in a listing.

    Attributes:
      size: in bytes.
      is_regular: False for links, pipes and the like.
      md5: hash of the content in hexadecimal, as reported by a server; "" if it does not report one.
    """

    size: int
    is_regular: bool = True
    md5: str = ""


class LocalFiles:
    """The files below a local directory; all methods raise OSError."""

    def __init__(self, path: str):
        self.path = path

    def exists(self) -> bool:
        return os.path.isdir(self.path)

    def list(self, prefix: str = "") -> dict[str, Entry]:
        """Return {relative path: entry} of all files, or of those below the directory `prefix`."""
        found = paths.walk(os.path.join(self.path, prefix))
        return {
            os.path.join(prefix, name): Entry(status.st_size, stat.S_ISREG(status.st_mode)) for name, status in found
        }

    def open(self, name: str) -> BufferedReader:
        return open_inside(self.path, name)

    def has(self, name: str) -> bool:
        return os.path.lexists(os.path.join(self.path, name))

    def reports_md5(self, empty: str) -> bool:
        """Return whether listings have the MD5 of files, judged by an empty one."""
        return False

    def write(self, name: str, content: bytes) -> None:
        """Write a new file. It is durable only after `atomic.sync_tree`."""
        paths.write_file(os.path.join(self.path, name), content)

    def hash(self, name: str, algorithm: str = "sha256", *, flush: bool = False) -> tuple[int, str]:
        """Return the size and the hash of a file; optionally flush it to disk."""
        with self.open(name) as file:
            digest = hashlib.file_digest(file, algorithm).hexdigest()
            if flush:
                os.fsync(file.fileno())
            return file.tell(), digest


class RemoteFiles(LocalFiles):
    """The files below a URL. Failures of the network or the server raise a UserError, a missing file an OSError."""

    @functools.cached_property
    def _remote(self) -> RemotePath:
        return RemotePath.parse(self.path)

    def exists(self) -> bool:
        return bool(self._remote.children())

    def list(self, prefix: str = "") -> dict[str, Entry]:
        self._remote.fs.invalidate_cache()
        found = (self._remote / prefix).descendants()
        return {
            f"{prefix}/{name}" if prefix else name: Entry(info["size"], md5=_md5(info))
            for name, info in found.items()
            if info["type"] == "file"
        }

    def open(self, name: str) -> BufferedReader:
        if not is_plain_relative(name):
            raise OSError(0, "not a path inside the directory", name)
        self._remote.fs.invalidate_cache()
        if (info := (self._remote / name).info()) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.path}/{name}")
        return (self._remote / name).file(info).open()

    def has(self, name: str) -> bool:
        self._remote.fs.invalidate_cache()
        return (self._remote / name).info() is not None

    def reports_md5(self, empty: str) -> bool:
        self._remote.fs.invalidate_cache()
        info = (self._remote / empty).info()
        return info is not None and _md5(info) == hashlib.md5(b"", usedforsecurity=False).hexdigest()

    def write(self, name: str, content: bytes) -> None:
        (self._remote / name).write_bytes(content)

    def hash(self, name: str, algorithm: str = "sha256", *, flush: bool = False) -> tuple[int, str]:
        size, digest = 0, hashlib.new(algorithm)
        with contextlib.closing(self.open(name)) as file:
            while content := file.read(2**23):
                digest.update(content)
                size += len(content)
        return size, digest.hexdigest()


def open_files(path: str | os.PathLike[str]) -> LocalFiles:
    """Return the files of the checkpoint at a local path or URL, which need not exist."""
    path = paths.location(path)
    return RemoteFiles(path) if is_remote(path) else LocalFiles(path)


def _md5(info: Mapping[str, Any]) -> str:
    """Return the MD5 in the description of a file: `md5Hash` of GCS, or `ETag` of S3, unless the file is encrypted."""
    if found := info.get("md5Hash"):
        return base64.b64decode(found).hex()
    etag = str(info.get("ETag", "")).strip('"')
    return etag if re.fullmatch("[0-9a-f]{32}", etag) else ""
