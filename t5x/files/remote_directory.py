"""A directory at a URL: `RemoteDirectory`, one of the two implementations of `directory.Directory`.

CACHE/uploads/upload-…/    files that are being written, before they are uploaded

Object stores cannot rename. A directory is published by writing the file that identifies it last, after the sizes of
the others are verified. Until then a file UNFINISHED marks it as ours, to be removed after a kill. It is removed in the
reverse order.
"""

import base64
import contextlib
import dataclasses
import errno
import glob
import hashlib
import logging
import os
import re
import tempfile
import threading
from collections.abc import Callable, Container, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, BinaryIO

from t5x._runtime.errors import UserError
from t5x.files import atomic, cache_directory, disk_space, locks
from t5x.files.local import LOCK_FILE, FileEntry, Publication, name_aside, walk, write_file
from t5x.files.remote import RemotePath, download, has_tensorstore_driver, run_concurrently
from t5x.files.untrusted import is_plain_relative

if TYPE_CHECKING:
    from fsspec import Callback

log = logging.getLogger(__name__)

UNFINISHED = "UNFINISHED"

_PROBE = ".t5x-write-test"
_REQUESTS = 16  # in flight


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

    # --- Publishing

    def children(self, publication: Publication) -> dict[str, bool]:
        names = sorted(name for name in self.names() if re.fullmatch(publication.names, name))
        with ThreadPoolExecutor(_REQUESTS, thread_name_prefix="t5x-list") as pool:
            contents = pool.map(lambda name: (self._remote / name).children(), names)
            return {
                name: _is_published(files, publication) for name, files in zip(names, contents, strict=True) if files
            }

    def begin(self, name: str, publication: Publication, space: int = 0) -> "RemoteTarget":
        child = self / name
        if files := child.names():
            if _is_published(files, publication):
                (self / name_aside(self, name, publication)).copy_from(child, publication)
            self.unpublish(name, publication)
        return (RemoteTarget if has_tensorstore_driver(str(self)) else StagedTarget)(self, name, publication, space)

    def unpublish(self, name: str, publication: Publication) -> None:
        child = self / name
        child.write_bytes(UNFINISHED, b"")
        child.clear(publication)
        child.remove(UNFINISHED)
        if not has_tensorstore_driver(str(self)):
            child._remote.call_if_exists(self._remote.fs.rm, recursive=True)  # empty directories, where they exist

    def upload(self, local: str | os.PathLike[str], publication: Publication) -> None:
        """Copy everything below a local directory, the file that identifies it last, after checking sizes and right."""
        sizes = {name: status.st_size for name, status in walk(local)}
        stopped = threading.Event()
        with publication.progress(sum(sizes.values())) as advance:
            callback = _callback(advance, stopped)

            def put(path: str, name: str) -> None:
                self._remote.fs.put_file(os.path.join(local, name), path, callback=callback)

            self._fill(sizes, put, publication, stopped)

    def copy_from(self, source: "RemoteDirectory", publication: Publication) -> None:
        """Copy everything from another directory of the server, as `upload` does."""

        def copy(path: str, name: str) -> None:
            self._remote.fs.cp_file((source._remote / name).path, path)

        self._fill({name: entry.size for name, entry in source.list().items()}, copy, publication)

    def clear(self, publication: Publication) -> None:
        """Remove everything but UNFINISHED; first the files that identify a complete directory."""
        names = [name for name in self.list() if name != UNFINISHED]
        for is_marker in (True, False):
            self.remove(*(name for name in names if (name in publication.markers) == is_marker))

    def _fill(
        self,
        sizes: Mapping[str, int],
        put: Callable[..., None],
        publication: Publication,
        stopped: threading.Event | None = None,
    ) -> None:
        last = next((name for name in publication.markers if name in sizes), None)
        for names in ([name for name in sizes if name != last], [name for name in sizes if name == last]):
            publication.check()
            run_concurrently(
                lambda name: (self._remote / name).call(put, name=name), [(name,) for name in names], stopped
            )
            arrived = {name: entry.size for name, entry in self.list().items()}
            if wrong := [name for name in names if arrived.get(name) != sizes[name]]:
                raise UserError(
                    f"{self.path(wrong[0])} has {arrived.get(wrong[0])} bytes, not {sizes[wrong[0]]}. Start again."
                )

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


class RemoteTarget:
    """An unpublished child of an object store, written to its final place. Processes need not share a disk."""

    def __init__(self, parent: RemoteDirectory, name: str, publication: Publication, space: int):
        self._parent, self._name, self._publication = parent, name, publication
        self._child = parent / name
        self._has_ended = False
        self.path = self._begin(space)

    def _begin(self, space: int) -> str:
        self._child.write_bytes(UNFINISHED, b"")
        return str(self._child)

    def commit(self, data: bytes, *, flushed: Container[str] = ()) -> None:
        self._child.write_bytes(self._publication.markers[0], data)
        self._unmark()

    def _unmark(self) -> None:
        self._has_ended = True
        try:
            self._child.remove(UNFINISHED)
        except UserError as error:
            log.debug("%s is complete, but its file UNFINISHED could not be removed: %s", self._child, error)

    def discard(self) -> None:
        if self._has_ended:
            return  # another target may be there by now; what is written from here on is marked as unfinished
        self._has_ended = True
        try:
            self._publication.check()  # a program that took the lease may be writing there
            self._parent.unpublish(self._name, self._publication)
        except UserError as error:
            log.warning("%s is unfinished and could not be removed; the next start removes it: %s", self._child, error)


class StagedTarget(RemoteTarget):
    """An unpublished child on a file system that TensorStore cannot access: a local directory until it is uploaded."""

    def _begin(self, space: int) -> str:
        with contextlib.ExitStack() as stack:
            path = os.path.join(stack.enter_context(upload_directory()), self._name)
            disk_space.check_space(os.path.dirname(path), space)
            os.mkdir(path)
            self._scratch = stack.pop_all()
        return path

    def commit(self, data: bytes, *, flushed: Container[str] = ()) -> None:
        write_file(os.path.join(self.path, self._publication.markers[0]), data)
        self._child.write_bytes(UNFINISHED, b"")
        self._child.upload(self.path, self._publication)
        self._unmark()
        self._scratch.close()

    def discard(self) -> None:
        self._scratch.close()
        super().discard()


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


def _is_published(names: Container[str], publication: Publication) -> bool:
    return publication.markers[0] in names or UNFINISHED not in names


def _callback(advance: Callable[[int], None], stopped: threading.Event) -> "Callback":
    """Return an fsspec callback that reports progress, and aborts the upload once `stopped` is set."""
    from fsspec import Callback

    class UploadProgress(Callback):
        def relative_update(self, inc: int = 1) -> None:
            if stopped.is_set():
                raise InterruptedError
            advance(inc)

    return UploadProgress()


def _md5(info: Mapping[str, Any]) -> str:
    """Return the MD5 in the description of a file: `md5Hash` of GCS, or `ETag` of S3, unless the file is encrypted."""
    if encoded := info.get("md5Hash"):
        return base64.b64decode(encoded).hex()
    etag = str(info.get("ETag", "")).strip('"')
    return etag if re.fullmatch("[0-9a-f]{32}", etag) else ""
