"""A directory on a disk: `LocalDirectory`, one of the two implementations of `directory.Directory`."""

import contextlib
import dataclasses
import hashlib
import logging
import os
import re
import stat
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, BinaryIO, NamedTuple

from t5x._runtime.errors import UserError
from t5x.files import atomic, disk_space, locks
from t5x.files.untrusted import open_inside, open_regular

log = logging.getLogger(__name__)

LOCK_FILE = ".lock"

Advance = Callable[[int], None]
Progress = Callable[[int], AbstractContextManager[Advance]]


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


@dataclasses.dataclass(frozen=True)
class Publication:
    """Directories that appear in another one all at once, such as the checkpoints in a MODEL_DIR.

    Attributes:
      names: pattern of their names.
      markers: names of files that only complete ones have, in order of preference. The first is that of our own.
      check: called before anything is published; it raises a UserError if this program may no longer write.
      progress: shows the progress of uploading that many bytes, as `telemetry.copy_progress` does.
    """

    names: str
    markers: tuple[str, ...]
    check: Callable[[], None] = lambda: None
    progress: Progress = lambda size: contextlib.nullcontext(lambda count: None)


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
        return (os.path.exists if self._follow_links else os.path.lexists)(self.path(name))

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

    # --- Publishing

    def children(self, publication: Publication) -> dict[str, bool]:
        if not os.path.isdir(self._path):
            return {}
        with os.scandir(self._path) as entries:
            names = [entry.name for entry in entries if entry.is_dir()]
        published = [name for name in names if re.fullmatch(publication.names, name) and os.listdir(self.path(name))]
        temporary = rf"(?:{publication.names})\.tmp-[0-9]+(-[0-9a-f]+){{2}}"  # `unique_name` of any version
        return dict.fromkeys(published, True) | {name: False for name in names if re.fullmatch(temporary, name)}

    def begin(self, name: str, publication: Publication, space: int = 0) -> "LocalTarget":
        disk_space.check_space(self._path, space)
        return LocalTarget(self, name, publication)

    def unpublish(self, name: str, publication: Publication) -> None:
        condemned = path = self.path(name)
        if re.fullmatch(publication.names, name):
            os.rename(path, condemned := atomic.unique_name(path))
        _remove_tree(condemned)

    @contextlib.contextmanager
    def locked(self) -> Iterator[Callable[[], None]]:
        with locks.locked(self.path(LOCK_FILE), wait=False):
            try:
                yield lambda: None
            finally:
                self.remove(LOCK_FILE)


class LocalTarget:
    """An unpublished child of a local directory, under a temporary name beside its own."""

    def __init__(self, parent: LocalDirectory, name: str, publication: Publication):
        self._parent, self._name, self._publication = parent, name, publication
        self.path = atomic.unique_name(parent.path(name))
        self._quiet_rounds = 5
        os.mkdir(self.path)

    def commit(self, data: bytes, *, flushed: Container[str] = ()) -> None:
        write_file(os.path.join(self.path, self._publication.markers[0]), data)
        atomic.sync_tree(self.path, flushed=flushed)
        if self._parent.exists(self._name):
            aside = name_aside(self._parent, self._name, self._publication)
            os.rename(self._parent.path(self._name), self._parent.path(aside))
        atomic.rename(self.path, self._parent.path(self._name))

    def discard(self) -> None:
        _remove_tree(self.path, quiet_rounds=self._quiet_rounds)
        self._quiet_rounds = 1


def name_aside(directory: Any, name: str, publication: Publication) -> str:
    """Return the name under which a directory is kept that makes way for a complete one."""
    purpose = "damaged" if directory.exists(f"{name}/{publication.markers[0]}") else "foreign"
    aside = atomic.unique_name(name, purpose)
    log.warning("%s is %s; keeping it as %s", directory.path(name), purpose, aside)
    return aside


def _remove_tree(path: str, *, quiet_rounds: int = 1) -> None:
    if not atomic.remove_tree(path, quiet_rounds=quiet_rounds):
        log.warning("%s could not be removed; it is not needed and may be deleted", path)


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
