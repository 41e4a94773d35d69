"""Directories that are local or remote (`gs://`, `s3://`, any fsspec URL), with one interface.

    directory, name = split("gs://bucket/runs/out.jsonl")
    with directory.new_file(name) as file:
        file.write(b"…")

A file appears with its entire content, or not at all: a local one is renamed (see `atomic`), a remote one is written to
a local file and uploaded as one object. Requests that fail are repeated; see `remote.retried`.

CACHE/uploads/upload-…/    files that are being written, before they are uploaded
"""

import contextlib
import dataclasses
import errno
import glob
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, BinaryIO

from t5x.errors import UserError
from t5x.files import atomic, cache_directory, locks
from t5x.files.digests import digest_of
from t5x.files.downloads import download
from t5x.files.remote import RemotePath, as_local, run_concurrently
from t5x.files.untrusted import open_regular

LOCK_FILE = ".lock"
_PROBE = ".t5x-write-test"


class Directory:
    """A directory on a disk; `RemoteDirectory` is the same for others. `str()` is its path.

    Names are those of files in it; `/` gives a directory below it.
    """

    def __init__(self, path: str):
        self._path = path

    def __str__(self) -> str:
        return self._path

    def __truediv__(self, name: str) -> "Directory":
        return Directory(self.path(name))

    def path(self, name: str) -> str:
        """Return the path or URL of a file."""
        return os.path.join(str(self), name)

    def make(self) -> None:
        """Create the directory and its parents, if necessary."""
        atomic.make_directories(self._path)

    def check_writable(self) -> None:
        """Raise a UserError unless the directory or bucket exists and new files can be written."""
        if not os.path.isdir(self._path):
            raise UserError(f"the directory {self} does not exist.")
        if not os.access(self._path, os.W_OK | os.X_OK):
            raise UserError(f"{self} is not writable. Change its permissions or choose another.")

    def names(self) -> set[str]:
        """Return the names of files and directories, without temporary files; none if the directory is missing."""
        try:
            return {name for name in os.listdir(self._path) if not atomic.is_temporary(name)}
        except FileNotFoundError:
            return set()

    def exists(self, name: str) -> bool:
        return os.path.exists(self.path(name))

    def is_directory(self, name: str) -> bool:
        return os.path.isdir(self.path(name))

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading; raise a FileNotFoundError if there is none."""
        return open_regular(self.path(name))

    def new_file(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Yield a binary file that becomes `name` when the block ends without an error.

        A writer that takes a path may write to `file.name`.
        """
        return atomic.new_file(self.path(name))

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[str]:
        """Yield a local path for `name`, to be written by others, which may also write files beside it."""
        path = self.path(name)
        existed = os.path.lexists(path)
        try:
            yield path
            if os.path.isfile(path):
                atomic.sync(path)
        except BaseException:
            if not existed:
                self.remove(name)
            raise

    @contextlib.contextmanager
    def reading(self, *names: str) -> Iterator[str]:
        """Yield a local directory with these files, of those that exist."""
        yield self._path

    def remove(self, *names: str) -> None:
        """Remove existing files. Directories are kept."""
        for path in map(self.path, names):
            if os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path)):
                os.unlink(path)

    def remove_temporaries(self) -> None:
        """Remove what writers that were killed left. The caller must hold the lock of all writers."""
        self.remove(*filter(atomic.is_temporary, os.listdir(self._path)))

    def remove_itself(self) -> None:
        """Remove the directory if it is empty, except for temporary files."""
        with contextlib.suppress(OSError):
            self.remove_temporaries()
            os.rmdir(self._path)

    def is_intact(self, name: str, digest: Mapping[str, Any]) -> bool:
        """Return whether a file has this `size` and `sha256`. Of a remote file only the size is compared."""
        return self.exists(name) and digest_of(self.path(name)) == {key: digest.get(key) for key in ("size", "sha256")}

    @contextlib.contextmanager
    def locked(self) -> Iterator[Callable[[], None]]:
        """Hold the lock of the directory, which must exist. Yield a function that raises a UserError if it is lost.

        Raises:
          BlockingIOError: another process holds the lock of a local directory.
          UserError: another process holds the lease of a remote directory.
        """
        with locks.locked(self.path(LOCK_FILE), wait=False):
            try:
                yield lambda: None
            finally:
                self.remove(LOCK_FILE)

    def read_bytes(self, name: str) -> bytes | None:
        """Return the content of a file; None if it is missing."""
        try:
            with self.open(name) as file:
                return file.read()
        except FileNotFoundError:
            return None

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write a file, or replace it."""
        with self.new_file(name) as file:
            file.write(data)


def open_directory(path: str | os.PathLike[str]) -> Directory:
    """Return the directory at a local path or URL. It need not exist."""
    if (local := as_local(path)) is not None:
        return Directory(os.path.abspath(os.path.expanduser(local)))
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
        return Directory(parent), name
    remote = RemotePath.parse(os.fspath(path))
    if not remote.parent.path:
        raise UserError(f"{remote.url} is an entire bucket. Name a file in it: {remote.url}/NAME.")
    return RemoteDirectory(remote.parent), remote.name


class RemoteDirectory(Directory):
    """A prefix of an object store, or a directory of another remote file system."""

    def __init__(self, remote: RemotePath):
        self._remote = remote

    def __str__(self) -> str:
        return self._remote.url

    def __truediv__(self, name: str) -> "RemoteDirectory":
        return RemoteDirectory(self._remote / name)

    def make(self) -> None:
        """Do nothing: object stores have no directories."""

    def check_writable(self) -> None:
        probe = dataclasses.replace(self._remote / _PROBE, url=str(self))  # messages name the directory
        probe.write_bytes(b"")
        probe.remove()

    def names(self) -> set[str]:
        self._remote.fs.invalidate_cache()
        return set(self._remote.children())

    def exists(self, name: str) -> bool:
        return self._info(name) is not None

    def is_directory(self, name: str) -> bool:
        info = self._info(name)
        return info is not None and info["type"] == "directory"

    def open(self, name: str) -> BinaryIO:
        if (info := self._info(name)) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path(name))
        return (self._remote / name).file(info).open()

    @contextlib.contextmanager
    def new_file(self, name: str) -> Iterator[BinaryIO]:
        with self.writing(name) as path, open(path, "xb") as file:
            yield file

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[str]:
        with self._scratch() as scratch:
            yield os.path.join(scratch, name)
            written = [os.path.join(parent, file) for parent, _, files in os.walk(scratch) for file in files]
            for path in sorted(written, key=lambda path: path == os.path.join(scratch, name)):  # `name` is last
                (self._remote / os.path.relpath(path, scratch)).upload(path)

    @contextlib.contextmanager
    def reading(self, *names: str) -> Iterator[str]:
        self._remote.fs.invalidate_cache()
        there = self._remote.children()
        with self._scratch() as scratch:
            files = {
                os.path.join(scratch, name): (self._remote / name).file(there[name]) for name in names if name in there
            }
            download(files, lambda count: None)
            yield scratch

    def read_bytes(self, name: str) -> bytes | None:
        return (self._remote / name).read_bytes_if_exists()

    def write_bytes(self, name: str, data: bytes) -> None:
        (self._remote / name).write_bytes(data)

    def remove(self, *names: str) -> None:
        run_concurrently(lambda name: (self._remote / name).remove(), [(name,) for name in names])

    def remove_temporaries(self) -> None:
        """Do nothing: remote directories have no temporary files."""

    def remove_itself(self) -> None:
        """Do nothing: object stores have no directories."""

    def is_intact(self, name: str, digest: Mapping[str, Any]) -> bool:
        info = self._info(name)
        return info is not None and info["size"] == digest.get("size")

    @contextlib.contextmanager
    def locked(self) -> Iterator[Callable[[], None]]:
        from t5x.files.lease import Lease  # imports TensorStore, which takes a while

        with Lease.acquire(self.path(LOCK_FILE), str(self)) as lease:
            yield lease.check

    def _info(self, name: str) -> dict[str, Any] | None:
        self._remote.fs.invalidate_cache()
        return (self._remote / name).info()

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
            for left in glob.glob(os.path.join(glob.escape(home), "upload-*")):
                with contextlib.suppress(BlockingIOError), locks.locked(left, wait=False):
                    atomic.remove_tree(left)
            directory = held.enter_context(tempfile.TemporaryDirectory(prefix="upload-", dir=home))
            held.enter_context(locks.locked(directory))
        yield directory
