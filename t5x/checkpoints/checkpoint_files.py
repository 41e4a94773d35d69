"""The files of a checkpoint, at a local path or a URL. They are untrusted: nothing outside the directory is opened."""

import contextlib
import errno
import functools
import hashlib
import os
import stat
from typing import BinaryIO, NamedTuple

from t5x.checkpoints import paths
from t5x.files.remote import RemotePath, is_remote
from t5x.files.untrusted import is_plain_relative, open_inside

# Fields of fsspec's drivers that depend on the content alone, so that a copy has the same; ETag is that of S3.
_CONTENT_FIELDS = ("md5Hash", "crc32c", "ETag", "content_md5")


class Entry(NamedTuple):
    """A file in a listing.

    Attributes:
      size: in bytes.
      is_regular: False for links, pipes and the like.
      tag: what a server computed from the content; "" if it does not say.
    """

    size: int
    is_regular: bool = True
    tag: str = ""


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

    def open(self, name: str) -> BinaryIO:
        return open_inside(self.path, name)

    def has(self, name: str) -> bool:
        return os.path.lexists(os.path.join(self.path, name))

    def write(self, name: str, content: bytes) -> None:
        """Write a new file. It is durable only after `atomic.sync_tree`."""
        paths.write_file(os.path.join(self.path, name), content)

    def hash(self, name: str, *, flush: bool = False) -> tuple[int, str]:
        """Return the size and SHA-256 of a file; optionally flush it to disk."""
        with self.open(name) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
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
            f"{prefix}/{name}" if prefix else name: Entry(info["size"], tag=_tag(info))
            for name, info in found.items()
            if info["type"] == "file"
        }

    def open(self, name: str) -> BinaryIO:
        if not is_plain_relative(name):
            raise OSError(0, "not a path inside the directory", name)
        self._remote.fs.invalidate_cache()
        if (info := (self._remote / name).info()) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.path}/{name}")
        return (self._remote / name).file(info).open()

    def has(self, name: str) -> bool:
        self._remote.fs.invalidate_cache()
        return (self._remote / name).info() is not None

    def write(self, name: str, content: bytes) -> None:
        (self._remote / name).write_bytes(content)

    def hash(self, name: str, *, flush: bool = False) -> tuple[int, str]:
        size, digest = 0, hashlib.sha256()
        with contextlib.closing(self.open(name)) as file:
            while content := file.read(2**23):
                digest.update(content)
                size += len(content)
        return size, digest.hexdigest()


def open_files(path: str | os.PathLike[str]) -> LocalFiles:
    """Return the files of the checkpoint at a local path or URL, which need not exist."""
    path = paths.location(path)
    return RemoteFiles(path) if is_remote(path) else LocalFiles(path)


def _tag(info: dict) -> str:
    return next((f"{field}:{info[field]}" for field in _CONTENT_FIELDS if info.get(field)), "")
