"""A directory on a disk: `LocalDirectory`, one of the two implementations of `directory.Directory`."""

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, BinaryIO, NamedTuple

from t5x.errors import UserError
from t5x.files import atomic, locks
from t5x.files.untrusted import open_inside, open_regular

LOCK_FILE = ".lock"


class FileEntry(NamedTuple):
    """A file in a listing.

    Attributes:
      size: in bytes.
      is_regular: False for links, pipes and the like.
      md5: hash of the content in hexadecimal, as reported by a server; "" if it does not report one.
    """

    size: int
    is_regular: bool = True
    md5: str = ""


class LocalDirectory:
    """A directory on a disk.

    Args:
      path: absolute path.
      follow_links: whether `open` follows symbolic links. Where the content is untrusted, they could lead anywhere:
        then they are an OSError, and so are names that leave the directory.
    """

    def __init__(self, path: str, *, follow_links: bool = True):
        self._path, self._follow_links = path, follow_links

    def __str__(self) -> str:
        return self._path

    def __truediv__(self, name: str) -> "LocalDirectory":
        return LocalDirectory(self.path(name), follow_links=self._follow_links)

    def path(self, name: str) -> str:
        return os.path.join(self._path, name)

    def make(self) -> None:
        atomic.make_directories(self._path)

    def check_writable(self) -> None:
        if not os.path.isdir(self._path):
            raise UserError(f"the directory {self} does not exist.")
        if not os.access(self._path, os.W_OK | os.X_OK):
            raise UserError(f"{self} is not writable. Change its permissions or choose another.")

    # --- Reading

    def names(self) -> set[str]:
        try:
            return {name for name in os.listdir(self._path) if not atomic.is_temporary(name)}
        except FileNotFoundError:
            return set()

    def list(self, prefix: str = "") -> dict[str, FileEntry]:
        entries = walk(self.path(prefix))
        return {
            os.path.join(prefix, name): FileEntry(status.st_size, stat.S_ISREG(status.st_mode))
            for name, status in entries
        }

    def exists(self, name: str = "") -> bool:
        return os.path.lexists(self.path(name))

    def is_directory(self, name: str) -> bool:
        return os.path.isdir(self.path(name))

    def open(self, name: str) -> BinaryIO:
        return open_regular(self.path(name)) if self._follow_links else open_inside(self._path, name)

    def read_bytes(self, name: str) -> bytes | None:
        try:
            with self.open(name) as file:
                return file.read()
        except FileNotFoundError:
            return None

    def hash(self, name: str, algorithm: str = "sha256", *, flush: bool = False) -> tuple[int, str]:
        with self.open(name) as file:
            digest = hashlib.file_digest(file, algorithm).hexdigest()  # type: ignore[arg-type]
            if flush:
                os.fsync(file.fileno())
            return file.tell(), digest

    def reports_md5(self, empty: str) -> bool:
        return False

    def is_intact(self, name: str, digest: Mapping[str, Any]) -> bool:
        try:
            return self.hash(name) == (digest.get("size"), digest.get("sha256"))
        except FileNotFoundError:
            return False

    @contextlib.contextmanager
    def reading(self, *names: str) -> Iterator[str]:
        yield self._path

    # --- Writing

    def new_file(self, name: str) -> AbstractContextManager[BinaryIO]:
        return atomic.new_file(self.path(name))

    def write_bytes(self, name: str, data: bytes) -> None:
        with self.new_file(name) as file:
            file.write(data)

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[str]:
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

    def create(self, name: str, data: bytes) -> None:
        write_file(self.path(name), data)

    def flush(self, name: str = "", *, flushed: Container[str] = ()) -> None:
        atomic.sync_tree(self.path(name), flushed=flushed)

    def remove(self, *names: str) -> None:
        for path in map(self.path, names):
            if os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path)):
                os.unlink(path)

    def remove_temporaries(self) -> None:
        self.remove(*filter(atomic.is_temporary, os.listdir(self._path)))

    def remove_itself(self) -> None:
        with contextlib.suppress(OSError):
            self.remove_temporaries()
            os.rmdir(self._path)

    @contextlib.contextmanager
    def locked(self) -> Iterator[Callable[[], None]]:
        with locks.locked(self.path(LOCK_FILE), wait=False):
            try:
                yield lambda: None
            finally:
                self.remove(LOCK_FILE)


def walk(directory: str | os.PathLike[str]) -> Iterator[tuple[str, os.stat_result]]:
    """Yield (path relative to `directory`, lstat) of everything below it but directories; links are not followed."""
    pending = [""]
    while pending:
        prefix = pending.pop()
        with os.scandir(os.path.join(directory, prefix)) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                relative = prefix + entry.name
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    pending.append(relative + "/")
                else:
                    yield relative, status


def write_file(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a new file, creating its parent directories. It is durable only after `atomic.sync_tree`."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "xb") as file:
        file.write(content)
