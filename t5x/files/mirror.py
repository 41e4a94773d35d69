"""A local directory for the small files of a remote one: metrics, events, configurations, predictions.

Object stores cannot append to files, so a program writes its files locally and they are uploaded when they have
changed: every minute, and whenever `upload` is called. A program that starts again finds them as they were uploaded.
"""

import contextlib
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterator

from t5x._runtime.errors import UserError
from t5x.files import atomic
from t5x.files.remote import RemotePath, download, is_remote, run_concurrently
from t5x.files.remote_directory import upload_directory
from t5x.files.untrusted import is_plain_relative

log = logging.getLogger(__name__)

_PERIOD = 60.0  # seconds between uploads
_LARGE_BYTES = 32 * 2**20  # larger files are uploaded only by `upload`


class Mirror:
    """The local directory; use `local_files`.

    Attributes:
      directory: its path.
      url: the remote directory.
    """

    def __init__(self, directory: str, url: str, unread: Callable[[str], bool], check: Callable[[], object]):
        self.directory, self.url, self._check = directory, url, check
        self._remote = RemotePath.parse(url)
        self._uploaded: dict[str, tuple[int, int]] = {}  # time and size of the files that are in the remote directory
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._download(unread)
        self._thread = threading.Thread(target=self._keep, name="t5x-mirror", daemon=True)
        self._thread.start()

    def upload(self, *, largest: int | None = None) -> None:
        """Upload the files that have changed; remove those that were removed here.

        Args:
          largest: skip files with more bytes.

        Raises:
          UserError: a file cannot be uploaded. It is tried again the next time.
        """
        with self._lock:
            self._check()
            here = dict(self._files())
            changed = [
                (name, status)
                for name, status in here.items()
                if self._uploaded.get(name) != status and (largest is None or status[1] <= largest)
            ]
            run_concurrently(self._upload, changed)
            for name in [name for name in self._uploaded if name not in here]:
                (self._remote / name).remove()
                del self._uploaded[name]

    def close(self) -> None:
        """Upload everything and stop."""
        self._stopped.set()
        self._thread.join()
        self.upload()

    def _upload(self, name: str, status: tuple[int, int]) -> None:
        path, remote = os.path.join(self.directory, name), self._remote / name
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            if status[1] > _LARGE_BYTES:
                remote.upload(path)
            else:
                with open(path, "rb") as file:
                    remote.write_bytes(file.read())
            self._uploaded[name] = status

    def _files(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield (relative path, (time of change, size)) of all files, except unfinished ones."""
        for parent, _, names in os.walk(self.directory):
            for name in names:
                path = os.path.join(parent, name)
                with contextlib.suppress(FileNotFoundError):
                    if not atomic.is_temporary(name):
                        status = os.stat(path)
                        yield os.path.relpath(path, self.directory), (status.st_mtime_ns, status.st_size)

    def _download(self, unread: Callable[[str], bool]) -> None:
        infos = {}
        self._remote.fs.invalidate_cache()
        for child, info in self._remote.children().items():
            if unread(child):
                continue
            if info["type"] == "file":
                infos[child] = info
            else:
                infos |= {f"{child}/{name}": each for name, each in (self._remote / child).descendants().items()}
        names = [name for name in infos if is_plain_relative(name) and not unread(os.path.basename(name))]
        files = {os.path.join(self.directory, name): (self._remote / name).file(infos[name]) for name in names}
        download(files, lambda count: None)
        self._uploaded = dict(self._files())

    def _keep(self) -> None:
        while not self._stopped.wait(_PERIOD):
            try:
                self.upload(largest=_LARGE_BYTES)
            except UserError as error:
                log.warning("%s is not up to date; trying again in %d s: %s", self.url, _PERIOD, error)


@contextlib.contextmanager
def local_files(
    directory: str, *, writes: bool, unread: Callable[[str], bool], check: Callable[[], object] = lambda: None
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield a local directory for the files of a local or remote one, and a function that uploads them.

    Args:
      directory: a local directory, which is used itself, or a URL.
      writes: whether this process writes the files; what other processes write is dropped.
      unread: returns whether a file or directory, given its name, must not be downloaded.
      check: called before every upload; it raises if nothing may be written any more.
    """
    if not is_remote(directory):
        yield directory, lambda: None
    elif not writes:
        with tempfile.TemporaryDirectory() as scratch:
            yield scratch, lambda: None
    else:
        with upload_directory() as scratch:
            mirror = Mirror(scratch, directory, unread, check)
            try:
                yield scratch, mirror.upload
            except BaseException:
                try:
                    mirror.close()
                except UserError as error:
                    log.warning("the last files of the run could not be uploaded: %s", error)
                raise
            try:
                mirror.close()
            except UserError as error:
                raise UserError(f"{error} The same command writes the missing files of {directory}.") from error
