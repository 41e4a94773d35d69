"""A disk that loses at a power cut what was not flushed.

Files may be written by anything: when `os.fsync` is called for one, it is read back and kept as what the disk holds.
Two kinds of disk are the extremes of what file systems do:

    forgetful: a name in a directory is lost, unless the directory was flushed after the name was given;
    hasty: a rename is on the disk at once, though the content of the file may not be.
"""

import contextlib
import os
import stat
import threading
from pathlib import Path


class Disk:
    """The directory `root`, which must exist; what it holds now is on the disk.

    Attributes:
      hasty: for each rename, {relative path: content} of all files, as a hasty disk has them right after it.
    """

    def __init__(self, root: Path, monkeypatch):
        self.root = root
        self.hasty: list[dict[str, bytes]] = []
        self._files: dict[int, bytes] = {}
        self._directories: dict[int, dict[str, int]] = {}
        self._open: list[int] = []  # so that no file gets the inode number of a removed one
        self._lock = threading.Lock()
        fsync, rename, replace = os.fsync, os.rename, os.replace
        for path in (root, *root.rglob("*")):
            descriptor = os.open(path, os.O_RDONLY)
            self._flush(descriptor)
            os.close(descriptor)

        def flush(descriptor: int) -> None:
            fsync(descriptor)
            self._flush(descriptor)

        def observed(call):
            def rename(source, destination):
                call(source, destination)
                self._look()

            return rename

        monkeypatch.setattr(os, "fsync", flush)
        monkeypatch.setattr(os, "rename", observed(rename))
        monkeypatch.setattr(os, "replace", observed(replace))

    def cut(self, to: Path) -> Path:
        """Write to the new directory `to` what a forgetful disk has left of `root`."""
        self._put(os.stat(self.root).st_ino, to)
        return to

    def close(self) -> None:
        for descriptor in self._open:
            os.close(descriptor)

    def _flush(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        with self._lock:
            self._open.append(os.dup(descriptor))
            if stat.S_ISDIR(status.st_mode):
                with os.scandir(descriptor) as entries:
                    self._directories[status.st_ino] = {entry.name: entry.inode() for entry in entries}
            else:
                self._files[status.st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()

    def _look(self) -> None:
        image = {}
        with self._lock:
            for path in self.root.rglob("*"):
                with contextlib.suppress(FileNotFoundError):  # another thread has removed it
                    if path.is_file():
                        image[str(path.relative_to(self.root))] = self._files.get(path.stat().st_ino, b"")
            self.hasty.append(image)

    def _put(self, number: int, to: Path) -> None:
        if number in self._directories:
            to.mkdir()
            for name, below in self._directories[number].items():
                self._put(below, to / name)
        else:
            to.write_bytes(self._files.get(number, b""))  # never flushed: a name, and nothing behind it


def write(image: dict[str, bytes], to: Path) -> Path:
    """Write files to the new directory `to`."""
    to.mkdir()
    for name, content in image.items():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (to / name).write_bytes(content)
    return to


def contents(directory: Path) -> dict[str, bytes]:
    """Return {relative path: content} of all files."""
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}
