"""Directories that are local or remote (`gs://`, `s3://`, any fsspec URL), with one interface.

    directory, name = split("gs://bucket/runs/out.jsonl")
    with directory.new_file(name) as file:
        file.write(b"…")

A file appears with its entire content, or not at all: a local one is renamed (see `atomic`), a remote one is written to
a local file and uploaded as one object. Requests that fail are repeated; see `remote.RemotePath.call`. Local errors are
OSErrors, those of the network or the server UserErrors that name the URL; a missing file is a FileNotFoundError.
"""

import os
from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager
from typing import Any, BinaryIO, Protocol

from t5x._runtime.errors import UserError
from t5x.files.local import FileEntry, LocalDirectory, Publication
from t5x.files.remote import RemotePath, as_local
from t5x.files.remote_directory import RemoteDirectory


class Target(Protocol):
    """A directory that is not published yet. Other processes may write below `path`; only its creator ends it.

    Attributes:
      path: where it is written: a temporary name, the final place in an object store, or the local disk.
    """

    path: str

    def commit(self, data: bytes, *, flushed: Container[str] = ()) -> None:
        """Publish it, all at once, after writing `data` to the file that identifies it.

        Args:
          flushed: files that are durable already, by their relative paths.
        """

    def discard(self) -> None:
        """Remove it. May be repeated: threads that still write there may bring parts of it back."""


class Directory(Protocol):
    """A local or remote directory, which need not exist. `str()` is its path or URL.

    Names are those of files in it, or paths relative to it; `/` gives a directory below it.
    """

    def __truediv__(self, name: str) -> "Directory": ...

    def path(self, name: str) -> str:
        """Return the path or URL of a file."""

    def make(self) -> None:
        """Create the directory and its parents, if necessary."""

    def check_writable(self) -> None:
        """Raise a UserError unless the directory or bucket exists and new files can be written."""

    def names(self) -> set[str]:
        """Return the names of files and directories, without temporary files; none if the directory is missing."""

    def list(self, prefix: str = "") -> dict[str, FileEntry]:
        """Return {relative path: entry} of all files, or of those below the directory `prefix`."""

    def exists(self, name: str = "") -> bool:
        """Return whether a file or directory exists; without a name, the directory itself."""

    def is_directory(self, name: str) -> bool: ...

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading. A `LocalDirectory` follows links unless `follow_links` is False."""

    def read_bytes(self, name: str) -> bytes | None:
        """Return the content of a file; None if it is missing."""

    def hash(self, name: str, algorithm: str = "sha256", *, flush: bool = False) -> tuple[int, str]:
        """Return the size and the hash of a file; optionally flush it to disk."""

    def reports_md5(self, empty: str) -> bool:
        """Return whether listings have the MD5 of files, judged by an empty one."""

    def is_intact(self, name: str, digest: Mapping[str, Any]) -> bool:
        """Return whether a file has this `size` and `sha256`. Of a remote file only the size is compared."""

    def reading(self, *names: str) -> AbstractContextManager[str]:
        """Yield a local directory with these files, of those that exist."""

    def new_file(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Yield a binary file that becomes `name` when the block ends without an error.

        A writer that takes a path may write to `file.name`.
        """

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write a file, or replace it."""

    def writing(self, name: str) -> AbstractContextManager[str]:
        """Yield a local path for `name`, to be written by others, which may also write files beside it."""

    def create(self, name: str, data: bytes) -> None:
        """Write a new file, which is durable only after `flush`."""

    def flush(self, name: str = "", *, flushed: Container[str] = ()) -> None:
        """Make everything below a directory durable, except files, relative to it, that have been `flushed`."""

    def remove(self, *names: str) -> None:
        """Remove existing files. Directories are kept."""

    def remove_temporaries(self) -> None:
        """Remove what writers that were killed left. The caller must hold the lock of all writers."""

    def remove_itself(self) -> None:
        """Remove the directory if it is empty, except for temporary files."""

    def children(self, publication: Publication) -> dict[str, bool]:
        """Return {name: whether it is published} of the directories that `publication` is about.

        An unfinished one of ours is not published; one of another program is.
        """

    def begin(self, name: str, publication: Publication, space: int = 0) -> Target:
        """Begin a directory that `commit` publishes as `name`.

        What is published there makes way: it is kept under another name, never deleted. In an object store that happens
        now, elsewhere at `commit`.

        Args:
          space: bytes that must be free on the disk.
        """

    def unpublish(self, name: str, publication: Publication) -> None:
        """Remove a directory; a reader, or a kill in between, never finds a part of it that looks complete."""

    def locked(self) -> AbstractContextManager[Callable[[], None]]:
        """Hold the lock of the directory, which must exist. Yield a function that raises a UserError if it is lost.

        Raises:
          BlockingIOError: another process holds the lock of a local directory.
          UserError: another process holds the lease of a remote directory.
        """


def open_directory(path: str | os.PathLike[str]) -> Directory:
    """Return the directory at a local path or URL. It need not exist."""
    if (local := as_local(path)) is not None:
        return LocalDirectory(os.path.abspath(os.path.expanduser(local)))
    return RemoteDirectory(RemotePath.parse(os.fspath(path)))


def make_directory(path: str | os.PathLike[str], option: str) -> str:
    """Create the directory that the user gave as `option`. Return its absolute path, or its URL.

    Raises:
      UserError: it cannot be created, or files cannot be written there.
    """
    directory = open_directory(path)
    try:
        directory.make()
        directory.check_writable()
    except FileExistsError as error:
        raise UserError(f"{option} {directory} exists but is not a directory. Choose another path.") from error
    except OSError as error:
        raise UserError(f"{option} {directory} cannot be created: {error.strerror}. Choose another path.") from error
    except UserError as error:
        raise UserError(f"{option} {error}") from error
    return str(directory)


def split(path: str | os.PathLike[str]) -> tuple[Directory, str]:
    """Return the directory and the name of a file."""
    if (local := as_local(path)) is not None:
        parent, name = os.path.split(os.path.abspath(os.path.expanduser(local)))
        return LocalDirectory(parent), name
    remote = RemotePath.parse(os.fspath(path))
    if not remote.parent.path:
        raise UserError(f"{remote.url} is an entire bucket. Name a file in it: {remote.url}/NAME.")
    return RemoteDirectory(remote.parent), remote.name
